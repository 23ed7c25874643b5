"""The memory budget for attention state: who holds which block, and which goes next.

A block in the pool is in one of three states:

    held    referenced by a running sequence; never evicted
    idle    cached: nobody holds it; evicted in LRU order when room is needed
    absent  evicted, or never there

Besides blocks the budget covers *working bytes*, which the pool only counts: the live state of
running sequences, and room for what is being read. The pool moves names and counts; whoever owns
the payloads drops those of the blocks that an operation reports as evicted.
"""

import enum
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from semantic.domain.blocks import BlockName, KVBlock
from semantic.domain.errors import PoolExhaustedError
from semantic.domain.spec import ModelCacheSpec


class Pressure(enum.IntEnum):
    """How much of the budget is held, i.e. cannot be had by evicting."""

    LOW = 0
    ELEVATED = 80
    HIGH = 90
    FULL = 100


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """One consistent reading of the pool, in bytes."""

    total: int
    held: int
    idle: int
    working: int
    num_blocks: int

    @property
    def used(self) -> int:
        """Everything that counts against the budget."""
        return self.held + self.idle + self.working

    @property
    def available(self) -> int:
        """Free without evicting anything."""
        return self.total - self.used

    @property
    def pressure(self) -> Pressure:
        """The highest level that held and working bytes have reached."""
        if self.total == 0:
            return Pressure.FULL
        percent = 100 * (self.held + self.working) // self.total
        return max(level for level in Pressure if percent >= level)


@dataclass(slots=True)
class _Entry:
    block: KVBlock
    num_refs: int = 0

    @property
    def is_held(self) -> bool:
        return self.num_refs > 0


