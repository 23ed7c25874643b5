"""Reads parts of blocks from disk into memory, and holds the parts that a restore is about to load.

The loader reserves room in the pool before it reads a file, and a part that was read stays in the
pool while it is held, so that parts waiting to be loaded never exceed the memory budget. A call
that finds no room returns None and the caller tries again later; no call blocks. Thread-safe.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from semantic.application.cache.index import BlockNode
from semantic.application.cache.restore_plan import WantedPart
from semantic.application.cache.tiers import BlockTiers
from semantic.application.cache.writer import NUM_READERS
from semantic.domain.blocks import TOKEN_BYTES, BlockName, BlockPart, PartKey
from semantic.domain.errors import CacheCorruptionError, DrainingError, PoolExhaustedError
from semantic.domain.spec import LayerKind
from semantic.ports.backend import KVPayload

_log = logging.getLogger(__name__)

# Number of files that are prefetched at the same time.
_NUM_PREFETCHED = max(2, NUM_READERS // 2)


@dataclass(slots=True, eq=False)
class HeldPart:
    """A part that stays in memory, or is being read into it, until `let_go`.

    Attributes:
        nbytes: Upper bound of the memory it takes.
        future: Its payload; fails with `CacheCorruptionError` if the part cannot be read.
        is_counted: Whether the pool holds it; False while it is being read or if reading failed.
    """

    wanted: WantedPart
    nbytes: int = 0
    future: Future[KVPayload] = field(default_factory=Future)
    is_counted: bool = False


@dataclass(slots=True, eq=False)
class _Reading:
    """A file that is being read into reserved room of `nbytes`, and the parts waiting for it."""

    wanted: WantedPart
    part: BlockPart
    nbytes: int
    waiting: list[HeldPart]


class PartLoader:
    """Reads parts into room reserved in the pool, and holds them for loading."""

    def __init__(self, tiers: BlockTiers) -> None:
        self._tiers = tiers
        self._disk = tiers.disk
        self._lock = tiers.lock
        self._reading: dict[PartKey, _Reading] = {}
        self._prefetches: deque[WantedPart] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether a part is being read; its room can be evicted once the read has ended."""
        with self._lock:
            return bool(self._reading)

    @property
    def num_bytes(self) -> int:
        """Bytes reserved for parts that are being read."""
        with self._lock:
            return sum(reading.nbytes for reading in self._reading.values())

    # -- loading --------------------------------------------------------------------------------

    def hold(self, wanted: WantedPart) -> HeldPart | None:
        """Hold a part in memory until `let_go`; None if there is no room for it.

        The future is done at once if the part is in memory, otherwise when it has been read.
        """
        held = HeldPart(wanted)
        with self._lock:
            payload = wanted.node.payloads.get(wanted.kind)
            reading = self._reading.get(wanted.key)
            if payload is not None:
                self._count(held)
                held.nbytes = payload.nbytes
                held.future.set_result(payload)
            elif reading is not None:
                held.nbytes = reading.nbytes
                reading.waiting.append(held)
            elif not self._is_unread(wanted):
                gone = CacheCorruptionError(f"block {wanted.node.name.short} is gone")
                held.future.set_exception(gone)
            elif not self._begin(wanted, [held]):
                return None
        return held

    def let_go(self, held: HeldPart) -> None:
        """Undo `hold`. A read that has started still runs to its end."""
        with self._lock:
            reading = self._reading.get(held.wanted.key)
            if held.is_counted:
                held.is_counted = False
                self._tiers.pool.let_go(held.wanted.key)
                self._tiers.reconsider(held.wanted.node)
            elif reading is not None and held in reading.waiting:
                reading.waiting.remove(held)

    def lease(self, parts: Sequence[WantedPart]) -> None:
        """Protect the files of parts that will be held soon from deletion."""
        with self._lock:
            leased = {wanted.key for wanted in parts}
            for wanted in parts:
                wanted.node.num_leases += 1
            # `hold` reads these parts when the restore reaches them, so they are not prefetched.
            self._prefetches = deque(w for w in self._prefetches if w.key not in leased)

    def end_lease(self, parts: Sequence[WantedPart]) -> None:
        """Undo `lease`."""
        with self._lock:
            for wanted in parts:
                self._end_lease(wanted.node)

    # -- prefetching ----------------------------------------------------------------------------

    def prefetch(self, parts: Sequence[WantedPart], max_bytes: int) -> list[WantedPart]:
        """Start reading parts that are not in memory, in order and a few at a time.

        A part is skipped if there is no room for it when its read would start.

        Args:
            parts: Candidates, the most useful first.
            max_bytes: Upper limit of the bytes to read, including prefetches already queued.

        Returns:
            The parts that are queued for reading.
        """
        with self._lock:
            chosen: dict[PartKey, WantedPart] = {}
            max_bytes -= sum(self._room_for(wanted) for wanted in self._prefetches)
            for wanted in parts:
                if wanted.key in chosen or not self._is_unread(wanted):
                    continue
                max_bytes -= self._room_for(wanted)
                if max_bytes < 0:
                    break
                chosen[wanted.key] = wanted
            self._prefetches.extend(chosen.values())
            self._prefetch_more()
            return list(chosen.values())

    def stop_prefetching(self) -> None:
        """Clear the prefetch queue, because the room is needed; reads in progress continue."""
        with self._lock:
            self._prefetches.clear()

    # -- blocks of other machines -----------------------------------------------------------------

    def learn(self, root: BlockName, tokens: bytes, block_tokens: int) -> None:
        """Look up which blocks of a prompt other machines have uploaded, and add them to the index.

        Does nothing if less than one block of the prompt is unknown here. Sends one query to the
        shared index, so it must not run on the engine's thread.
        """
        remote = self._tiers.remote
        if remote is None:
            return
        index = self._tiers.index
        with self._lock:
            end = index.match(root, tokens, block_tokens).end
        if len(tokens) // TOKEN_BYTES - end < block_tokens:
            return
        parts = remote.follow(root, tokens)
        with self._lock:
            for part in parts:
                node = index.add(part.root, part.parent, part.start, part.tokens)
                node.remote.setdefault(part.kind, part)
                node.last_used = node.last_used or time.time()
            index.version += len(parts)

    # -- inside the lock ------------------------------------------------------------------------

    def _is_unread(self, wanted: WantedPart) -> bool:
        is_somewhere = wanted.node.unread(wanted.kind) is not None
        return self._disk is not None and is_somewhere and wanted.key not in self._reading

    def _room_for(self, wanted: WantedPart) -> int:
        part = wanted.node.unread(wanted.kind)
        return self._disk.room_for(part) if self._disk is not None and part is not None else 0

    def _prefetch_more(self) -> None:
        while self._prefetches and len(self._reading) < _NUM_PREFETCHED:
            wanted = self._prefetches.popleft()
            if self._is_unread(wanted):
                self._begin(wanted, [])

    def _begin(self, wanted: WantedPart, waiting: list[HeldPart]) -> bool:
        """Reserve room for a part and start reading it; False if there is no room."""
        part, nbytes = wanted.node.unread(wanted.kind), self._room_for(wanted)
        is_here = wanted.kind in wanted.node.files
        source = self._disk if is_here else self._tiers.remote
        assert part is not None and source is not None  # noqa: S101, PT018 - callers check
        try:
            self._tiers.reserve(nbytes)
        except PoolExhaustedError:
            return False
        reading = _Reading(wanted, part, nbytes, waiting)
        for held in waiting:
            held.nbytes = nbytes
        wanted.node.num_leases += 1
        self._reading[wanted.key] = reading
        source.read(part).add_done_callback(lambda done: self._end(reading, done))
        return True

    def _end(self, reading: _Reading, done: Future[KVPayload]) -> None:
        """Replace reserved room by the part that was read. Runs on a reader's thread."""
        wanted = reading.wanted
        with self._lock:
            del self._reading[wanted.key]
            self._tiers.pool.release(reading.nbytes)
            try:
                error = self._take(reading, done)
            except Exception as defect:  # noqa: BLE001 - every waiting future must complete
                _log.exception("a part that was read could not be kept")
                error = defect
            payload = wanted.node.payloads.get(wanted.kind)
            self._end_lease(wanted.node)
            self._prefetch_more()
        for held in reading.waiting:
            if error is None and payload is not None:
                held.future.set_result(payload)
            else:
                held.future.set_exception(error or CacheCorruptionError("a block is gone"))

    def _take(self, reading: _Reading, done: Future[KVPayload]) -> BaseException | None:
        """Keep a part that was read and hold it for its waiters; returns the error on failure."""
        wanted = reading.wanted
        error = DrainingError("cancelled") if done.cancelled() else done.exception()
        if isinstance(error, DrainingError):
            self._prefetches.clear()
            return CacheCorruptionError("the server is shutting down")
        if error is not None:
            is_bad = isinstance(error, CacheCorruptionError)
            # A waiting caller may have discarded the file already.
            if is_bad and wanted.node.unread(wanted.kind) is reading.part:
                self._tiers.lose_file(wanted)
            return error
        self._tiers.counts.restored += 1
        self._tiers.counts.restored_bytes += reading.part.nbytes
        try:
            self._tiers.keep(wanted.node, [done.result()])
        except PoolExhaustedError as full:
            return CacheCorruptionError(f"a file holds more than it should: {full.message}")
        if wanted.kind is not LayerKind.WINDOW:
            self._tiers.write(wanted)  # its file may have been deleted during the read
        for held in reading.waiting:
            self._count(held)
        return None

    def _count(self, held: HeldPart) -> None:
        self._tiers.pool.hold(held.wanted.key)
        held.is_counted = True

    def _end_lease(self, node: BlockNode) -> None:
        node.num_leases -= 1
        self._tiers.reconsider(node)
