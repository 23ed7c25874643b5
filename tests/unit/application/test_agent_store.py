import gc
import tracemalloc

import pytest

from semantic.adapters.outbound.fake_backend import fake_spec
from semantic.application.agent_store import AgentCacheStore
from semantic.domain.block_pool import BlockPool
from semantic.domain.blocks import BlockName
from semantic.domain.spec import LayerKind
from semantic.ports.outbound import HostBuffer, KVPayload
from tests.unit.application.engine_rig import ROOT

pytestmark = pytest.mark.unit

BLOCK_BYTES = 32


def store_of(num_blocks: int) -> AgentCacheStore:
    return AgentCacheStore(BlockPool(fake_spec(block_tokens=8), num_blocks * BLOCK_BYTES))


def payload(start: int, end: int) -> tuple[KVPayload]:
    data = HostBuffer("full", (8,), "u32", bytes(BLOCK_BYTES))
    return (KVPayload("fake.v1", LayerKind.FULL, start, end, (data,)),)


def test_recall_makes_a_block_young_again() -> None:
    store = store_of(2)
    for first in (1, 2):
        store.seal(ROOT, ROOT, [first] * 8, payload(0, 8))
    store.plan(ROOT, [1] * 8)
    store.seal(ROOT, ROOT, [3] * 8, payload(0, 8))
    assert store.plan(ROOT, [1] * 8).end == 8
    assert store.plan(ROOT, [2] * 8).end == 0


def test_of_two_known_beginnings_the_longer_is_taken() -> None:
    store = store_of(8)
    store.seal(ROOT, ROOT, [1, 2], payload(0, 2))
    store.seal(ROOT, ROOT, [1, 2, 3, 4, 5], payload(0, 5))
    assert store.plan(ROOT, [1, 2, 3, 4, 5, 6]).end == 5


def test_the_child_with_the_longest_run_is_sliced() -> None:
    store = store_of(8)
    store.seal(ROOT, ROOT, [1, 2, 9, 9, 9, 9, 9, 9], payload(0, 8))
    store.seal(ROOT, ROOT, [1, 2, 3, 4, 9, 9, 9, 9], payload(0, 8))
    store.seal(ROOT, ROOT, [1, 9, 9, 9, 9, 9, 9, 9], payload(0, 8))
    assert store.plan(ROOT, [1, 2, 3, 4, 5]).end == 4


def seal_pairs(store: AgentCacheStore, firsts: range) -> None:
    """Seal chains of two blocks; in a store of two blocks each pair evicts the one before."""
    for first in firsts:
        parent = store.seal(ROOT, ROOT, [first] * 8, payload(0, 8))
        assert parent is not None
        store.seal(ROOT, parent, [first] * 8, payload(8, 16))


def test_eviction_leaves_no_empty_entries() -> None:
    store = store_of(2)
    tracemalloc.start()
    try:
        seal_pairs(store, range(1000))
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        seal_pairs(store, range(1000, 2000))
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # An entry left behind by each pair would take some 200 bytes.
    assert after - before < 20_000


def test_a_tail_goes_into_the_block_that_it_begins() -> None:
    moved: list[tuple[BlockName, BlockName]] = []
    pool = BlockPool(fake_spec(block_tokens=8), 8 * BLOCK_BYTES)
    store = AgentCacheStore(pool, on_moved=lambda old, new: moved.append((old, new)))
    tail = store.seal(ROOT, ROOT, [1, 2], payload(0, 2))
    block = store.seal(ROOT, ROOT, [1, 2, 3], payload(0, 3))
    assert moved == [(tail, block)]
    assert len(store.index) == 1
