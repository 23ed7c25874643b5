import contextlib
import gc
import itertools
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from semantic.adapters.outbound.backends.fake import fake_spec
from semantic.application.cache.store import AgentCacheStore
from semantic.domain.blocks import BlockName
from semantic.domain.pool import BlockPool
from semantic.domain.spec import LayerKind
from semantic.ports.backend import HostBuffer, KVPayload
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


def test_the_version_changes_with_what_a_plan_depends_on_and_nothing_else() -> None:
    store = store_of(2)
    versions = [store.version]
    name = store.seal(ROOT, ROOT, [1] * 8, payload(0, 8))
    assert name is not None
    versions.append(store.version)
    (full,) = payload(0, 8)
    store.add_parts(name, [replace(full, kind=LayerKind.STATE)])
    versions.append(store.version)
    plan = store.plan(ROOT, [1] * 8)
    store.touch_parts(plan.parts)
    store.touch_chain(name)
    assert store.version == versions[-1]
    assert store.drop_payloads(plan.parts) == 1
    versions.append(store.version)
    assert len(set(versions)) == 4


def test_the_longer_of_two_known_prefixes_is_used() -> None:
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


def seal_chain(store: AgentCacheStore, first: int, num_blocks: int) -> list[BlockName]:
    """Seal blocks that follow each other, until one finds no room."""
    sealed: list[BlockName] = []
    for index in range(num_blocks):
        parent = sealed[-1] if sealed else ROOT
        name = store.seal(ROOT, parent, [first] * 8, payload(8 * index, 8 * index + 8))
        if name is None:
            break
        sealed.append(name)
    return sealed


@contextlib.contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Count the functions that are called in the block."""
    calls: Counter[str] = Counter()
    sys.setprofile(lambda _, event, __: calls.update([event]))
    try:
        yield calls
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("num_old", [0, 400])
def test_a_block_takes_as_long_to_seal_however_many_it_follows(num_old: int) -> None:
    now = [0.0]
    pool = BlockPool(fake_spec(block_tokens=8), 400 * BLOCK_BYTES)
    store = AgentCacheStore(pool, now=lambda: now[0])
    for first in range(num_old):  # which have to make room
        store.seal(ROOT, ROOT, [1000 + first] * 8, payload(0, 8))
    now[0] = 10.0
    with counted_calls() as few:
        seal_chain(store, 1, 20)
    with counted_calls() as many:
        assert len(seal_chain(store, 2, 200)) == 200
    assert many["call"] < 15 * few["call"]


def test_a_used_chain_is_evicted_from_its_end() -> None:
    store = store_of(6)
    store.touch_chain(seal_chain(store, 1, 6)[-1])
    seal_chain(store, 2, 2)
    assert store.plan(ROOT, [1] * 48).end == 32


@pytest.mark.parametrize("seconds", [0.0, 0.4, 5.0])
def test_a_block_does_not_take_the_place_of_what_it_follows(seconds: float) -> None:
    times = itertools.count()
    pool = BlockPool(fake_spec(block_tokens=8), 4 * BLOCK_BYTES)
    store = AgentCacheStore(pool, now=lambda: next(times) * seconds)
    seal_chain(store, 1, 4)
    assert len(seal_chain(store, 2, 6)) == 4
    assert store.plan(ROOT, [2] * 48).end == 32
    assert store.plan(ROOT, [1] * 48).end == 0


def test_a_tail_goes_into_the_block_that_it_begins() -> None:
    moved: list[tuple[BlockName, BlockName]] = []
    pool = BlockPool(fake_spec(block_tokens=8), 8 * BLOCK_BYTES)
    store = AgentCacheStore(pool, on_moved=lambda old, new: moved.append((old, new)))
    tail = store.seal(ROOT, ROOT, [1, 2], payload(0, 2))
    block = store.seal(ROOT, ROOT, [1, 2, 3], payload(0, 3))
    assert moved == [(tail, block)]
    assert len(store.nodes()) == 1
