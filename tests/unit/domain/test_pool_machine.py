"""Any sequence of operations, done to a pool and to a plain model of it."""

import sys
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from semantic.domain.blocks import BlockName, BlockNamespace, KVBlock
from semantic.domain.errors import PoolExhaustedError
from semantic.domain.pool import BlockPool, PoolUsage
from semantic.domain.spec import LayerKind, LayerSpec, ModelCacheSpec

pytestmark = pytest.mark.unit

ROOT = BlockNamespace("model@1", "bf16").root()


def spec_of(block_tokens: int) -> ModelCacheSpec:
    layer = LayerSpec(LayerKind.FULL, num_kv_heads=1, key_dim=8, value_dim=8)
    return ModelCacheSpec("tiny", (layer,), 100, 10_000, block_tokens=block_tokens)


def names(blocks: tuple[KVBlock, ...]) -> list[BlockName]:
    return [block.name for block in blocks]


class PoolModel:
    """What the pool should do, without regard to speed.

    Recency is a clock reading per block, not a list; bytes are summed up when asked for.
    """

    def __init__(self, block_tokens: int, budget: int) -> None:
        self.block_tokens, self.budget, self.working = block_tokens, budget, 0
        self.blocks: dict[BlockName, KVBlock] = {}
        self.refs: dict[BlockName, int] = {}
        self.idle_since: dict[BlockName, int] = {}
        self.clock = 0

    def is_held(self, name: BlockName) -> bool:
        return self.refs[name] > 0

    def usage(self) -> PoolUsage:
        held = sum(b.nbytes for b in self.blocks.values() if self.is_held(b.name))
        idle = sum(b.nbytes for b in self.blocks.values() if not self.is_held(b.name))
        return PoolUsage(self.budget, held, idle, self.working, len(self.blocks))

    def lru(self) -> list[KVBlock]:
        idle = [block for block in self.blocks.values() if not self.is_held(block.name)]
        return sorted(idle, key=lambda block: self.idle_since[block.name])

    def stamp(self, name: BlockName) -> None:
        self.clock += 1
        self.idle_since[name] = self.clock

    def count(self, given: list[BlockName], by: int) -> None:
        for name in given:
            if self.refs.get(name, 0) + by * given.count(name) < 0 or name not in self.blocks:
                raise ValueError(name.short)
        for name in given if by > 0 else reversed(given):
            self.refs[name] += by
            if not self.is_held(name):
                self.stamp(name)

    def drop(self, excess: int, spared: tuple[KVBlock, ...] = ()) -> tuple[KVBlock, ...]:
        victims: list[KVBlock] = []
        for block in self.lru():
            if sum(victim.nbytes for victim in victims) >= excess:
                break
            if block not in spared:
                victims.append(block)
        for victim in victims:
            del self.blocks[victim.name], self.refs[victim.name]
        return tuple(victims)

    def make_room(self, nbytes: int, spared: tuple[KVBlock, ...] = ()) -> tuple[KVBlock, ...]:
        evictable = sum(block.nbytes for block in self.lru() if block not in spared)
        if nbytes > self.usage().available + evictable:
            raise PoolExhaustedError("full")
        return self.drop(nbytes - self.usage().available, spared)

    def allocate(self, blocks: tuple[KVBlock, ...]) -> tuple[KVBlock, ...]:
        if any(block.num_tokens > self.block_tokens for block in blocks):
            raise ValueError("too long")
        new = {block for block in blocks if block.name not in self.blocks}
        evicted = self.make_room(sum(block.nbytes for block in new), blocks)
        for block in new:
            self.blocks[block.name] = block
            self.refs[block.name] = 0
        self.count(names(blocks), by=1)
        return evicted

    def acquire(self, given: list[BlockName]) -> tuple[KVBlock, ...]:
        absent = [index for index, name in enumerate(given) if name not in self.blocks]
        found = given[: absent[0]] if absent else given
        self.count(found, by=1)
        return tuple(self.blocks[name] for name in found)

    def touch(self, given: list[BlockName]) -> None:
        for name in reversed(given):
            self.stamp(name)

    def reserve(self, nbytes: int) -> tuple[KVBlock, ...]:
        if nbytes < 0:
            raise ValueError("negative")
        evicted = self.make_room(nbytes)
        self.working += nbytes
        return evicted

    def release(self, nbytes: int) -> None:
        if nbytes < 0 or nbytes > self.working:
            raise ValueError("not reserved")
        self.working -= nbytes


