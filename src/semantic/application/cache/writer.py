"""The disk tier: one thread writes, several threads read, and no caller waits for them.

Jobs are written in order: files first, then, in one transaction, the rows that refer to them. The
queue is bounded in bytes; parts that do not fit stay in memory and are offered again later. A disk
failure costs durability but never fails a request. A busy ledger is retried, because turns must not
be lost. A turn is marked as durable when its row and all its blocks are on disk.
"""

import logging
import math
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from semantic.application.cache.restore_plan import ReadCost
from semantic.domain.agents import Pointer
from semantic.domain.blocks import BlockName, BlockPart
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError, DrainingError
from semantic.ports.backend import KVPayload
from semantic.ports.storage import (
    BlockFilesPort,
    DropPart,
    LedgerChange,
    LedgerPort,
    MarkDurable,
    PutPart,
    PutTurn,
    Repoint,
)
from semantic.ports.telemetry import Measure, NoTelemetry, TelemetryPort

_log = logging.getLogger(__name__)

NUM_READERS = max(2, min(16, os.cpu_count() or 1))
_MAX_BATCH = 256
_MAX_BATCH_BYTES = 64 * 2**20  # rows are written at least this often: a crash must not lose many
_RETRY_S = 0.5
_LOG_AGAIN_S = 60.0
_MAX_WAITING_TURNS = 1024
_SLACK = 0.02  # share of the budget freed in advance, so that not every file evicts
_FILE_OVERHEAD = 4096  # upper bound of a file's size beyond its payload and token ids


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """Limits of disk use.

    Attributes:
        budget_bytes: For everything in the directory, including other models' files and the ledger.
        queue_bytes: For parts that are queued for writing.
        tenant_bytes: Returns the limit of the tenant that owns a root; None means no limit besides
            the budget.
    """

    budget_bytes: int
    queue_bytes: int
    tenant_bytes: Callable[[BlockName], int | None] = lambda _: None


@dataclass(frozen=True, slots=True)
class WriteJob:
    """A part to be written. Its callbacks run on the writer's thread.

    Attributes:
        victims: Chooses files to evict for the part and removes them from the index. Takes the
            part, its bytes, the bytes by which the disk budget is exceeded, and further bytes to
            free if possible. Raises `CachePersistenceError` if the part may not be written.
        on_end: Called with the part and its file with its size; None if it could not be written.
        on_lost: Called with the part if its bytes could not be copied from the device.
    """

    part: BlockPart
    payload: KVPayload
    victims: Callable[[BlockPart, int, int, int], Sequence[BlockPart]]
    on_end: Callable[[BlockPart, BlockPart | None], None]
    on_lost: Callable[[BlockPart], None]


def read_by(
    readers: ThreadPoolExecutor, read: Callable[[BlockPart], KVPayload], part: BlockPart
) -> Future[KVPayload]:
    """Read a part on one of the readers; fails with `DrainingError` once they are closed."""
    try:
        return readers.submit(read, part)
    except RuntimeError:  # closed
        late: Future[KVPayload] = Future()
        late.set_exception(DrainingError("the server is shutting down."))
        return late


