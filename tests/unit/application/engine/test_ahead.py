"""Prompts computed ahead: what they save, and that requests notice nothing else of them."""

from dataclasses import replace

import pytest

from semantic.adapters.outbound.backends.fake import FakeTokenizer, fake_spec
from semantic.application.engine.request import AheadJob, Job
from semantic.application.settings import EngineLimits
from semantic.domain.spec import ModelCacheSpec
from semantic.ports.telemetry import EngineCounts
from tests.unit.application.engine_rig import ROOT, Rig, make_job, make_rig

pytestmark = pytest.mark.unit

SPECS = {
    "full": fake_spec(block_tokens=8),
    "window": fake_spec(block_tokens=8, window=12),
    "state": fake_spec(block_tokens=8, has_state=True),
    "all": fake_spec(block_tokens=8, window=5, has_state=True),
}
FIRST = "read the file, please, and tell me what it says about the weather. "
RESULT = " the file says that it rains, and that it rains a lot. " * 4
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def first_turn(rig: Rig, agent: str = "coder") -> Job:
    rig.serve(job := make_job(f"{agent}-1", FIRST + agent, agent=agent))
    return job


def next_turn(rig: Rig, first: Job, result: str = RESULT, name: str = "next") -> Job:
    """The turn after a first one, whose prompt repeats the reply."""
    text = bytes(first.tokens).decode() + rig.text(first.id) + result
    return make_job(name, text, agent=first.agent, max_tokens=20)


def expect(rig: Rig, job: Job, *, is_whole: bool = True) -> None:
    """Have a job's prompt computed ahead, all but its last token."""
    rig.engine.compute_ahead(AheadJob(job.agent, ROOT, job.tokens[:-1]))
    if is_whole:
        finish_ahead(rig)


def finish_ahead(rig: Rig) -> None:
    while rig.engine.has_ahead:
        step_ahead(rig)


def step_ahead(rig: Rig) -> None:
    rig.engine.step_ahead()
    rig.check()
    assert rig.backend.memory() <= rig.store.usage().working


def counts(rig: Rig) -> EngineCounts:
    return rig.store.telemetry.counts.engine


def figures(rig: Rig) -> tuple[int, int, int]:
    now = counts(rig)
    return now.ahead_tokens, now.used_ahead_tokens, now.wasted_ahead_tokens


@each_spec
@pytest.mark.parametrize("depth", [0, 1])
def test_a_right_prediction_leaves_one_token_to_compute(spec: ModelCacheSpec, depth: int) -> None:
    rig = make_rig(spec=spec, max_idle=4, pipeline_depth=1 if depth else 0)
    first = first_turn(rig)
    job = next_turn(rig, first)
    blocks = [node.name for node in rig.store.nodes()]
    expect(rig, job)
    assert [node.name for node in rig.store.nodes()] == blocks  # nothing is sealed
    before = rig.backend.num_computed
    rig.serve(job)
    assert rig.num_reused("next") == len(job.tokens) - 1
    assert rig.backend.num_computed - before == 1 + job.max_tokens - 1
    num_new = len(job.tokens) - 1 - (len(first.tokens) + first.max_tokens - 1)
    assert figures(rig) == (num_new, num_new, 0)
    assert rig.reply_state("next").reuse.ahead == num_new
    rig.expect_alone(first, job)
    assert rig.backend.num_open == 1  # no copy is left over
    # What the request sealed is whole: a later one restores it.
    rig.engine.close_idle("coder")
    assert rig.backend.num_open == rig.store.usage().working == 0
    again = next_turn(rig, job, " and then?", "again")
    rig.serve(again)
    assert rig.reply_state("again").reuse.pool >= len(job.tokens)
    rig.expect_alone(again)


@each_spec
@pytest.mark.parametrize("same", [0, 1, 100])
def test_a_wrong_prediction_changes_nothing(spec: ModelCacheSpec, same: int) -> None:
    result = RESULT[:same] + "#" * 30
    plain, rig = (make_rig(spec=spec, max_idle=4) for _ in range(2))
    for each in (plain, rig):
        first = first_turn(each)
        if each is rig:
            expect(rig, next_turn(rig, first))
        job = next_turn(each, first, result)
        each.serve(job)
        each.expect_alone(first, job)
        assert each.backend.num_open == 1
    num_used = rig.num_reused("next") - plain.num_reused("next")
    is_cut = spec is SPECS["full"]
    # One token of the reply is not computed before the prompt repeats it.
    assert num_used == (same + 1 if is_cut else 0)
    num_ahead, used, wasted = figures(rig)
    assert (used, wasted) == (num_used, num_ahead - num_used)