def outcome(operation: Callable[[], object]) -> object:
    """What an operation returns, or the type of what it raises."""
    try:
        return operation()
    except (ValueError, PoolExhaustedError) as error:
        return type(error)


def make_universe() -> tuple[KVBlock, ...]:
    """Two conversations that begin alike, with blocks of many sizes."""
    trunk = following(ROOT, ((1,), 10), ((2, 3), 20))
    left = following(trunk[-1].name, ((4, 5, 6, 7), 0), ((8,), 35), ((9, 10, 11), 50))
    right = following(trunk[-1].name, ((4,), 5), ((8, 9, 10, 11), 40))
    return (*trunk, *left, *right)


def following(parent: BlockName, *runs: tuple[tuple[int, ...], int]) -> list[KVBlock]:
    """Blocks of these tokens and sizes, one after another."""
    blocks: list[KVBlock] = []
    for tokens, nbytes in runs:
        blocks.append(KVBlock.of(parent, tokens, nbytes))
        parent = blocks[-1].name
    return blocks


UNIVERSE = make_universe()
block_lists = st.lists(st.sampled_from(UNIVERSE), max_size=4).map(tuple)
name_lists = block_lists.map(names)
# All but the last block fit.
BUDGET = sum(block.nbytes for block in UNIVERSE) - 1
amounts = st.integers(-5, 60)


class PoolMachine(RuleBasedStateMachine):
    """Does the same to a pool and to its model; both must agree on results and refusals."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(spec_of(4), BUDGET)
        self.model = PoolModel(4, BUDGET)

    @rule(blocks=block_lists)
    def allocate(self, blocks: tuple[KVBlock, ...]) -> None:
        expected = outcome(lambda: self.model.allocate(blocks))
        assert outcome(lambda: self.pool.allocate(blocks)) == expected

    @rule(blocks=block_lists)
    def allocate_and_free(self, blocks: tuple[KVBlock, ...]) -> None:
        before = self.pool.usage()
        self.allocate(blocks)
        if self.pool.usage() != before:
            self.free(names(blocks))

    @rule(given=name_lists)
    def acquire(self, given: list[BlockName]) -> None:
        assert self.pool.acquire(given) == self.model.acquire(given)

    @rule(given=name_lists)
    def free(self, given: list[BlockName]) -> None:
        expected = outcome(lambda: self.model.count(given, by=-1))
        assert outcome(lambda: self.pool.free(given)) == expected

    @precondition(lambda self: any(self.model.refs.values()))
    @rule(data=st.data())
    def free_referenced(self, data: st.DataObject) -> None:
        referenced = [name for name, count in self.model.refs.items() if count]
        self.free(data.draw(st.lists(st.sampled_from(referenced), min_size=1, max_size=4)))

    @rule(given=name_lists)
    def touch(self, given: list[BlockName]) -> None:
        self.model.touch(given)
        self.pool.touch(given)

    @precondition(lambda self: len(self.model.lru()) > 1)
    @rule(data=st.data())
    def touch_idle(self, data: st.DataObject) -> None:
        idle = [block.name for block in self.model.lru()]
        self.touch(data.draw(st.permutations(idle)))

    @rule(nbytes=amounts)
    def evict(self, nbytes: int) -> None:
        assert self.pool.evict(nbytes) == self.model.drop(nbytes)

    @rule(nbytes=amounts)
    def reserve(self, nbytes: int) -> None:
        expected = outcome(lambda: self.model.reserve(nbytes))
        assert outcome(lambda: self.pool.reserve(nbytes)) == expected

    @rule(nbytes=amounts)
    def release(self, nbytes: int) -> None:
        expected = outcome(lambda: self.model.release(nbytes))
        assert outcome(lambda: self.pool.release(nbytes)) == expected

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check_integrity()
        usage = self.pool.usage()
        assert usage == self.model.usage()
        assert usage.used + usage.available == usage.total
        assert min(usage.held, usage.idle, usage.working, usage.available) >= 0
        for block in UNIVERSE:
            assert self.pool.num_refs(block.name) == self.model.refs.get(block.name, 0)
            assert self.pool.get(block.name) == self.model.blocks.get(block.name)

    def teardown(self) -> None:
        # Whatever was refused on the way must have left the order of eviction alone.
        assert self.pool.evict(sys.maxsize) == tuple(self.model.lru())


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(deadline=None, max_examples=120, stateful_step_count=40)
