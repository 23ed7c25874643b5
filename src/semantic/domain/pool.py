"""The memory budget for the KV cache: counts the parts of blocks in memory and evicts.

A part is in one of three states:

    held    being loaded or written; never evicted
    idle    cached and not held; evicted in LRU order when room is needed
    absent  evicted, or never added

The budget also covers *working bytes*, which the pool only counts: the KV cache of running
sequences, and room for parts that are being read. The pool stores keys and sizes. The owner of the
payloads must drop those of the parts that an operation reports as evicted.
"""

import enum
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from semantic.domain.blocks import PartKey
from semantic.domain.errors import PoolExhaustedError
from semantic.domain.spec import ModelCacheSpec


class Pressure(enum.IntEnum):
    """Percentage of the budget that is held or working, so that eviction cannot free it."""

    LOW = 0
    ELEVATED = 80
    HIGH = 90
    FULL = 100


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """A consistent snapshot of the pool's counters, in bytes."""

    total: int
    held: int
    idle: int
    working: int
    num_blocks: int

    @property
    def used(self) -> int:
        return self.held + self.idle + self.working

    @property
    def available(self) -> int:
        """Bytes that are free without eviction."""
        return self.total - self.used

    @property
    def needed_share(self) -> float:
        """The share of the budget that eviction cannot free; 0 without a budget."""
        return (self.held + self.working) / self.total if self.total else 0.0

    @property
    def pressure(self) -> Pressure:
        """The highest level reached by held and working bytes."""
        if self.total == 0:
            return Pressure.FULL
        percent = 100 * (self.held + self.working) // self.total
        return max(level for level in Pressure if percent >= level)


@dataclass(slots=True)
class _PoolEntry:
    nbytes: int
    num_holds: int = 0


