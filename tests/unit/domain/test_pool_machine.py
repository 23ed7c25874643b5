"""Any sequence of operations, done to a pool and to a plain model of it."""

import sys
from collections.abc import Callable, Collection

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from semantic.domain.blocks import BlockNamespace, PartKey, block_name
from semantic.domain.errors import PoolExhaustedError
from semantic.domain.pool import BlockPool, PoolUsage
from semantic.domain.spec import LayerKind, LayerSpec, ModelCacheSpec

pytestmark = pytest.mark.unit

ROOT = BlockNamespace("model@1", "bf16").root()
SPEC = ModelCacheSpec("tiny", (LayerSpec(LayerKind.FULL, 1, 8, 8),), 100, 10_000, block_tokens=4)
# Parts of many sizes, some of the same block.
SIZES: dict[PartKey, int] = {
    (block_name(ROOT, (token,)), kind): nbytes
    for token, kind, nbytes in [
        (1, LayerKind.FULL, 10),
        (1, LayerKind.WINDOW, 20),
        (2, LayerKind.FULL, 0),
        (3, LayerKind.FULL, 35),
        (3, LayerKind.STATE, 50),
        (4, LayerKind.FULL, 5),
        (5, LayerKind.FULL, 40),
    ]
}
BUDGET = sum(SIZES.values()) - 1  # all but the last part fit
keys = st.sampled_from(list(SIZES))
key_lists = st.lists(keys, max_size=4)
amounts = st.integers(-5, 60)


class PoolModel:
    """What the pool should do, without regard to speed.

    Recency is a clock reading per part, not a list; bytes are summed up when asked for.
    """

    def __init__(self) -> None:
        self.working = self.clock = 0
        self.holds: dict[PartKey, int] = {}
        self.idle_since: dict[PartKey, int] = {}

    def usage(self) -> PoolUsage:
        held = sum(SIZES[key] for key, count in self.holds.items() if count)
        idle = sum(SIZES[key] for key, count in self.holds.items() if not count)
        return PoolUsage(BUDGET, held, idle, self.working, len(self.holds))

    def lru(self) -> list[PartKey]:
        idle = [key for key, count in self.holds.items() if not count]
        return sorted(idle, key=lambda key: self.idle_since[key])

    def touch(self, used: list[PartKey]) -> None:
        for key in reversed(used):
            self.clock += 1
            self.idle_since[key] = self.clock

    def count(self, key: PartKey, by: int) -> None:
        if self.holds.get(key, -1) + by < 0 or key not in self.holds:
            raise ValueError(key)
        self.holds[key] += by
        if by < 0 and not self.holds[key]:
            self.touch([key])

    def oldest(self, excess: int, spared: Collection[PartKey] = ()) -> list[PartKey]:
        victims: list[PartKey] = []
        for key in self.lru():
            if sum(SIZES[victim] for victim in victims) >= excess:
                break
            if key not in spared:
                victims.append(key)
        return victims

    def remove(self, victims: list[PartKey]) -> list[PartKey]:
        for victim in victims:
            del self.holds[victim]
        return victims

    def make_room(self, nbytes: int, spared: Collection[PartKey] = ()) -> list[PartKey]:
        evictable = sum(SIZES[key] for key in self.lru() if key not in spared)
        if nbytes > self.usage().available + evictable:
            raise PoolExhaustedError("full")
        return self.remove(self.oldest(nbytes - self.usage().available, spared))

    def put(self, parts: dict[PartKey, int], chain: list[PartKey]) -> list[PartKey]:
        new = {key: nbytes for key, nbytes in parts.items() if key not in self.holds}
        evicted = self.make_room(sum(new.values()), [*chain, *parts])
        self.holds.update(dict.fromkeys(new, 0))
        self.touch([*chain, *parts])
        return evicted

    def discard(self, dropped: list[PartKey]) -> list[PartKey]:
        return self.remove([key for key in dict.fromkeys(dropped) if self.holds.get(key) == 0])

    def reserve(self, nbytes: int) -> list[PartKey]:
        if nbytes < 0:
            raise ValueError("negative")
        evicted = self.make_room(nbytes)
        self.working += nbytes
        return evicted

    def unreserve(self, nbytes: int) -> None:
        if nbytes < 0 or nbytes > self.working:
            raise ValueError("not reserved")
        self.working -= nbytes


def outcome(operation: Callable[[], object]) -> object:
    """What an operation returns, or the type of what it raises."""
    try:
        return operation()
    except (ValueError, PoolExhaustedError) as error:
        return type(error)


class PoolMachine(RuleBasedStateMachine):
    """Does the same to a pool and to its model; both must agree on results and refusals."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SPEC, BUDGET)
        self.model = PoolModel()

    @rule(new=key_lists, chain=key_lists)
    def put(self, new: list[PartKey], chain: list[PartKey]) -> None:
        parts = {key: SIZES[key] for key in new}
        expected = outcome(lambda: self.model.put(parts, chain))
        assert outcome(lambda: self.pool.put(parts, chain)) == expected

    @rule(key=keys)
    def acquire(self, key: PartKey) -> None:
        expected = outcome(lambda: self.model.count(key, by=1))
        assert outcome(lambda: self.pool.acquire(key)) == expected

    @rule(key=keys)
    def release(self, key: PartKey) -> None:
        expected = outcome(lambda: self.model.count(key, by=-1))
        assert outcome(lambda: self.pool.release(key)) == expected

    @precondition(lambda self: any(self.model.holds.values()))
    @rule(data=st.data())
    def release_held(self, data: st.DataObject) -> None:
        held = [key for key, count in self.model.holds.items() if count]
        self.release(data.draw(st.sampled_from(held)))

    @rule(used=key_lists)
    def touch(self, used: list[PartKey]) -> None:
        self.model.touch(used)
        self.pool.touch(used)

    @precondition(lambda self: len(self.model.lru()) > 1)
    @rule(data=st.data())
    def touch_idle(self, data: st.DataObject) -> None:
        self.touch(data.draw(st.permutations(self.model.lru())))

    @rule(dropped=key_lists)
    def discard(self, dropped: list[PartKey]) -> None:
        assert self.pool.discard(dropped) == self.model.discard(dropped)

    @rule(nbytes=amounts)
    def reserve(self, nbytes: int) -> None:
        expected = outcome(lambda: self.model.reserve(nbytes))
        assert outcome(lambda: self.pool.reserve(nbytes)) == expected

    @rule(nbytes=amounts)
    def unreserve(self, nbytes: int) -> None:
        expected = outcome(lambda: self.model.unreserve(nbytes))
        assert outcome(lambda: self.pool.unreserve(nbytes)) == expected

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check_integrity()
        usage = self.pool.usage()
        assert usage == self.model.usage()
        assert usage.used + usage.available == usage.total
        assert min(usage.held, usage.idle, usage.working, usage.available) >= 0
        assert self.pool.keys() == set(self.model.holds)
        # Whatever was refused must have left the order of eviction alone.
        for nbytes in (1, 30, sys.maxsize):
            assert self.pool.oldest(nbytes) == self.model.oldest(nbytes)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(deadline=None, max_examples=120, stateful_step_count=40)
