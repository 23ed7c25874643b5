"""Working copies whose turn has ended, and which of them a request goes on with."""

import pytest

from semantic.application.engine.idle_copies import IdleCopies
from semantic.application.engine.request import Generation, Job
from semantic.application.engine.text import TextAssembler
from semantic.domain.blocks import BlockName
from semantic.domain.sampling import StopRules
from semantic.ports.backend import SequenceId
from tests.unit.application.engine_rig import GREEDY, ROOT

pytestmark = pytest.mark.unit


def generation(agent: str, tokens: list[int], seq: int = 0, root: BlockName = ROOT) -> Generation:
    job = Job(f"{agent}{seq}", agent, root, tuple(tokens), GREEDY, StopRules(), 1)
    made = Generation(job, 0, TextAssembler(lambda _: b"", ()), 0.0, 4, SequenceId(seq))
    made.num_computed = len(tokens)
    return made


def copies(*made: Generation) -> IdleCopies:
    idle = IdleCopies()
    for one in made:
        idle.add(one)
    return idle


def best(idle: IdleCopies, request: Generation) -> tuple[int, int] | None:
    found = idle.best_for(request)
    return (int(found[0].seq), found[1]) if found else None


def test_the_copy_that_shares_most_is_best() -> None:
    idle = copies(generation("a", [1, 2, 3], 1), generation("b", [1, 2, 3, 4, 5], 2))
    assert best(idle, generation("c", [1, 2, 3, 4, 9])) == (2, 4)
    assert best(idle, generation("c", [9, 9])) is None


def test_of_equals_an_agents_own_is_best_then_the_youngest() -> None:
    idle = copies(*(generation(name, [1, 2, 3], seq) for seq, name in enumerate("aba", 1)))
    request = [1, 2, 3, 4]
    assert best(idle, generation("b", request)) == (2, 3)
    assert best(idle, generation("a", request)) == (3, 3)
    assert best(idle, generation("c", request)) == (3, 3)


def test_one_token_is_left_to_compute() -> None:
    idle = copies(generation("a", [1, 2, 3], 1))
    assert best(idle, generation("a", [1, 2, 3])) == (1, 2)


def test_tenants_share_nothing() -> None:
    idle = copies(generation("a", [1, 2, 3], 1))
    assert best(idle, generation("a", [1, 2, 3, 4], root=BlockName(bytes(32)))) is None


def test_a_copy_holds_what_was_computed_and_no_more() -> None:
    ended = generation("a", [1, 2, 3, 4], 1)
    ended.num_computed = 3
    assert best(copies(ended), generation("a", [1, 2, 3, 4, 5])) == (1, 3)


def test_the_oldest_comes_first_and_a_removed_one_not_at_all() -> None:
    idle = copies(generation("a", [1], 1), generation("b", [2], 2), generation("c", [3], 3))
    idle.remove(SequenceId(2))
    idle.remove(SequenceId(2))
    assert [copy.agent for copy in idle] == ["a", "c"]
    assert len(idle) == 2
    idle.clear()
    assert not list(idle)
