"""Where a known beginning can be resumed, and from which parts."""

from collections.abc import Sequence

import pytest

from semantic.adapters.outbound.backends.fake import fake_spec
from semantic.application.cache.index import BlockIndex, BlockNode
from semantic.application.cache.restore_plan import (
    ReadCost,
    RestorePlan,
    WantedPart,
    needed_windows,
    plan_restore,
    worth_reading,
)
from semantic.domain.blocks import PartKey, pack_tokens
from semantic.domain.spec import LayerKind, ModelCacheSpec
from tests.unit.application.engine_rig import ROOT
from tests.unit.application.memory_rig import MemoryRig, fetch, make_payload

pytestmark = pytest.mark.unit

FULL, WINDOW, STATE = LayerKind.FULL, LayerKind.WINDOW, LayerKind.STATE
TOKENS = tuple(range(1, 21))


class Tree:
    """Blocks of four tokens of one conversation, and what they have."""

    def __init__(self, spec: ModelCacheSpec) -> None:
        self.spec = spec
        self.index = BlockIndex()
        self.chain: list[BlockNode] = []

    def block(self, *kinds: LayerKind, size: int = 4) -> BlockNode:
        node = self.part(size, *kinds)
        self.chain.append(node)
        return node

    def part(self, size: int, *kinds: LayerKind) -> BlockNode:
        start = self.chain[-1].end if self.chain else 0
        parent = self.chain[-1].name if self.chain else ROOT
        node = self.index.add(ROOT, parent, start, pack_tokens(TOKENS[start : start + size]))
        for kind in kinds:
            node.payloads[kind] = make_payload(self.spec, TOKENS, start, node.end, kind)
        return node

    def plan(self, num_tokens: int = 20) -> RestorePlan:
        match = self.index.match(ROOT, pack_tokens(TOKENS[:num_tokens]), 4)
        ends = frozenset(n.name for n in match.nodes if n.num_tokens == 4)
        return plan_restore(ROOT, match, self.spec, ends)


def spans(plan: RestorePlan, kind: LayerKind) -> list[tuple[int, int]]:
    return [(w.node.start, w.node.end) for w in plan.parts if w.kind is kind]


def test_full_attention_resumes_anywhere() -> None:
    tree = Tree(fake_spec(block_tokens=4))
    first, second = tree.block(FULL), tree.block(FULL)
    plan = tree.plan(7)
    assert (plan.end, plan.chain, plan.num_whole) == (7, first.name, 4)
    plan = tree.plan()
    assert (plan.end, plan.chain, plan.num_whole) == (8, second.name, 8)
    assert spans(plan, FULL) == [(0, 4), (4, 8)]


def test_a_tail_is_used_and_sealed_anew() -> None:
    tree = Tree(fake_spec(block_tokens=4))
    first = tree.block(FULL)
    tree.block(FULL, size=2)
    plan = tree.plan()
    assert (plan.end, plan.chain, plan.num_whole) == (6, first.name, 4)


@pytest.mark.parametrize(
    "window, expected",
    [(2, [(8, 12)]), (4, [(8, 12)]), (5, [(4, 8), (8, 12)]), (9, [(0, 4), (4, 8), (8, 12)])],
)
def test_a_window_is_covered_by_as_many_blocks_as_it_spans(
    window: int, expected: Sequence[tuple[int, int]]
) -> None:
    tree = Tree(fake_spec(block_tokens=4, window=window))
    for _ in range(3):
        tree.block(FULL, WINDOW)
    plan = tree.plan()
    assert plan.end == 12
    assert spans(plan, WINDOW) == list(expected)


def test_a_window_with_a_hole_falls_back_to_where_it_is_whole() -> None:
    tree = Tree(fake_spec(block_tokens=4, window=6))
    for kinds in ((FULL, WINDOW), (FULL, WINDOW), (FULL,), (FULL, WINDOW)):
        tree.block(*kinds)
    plan = tree.plan()
    assert plan.end == 8
    assert spans(plan, FULL) == [(0, 4), (4, 8)]
    assert spans(plan, WINDOW) == [(0, 4), (4, 8)]


def test_a_boundary_inside_a_block_slices_its_full_part() -> None:
    tree = Tree(fake_spec(block_tokens=4, window=3))
    first = tree.block(FULL)
    boundary = tree.part(3, WINDOW)
    tree.block(FULL)
    plan = tree.plan()
    assert (plan.end, plan.chain, plan.num_whole) == (7, first.name, 4)
    assert [w.node for w in plan.parts if w.kind is WINDOW] == [boundary]


