"""The simulation of retention: it computes what it must, and every policy keeps prefixes."""

from collections import Counter

import pytest

from experiments.exp_retention import Cell, mean_share
from experiments.retention.machine import Machine, Tally
from experiments.retention.policies import (
    CANDIDATES,
    Kind,
    Oracle,
    Policy,
    Recorder,
    ReturnTable,
    cost,
)
from experiments.retention.traces import GRAIN, WORKLOADS, TraceTurn, trace
from semantic.application.cache.index import BlockNode
from semantic.domain.spec import LayerKind

pytestmark = pytest.mark.unit

POLLUTED = "long-lived agents and one-off chats"


def made(name: str, turns: list[TraceTurn]) -> Policy:
    if name != "oracle":
        return CANDIDATES[name]()
    recorder = Recorder()
    Machine(recorder, 2**60).run(turns)
    return Oracle(recorder.uses)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_trace_is_the_same_for_the_same_seed_and_conversations_continue(workload: str) -> None:
    turns = trace(workload, 1, 100)
    assert turns == trace(workload, 1, 100) != trace(workload, 2, 100)
    ended: dict[str, tuple[int, ...]] = {}
    for turn in turns:
        before = ended.get(turn.agent, ())
        assert turn.prompt[: len(before)] == before
        ended[turn.agent] = (*turn.prompt, *turn.reply)


def test_with_enough_memory_only_new_tokens_are_computed() -> None:
    turns = trace(POLLUTED, 1, 60)
    reached: set[tuple[int, ...]] = set()
    num_new = 0
    for turn in turns:
        prompt = turn.prompt
        shared = max((n for n in range(len(prompt)) if prompt[:n] in reached), default=0)
        num_new += len(prompt) - shared
        known = (*prompt, *turn.reply)[:-1]
        reached.update(known[:n] for n in range(len(known) + 1))
    assert Machine(Policy(), 2**60).run(turns).computed == num_new * GRAIN


@pytest.mark.parametrize("disk", [0, 70_000])
@pytest.mark.parametrize("name", [*CANDIDATES, "oracle"])
def test_every_policy_keeps_the_limits_and_only_whole_prefixes(name: str, disk: int) -> None:
    turns = trace(POLLUTED, 1, 60)
    machine = Machine(made(name, turns), 40_000, disk)
    machine.run(turns)
    machine.store.check_integrity()
    assert machine.store.counts.evictions
    assert machine.store.usage().used <= 40_000
    nodes = machine.store.nodes()
    assert sum(node.disk_bytes for node in nodes) <= disk
    by_name = {node.name: node for node in nodes}

    def is_whole(node: BlockNode) -> bool:
        parent = by_name.get(node.parent)
        return node.start == 0 or (parent is not None and parent.has(LayerKind.FULL))

    assert all(is_whole(node) for node in nodes)


def test_chances_follow_what_conversations_did_and_fall_back_to_the_general() -> None:
    returned: Counter[tuple[Kind, int]] = Counter({(("many", "a"), 3): 90, (("one", "b"), 0): 10})
    waited: Counter[tuple[Kind, int]] = Counter({(("many", "a"), 10): 10, (("one", "b"), 10): 90})
    table = ReturnTable(returned, waited)
    assert table.within(("many", "a"), 8.0, 3600) > 0.8
    assert table.within(("one", "b"), 8.0, 3600) < 0.3
    unseen, general = table.chances(("many", "new")), table.chances(("many",))
    assert unseen == pytest.approx(general)
    assert table.rate(("many", "a"), 40.0) > table.rate(("many", "a"), 4000.0)


def test_later_tokens_cost_more() -> None:
    assert cost(0, 100) < cost(30_000, 30_100)
    assert cost(0, 200) == pytest.approx(cost(0, 100) + cost(100, 200))


def test_a_mean_counts_every_cell_the_same() -> None:
    def cell(lru: int, other: int) -> Cell:
        return Cell("x", 1, 0, Tally(10), {"LRU": Tally(10 + lru), "other": Tally(10 + other)})

    assert mean_share([cell(100, 50), cell(1_000_000, 2_000_000)], "other") == pytest.approx(1.0)
    assert not cell(0, 0).is_tight
