"""Parts of blocks on their way from disk into memory, and those that a restore is about to load.

Room is made before a file is read, and what was read stays in the pool while it is held: nothing
that waits to be loaded lies outside the budget. A caller that finds no room gets None and asks
again; nobody is made to wait here. Thread-safe.
"""

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

# Files that are read at a time for those who do not wait for them.
_NUM_PREFETCHED = max(2, NUM_READERS // 2)


@dataclass(slots=True, eq=False)
class HeldPart:
    """A part that stays in memory, or will come there, until it is let go.

    Attributes:
        nbytes: Room that it takes, at most.
        future: Its payload; fails with `CacheCorruptionError` if it cannot be had after all.
        is_counted: Whether it is held in memory; before that it is being read, or has failed.
    """

    wanted: WantedPart
    nbytes: int = 0
    future: Future[KVPayload] = field(default_factory=Future)
    is_counted: bool = False


@dataclass(slots=True, eq=False)
class _Reading:
    """A file that is being read into room of `nbytes`, and who waits for it."""

    wanted: WantedPart
    part: BlockPart
    nbytes: int
    waiting: list[HeldPart]


class PartLoader:
    """Brings parts into memory, each into room that was made for it, and holds them for loading."""

    def __init__(self, tiers: BlockTiers) -> None:
        self._tiers = tiers
        self._disk = tiers.disk
        self._lock = tiers.lock
        self._reading: dict[PartKey, _Reading] = {}
        self._prefetches: deque[WantedPart] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether something is being read; what it needs room for can be evicted after that."""
        with self._lock:
            return bool(self._reading)

    @property
    def num_bytes(self) -> int:
        """Room that is reserved for what is being read."""
        with self._lock:
            return sum(reading.nbytes for reading in self._reading.values())

    # -- for those who load them ----------------------------------------------------------------

    def hold(self, wanted: WantedPart) -> HeldPart | None:
        """Get a part: at once if it is in memory, else when it is read; None if there is no room.

        It stays in memory until it is let go.
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
        """Undo `hold`; what is being read is still read to its end."""
        with self._lock:
            reading = self._reading.get(held.wanted.key)
            if held.is_counted:
                held.is_counted = False
                self._tiers.pool.let_go(held.wanted.key)
                self._tiers.reconsider(held.wanted.node)
            elif reading is not None and held in reading.waiting:
                reading.waiting.remove(held)

    def lease(self, parts: Sequence[WantedPart]) -> None:
        """See that files which are about to be held are not deleted before."""
        with self._lock:
            leased = {wanted.key for wanted in parts}
            for wanted in parts:
                wanted.node.num_leases += 1
            # From here on they are read when their turn comes, and not before.
            self._prefetches = deque(w for w in self._prefetches if w.key not in leased)

    def end_lease(self, parts: Sequence[WantedPart]) -> None:
        """Undo `lease`."""
        with self._lock:
            for wanted in parts:
                self._end_lease(wanted.node)

    # -- for those who will need them -----------------------------------------------------------

    def prefetch(self, parts: Sequence[WantedPart], max_bytes: int) -> list[WantedPart]:
        """Begin to read what is not in memory, in order and a few at a time.

        Whatever finds no room when its turn comes is left out.

        Args:
            parts: The most useful first.
            max_bytes: The most that is read.

        Returns:
            The parts that are to be read.
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
        """Read no more than is being read: the room is needed."""
        with self._lock:
            self._prefetches.clear()

    # -- for those who have computed nothing yet --------------------------------------------------

    def learn(self, root: BlockName, tokens: bytes, block_tokens: int) -> None:
        """Find out what other machines have of a prompt, unless most of it is known here.

        Asks the shared index by one query; not on the engine's thread.
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
        """Whether a part is not in memory, can be read, and is not being read."""
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
        """Reserve room for a part that can be read, and read into it; False if there is none."""
        part, nbytes = wanted.node.unread(wanted.kind), self._room_for(wanted)
        is_here = wanted.kind in wanted.node.files
        source = self._disk if is_here else self._tiers.remote
        assert part is not None and source is not None  # noqa: S101, PT018 - the caller has looked
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
        """Turn room that was reserved into a part in memory. On a reader's thread."""
        wanted = reading.wanted
        with self._lock:
            del self._reading[wanted.key]
            self._tiers.pool.release(reading.nbytes)
            error = self._take(reading, done)
            payload = wanted.node.payloads.get(wanted.kind)
            self._end_lease(wanted.node)
            if isinstance(done.exception(), DrainingError):
                self._prefetches.clear()
            self._prefetch_more()
        for held in reading.waiting:
            if error is None and payload is not None:
                held.future.set_result(payload)
            else:
                held.future.set_exception(error or CacheCorruptionError("a block is gone"))

    def _take(self, reading: _Reading, done: Future[KVPayload]) -> BaseException | None:
        """Keep what was read, and hold it for those who wait; returns why that cannot be."""
        wanted = reading.wanted
        error = done.exception()
        if isinstance(error, DrainingError):
            return CacheCorruptionError("the server stops")
        if error is not None:
            is_bad = isinstance(error, CacheCorruptionError)
            # Unless a waiting caller was faster, and discarded it.
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
            self._tiers.write(wanted)  # its file may have been deleted meanwhile
        for held in reading.waiting:
            self._count(held)
        return None

    def _count(self, held: HeldPart) -> None:
        self._tiers.pool.hold(held.wanted.key)
        held.is_counted = True

    def _end_lease(self, node: BlockNode) -> None:
        node.num_leases -= 1
        self._tiers.reconsider(node)