class BlockPool:
    """Counts references and bytes of blocks, within a hard budget.

    Thread-safe: every method takes the one lock. Every mutation is all or nothing: it raises
    before it changes anything. Methods that may evict return the evicted blocks.
    """

    def __init__(self, spec: ModelCacheSpec, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes must not be negative, got {budget_bytes}")
        self._lock = threading.Lock()
        self._spec = spec
        self._budget = budget_bytes
        self._entries: dict[BlockName, _Entry] = {}
        # Eviction order: the first goes first.
        self._idle: OrderedDict[BlockName, None] = OrderedDict()
        self._idle_bytes = 0
        self._held_bytes = 0
        self._working_bytes = 0

    # -- references ---------------------------------------------------------------------------

    def allocate(self, blocks: Sequence[KVBlock]) -> tuple[KVBlock, ...]:
        """Put blocks into the pool and reference each once; known ones are only referenced.

        Returns:
            The blocks evicted to make room.

        Raises:
            PoolExhaustedError: they do not fit even if every idle block goes.
            ValueError: a block holds more tokens than the spec's blocks do.
        """
        with self._lock:
            for block in blocks:
                if block.num_tokens > self._spec.block_tokens:
                    raise ValueError(
                        f"a block holds at most {self._spec.block_tokens} tokens, "
                        f"{block.name.short} has {block.num_tokens}"
                    )
            new = {b.name: b for b in blocks if b.name not in self._entries}
            evicted = self._make_room(
                sum(b.nbytes for b in new.values()), keep={b.name for b in blocks}
            )
            for name, block in new.items():
                self._entries[name] = _Entry(block)
                self._held_bytes += block.nbytes
            for block in blocks:
                self._change(block.name, by=1)
            return evicted

    def acquire(self, names: Iterable[BlockName]) -> tuple[KVBlock, ...]:
        """Reference the leading run of `names` that is in the pool, and return those blocks.

        Stops at the first absent name, since a chain is of no use past a gap.
        """
        with self._lock:
            found: list[KVBlock] = []
            for name in names:
                if name not in self._entries:
                    break
                found.append(self._entries[name].block)
            for block in found:
                self._change(block.name, by=1)
            return tuple(found)

    def free(self, names: Sequence[BlockName]) -> None:
        """Give back one reference to each; blocks nobody holds become idle.

        The chain is freed from its end, so that under pressure tails go before what they follow.

        Raises:
            ValueError: a name is absent or freed more often than it was referenced.
        """
        with self._lock:
            for name, times in Counter(names).items():
                entry = self._entries.get(name)
                if entry is None or entry.num_refs < times:
                    raise ValueError(f"block {name.short} has no reference to give back")
            for name in reversed(names):
                self._change(name, by=-1)

    def touch(self, names: Iterable[BlockName]) -> None:
        """Mark blocks as just used, from the chain's end; absent and held ones are passed over."""
        with self._lock:
            for name in reversed(tuple(names)):
                if name in self._idle:
                    self._idle.move_to_end(name)

    # -- bytes --------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> tuple[KVBlock, ...]:
        """Count `nbytes` more of working state, evicting idle blocks if need be.

        Returns:
            The blocks evicted to make room.

        Raises:
            PoolExhaustedError: they do not fit even if every idle block goes.
            ValueError: `nbytes` is negative.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes must not be negative, got {nbytes}")
        with self._lock:
            evicted = self._make_room(nbytes)
            self._working_bytes += nbytes
            return evicted

    def release(self, nbytes: int) -> None:
        """Give back working bytes.

        Raises:
            ValueError: more than is reserved.
        """
        with self._lock:
            if not 0 <= nbytes <= self._working_bytes:
                raise ValueError(f"cannot release {nbytes} of {self._working_bytes} bytes")
            self._working_bytes -= nbytes

    def evict(self, nbytes: int) -> tuple[KVBlock, ...]:
        """Drop idle blocks, oldest first, until `nbytes` are gone or none is left."""
        with self._lock:
            return self._drop(nbytes)

    def oldest(self, nbytes: int) -> tuple[KVBlock, ...]:
        """The idle blocks that go next, up to `nbytes` of them; all if there are no more."""
        with self._lock:
            return tuple(self._entries[name].block for name in self._next_to_go(nbytes))

    def discard(self, names: Iterable[BlockName]) -> tuple[KVBlock, ...]:
        """Drop those of the blocks that are idle; held ones stay."""
        with self._lock:
            return tuple(self._remove(name) for name in names if name in self._idle)

    # -- readings -----------------------------------------------------------------------------

    @property
    def spec(self) -> ModelCacheSpec:
        """The geometry of the blocks."""
        return self._spec

    def get(self, name: BlockName) -> KVBlock | None:
        """Return a block without referencing it."""
        with self._lock:
            entry = self._entries.get(name)
            return entry.block if entry else None

    def num_refs(self, name: BlockName) -> int:
        """How often a block is referenced; 0 if it is absent."""
        with self._lock:
            entry = self._entries.get(name)
            return entry.num_refs if entry else 0

    def usage(self) -> PoolUsage:
        """Read all counters at one instant."""
        with self._lock:
            return PoolUsage(
                total=self._budget,
                held=self._held_bytes,
                idle=self._idle_bytes,
                working=self._working_bytes,
                num_blocks=len(self._entries),
            )

    def check_integrity(self) -> None:
        """Recount everything.

        Raises:
            AssertionError: a counter or a state is wrong.
        """
        with self._lock:
            held = [e for e in self._entries.values() if e.is_held]
            idle = [e for e in self._entries.values() if not e.is_held]
            counts = [entry.num_refs for entry in self._entries.values()]
            checks = {
                "counts are not negative": min(counts, default=0) >= 0,
                "idle are exactly the unheld": {e.block.name for e in idle} == set(self._idle),
                "held bytes add up": sum(e.block.nbytes for e in held) == self._held_bytes,
                "idle bytes add up": sum(e.block.nbytes for e in idle) == self._idle_bytes,
                "working bytes are not negative": self._working_bytes >= 0,
                "the budget holds": 0 <= self._used() <= self._budget,
                "names match": all(n == e.block.name for n, e in self._entries.items()),
            }
        broken = [what for what, holds in checks.items() if not holds]
        if broken:
            raise AssertionError("; ".join(broken))

    # -- inside the lock ----------------------------------------------------------------------

    def _used(self) -> int:
        return self._held_bytes + self._idle_bytes + self._working_bytes

    def _change(self, name: BlockName, *, by: int) -> None:
        entry = self._entries[name]
        was_idle = name in self._idle
        entry.num_refs += by
        if entry.is_held and was_idle:
            del self._idle[name]
            self._idle_bytes -= entry.block.nbytes
            self._held_bytes += entry.block.nbytes
        elif not entry.is_held and not was_idle:
            self._idle[name] = None
            self._idle_bytes += entry.block.nbytes
            self._held_bytes -= entry.block.nbytes

    def _make_room(self, nbytes: int, keep: set[BlockName] | None = None) -> tuple[KVBlock, ...]:
        """Evict until `nbytes` fit, sparing `keep`; changes nothing if that cannot be."""
        excess = self._used() + nbytes - self._budget
        if excess <= 0:
            return ()
        spared = {name for name in keep or () if name in self._idle}
        spared_bytes = sum(self._entries[name].block.nbytes for name in spared)
        if excess > self._idle_bytes - spared_bytes:
            raise PoolExhaustedError(
                f"{nbytes} bytes of attention state do not fit: "
                f"{self._held_bytes + self._working_bytes} of {self._budget} are in use",
                retry_after_s=1.0,
            )
        return self._drop(excess, spared)

    def _drop(self, excess: int, spared: set[BlockName] | None = None) -> tuple[KVBlock, ...]:
        """Remove idle blocks, oldest first, until at least `excess` bytes are gone."""
        return tuple(self._remove(name) for name in self._next_to_go(excess, spared))

    def _next_to_go(self, excess: int, spared: set[BlockName] | None = None) -> list[BlockName]:
        victims: list[BlockName] = []
        for name in self._idle:
            if excess <= 0:
                break
            if spared and name in spared:
                continue
            victims.append(name)
            excess -= self._entries[name].block.nbytes
        return victims

    def _remove(self, name: BlockName) -> KVBlock:
        del self._idle[name]
        block = self._entries.pop(name).block
        self._idle_bytes -= block.nbytes
        return block
