"""The tier below the disk: an object store that all servers share, and the index of its objects.

Files written to this machine's disk are uploaded in the background. Before a prompt is planned, the
server looks up blocks that other machines uploaded, and downloads them if that is faster than
computing them. One collector at a time deletes objects that no agent reaches. No request waits for
an upload, and a failed download is a cache miss.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from semantic.application.cache.restore_plan import ReadCost
from semantic.application.cache.writer import read_by
from semantic.cluster.ports import ObjectsPort, SharedPartsPort
from semantic.domain.blocks import BlockName, BlockPart
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError, DrainingError
from semantic.ports.backend import KVPayload
from semantic.ports.storage import BlockFilesPort

_log = logging.getLogger(__name__)
_NUM_UPLOADS, _NUM_DOWNLOADS = 2, 8
_MAX_WAITING = 4096  # queued uploads; further parts are not uploaded
GRACE_S = 3600.0  # longer than any request and any upload


class ObjectTier:
    """`SharedBlocksPort` over an object store and the shared index of its objects."""

    def __init__(
        self,
        files: BlockFilesPort,
        objects: ObjectsPort,
        index: SharedPartsPort,
        *,
        grace_s: float = GRACE_S,
    ) -> None:
        """Start idle; a dead object is deleted after `grace_s`, longer than any request."""
        self._files = files
        self._objects = objects
        self._index = index
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._is_closed = False
        self._uploads = ThreadPoolExecutor(_NUM_UPLOADS, "semantic-upload")
        self._downloads = ThreadPoolExecutor(_NUM_DOWNLOADS, "semantic-download")
        self._cost = ReadCost(num_ignored=1)
        self.seconds_to_read = self._cost.seconds_to_read
        self.problem = ""

    def offer(self, part: BlockPart, on_end: Callable[[BlockPart], None]) -> None:
        with self._lock:
            if self._is_closed or self._num_waiting >= _MAX_WAITING:
                return
            self._num_waiting += 1
            self._uploads.submit(self._upload, part, on_end)  # `close` waits for the lock

    def read(self, part: BlockPart) -> Future[KVPayload]:
        return read_by(self._downloads, self._read, part)

    def follow(self, root: BlockName, tokens: bytes) -> list[BlockPart]:
        try:
            return self._index.follow(root, tokens)
        except CachePersistenceError as error:
            _log.warning("could not look up blocks of other servers: %s", error.message)
            return []

    def publish(self, part: BlockPart) -> bool:
        """Upload a part and add it to the index; False if the part is being deleted there.

        Raises:
            CachePersistenceError: the store or the database does not respond.
            CacheCorruptionError: the part's file is missing or has the wrong size.
        """
        return all(self.steps(part))

    def steps(self, part: BlockPart) -> Iterator[bool]:
        """Publish a part step by step; each step yields whether to continue."""
        began = time.monotonic()
        is_there = self._index.revive(part.key)
        yield is_there is not False
        if is_there is None:
            self._objects.put(part.key, self._files.content(part))
            # After a long upload the index may have forgotten that the part was deleted meanwhile,
            # and would list a deleted object.
            yield time.monotonic() - began < self._grace_s / 2
            yield self._index.add(part)

    def collect(self, *, unused_s: float) -> int:
        with self._index.sole_collector() as is_sole:
            return sum(self.collection(unused_s=unused_s)) if is_sole else 0

    def collection(self, *, unused_s: float) -> Iterator[int]:
        """Collect step by step; each step yields the bytes it freed."""
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
        with self._lock:
            self._is_closed = True
        self._downloads.shutdown(wait=False)  # queued reads end with `DrainingError`
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
            _log.warning("could not upload a block: %s", error.message)
        except CacheCorruptionError:
            pass  # its file was evicted before the upload started
        except Exception:  # noqa: BLE001 - other uploads must continue
            _log.exception("could not upload a block")
        finally:
            with self._lock:
                self._num_waiting -= 1

    def _read(self, part: BlockPart) -> KVPayload:
        if self._is_closed:
            raise DrainingError("the server is shutting down.")
        try:
            with self._cost.measured(part.nbytes):
                return self._files.parse(part, self._objects.get(part.key))
        except CachePersistenceError as error:
            raise CacheCorruptionError(error.message) from error  # a miss; the next may succeed
        except CacheCorruptionError:
            with contextlib.suppress(CachePersistenceError):
                self._index.lose(part.key)
            raise