class DiskTier:
    """Files and ledger of one directory. Thread-safe; only `flush` and `close` block.

    It handles files and rows; the callers decide which blocks exist and which are evicted.
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
        self._problems: dict[str, str] = {}  # by source: "files" or "ledger"
        self._logged_at: dict[str, float] = {}
        self._is_drained = threading.Event()
        self._is_closed = False
        self._has_ended = False
        self._deadline = math.inf
        self._readers = ThreadPoolExecutor(NUM_READERS, "semantic-reader")
        self._writer = threading.Thread(target=self._run, name="semantic-writer", daemon=True)
        # Used by the writer's thread only.
        self._is_stopping = False
        self._batch_bytes = 0
        self._is_on_disk: Callable[[Pointer], bool] | None = None
        self._rows = _RowWriter(
            ledger, is_synced=is_synced, is_on_disk=self._is_durable, report=self._report
        )

    # -- any thread -----------------------------------------------------------------------------

    @property
    def queued_bytes(self) -> int:
        with self._lock:
            return self._queued_bytes

    @property
    def problem(self) -> str:
        """Reason of the last failed write; empty while writing succeeds."""
        with self._lock:
            return "; ".join(filter(None, self._problems.values()))

    def start(self, is_on_disk: Callable[[Pointer], bool]) -> None:
        """Start the writer; `is_on_disk` checks whether all blocks up to a pointer are on disk."""
        self._is_on_disk = is_on_disk
        self._writer.start()

    def offer(self, job: WriteJob) -> bool:
        """Queue a part, whose `on_end` or `on_lost` then runs; False if full or closed."""
        nbytes = job.payload.nbytes
        with self._lock:
            is_taken = not self._queued_bytes or (
                self._queued_bytes + nbytes <= self.limits.queue_bytes
            )
            is_taken = is_taken and not self._has_ended
            if is_taken:
                self._queued_bytes += nbytes
                self._work.put(partial(self._write, job))
        return is_taken

    def delete(self, parts: Sequence[BlockPart], *, is_bad: bool = False) -> None:
        """Delete files that are no longer referenced; `is_bad` moves them to quarantine instead."""
        self._work.put(partial(self._remove, tuple(parts), is_bad=is_bad))

    def change(self, *changes: LedgerChange) -> Future[None]:
        """Write to the ledger after all earlier jobs; the future completes when it is written.

        It fails with `CachePersistenceError` if the tier is closed or the first attempt fails.
        After a failed attempt the writer still retries the changes, unless they are invalid.
        """
        done: Future[None] = Future()
        with self._lock:
            if not self._is_closed:
                self._work.put(partial(self._rows.add, changes, done))
                return done
        done.set_exception(CachePersistenceError("the cache directory is closed."))
        return done

    def read(self, part: BlockPart) -> Future[KVPayload]:
        """Read a part; the future may fail with `CacheCorruptionError` or `DrainingError`."""
        return read_by(self._readers, self._read, part)

    def room_for(self, part: BlockPart) -> int:
        return self._files.room_for(part)

    @property
    def used_bytes(self) -> int:
        """Bytes of everything in the directory, to which the budget applies."""
        return self._files.used_bytes()

    @property
    def other_bytes(self) -> int:
        """Bytes in the directory that are not blocks: the ledger and its backup."""
        return self._files.other_bytes()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all earlier jobs are written; False on timeout or failure."""
        try:
            self.change().result(timeout_s)
        except (TimeoutError, CachePersistenceError):
            return False
        return True

    def close(self, timeout_s: float) -> bool:
        """Write the queue and end the threads; False if not everything is written in time.

        Blocks are skipped in the second half of the time, so that the turns queued behind them are
        not lost.
        """
        with self._lock:
            self._is_closed = True
            self._deadline = min(self._deadline, time.monotonic() + timeout_s / 2)
        # Cancelling futures would run their callbacks inside the executor's lock.
        self._readers.shutdown(wait=False)
        self._work.put(self._stop)
        self._writer.join(timeout_s)
        is_written = self._is_drained.is_set()
        if is_written and not self.is_closed:
            _log.warning("the ledger's backup was not finished; everything else is written")
        return is_written

    @property
    def is_closed(self) -> bool:
        """Whether the writer's thread has ended, so that the directory no longer changes."""
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
        while not self._is_at_end():
            try:
                self._round()
            except Exception:  # noqa: BLE001 - the writer must continue
                _log.exception("the writer failed; continuing")
        self._rows.apply_last()
        if not self._rows.has_unwritten:
            self._is_drained.set()
        self._rows.close()

    def _is_at_end(self) -> bool:
        """Whether the writer is stopping and its queue is empty; it then accepts no more jobs."""
        with self._lock:
            self._has_ended = self._is_stopping and self._work.empty()
            return self._has_ended

    def _stop(self) -> None:
        self._is_stopping = True

    def _round(self) -> None:
        """Run queued jobs, files first, then write the rows that refer to them."""
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
            _log.warning("lost a block of KV cache: %s", error.message)
            is_lost = True
        except Exception as error:  # noqa: BLE001 - the writer must continue
            _log.exception("cannot write a block")
            self._report("files", repr(error))
        self._batch_bytes += payload.nbytes
        with self._lock:
            self._queued_bytes -= payload.nbytes
        if is_lost:
            job.on_lost(part)
        else:
            job.on_end(part, written)

    def _make_room(self, job: WriteJob, nbytes: int) -> None:
        """Evict files so that a new one fits the budget; else raises `CachePersistenceError`."""
        budget, others = self.limits.budget_bytes, self._files.other_bytes()
        room = budget - others  # the ledger takes precedence and is never evicted
        if nbytes > room:
            raise CachePersistenceError(
                f"the ledger and its backup take {_megabytes(others)} of the disk budget of "
                f"{_megabytes(budget)}, which leaves no room for the KV cache. Raise "
                "disk_budget_mb, or delete agents."
            )
        excess = self._files.used_bytes() + nbytes - budget
        if excess > 0:
            excess -= self._files.empty_quarantine(before=math.inf)  # useless files go first
        self._remove(job.victims(job.part, nbytes, excess, int(room * _SLACK)))
        if excess > 0 and self._files.used_bytes() + nbytes > budget:
            raise CachePersistenceError("the disk budget is full and no block can be evicted.")

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
        """Record a failure, or its end; logs each problem at most once a minute."""
        with self._lock:
            self._problems[source] = problem
        now = time.monotonic()
        if problem and now - self._logged_at.get(problem, -_LOG_AGAIN_S) >= _LOG_AGAIN_S:
            self._logged_at[problem] = now
            _log.warning("cannot write turns and KV cache to disk; retrying: %s", problem)


