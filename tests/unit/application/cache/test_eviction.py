"""Which files are evicted, by the index alone; `test_writer` tests the eviction itself."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.application.cache.eviction import disk_victims
from semantic.application.cache.index import BlockIndex, BlockNode
from semantic.domain.blocks import BlockName, pack_tokens
from semantic.domain.spec import LayerKind
from tests.unit.application.engine_rig import ROOT

pytestmark = pytest.mark.unit

NBYTES = 10


class CountingIndex(BlockIndex):
    """Counts how often it is asked what follows a block."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    def followers(self, name: BlockName) -> Iterable[BlockNode]:
        self.num_asked += 1
        return super().followers(name)


def add_chain(index: BlockIndex, first: int, num_blocks: int) -> list[BlockNode]:
    """Blocks on disk that follow each other, as a sequence seals them: the first is the oldest."""
    nodes: list[BlockNode] = []
    for start in range(0, 4 * num_blocks, 4):
        parent = nodes[-1].name if nodes else ROOT
        node = index.add(ROOT, parent, start, pack_tokens([first] * 4))
        index.put_file(node, replace(node.part(LayerKind.FULL), nbytes=NBYTES))
        nodes.append(node)
    return nodes


@pytest.mark.parametrize("is_touched", [False, True])
def test_an_old_chain_goes_from_its_end_before_any_of_a_young_one(is_touched: bool) -> None:
    index = BlockIndex()
    old, young = add_chain(index, 1, 3), add_chain(index, 2, 2)
    if is_touched:  # which puts ends before beginnings
        index.touch(old, 1.0)
        index.touch(young, 2.0)
    order = [*old[::-1], *young[::-1]]
    for count in range(6):
        assert disk_victims(index, count * NBYTES, spared=()) == order[:count]
    assert disk_victims(index, 99 * NBYTES, spared=()) == order
    assert disk_victims(index, 99 * NBYTES, spared={old[1].name}) == [old[2], *order[3:]]


def test_a_fork_goes_before_what_it_shares() -> None:
    index = BlockIndex()
    trunk = add_chain(index, 1, 2)
    fork = index.add(ROOT, trunk[0].name, 4, pack_tokens([9] * 4))
    index.put_file(fork, replace(fork.part(LayerKind.FULL), nbytes=NBYTES))
    assert disk_victims(index, 99 * NBYTES, spared=()) == [trunk[1], fork, trunk[0]]
    fork.num_pins = 1
    assert disk_victims(index, 99 * NBYTES, spared=()) == [trunk[1]]


def test_every_block_is_looked_at_twice_at_most_however_long_the_chains() -> None:
    index = CountingIndex()
    for first in range(5):
        add_chain(index, first, 100)
    assert len(disk_victims(index, 500 * NBYTES, spared=())) == 500
    assert index.num_asked <= 1000


@given(data=st.data())
def test_whatever_the_tree_pins_stay_and_what_stays_has_its_prefix(data: st.DataObject) -> None:
    index, nodes = BlockIndex(), list[BlockNode]()
    for count in range(data.draw(st.integers(1, 12))):
        before = data.draw(st.sampled_from([None, *nodes]))
        parent, start = (before.name, before.end) if before else (ROOT, 0)
        node = index.add(ROOT, parent, start, pack_tokens([count] * 4))
        index.put_file(node, replace(node.part(LayerKind.FULL), nbytes=NBYTES))
        nodes.append(node)
    for at, node in enumerate(data.draw(st.lists(st.sampled_from(nodes)))):
        index.touch(index.chain(node.name), float(at))
    index.pin(node.name for node in data.draw(st.sets(st.sampled_from(nodes))))
    spared = {node.name for node in data.draw(st.sets(st.sampled_from(nodes)))}
    wanted = NBYTES * data.draw(st.integers(0, len(nodes) + 1))

    victims = disk_victims(index, wanted, spared=spared)
    kept = {node.name for node in nodes} - {node.name for node in victims}
    assert all(node.name in kept for node in nodes if node.num_pins or node.name in spared)
    assert all(node.parent in kept for node in nodes if node.name in kept and node.start)
    needed = {link.name for node in nodes if node.num_pins for link in index.chain(node.name)}
    needed |= {link.name for name in spared for link in index.chain(name)}
    assert NBYTES * len(victims) == min(wanted, NBYTES * (len(nodes) - len(needed)))
