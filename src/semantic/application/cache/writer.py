"""The disk behind the pool: one thread writes, a few read, and nobody waits for either.

What is handed in is written in order: files first, then in one transaction the rows that speak of
them. The queue is bounded in bytes; what does not fit stays in memory and is offered again when
there is room. A disk that fails costs durability, never a request; a ledger that is busy is tried
again, for turns must not be lost.
"""

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from semantic.application.cache.row_writer import RowWriter
from semantic.domain.agents import Pointer
from semantic.domain.blocks import BlockName, BlockPart
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError, DrainingError
from semantic.ports.backend import KVPayload
from semantic.ports.storage import BlockFilesPort, DropPart, LedgerChange, LedgerPort, PutPart
from semantic.ports.telemetry import Measure, NoTelemetry, TelemetryPort

_log = logging.getLogger(__name__)

NUM_READERS = max(2, min(16, os.cpu_count() or 1))
_MAX_BATCH = 256
_MAX_BATCH_BYTES = 64 * 2**20  # after so much, rows are written: a crash must not lose many
_RETRY_S = 0.5
_TELL_AGAIN_S = 60.0
_MEMORY = 0.9  # how much of what reading took before counts at the next read
_DOUBT = 0.9  # of what reading is said to take, each time that was too long
_SLACK = 0.02  # of what blocks may take, freed beyond need, so that it is not done for each file
_FILE_OVERHEAD = 4096  # what a file holds beside its payload and its ids, at most


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """How much of the disk may be used.

    Attributes:
        budget_bytes: Everything in the directory, other models' files and the ledger too.
        queue_bytes: The most that waits to be written.
        tenant_bytes: Says of a root how much its tenant may have below it; None is as much as the
            budget allows.
    """

    budget_bytes: int
    queue_bytes: int
    tenant_bytes: Callable[[BlockName], int | None] = lambda _: None


@dataclass(frozen=True, slots=True)
class WriteJob:
    """A part to be written. Its callbacks run on the writer's thread.

    Attributes:
        victims: Chooses and forgets files that make way for it: told the part, its bytes, how many
            bytes the disk's budget lacks, and how many more would be welcome. Raises
            `CachePersistenceError` if the part may not be written.
        on_end: Told the part and its file, with its size; no file if it could not be written.
        on_lost: Told the part if its bytes never came.
    """

    part: BlockPart
    payload: KVPayload
    victims: Callable[[BlockPart, int, int, int], Sequence[BlockPart]]
    on_end: Callable[[BlockPart, BlockPart | None], None]
    on_lost: Callable[[BlockPart], None]


class ReadCost:
    """How long reading takes, judged by what was read so far. Thread-safe."""

    def __init__(self, num_ignored: int = 0) -> None:
        """Start without a judgement; the first `num_ignored` readings pay for connections."""
        self._lock = threading.Lock()
        self._num_ignored = num_ignored
        self._num_reading = 0
        self._seconds = 0.0
        self._bytes = 0.0

    @contextlib.contextmanager
    def measured(self, nbytes: int) -> Iterator[None]:
        """Measure a reading; one that fails says nothing."""
        with self._lock:
            self._num_reading += 1
            num_reading = self._num_reading
        started = time.perf_counter()
        try:
            yield
        except BaseException:
            with self._lock:
                self._num_reading -= 1
            raise
        elapsed = time.perf_counter() - started
        with self._lock:
            num_reading = max(num_reading, self._num_reading)
            self._num_reading -= 1
            if self._num_ignored:
                self._num_ignored -= 1
                return
            # By bytes: many small files must not make large ones look slow. Those that were read
            # side by side took the time together.
            self._seconds = self._seconds * _MEMORY + elapsed / num_reading
            self._bytes = self._bytes * _MEMORY + nbytes

    def seconds_to_read(self, nbytes: int) -> float:
        """How long reading takes; 0 before the first time."""
        with self._lock:
            return nbytes * self._seconds / max(self._bytes, 1)

    def is_read_in(self, nbytes: int, seconds: float) -> bool:
        """Whether reading takes no longer than so many seconds.

        Each time it does, the measured cost is believed less: one that keeps all from being read
        is never measured again.
        """
        is_fast = self.seconds_to_read(nbytes) <= seconds
        if not is_fast:
            with self._lock:
                self._seconds *= _DOUBT
        return is_fast