@each_spec
def test_requests_come_first_at_the_next_step(spec: ModelCacheSpec) -> None:
    rig = make_rig(spec=spec, max_idle=4)
    first = first_turn(rig)
    job = next_turn(rig, first, RESULT * 3)
    expect(rig, job, is_whole=False)
    step_ahead(rig)
    num_ahead = counts(rig).ahead_tokens
    assert 0 < num_ahead < len(job.tokens) - len(first.tokens) - first.max_tokens
    rig.submit(other := make_job("other", "something else", max_tokens=30))
    for _ in range(5):
        step_ahead(rig)  # does nothing: there is work
        rig.step()
    assert counts(rig).ahead_tokens == num_ahead
    # No step has had a row of the expected prompt since the other request came.
    rows = {len(step.chunks) for step in rig.backend.steps[-5:]}
    assert rows == {1}
    rig.run()
    step_ahead(rig)
    assert counts(rig).ahead_tokens > num_ahead  # goes on where it was
    rig.serve(job)
    assert not rig.engine.has_ahead
    assert rig.reply_state("next").reuse.ahead >= (0 if spec.window else 1)
    rig.expect_alone(first, other, job)


@each_spec
def test_a_request_in_the_middle_uses_what_is_there(spec: ModelCacheSpec) -> None:
    rig = make_rig(spec=spec, max_idle=4)
    first = first_turn(rig)
    job = next_turn(rig, first, RESULT * 3)
    expect(rig, job, is_whole=False)
    step_ahead(rig)
    num_ahead = counts(rig).ahead_tokens
    rig.serve(job)
    assert rig.reply_state("next").reuse.ahead == num_ahead
    rig.expect_alone(first, job)


@each_spec
def test_beside_others_and_after_a_preemption(spec: ModelCacheSpec) -> None:
    rig = make_rig(spec=spec, max_idle=8)
    turns = [first_turn(rig, agent) for agent in "abc"]
    jobs = [next_turn(rig, first, RESULT, f"next-{first.agent}") for first in turns]
    for job in jobs:
        expect(rig, job)
    rig.serve(*jobs)
    assert all(rig.num_reused(job.id) == len(job.tokens) - 1 for job in jobs)
    rig.expect_alone(*turns, *jobs)
    assert counts(rig).wasted_ahead_tokens == 0


@each_spec
def test_a_fork_of_the_agent_finds_it_too(spec: ModelCacheSpec) -> None:
    rig = make_rig(spec=spec, max_idle=8)
    first = first_turn(rig)
    expect(rig, job := next_turn(rig, first))
    branches = [replace(job, id=f"branch{n}", agent=f"branch{n}") for n in range(2)]
    other = replace(next_turn(rig, first, "something else"), id="other", agent="branch2")
    rig.serve(other, *branches, job)
    rig.expect_alone(other, *branches, job)


# -- memory ---------------------------------------------------------------------------------------


def test_only_free_memory_is_used() -> None:
    rig = make_rig(max_idle=4, budget_tokens=1000)
    others = [first_turn(rig, f"other{n}") for n in range(3)]
    first = first_turn(rig)
    room = rig.store.usage().available - rig.backend.bytes_for([40])
    rig.store.reserve(room)
    blocks, num_open = [node.name for node in rig.store.nodes()], rig.backend.num_open
    expect(rig, job := next_turn(rig, first))
    assert [node.name for node in rig.store.nodes()] == blocks
    assert rig.backend.num_open == num_open
    assert counts(rig).ahead_tokens <= 40
    rig.store.unreserve(room)
    rig.serve(job)
    rig.expect_alone(*others, first, job)


