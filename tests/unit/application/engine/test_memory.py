"""Room for sequences: who is admitted, how they grow, what giving way costs, who stays open."""

from typing import Literal

import pytest

from semantic.adapters.outbound.backends.fake import fake_spec
from semantic.application.engine.memory import IdleCopies
from semantic.application.engine.request import Generation, Job, TextAssembler
from semantic.domain.blocks import BlockName
from semantic.domain.events import Failed
from semantic.domain.sampling import StopRules
from semantic.ports.backend import SequenceId
from tests.unit.application.engine_rig import GREEDY, ROOT, Rig, alone, make_job, make_rig

pytestmark = pytest.mark.unit


# -- admission ----------------------------------------------------------------------------------


def test_admission_reserves_the_prompt_and_one_block() -> None:
    rig = make_rig()
    rig.submit(make_job("a", "x" * 20))
    rig.step()
    assert rig.store.usage().working == rig.backend.bytes_for([28])


def test_a_prompt_of_exactly_what_fits_is_refused_since_a_reply_needs_a_token() -> None:
    rig = make_rig(budget_tokens=50)
    rig.submit(make_job("exact", "x" * 50))
    rig.run()
    assert isinstance(rig.final("exact"), Failed)
    assert rig.text("exact") == ""


def test_a_prompt_that_leaves_less_than_a_block_is_still_admitted() -> None:
    rig = make_rig(budget_tokens=50)
    job = make_job("a", "x" * 45, max_tokens=3)
    rig.submit(job)
    rig.run(max_steps=100)
    assert rig.text("a") == alone(job)


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_memory() -> None:
    rig = make_rig(budget_tokens=100)
    rig.submit(make_job("first", "f" * 40, max_tokens=20))
    rig.step()
    rig.submit(make_job("large", "l" * 60, max_tokens=2))
    rig.submit(make_job("small", "s" * 4, max_tokens=2))
    rig.step()
    assert rig.backend.num_open == 1
    rig.run()


# -- growth -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_live_state_never_exceeds_its_reservation(depth: Literal[0, 1]) -> None:
    rig = make_rig(pipeline_depth=depth)
    rig.submit(make_job("a", "x" * 20, max_tokens=40))
    while rig.engine.has_work:
        rig.step()
        assert rig.backend.memory() <= rig.store.usage().working


@pytest.mark.parametrize("depth", [0, 1])
def test_room_grows_by_blocks_and_not_by_tokens(depth: Literal[0, 1]) -> None:
    rig = make_rig(pipeline_depth=depth)
    rig.submit(make_job("a", "x" * 20, max_tokens=40))
    reserved: set[int] = set()
    while rig.engine.has_work:
        rig.step()
        reserved.add(rig.store.usage().working)
    assert len(reserved) <= 8


def test_blocks_are_sealed_as_they_fill() -> None:
    rig = make_rig()
    rig.submit(make_job("a", "x" * 40, max_tokens=100))
    rig.step()
    assert rig.store.usage().num_blocks == 5


# -- preemption ---------------------------------------------------------------------------------


def run_with_one_preemption() -> Rig:
    """Run two requests, the younger of which gives way once, before its first block is full.

    The older one wants 65 tokens more than its 164 while the younger holds 94: of 320 there are
    62 left, too few to grow and enough for what the younger has computed.
    """
    rig = make_rig(spec=fake_spec(block_tokens=64), budget_tokens=320)
    rig.submit(make_job("old", "o" * 100, max_tokens=100))
    for _ in range(45):
        rig.step()
    rig.submit(make_job("young", "y" * 30, max_tokens=40))
    rig.run()
    assert rig.engine.num_preemptions == 1
    return rig


def test_preemption_keeps_what_was_computed() -> None:
    rig = run_with_one_preemption()
    computed = sum(step.num_tokens for step in rig.backend.steps)
    # Each token once; the last of a reply is never fed.
    assert computed == (100 + 100 - 1) + (30 + 40 - 1)


def test_what_is_resumed_after_a_preemption_does_not_count_as_reuse() -> None:
    rig = run_with_one_preemption()
    assert rig.finished("young").usage.cache_read_tokens == 0


# -- idle copies --------------------------------------------------------------------------------


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
