"""The disk behind the pool: one thread writes, a few read, and nobody waits for either.

What is handed in is written in order: files first, then in one transaction the rows that speak of
them. The queue is bounded in bytes; what does not fit stays in memory and is offered again when
there is room. A disk that fails costs durability, never a request.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeAlias, assert_never

from semantic.domain.blocks import BlockName, BlockPart
from semantic.domain.errors import CachePersistenceError
from semantic.ports.outbound import KVPayload
from semantic.ports.persistence import (
    BlockFilesPort,
    DropPart,
    LedgerChange,
    LedgerPort,
    PutPart,
    Repoint,
)

_log = logging.getLogger(__name__)

_NUM_READERS = 2
_MAX_BATCH = 256
_RETRY_S = 0.5
_TELL_AGAIN_S = 60.0
_SMOOTHING = 0.3
_SLACK = 0.02  # of the budget, freed beyond what is needed, so that it is not done for each file


class PartKeeper(Protocol):
    """What the disk asks of whoever knows all parts."""

    def end_writing(self, part: BlockPart, *, is_written: bool) -> None:
        """Take note of the fate of a part that was offered."""
        ...

    def victims(self, nbytes: int, incoming: BlockPart) -> list[BlockPart]:
        """Choose files that make room for another."""
        ...


@dataclass(frozen=True, slots=True)
class _WritePart:
    part: BlockPart
    payload: KVPayload


@dataclass(frozen=True, slots=True)
class _Delete:
    parts: tuple[BlockPart, ...]


@dataclass(frozen=True, slots=True)
class _Change:
    changes: tuple[LedgerChange, ...]
    done: Future[None]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Item: TypeAlias = _WritePart | _Delete | _Change | _Stop


class DiskTier:
    """Files and ledger of one directory. All methods are safe on any thread and return at once."""

    def __init__(
        self,
        files: BlockFilesPort,
        ledger: LedgerPort,
        *,
        budget_bytes: int,
        queue_bytes: int,
        is_synced: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.now = now
        self._files = files
        self._ledger = ledger
        self._budget_bytes = budget_bytes
        self._queue_bytes = queue_bytes
        self._is_synced = is_synced
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._seconds_per_byte = 0.0
        self._problems: dict[str, str] = {}  # of files, and of the ledger
        self._told_at: dict[str, float] = {}
        self._is_drained = threading.Event()
        self._unwritten: list[LedgerChange] = []
        self._waiting: list[Future[None]] = []
        self._keeper: PartKeeper | None = None
        self._readers = ThreadPoolExecutor(_NUM_READERS, "semantic-reader")
        self._writer = threading.Thread(target=self._run, name="semantic-writer", daemon=True)

    # -- any thread -----------------------------------------------------------------------------

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written."""
        with self._lock:
            return self._queued_bytes

    @property
    def problem(self) -> str:
        """Why the last write failed; empty while writing works."""
        with self._lock:
            return "; ".join(filter(None, self._problems.values()))

    def start(self, keeper: PartKeeper) -> None:
        """Begin writing."""
        self._keeper = keeper
        self._writer.start()

    def offer(self, part: BlockPart, payload: KVPayload) -> bool:
        """Queue a part; False if the queue is full. `end_writing` follows if it is taken."""
        with self._lock:
            is_taken = not self._queued_bytes or (
                self._queued_bytes + payload.nbytes <= self._queue_bytes
            )
            if is_taken:
                self._queued_bytes += payload.nbytes
        if is_taken:
            self._items.put(_WritePart(part, payload))
        return is_taken

    def delete(self, parts: Sequence[BlockPart]) -> None:
        """Remove files that no one refers to any more."""
        self._items.put(_Delete(tuple(parts)))

    def change(self, *changes: LedgerChange) -> Future[None]:
        """Write to the ledger after everything handed in before; the future tells when.

        It fails with `CachePersistenceError` if that cannot be done now; it is tried again until
        it succeeds or the server stops.
        """
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # whoever waits may leave, the writer goes on
        self._items.put(_Change(changes, done))
        return done

    def repoint(self, old: BlockName, new: BlockName) -> None:
        """Let turns that point at one block point into another."""
        self.change(Repoint(old, new))

    def read(self, part: BlockPart) -> Future[KVPayload]:
        """Read a part; the future may fail with `CacheCorruptionError`."""
        return self._readers.submit(self._read, part)

    def seconds_to_read(self, nbytes: int) -> float:
        """How long reading takes, judged by what was read so far; 0 before the first time."""
        with self._lock:
            return nbytes * self._seconds_per_byte

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything handed in so far is written; False if it took too long."""
        try:
            self.change().result(timeout_s)
        except (TimeoutError, CachePersistenceError):
            return False
        return True

    def close(self, timeout_s: float) -> bool:
        """Write what is queued and end the threads; False if not all is written by then."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._items.put(_Stop())
        self._writer.join(timeout_s)
        return self._is_drained.is_set()

    @property
    def is_closed(self) -> bool:
        """Whether the writer has ended: nothing more happens to the directory."""
        return not self._writer.is_alive()

    # -- readers --------------------------------------------------------------------------------

    def _read(self, part: BlockPart) -> KVPayload:
        started = time.perf_counter()
        payload = self._files.read(part)
        cost = (time.perf_counter() - started) / max(part.nbytes, 1)
        with self._lock:
            known = self._seconds_per_byte or cost
            self._seconds_per_byte = known + _SMOOTHING * (cost - known)
        return payload

    # -- the writer -----------------------------------------------------------------------------

    def _run(self) -> None:
        is_stopping = False
        # Writing makes room in the queue, and what had none is offered then, even at the end.
        while not (is_stopping and self._items.empty()):
            try:
                items = [self._items.get(timeout=_RETRY_S if self._unwritten else None)]
            except queue.Empty:
                items = []
            while len(items) < _MAX_BATCH and not self._items.empty():
                items.append(self._items.get())
            for item in items:
                is_stopping |= self._take(item)
            self._apply(is_final=is_stopping)
        if not self._unwritten:
            self._is_drained.set()
        for end in (self._ledger.back_up, self._ledger.close):
            try:
                end()
            except CachePersistenceError as error:
                self._report("ledger", error.message)

    def _take(self, item: _Item) -> bool:
        """Do what is asked of the files and note what the ledger must know; True means stop."""
        match item:
            case _WritePart(part, payload):
                self._unwritten += self._write(part, payload)
            case _Delete(parts):
                self._unwritten += self._remove(parts)
            case _Change(changes, done):
                self._unwritten += changes
                self._waiting.append(done)
            case _Stop():
                return True
            case _:
                assert_never(item)
        return False

    def _write(self, part: BlockPart, payload: KVPayload) -> list[LedgerChange]:
        """Write one file, making room for it; returns what the ledger must know."""
        changes: list[LedgerChange] = []
        written: BlockPart | None = None
        try:
            changes += self._make_room(part, payload.nbytes)
            written = self._files.write(part, payload, is_synced=self._is_synced)
            changes.append(PutPart(written))
            self._report("files", "")
        except CachePersistenceError as error:
            self._report("files", error.message)
        except Exception as error:  # noqa: BLE001 - whatever happens, the writer goes on
            _log.exception("a block could not be written")
            self._report("files", repr(error))
        with self._lock:
            self._queued_bytes -= payload.nbytes
        assert self._keeper is not None  # noqa: S101 - set before the thread starts
        self._keeper.end_writing(written or part, is_written=written is not None)
        return changes

    def _make_room(self, part: BlockPart, nbytes: int) -> list[LedgerChange]:
        excess = self._files.used_bytes() + nbytes - self._budget_bytes
        if excess <= 0:
            return []
        assert self._keeper is not None  # noqa: S101 - set before the thread starts
        slack = int(self._budget_bytes * _SLACK)
        changes = self._remove(self._keeper.victims(excess + slack, part))
        if self._files.used_bytes() + nbytes > self._budget_bytes:
            raise CachePersistenceError("the disk budget is full and nothing may be evicted.")
        return changes

    def _remove(self, parts: Sequence[BlockPart]) -> list[LedgerChange]:
        changes: list[LedgerChange] = []
        for part in parts:
            try:
                self._files.delete(part)
            except CachePersistenceError as error:
                self._report("files", error.message)
            changes.append(DropPart(part.key))
        return changes

    def _apply(self, *, is_final: bool) -> None:
        """Write to the ledger. What fails is tried again: turns must not be lost."""
        error: CachePersistenceError | None = None
        try:
            if self._unwritten:
                self._ledger.apply(self._unwritten, is_synced=self._is_synced)
            self._unwritten = []
            self._report("ledger", "")
        except CachePersistenceError as failure:
            error = failure
            self._report("ledger", failure.message)
            if is_final:
                _log.error("%d changes of the ledger are lost", len(self._unwritten))
        except ValueError as failure:
            _log.exception("a change can never be stored, and is dropped with its batch")
            error = CachePersistenceError(f"it cannot be stored: {failure}")
            self._unwritten = []
        # Nobody waits for a disk that fails: replies go out, and are not durable yet.
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

    def _report(self, source: str, problem: str) -> None:
        """Take note of what fails, or works again; said at most once a minute."""
        with self._lock:
            self._problems[source] = problem
        now = time.monotonic()
        if problem and now - self._told_at.get(problem, -_TELL_AGAIN_S) >= _TELL_AGAIN_S:
            self._told_at[problem] = now
            _log.warning("what agents leave behind is not written: %s", problem)