# -- rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rows:
    """Changes that are written together, and the future to complete afterwards."""

    changes: tuple[LedgerChange, ...]
    done: Future[None] | None


class _RowWriter:
    """Writes changes in order, many in one transaction. Runs on the writer's thread.

    `report` gets the source and the reason of a failure, or an empty reason once writing succeeds.
    """

    def __init__(
        self,
        ledger: LedgerPort,
        *,
        is_synced: bool,
        is_on_disk: Callable[[Pointer], bool],
        report: Callable[[str, str], None],
    ) -> None:
        self._ledger = ledger
        self._is_synced = is_synced
        self._report = report
        self._turns = _PendingTurns(is_on_disk)
        self._unwritten: list[_Rows] = []

    @property
    def has_unwritten(self) -> bool:
        return bool(self._unwritten)

    def add(self, changes: Sequence[LedgerChange], done: Future[None] | None = None) -> None:
        for change in changes:
            self._turns.note(change)
        # After this call the future can no longer be cancelled.
        is_wanted = done is not None and done.set_running_or_notify_cancel()
        self._unwritten.append(_Rows(tuple(changes), done if is_wanted else None))

    def apply(self) -> None:
        """Write the queued changes; keep those that cannot be written now for the next call."""
        rows, self._unwritten = [*self._unwritten, _Rows(self._turns.take(), None)], []
        try:
            self._write(rows)
        except ValueError:
            _log.exception("dropped a change that the ledger cannot store")
            self._write_one_by_one(rows)
        except Exception as error:  # noqa: BLE001 - queued changes must not be lost
            self._keep(rows, error)

    def apply_last(self) -> None:
        self.apply()
        if self._unwritten:
            _log.error("lost %d changes of the ledger", len(self._unwritten))

    def close(self) -> None:
        """Back the ledger up, which takes half a minute for some gigabytes, and close it."""
        for end in (self._ledger.back_up, self._ledger.close):
            try:
                end()
            except CachePersistenceError as error:
                self._report("ledger", error.message)

    def _write_one_by_one(self, rows: Sequence[_Rows]) -> None:
        for index, row in enumerate(rows):
            try:
                self._write([row])
            except ValueError as error:
                _fail(row, CachePersistenceError(f"the ledger cannot store it: {error}"))
            except Exception as error:  # noqa: BLE001 - queued changes must not be lost
                self._keep(rows[index:], error)
                return

    def _write(self, rows: Sequence[_Rows]) -> None:
        changes = [change for row in rows for change in row.changes]
        if changes:
            self._ledger.apply(changes, is_synced=self._is_synced)
        self._report("ledger", "")
        for row in rows:
            if row.done is not None:
                row.done.set_result(None)

    def _keep(self, rows: Sequence[_Rows], error: Exception) -> None:
        """Keep rows for another attempt, and fail their futures so that replies do not wait."""
        self._report("ledger", str(error))
        for row in rows:
            _fail(row, CachePersistenceError(str(error)))
        self._unwritten = [_Rows(row.changes, None) for row in rows]


def _fail(rows: _Rows, error: CachePersistenceError) -> None:
    if rows.done is not None:
        rows.done.set_exception(error)


class _PendingTurns:
    """Turns whose rows are queued or written but whose blocks may not be on disk yet."""

    def __init__(self, is_on_disk: Callable[[Pointer], bool]) -> None:
        self._is_on_disk = is_on_disk
        self._waiting: OrderedDict[str, Pointer] = OrderedDict()

    def note(self, change: LedgerChange) -> None:
        match change:
            case PutTurn(_, turn) if turn.pointer is not None:
                self._waiting[turn.id] = turn.pointer
                # Turns whose blocks were evicted before they were written never become durable.
                if len(self._waiting) > _MAX_WAITING_TURNS:
                    self._waiting.popitem(last=False)
            case Repoint(old, new):
                for turn_id, pointer in self._waiting.items():
                    if pointer.block == old:
                        self._waiting[turn_id] = replace(pointer, block=new)
            case _:
                return

    def take(self) -> tuple[MarkDurable, ...]:
        """Return marks for turns that are durable once the changes noted so far are written."""
        durable = [turn for turn, pointer in self._waiting.items() if self._is_on_disk(pointer)]
        for turn_id in durable:
            del self._waiting[turn_id]
        return tuple(MarkDurable(turn_id) for turn_id in durable)


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MB"
