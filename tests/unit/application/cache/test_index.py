"""The tree that recall walks: what is found, in which order it ages, and what is on disk."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from semantic.adapters.outbound.backends.fake import fake_spec
from semantic.application.cache.index import BlockIndex, BlockNode
from semantic.domain.blocks import BlockName, pack_tokens
from semantic.domain.spec import LayerKind
from tests.unit.application.engine_rig import ROOT
from tests.unit.application.memory_rig import make_payload

pytestmark = pytest.mark.unit

SPEC = fake_spec(block_tokens=4)


@pytest.fixture
def index() -> BlockIndex:
    return BlockIndex()


def add(
    index: BlockIndex, tokens: Sequence[int], parent: BlockNode | None = None, *, full: bool = True
) -> BlockNode:
    start = parent.end if parent else 0
    node = index.add(ROOT, parent.name if parent else ROOT, start, pack_tokens(tokens))
    if full:
        span = [0] * start + list(tokens)
        node.payloads[LayerKind.FULL] = make_payload(SPEC, span, start, len(span), LayerKind.FULL)
    return node


def matched(index: BlockIndex, tokens: Sequence[int]) -> tuple[list[BlockName], int]:
    match = index.match(ROOT, pack_tokens(tokens), 4)
    return [node.name for node in match.nodes], match.end


def test_a_chain_is_followed_and_its_last_block_sliced(index: BlockIndex) -> None:
    first = add(index, [1, 2, 3, 4])
    second = add(index, [5, 6, 7, 8], first)
    assert matched(index, [1, 2, 3, 4, 5, 6, 9]) == ([first.name, second.name], 6)
    assert matched(index, [9]) == ([], 0)


def test_every_way_is_followed_not_only_the_longest_first_block(index: BlockIndex) -> None:
    long = add(index, [1, 2, 3, 4])
    add(index, [0, 0, 0, 0], long)
    short = add(index, [1, 2, 3])
    rest = add(index, [4, 5, 6, 7], short)
    assert matched(index, [1, 2, 3, 4, 5, 6, 7]) == ([short.name, rest.name], 7)


def test_a_node_without_full_state_is_a_boundary_and_not_on_the_path(index: BlockIndex) -> None:
    boundary = add(index, [1, 2], full=False)
    block = add(index, [1, 2, 3, 4])
    match = index.match(ROOT, pack_tokens([1, 2, 3, 4, 5]), 4)
    assert match.nodes == (block,)
    assert match.boundaries == (block, boundary)
    assert index.match(ROOT, pack_tokens([1, 2, 9]), 4).boundaries == (boundary,)


def test_a_whole_block_is_preferred_to_a_slice_of_a_longer_one(index: BlockIndex) -> None:
    short = add(index, [1, 2])
    add(index, [1, 2, 3, 4])
    add(index, [7], short)
    assert matched(index, [1, 2, 5]) == ([short.name], 2)


def test_a_touched_chain_is_evicted_last(index: BlockIndex) -> None:
    first = add(index, [1, 2, 3, 4])
    second = add(index, [5], first)
    other = add(index, [9])
    index.touch([first, second], at=5.0)
    assert list(index) == [other, second, first]
    assert (first.last_used, other.last_used) == (5.0, 0.0)


def test_known_ages_make_the_order(index: BlockIndex) -> None:
    young, old = add(index, [1]), add(index, [2])
    child = add(index, [3], old)
    young.last_used = 2.0
    index.sort_by_age()
    assert list(index) == [child, old, young]


def test_restored_files_are_found_and_sorted_by_age(index: BlockIndex) -> None:
    known = add(index, [2, 2, 2, 2])
    other = BlockIndex()
    first, second = add(other, [3, 3, 3, 3]), add(other, [1, 1, 1, 1])
    third = add(other, [4], second)
    nodes = (first, second, third)
    parts = [
        replace(node.part(kind), nbytes=10, last_used=age)
        for node, age in zip(nodes, (7.0, 5.0, 5.0), strict=True)
        for kind in (LayerKind.FULL, LayerKind.STATE)
    ]
    index.restore(parts)
    assert [node.name for node in index] == [n.name for n in (known, third, second, first)]
    assert matched(index, [1, 1, 1, 1, 4, 5]) == ([second.name, third.name], 5)
    assert matched(index, [2, 2, 9]) == ([known.name], 2)
    assert matched(index, [3, 3, 9]) == ([first.name], 2)
    assert index.disk_bytes(ROOT) == 60
    assert len(index.changed_since(index.mark - 6) or ()) == 3
    index.check_integrity()


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    "damage",
    [{"tokens": pack_tokens([1, 9])}, {"parent": BlockName(32)}, {"name": BlockName(32)}],
    ids=["tokens", "parent", "name"],
)
def test_a_damaged_row_gives_way_to_the_block(
    index: BlockIndex, damage: dict[str, bytes], *, is_first: bool
) -> None:
    block = add(BlockIndex(), [1, 2])
    whole = replace(block.part(LayerKind.STATE), nbytes=20)
    damaged = replace(block.part(LayerKind.FULL), nbytes=10, **damage)  # type: ignore[arg-type]
    index.restore([damaged, whole] if is_first else [whole, damaged])
    index.check_integrity()
    node = index.add(ROOT, ROOT, 0, pack_tokens([1, 2]))
    assert node.name == block.name
    assert node.files[LayerKind.STATE] is whole
    index.restore([replace(whole, kind=LayerKind.FULL)])
    assert matched(index, [1, 2]) == ([block.name], 2)
    index.check_integrity()


def test_a_block_is_added_again_if_its_row_is_damaged(index: BlockIndex) -> None:
    block = add(BlockIndex(), [1, 2, 3, 4])
    for damage in (pack_tokens([1, 2, 3, 9]), pack_tokens([7])):
        index.restore([replace(block.part(LayerKind.FULL), tokens=damage, nbytes=10)])
        again = add(index, [1, 2, 3, 4])
        assert (again.name, again.files, index.disk_bytes(ROOT)) == (block.name, {}, 0)
        assert matched(index, [1, 2, 3, 4]) == ([block.name], 4)
        index.check_integrity()
        index.remove(again)


def test_bytes_on_disk_are_counted_by_root(index: BlockIndex) -> None:
    node = add(index, [1])
    part = replace(node.part(LayerKind.FULL), nbytes=10)
    index.put_file(node, part)
    index.put_file(node, replace(part, nbytes=30))
    assert index.disk_bytes(ROOT) == 30
    assert index.pop_file(node, LayerKind.FULL) == replace(part, nbytes=30)
    assert index.pop_file(node, LayerKind.FULL) is None
    assert index.disk_bytes(ROOT) == 0
    index.check_integrity()


def test_tails_are_those_nothing_follows(index: BlockIndex) -> None:
    tail, cut = add(index, [1]), add(index, [1, 2])
    add(index, [8], cut)
    block = add(index, [1, 2, 3, 4])
    assert index.prefixes_of(block) == [tail]
    boundary = add(index, [1, 2, 3], full=False)
    assert index.extension_of(boundary) is block
    assert index.extension_of(tail) is cut
    assert index.extension_of(block) is None


def test_a_removed_node_may_come_back_under_what_followed_it(index: BlockIndex) -> None:
    first = add(index, [1, 2, 3, 4])
    second = add(index, [5], first)
    index.remove(first)
    assert matched(index, [1, 2, 3, 4, 5]) == ([], 0)
    assert index.chain(second.name) == [second]
    again = add(index, [1, 2, 3, 4])
    assert matched(index, [1, 2, 3, 4, 5, 6]) == ([again.name, second.name], 5)
    index.check_integrity()