class BlockPool:
    """Counts the bytes and holds of parts, within a hard budget.

    Thread-safe: every method takes the pool's lock. Every mutation is atomic: a method that raises
    changes nothing. Methods that may evict return the keys of the evicted parts, and raise
    PoolExhaustedError if evicting all idle parts is not enough. Misuse raises ValueError.
    """

    def __init__(self, spec: ModelCacheSpec, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes must not be negative, got {budget_bytes}")
        self.spec = spec
        self._lock = threading.Lock()
        self._budget = budget_bytes
        self._entries: dict[PartKey, _PoolEntry] = {}
        # In eviction order, the next part to evict first.
        self._idle: OrderedDict[PartKey, None] = OrderedDict()
        self._idle_bytes = 0
        self._held_bytes = 0
        self._working_bytes = 0

    # -- parts --------------------------------------------------------------------------------

    def put(self, sizes: Mapping[PartKey, int], chain: Sequence[PartKey] = ()) -> list[PartKey]:
        """Add parts as idle; parts that are already present are only marked as used.

        Parts of `chain`, which precede the new ones, are marked as used and not evicted for them.
        """
        used = [*chain, *sizes]
        with self._lock:
            new = {key: nbytes for key, nbytes in sizes.items() if key not in self._entries}
            evicted = self._make_room(sum(new.values()), spared=set(used))
            for key, nbytes in new.items():
                self._entries[key] = _PoolEntry(nbytes)
                self._idle[key] = None
                self._idle_bytes += nbytes
            self._touch(used)
            return evicted

    def acquire(self, key: PartKey) -> None:
        """Protect a part from eviction until `release` was called as often as `acquire`."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                raise ValueError(f"block {key[0].short} is not in the pool")
            if not entry.num_holds:
                del self._idle[key]
                self._idle_bytes -= entry.nbytes
                self._held_bytes += entry.nbytes
            entry.num_holds += 1

    def release(self, key: PartKey) -> None:
        """Undo one `acquire`."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not entry.num_holds:
                raise ValueError(f"block {key[0].short} is not held")
            entry.num_holds -= 1
            if not entry.num_holds:
                self._idle[key] = None
                self._idle_bytes += entry.nbytes
                self._held_bytes -= entry.nbytes

    def touch(self, keys: Iterable[PartKey]) -> None:
        """Mark the parts of a chain as just used, so that its end is evicted before its beginning.

        Absent and held parts are ignored.
        """
        with self._lock:
            self._touch(tuple(keys))

    def discard(self, keys: Iterable[PartKey]) -> list[PartKey]:
        """Remove those of the parts that are idle, and return them; held parts stay."""
        with self._lock:
            return self._remove(key for key in dict.fromkeys(keys) if key in self._idle)

    def oldest(self, nbytes: int) -> list[PartKey]:
        """Return the next idle parts to evict, at least `nbytes` in total or all there are."""
        with self._lock:
            return self._next_victims(nbytes)

    # -- working bytes ------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> list[PartKey]:
        """Add `nbytes` to the working bytes, evicting idle parts if necessary."""
        if nbytes < 0:
            raise ValueError(f"nbytes must not be negative, got {nbytes}")
        with self._lock:
            evicted = self._make_room(nbytes)
            self._working_bytes += nbytes
            return evicted

    def unreserve(self, nbytes: int) -> None:
        with self._lock:
            if not 0 <= nbytes <= self._working_bytes:
                raise ValueError(f"cannot unreserve {nbytes} of {self._working_bytes} bytes")
            self._working_bytes -= nbytes

    def resize(self, budget_bytes: int) -> list[PartKey]:
        """Change the budget, evicting idle parts if necessary."""
        with self._lock:
            before, self._budget = self._budget, budget_bytes
            try:
                return self._make_room(0)
            except PoolExhaustedError:
                self._budget = before
                raise

    # -- readings -----------------------------------------------------------------------------

    def keys(self) -> set[PartKey]:
        with self._lock:
            return set(self._entries)

    def usage(self) -> PoolUsage:
        with self._lock:
            return PoolUsage(
                total=self._budget,
                held=self._held_bytes,
                idle=self._idle_bytes,
                working=self._working_bytes,
                num_blocks=len(self._entries),
            )

    def check_integrity(self) -> None:
        """Recount all parts; raises AssertionError if a counter or a state is wrong."""
        with self._lock:
            held = [entry for entry in self._entries.values() if entry.num_holds]
            idle = {key: entry for key, entry in self._entries.items() if not entry.num_holds}
            holds = [entry.num_holds for entry in self._entries.values()]
            checks = {
                "holds are not negative": min(holds, default=0) >= 0,
                "idle are exactly the unheld": set(idle) == set(self._idle),
                "held bytes add up": sum(e.nbytes for e in held) == self._held_bytes,
                "idle bytes add up": sum(e.nbytes for e in idle.values()) == self._idle_bytes,
                "working bytes are not negative": self._working_bytes >= 0,
                "the budget holds": 0 <= self._used() <= self._budget,
            }
        broken = [what for what, holds in checks.items() if not holds]
        if broken:
            raise AssertionError("; ".join(broken))

    # -- inside the lock ----------------------------------------------------------------------

    def _used(self) -> int:
        return self._held_bytes + self._idle_bytes + self._working_bytes

    def _touch(self, keys: Sequence[PartKey]) -> None:
        for key in reversed(keys):
            if key in self._idle:
                self._idle.move_to_end(key)

    def _make_room(self, nbytes: int, spared: Collection[PartKey] = ()) -> list[PartKey]:
        """Evict idle parts, except `spared`, until `nbytes` fit; raises before any change."""
        excess = self._used() + nbytes - self._budget
        if excess <= 0:
            return []
        spared_bytes = sum(self._entries[key].nbytes for key in spared if key in self._idle)
        if excess > self._idle_bytes - spared_bytes:
            raise PoolExhaustedError(
                f"{nbytes} bytes of KV cache do not fit: "
                f"{self._held_bytes + self._working_bytes} of {self._budget} are in use",
                retry_after_s=1.0,
            )
        return self._remove(self._next_victims(excess, spared))

    def _next_victims(self, excess: int, spared: Collection[PartKey] = ()) -> list[PartKey]:
        victims: list[PartKey] = []
        for key in self._idle:
            if excess <= 0:
                break
            if key not in spared:
                victims.append(key)
                excess -= self._entries[key].nbytes
        return victims

    def _remove(self, keys: Iterable[PartKey]) -> list[PartKey]:
        removed = list(keys)
        for key in removed:
            del self._idle[key]
            self._idle_bytes -= self._entries.pop(key).nbytes
        return removed
