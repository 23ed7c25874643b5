"""The tier behind the disk: an object store that all servers share, and the index of what is there.

What was written to this machine's disk is uploaded behind it; what another machine uploaded is
found before a prompt is planned, and read if that is faster than computing it. One collector at a
time deletes what no agent reaches. Nobody waits for an upload, and a failed read is a miss.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from semantic.application.cache.writer import ReadCost, read_by
from semantic.domain.blocks import BlockName, BlockPart
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError, DrainingError
from semantic.ports.backend import KVPayload
from semantic.ports.storage import BlockFilesPort, ObjectsPort, SharedPartsPort

_log = logging.getLogger(__name__)
_NUM_UPLOADS, _NUM_DOWNLOADS = 2, 8
_MAX_WAITING = 4096  # parts that wait to be uploaded; others are left to this machine alone
GRACE_S = 3600.0  # longer than any request and any upload


class RemoteTier:
    """Objects and their index. All methods are safe on any thread; `follow` asks the database."""

    def __init__(
        self,
        files: BlockFilesPort,
        objects: ObjectsPort,
        index: SharedPartsPort,
        *,
        grace_s: float = GRACE_S,
    ) -> None:
        """Start with nothing on the way.

        Args:
            files: This machine's: what is uploaded is read there.
            objects: The store.
            index: What is in it.
            grace_s: How long what is dead stays; longer than any request.
        """
        self._files = files
        self._objects = objects
        self._index = index
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._is_closed = False
        self._uploads = ThreadPoolExecutor(_NUM_UPLOADS, "semantic-upload")
        self._downloads = ThreadPoolExecutor(_NUM_DOWNLOADS, "semantic-download")
        self.cost = ReadCost(num_ignored=1)
        self.problem = ""

    def offer(self, part: BlockPart, on_end: Callable[[BlockPart], None]) -> None:
        """Upload a part from its file, behind the caller's back; `on_end` follows if it is there.

        What cannot be uploaded now is left: it is a cache's.
        """
        with self._lock:
            if self._is_closed or self._num_waiting >= _MAX_WAITING:
                return
            self._num_waiting += 1
        self._uploads.submit(self._upload, part, on_end)

    def read(self, part: BlockPart) -> Future[KVPayload]:
        """Download a part; the future may fail with `CacheCorruptionError`, or `DrainingError`."""
        return read_by(self._downloads, self._read, part)

    def follow(self, root: BlockName, tokens: bytes) -> list[BlockPart]:
        """Find what others uploaded of a prompt; nothing if the database does not answer."""
        try:
            return self._index.follow(root, tokens)
        except CachePersistenceError as error:
            _log.warning("blocks of other servers cannot be looked up now: %s", error.message)
            return []

    def publish(self, part: BlockPart) -> bool:
        """Bring a part to the store and into the index; False if it is just being deleted there.

        Raises:
            CachePersistenceError: the store or the database does not answer.
            CacheCorruptionError: its file is gone.
        """
        return all(self.steps(part))

    def steps(self, part: BlockPart) -> Iterator[bool]:
        """Publish a part step by step; each says whether it may go on."""
        began = time.monotonic()
        is_there = self._index.revive(part.key)
        yield is_there is not False
        if is_there is None:
            self._objects.put(part.key, self._files.content(part))
            # An index that no longer knows that the part was deleted would take it for uploaded.
            yield time.monotonic() - began < self._grace_s / 2
            yield self._index.add(part)

    def collect(self, *, unused_s: float) -> int:
        """Delete what no agent reaches, unless another server does so now; returns the bytes freed.

        Raises:
            CachePersistenceError: the store or the database does not answer.
        """
        with self._index.sole_collector() as is_sole:
            return sum(self.collection(unused_s=unused_s)) if is_sole else 0

    def collection(self, *, unused_s: float) -> Iterator[int]:
        """Collect step by step; each says how many bytes it freed."""
        self._index.mark(unused_s=unused_s)
        yield 0
        for key, nbytes in self._index.condemn(grace_s=self._grace_s):
            yield 0
            self._objects.delete(key)
            yield nbytes
        for page in self._objects.older_than(self._grace_s):
            for key in self._index.condemn_unknown(page):
                yield 0
                self._objects.delete(key)
        self._index.forget(grace_s=self._grace_s)

    def close(self, timeout_s: float) -> None:
        """Give what waits to be uploaded so much time."""
        with self._lock:
            self._is_closed = True
        self._downloads.shutdown(wait=False, cancel_futures=True)
        end = time.monotonic() + timeout_s
        while self._num_waiting and time.monotonic() < end:
            time.sleep(0.02)
        self._uploads.shutdown(wait=False, cancel_futures=True)

    # -- threads --------------------------------------------------------------------------------

    def _upload(self, part: BlockPart, on_end: Callable[[BlockPart], None]) -> None:
        try:
            if self.publish(part):
                on_end(part)
            self.problem = ""
        except CachePersistenceError as error:
            self.problem = error.message
            _log.warning("a block could not be uploaded: %s", error.message)
        except CacheCorruptionError:
            pass  # its file was evicted before its turn came
        except Exception:  # noqa: BLE001 - whatever happens, the others go on
            _log.exception("a block could not be uploaded")
        finally:
            with self._lock:
                self._num_waiting -= 1

    def _read(self, part: BlockPart) -> KVPayload:
        if self._is_closed:
            raise DrainingError("the server is shutting down.")
        try:
            with self.cost.measured(part.nbytes):
                return self._files.parse(part, self._objects.get(part.key))
        except CachePersistenceError as error:
            raise CacheCorruptionError(error.message) from error  # a miss; it may come back
        except CacheCorruptionError:
            with contextlib.suppress(CachePersistenceError):
                self._index.lose(part.key)
            raise