def test_a_window_smaller_than_a_block_can_be_cut_inside_it() -> None:
    tree = Tree(fake_spec(block_tokens=4, window=2))
    tree.block(FULL, WINDOW)
    assert tree.plan(4).end == 4
    # [2, 4) is there; [1, 3) is not.
    assert tree.plan(3).end == 0


def test_parts_that_overlap_are_never_both_taken() -> None:
    tree = Tree(fake_spec(block_tokens=4, window=6))
    tree.block(FULL, WINDOW)
    tree.part(2, FULL, WINDOW)  # [4, 6)
    tree.block(FULL, WINDOW)
    plan = tree.plan()
    assert plan.end == 8
    assert spans(plan, WINDOW) == [(0, 4), (4, 8)]
    assert spans(tree.plan(6), WINDOW) in ([(0, 4), (4, 6)], [(0, 4), (4, 8)])


def test_state_is_resumed_exactly_where_it_was_taken() -> None:
    tree = Tree(fake_spec(block_tokens=4, has_state=True))
    tree.block(FULL)
    tree.block(FULL, STATE)
    tree.part(2, STATE)
    tree.block(FULL)
    assert tree.plan().end == 10
    assert tree.plan(9).end == 8
    assert tree.plan(7).end == 0
    assert spans(tree.plan(), STATE) == [(8, 10)]


def test_kept_windows_are_those_before_a_boundary() -> None:
    tree = Tree(fake_spec(block_tokens=4, window=5))
    nodes = [tree.block(FULL, WINDOW) for _ in range(5)]
    names = [node.name for node in nodes]
    assert needed_windows(nodes, [12], 5) == {names[1], names[2]}
    assert needed_windows(nodes, [13], 5) == {names[2], names[3]}
    assert needed_windows(nodes, [], 5) == set()


# -- what is worth reading ----------------------------------------------------------------------


def read(cost: ReadCost, now: list[float], nbytes: int, seconds: float) -> None:
    with cost.measured(nbytes):
        now[0] += seconds


def test_small_files_do_not_make_large_ones_look_slow() -> None:
    now = [100.0]
    cost = ReadCost(clock=lambda: now[0])
    assert cost.seconds_to_read(10**9) == 0
    read(cost, now, 10**6, 1.0)
    for _ in range(20):
        read(cost, now, 1, 0.001)
    assert cost.seconds_to_read(10**6) < 1.1


def test_asking_how_fast_a_disk_is_does_not_change_the_answer() -> None:
    now = [100.0]
    cost = ReadCost(clock=lambda: now[0])
    read(cost, now, 10**6, 1.0)
    for _ in range(1000):
        assert cost.seconds_to_read(10**6) > 0.1
    assert cost.seconds_to_read(10**6) == pytest.approx(1.0)


def test_a_slow_disk_is_tried_again_after_a_while_and_measured_anew() -> None:
    now = [100.0]
    cost = ReadCost(clock=lambda: now[0])
    read(cost, now, 10**6, 1.0)
    now[0] += 150
    assert cost.seconds_to_read(10**6) > 0.1
    now[0] += 60
    assert cost.seconds_to_read(10**6) < 0.1
    read(cost, now, 10**6, 1.0)
    assert cost.seconds_to_read(10**6) > 0.1


def test_reads_that_open_a_connection_are_not_measured() -> None:
    cost = ReadCost(num_ignored=1)
    for is_judged in (False, True):
        with cost.measured(1):
            pass
        assert (cost.seconds_to_read(10**9) > 0) is is_judged


def test_what_takes_longer_to_read_than_to_compute_is_computed(rig: MemoryRig) -> None:
    tokens = list(range(8))
    rig.seal(tokens)
    rig.flush()
    assert rig.spec == fake_spec(block_tokens=4)
    nodes = sorted(rig.store.nodes(), key=lambda node: node.start)
    rig.store.drop_payloads([WantedPart(nodes[1], LayerKind.FULL)])
    fetch(rig.store, WantedPart(nodes[1], LayerKind.FULL)).result(60)
    rig.store.drop_payloads([WantedPart(nodes[1], LayerKind.FULL)])
    plan = rig.store.plan(ROOT, tokens)

    def num_worth_reading(seconds_per_token: float, *begun: PartKey) -> int:
        costs = rig.store.read_costs
        return worth_reading(plan, ROOT, rig.spec, costs, seconds_per_token, begun).end

    assert num_worth_reading(10**9) == 8
    assert num_worth_reading(1e-30) == 4
    assert num_worth_reading(0.0) == 8  # not measured yet
    # What is being read for it already is not thought over.
    assert num_worth_reading(1e-30, plan.parts[1].key) == 8