def read_by(
    readers: ThreadPoolExecutor, read: Callable[[BlockPart], KVPayload], part: BlockPart
) -> Future[KVPayload]:
    """Let one of the readers read a part; fails with `DrainingError` once they are closed."""
    try:
        return readers.submit(read, part)
    except RuntimeError:  # closed
        late: Future[KVPayload] = Future()
        late.set_exception(DrainingError("the server is shutting down."))
        return late


class DiskTier:
    """Files and ledger of one directory. All methods are safe on any thread and return at once.

    It knows files and rows; which blocks there are, and which go, is for those who offer them.
    """

    def __init__(
        self,
        files: BlockFilesPort,
        ledger: LedgerPort,
        limits: DiskLimits,
        *,
        is_synced: bool = False,
        telemetry: TelemetryPort | None = None,
    ) -> None:
        self._files = files
        self._telemetry: TelemetryPort = telemetry or NoTelemetry()
        self.limits = limits
        self._is_synced = is_synced
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self.cost = ReadCost()
        self._problems: dict[str, str] = {}  # of files, and of the ledger
        self._told_at: dict[str, float] = {}
        self._is_drained = threading.Event()
        self._is_closed = False
        self._deadline = math.inf
        self._readers = ThreadPoolExecutor(NUM_READERS, "semantic-reader")
        self._writer = threading.Thread(target=self._run, name="semantic-writer", daemon=True)
        # The writer's own.
        self._is_stopping = False
        self._batch_bytes = 0
        self._is_on_disk: Callable[[Pointer], bool] | None = None
        self._rows = RowWriter(
            ledger, is_synced=is_synced, is_on_disk=self._is_durable, report=self._report
        )

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

    def start(self, is_on_disk: Callable[[Pointer], bool]) -> None:
        """Begin writing; turns are durable when all that leads to them is on disk."""
        self._is_on_disk = is_on_disk
        self._writer.start()

    def offer(self, job: WriteJob) -> bool:
        """Queue a part; False if the queue is full. `on_end` follows if it is taken."""
        nbytes = job.payload.nbytes
        with self._lock:
            is_taken = not self._queued_bytes or (
                self._queued_bytes + nbytes <= self.limits.queue_bytes
            )
            if is_taken:
                self._queued_bytes += nbytes
        if is_taken:
            self._work.put(partial(self._write, job))
        return is_taken

    def delete(self, parts: Sequence[BlockPart], *, is_bad: bool = False) -> None:
        """Remove files that no one refers to any more; bad ones go to quarantine."""
        self._work.put(partial(self._remove, tuple(parts), is_bad=is_bad))

    def change(self, *changes: LedgerChange) -> Future[None]:
        """Write to the ledger after everything handed in before; the future tells when.

        It fails with `CachePersistenceError` if they cannot be written, now or later.
        """
        done: Future[None] = Future()
        with self._lock:
            if not self._is_closed:
                self._work.put(partial(self._rows.add, changes, done))
                return done
        done.set_exception(CachePersistenceError("the directory was closed."))
        return done

    def read(self, part: BlockPart) -> Future[KVPayload]:
        """Read a part; the future may fail with `CacheCorruptionError`, or `DrainingError`."""
        return read_by(self._readers, self._read, part)

    def room_for(self, part: BlockPart) -> int:
        """Memory that reading a part takes, at most."""
        return self._files.room_for(part)

    @property
    def used_bytes(self) -> int:
        """Bytes of everything in the directory, which the budget is for."""
        return self._files.used_bytes()

    @property
    def other_bytes(self) -> int:
        """Bytes of what is in the directory and no block: the ledger and its backup."""
        return self._files.other_bytes()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything handed in so far is written; False if it took too long."""
        try:
            self.change().result(timeout_s)
        except (TimeoutError, CachePersistenceError):
            return False
        return True

    def close(self, timeout_s: float) -> bool:
        """Write what is queued and end the threads; False if not all is written by then.

        In the second half of the time blocks are left unwritten, so that the turns behind them
        are not lost.
        """
        with self._lock:
            self._is_closed = True
            self._deadline = min(self._deadline, time.monotonic() + timeout_s / 2)
        # Cancelling them would run what waits for them inside the executor's lock.
        self._readers.shutdown(wait=False)
        self._work.put(self._stop)
        self._writer.join(timeout_s)
        return self._is_drained.is_set()

    @property
    def is_closed(self) -> bool:
        """Whether the writer has ended: nothing more happens to the directory."""
        return not self._writer.is_alive()

    # -- readers --------------------------------------------------------------------------------

    def _read(self, part: BlockPart) -> KVPayload:
        if self._is_closed:
            raise DrainingError("the server is shutting down.")
        started = time.perf_counter()
        with self.cost.measured(part.nbytes):
            payload = self._files.read(part)
        self._telemetry.observe(Measure.RESTORE, time.perf_counter() - started)
        return payload

    # -- the writer -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not (self._is_stopping and self._work.empty()):
            try:
                self._round()
            except Exception:  # noqa: BLE001 - whatever happens, the writer goes on
                _log.exception("the writer failed, and goes on")
        self._rows.close()
        if not self._rows.has_unwritten:
            self._is_drained.set()

    def _stop(self) -> None:
        self._is_stopping = True

    def _round(self) -> None:
        """Do what is there, files first, then write the rows that speak of them."""
        self._batch_bytes = 0
        try:
            self._work.get(timeout=_RETRY_S if self._rows.has_unwritten else None)()
            for _ in range(_MAX_BATCH):
                if self._batch_bytes < _MAX_BATCH_BYTES:
                    self._work.get_nowait()()
        except queue.Empty:
            pass
        self._rows.apply()

    def _write(self, job: WriteJob) -> None:
        """Write one file, making room for it."""
        part, payload = job.part, job.payload
        written, is_lost = None, False
        try:
            if time.monotonic() < self._deadline:
                self._make_room(job, payload.nbytes + len(part.tokens) + _FILE_OVERHEAD)
                started = time.perf_counter()
                written = self._files.write(part, payload, is_synced=self._is_synced)
                self._telemetry.observe(Measure.PERSIST, time.perf_counter() - started)
                self._rows.add([PutPart(written)])
                self._report("files", "")
        except CachePersistenceError as error:
            self._report("files", error.message)
        except CacheCorruptionError as error:
            _log.warning("a block is lost: %s", error.message)
            is_lost = True
        except Exception as error:  # noqa: BLE001 - whatever happens, the writer goes on
            _log.exception("a block could not be written")
            self._report("files", repr(error))
        self._batch_bytes += payload.nbytes
        with self._lock:
            self._queued_bytes -= payload.nbytes
        if is_lost:
            job.on_lost(part)
        else:
            job.on_end(part, written)

    def _make_room(self, job: WriteJob, nbytes: int) -> None:
        """Evict what stands in a new file's way.

        Raises:
            CachePersistenceError: there is not enough that may go.
        """
        budget, others = self.limits.budget_bytes, self._files.other_bytes()
        room = budget - others  # what was said comes first, and is never dropped
        if nbytes > room:
            raise CachePersistenceError(
                f"the ledger and its backup take {_megabytes(others)} of the disk budget of "
                f"{_megabytes(budget)}, which leaves no room for the KV cache. Raise "
                "disk_budget_mb, or delete agents."
            )
        excess = self._files.used_bytes() + nbytes - budget
        if excess > 0:
            excess -= self._files.empty_quarantine(before=math.inf)  # of no use, so it goes first
        self._remove(job.victims(job.part, nbytes, excess, int(room * _SLACK)))
        if excess > 0 and self._files.used_bytes() + nbytes > budget:
            raise CachePersistenceError("the disk budget is full and nothing may be evicted.")

    def _remove(self, parts: Sequence[BlockPart], *, is_bad: bool = False) -> None:
        for part in parts:
            try:
                (self._files.quarantine if is_bad else self._files.delete)(part)
            except CachePersistenceError as error:
                self._report("files", error.message)
        if parts:
            self._rows.add([DropPart(part.key) for part in parts])

    def _is_durable(self, pointer: Pointer) -> bool:
        return self._is_on_disk is not None and self._is_on_disk(pointer)

    def _report(self, source: str, problem: str) -> None:
        """Take note of what fails, or works again; said at most once a minute."""
        with self._lock:
            self._problems[source] = problem
        now = time.monotonic()
        if problem and now - self._told_at.get(problem, -_TELL_AGAIN_S) >= _TELL_AGAIN_S:
            self._told_at[problem] = now
            _log.warning("agents' turns and state cannot be written: %s", problem)


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MB"
