"""The memory budget for the KV cache: which parts of blocks are held, and which goes next.

A part is in one of three states:

    held    being loaded or written; never evicted
    idle    cached: nobody holds it; evicted in LRU order when room is needed
    absent  evicted, or never there

Besides parts the budget covers *working bytes*, which the pool only counts: the live state of
running sequences, and room for what is being read. The pool knows keys and sizes; whoever owns the
payloads drops those of the parts that an operation reports as evicted.
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
    nbytes: int
    num_holds: int = 0


class BlockPool:
    """Counts the bytes and holds of parts, within a hard budget.

    Thread-safe: every method takes the one lock. Every mutation is all or nothing: it raises
    before it changes anything. Methods that may evict return the keys of what was evicted.
    """

    def __init__(self, spec: ModelCacheSpec, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes must not be negative, got {budget_bytes}")
        self.spec = spec
        self._lock = threading.Lock()
        self._budget = budget_bytes
        self._entries: dict[PartKey, _Entry] = {}
        # Eviction order: the first goes first.
        self._idle: OrderedDict[PartKey, None] = OrderedDict()
        self._idle_bytes = 0
        self._held_bytes = 0
        self._working_bytes = 0

    # -- parts --------------------------------------------------------------------------------

    def put(self, sizes: Mapping[PartKey, int], chain: Sequence[PartKey] = ()) -> list[PartKey]:
        """Take in parts, which are idle then; those that are there already are only touched.

        Nothing of `chain`, which they follow, makes room for them; it is marked as used with them.

        Raises:
            PoolExhaustedError: they do not fit even if everything else that is idle goes.
        """
        used = [*chain, *sizes]
        with self._lock:
            new = {key: nbytes for key, nbytes in sizes.items() if key not in self._entries}
            evicted = self._make_room(sum(new.values()), spared=set(used))
            for key, nbytes in new.items():
                self._entries[key] = _Entry(nbytes)
                self._idle[key] = None
                self._idle_bytes += nbytes
            self._touch(used)
            return evicted

    def hold(self, key: PartKey) -> None:
        """Keep a part from being evicted, until it was let go as often as it was held.

        Raises:
            ValueError: it is absent.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                raise ValueError(f"block {key[0].short} is not in the pool")
            if not entry.num_holds:
                del self._idle[key]
                self._idle_bytes -= entry.nbytes
                self._held_bytes += entry.nbytes
            entry.num_holds += 1

    def let_go(self, key: PartKey) -> None:
        """Undo one `hold`.

        Raises:
            ValueError: it is not held.
        """
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
        """Mark parts as just used, from the chain's end; absent and held ones are ignored."""
        with self._lock:
            self._touch(tuple(keys))

    def discard(self, keys: Iterable[PartKey]) -> list[PartKey]:
        """Drop those of the parts that are idle; held ones stay."""
        with self._lock:
            return self._remove(key for key in dict.fromkeys(keys) if key in self._idle)

    def oldest(self, nbytes: int) -> list[PartKey]:
        """The idle parts that go next, up to `nbytes` of them; all if there are no more."""
        with self._lock:
            return self._next_to_go(nbytes)

    # -- working bytes ------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> list[PartKey]:
        """Count `nbytes` more of working state, evicting idle parts if need be.

        Raises:
            PoolExhaustedError: they do not fit even if everything idle goes.
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

    def resize(self, budget_bytes: int) -> list[PartKey]:
        """Use another budget, evicting idle parts if need be.

        Raises:
            PoolExhaustedError: more than that is held or working.
        """
        with self._lock:
            before, self._budget = self._budget, budget_bytes
            try:
                return self._make_room(0)
            except PoolExhaustedError:
                self._budget = before
                raise

    # -- readings -----------------------------------------------------------------------------

    def keys(self) -> set[PartKey]:
        """Which parts are there."""
        with self._lock:
            return set(self._entries)

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
        """Evict until `nbytes` fit, sparing some; changes nothing if that cannot be."""
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
        return self._remove(self._next_to_go(excess, spared))

    def _next_to_go(self, excess: int, spared: Collection[PartKey] = ()) -> list[PartKey]:
        """Idle parts, oldest first, that make up at least `excess` bytes."""
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