@pytest.mark.parametrize("kind", SPECS)
def test_tokens_computed_ahead_make_room_before_blocks_and_copies_do(kind: str) -> None:
    rig = make_rig(spec=SPECS[kind], max_idle=4, budget_tokens=2000)
    first, other = first_turn(rig), first_turn(rig, "other")
    expect(rig, next_turn(rig, first))
    num_ahead = counts(rig).ahead_tokens
    assert num_ahead
    blocks = {node.name for node in rig.store.nodes() if node.payloads}
    room = rig.store.usage().available
    rig.store.reserve(room)
    rig.submit(small := make_job("small", "a", max_tokens=1))
    rig.step()
    assert counts(rig).wasted_ahead_tokens == num_ahead
    assert blocks <= {node.name for node in rig.store.nodes() if node.payloads}
    rig.run()
    rig.store.unreserve(room)
    rig.serve(job := next_turn(rig, first, name="late"))
    assert rig.num_reused("late") == len(first.tokens) + first.max_tokens - 1
    rig.expect_alone(first, other, small, job)


@pytest.mark.parametrize("kind", ["window", "state"])
def test_a_fork_takes_the_place_of_no_other_copy(kind: str) -> None:
    rig = make_rig(spec=SPECS[kind], max_idle=2)
    first_turn(rig, "other")
    first = first_turn(rig)
    expect(rig, next_turn(rig, first))
    assert figures(rig) == (0, 0, 0)
    assert rig.backend.num_open == 2


@pytest.mark.parametrize("limit", [0, 10])
def test_the_limit(limit: int) -> None:
    rig = make_rig(max_idle=4, limits=EngineLimits(ahead_tokens=limit))
    first = first_turn(rig)
    expect(rig, job := next_turn(rig, first))
    assert counts(rig).ahead_tokens == limit
    rig.serve(job)
    rig.expect_alone(job)


# -- what is not touched --------------------------------------------------------------------------


def test_another_tenant_gets_nothing() -> None:
    rig = make_rig(max_idle=4)
    first = first_turn(rig)
    job = next_turn(rig, first)
    rig.engine.compute_ahead(AheadJob(job.agent, type(ROOT)(bytes(32)), job.tokens[:-1]))
    step_ahead(rig)
    assert not rig.engine.has_ahead
    assert figures(rig) == (0, 0, 0)


@each_spec
def test_an_ephemeral_request_leaves_it_as_it_is(spec: ModelCacheSpec) -> None:
    rig = make_rig(spec=spec, max_idle=4)
    first = first_turn(rig)
    job = next_turn(rig, first, RESULT * 3)
    expect(rig, job, is_whole=False)
    step_ahead(rig)
    num_open = rig.backend.num_open
    secret = replace(next_turn(rig, first, "something else"), id="secret", is_ephemeral=True)
    rig.serve(secret)
    assert rig.engine.has_ahead
    assert rig.backend.num_open == num_open
    finish_ahead(rig)
    rig.serve(job)
    assert rig.num_reused("next") == len(job.tokens) - 1
    rig.expect_alone(first, secret, job)


@each_spec
@pytest.mark.parametrize("where", ["launch", "collect"])
def test_a_failed_step_costs_the_copy_and_no_request(spec: ModelCacheSpec, where: str) -> None:
    rig = make_rig(spec=spec, max_idle=4)
    first = first_turn(rig)
    job = next_turn(rig, first)
    rig.backend.fail_next(where)
    expect(rig, job)
    rig.serve(job)
    rig.expect_alone(first, job)


def test_invalid_tokens_end_the_job() -> None:
    rig = make_rig(max_idle=4)
    first = first_turn(rig)
    job = next_turn(rig, first)
    invalid = (*job.tokens[:-1], FakeTokenizer().vocab_size)
    rig.engine.compute_ahead(AheadJob(job.agent, ROOT, invalid))
    finish_ahead(rig)
    rig.serve(job)
    rig.expect_alone(job)


def test_a_deleted_agent_leaves_nothing() -> None:
    rig = make_rig(max_idle=4)
    first = first_turn(rig)
    expect(rig, next_turn(rig, first, RESULT * 3), is_whole=False)
    step_ahead(rig)
    rig.engine.close_idle("coder")
    assert not rig.engine.has_ahead
    assert rig.backend.num_open == rig.store.usage().working == 0
    assert counts(rig).wasted_ahead_tokens == counts(rig).ahead_tokens
