from dataclasses import replace
from typing import Literal

import pytest

from semantic.adapters.outbound.backends.fake import END_TOKEN, fake_spec
from semantic.application.engine.scheduler import EngineLimits
from semantic.domain.blocks import BlockNamespace
from semantic.domain.chat import ServiceClass
from semantic.domain.errors import (
    BackendError,
    GenerationTimeoutError,
    InvalidRequestError,
    PoolExhaustedError,
)
from semantic.domain.events import Failed, Finished, PrefillProgress
from semantic.domain.sampling import FinishReason, SamplingParams, StopRules
from semantic.domain.spec import ModelCacheSpec
from semantic.ports.backend import LAST_SAMPLED
from tests.unit.application.engine_rig import alone, make_job, make_rig

pytestmark = pytest.mark.unit

SPECS = {
    "full": fake_spec(block_tokens=8),
    "window": fake_spec(block_tokens=8, window=12),
    "state": fake_spec(block_tokens=8, has_state=True),
    "all": fake_spec(block_tokens=8, window=5, has_state=True),
}


@pytest.fixture(params=list(SPECS.values()), ids=list(SPECS))
def spec(request: pytest.FixtureRequest) -> ModelCacheSpec:
    assert isinstance(request.param, ModelCacheSpec)
    return request.param


@pytest.mark.parametrize("depth", [0, 1])
def test_many_jobs_get_what_each_would_get_alone(spec: ModelCacheSpec, depth: int) -> None:
    rig = make_rig(spec=spec, pipeline_depth=1 if depth else 0)
    jobs = [make_job(f"j{i}", "x" * (3 * i) + f"prompt {i}", max_tokens=5 + i) for i in range(8)]
    for job in jobs:
        rig.submit(job)
        rig.step()
    rig.run()
    for job in jobs:
        assert rig.text(job.id) == alone(job, spec)
        assert rig.finished(job.id).reason is FinishReason.MAX_TOKENS
        assert rig.finished(job.id).usage.completion_tokens == job.max_tokens
    assert rig.backend.num_open == 0
    assert rig.store.usage().working == 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    "spec, ends",
    [
        (fake_spec(block_tokens=8), [40]),  # can be cut anywhere
        (fake_spec(block_tokens=8, window=40), [40]),  # nothing leaves the window
        (fake_spec(block_tokens=8, window=20), [20, 35, 40]),  # the block at 20 begins at 15
        (fake_spec(block_tokens=8, window=4), [7, 15, 21, 29, 37, 40]),
        (fake_spec(block_tokens=8, has_state=True), [7, 21, 40]),
    ],
)
def test_a_prompt_is_cut_only_where_its_state_must_be_kept(
    spec: ModelCacheSpec, ends: list[int], depth: Literal[0, 1]
) -> None:
    rig = make_rig(spec=spec, pipeline_depth=depth)
    job = make_job("a", "0123456789" * 4, boundaries=(7, 21))
    rig.submit(job)
    rig.run()
    chunks = [chunk for step in rig.backend.steps for chunk in step.chunks]
    assert [c.start + c.num_tokens for c in chunks if c.start < 40] == ends
    assert rig.text("a") == alone(job, spec)
    for end in (7, 21, 40):
        assert rig.store.plan(job.root, [*job.tokens[:end], 0]).end == end


def test_a_second_turn_reuses_the_first() -> None:
    rig = make_rig()
    first = make_job("a", "a long common beginning of a conversation. ")
    rig.submit(first)
    rig.run()
    said = "a long common beginning of a conversation. " + rig.text("a")
    second = make_job("b", said + " and more")
    rig.submit(second)
    rig.run()
    # All but the last sampled token of the reply has been computed.
    assert rig.finished("b").usage.cache_read_tokens == len(said) - 1
    assert rig.text("b") == alone(second)


def test_two_that_start_together_compute_the_common_part_once(spec: ModelCacheSpec) -> None:
    rig = make_rig(spec=spec, limits=EngineLimits(prefill_step_size=8))
    common = "c" * 64
    jobs = [make_job(f"j{i}", common + f" own {i}", boundaries=(64,)) for i in range(5)]
    for job in jobs:
        rig.submit(job)
    rig.run()
    computed = sum(c.num_tokens for step in rig.backend.steps for c in step.chunks)
    generated = sum(job.max_tokens - 1 for job in jobs)
    own = sum(len(job.tokens) - 64 for job in jobs)
    assert computed - generated <= 64 + own + len(jobs) * spec.block_tokens
    for job in jobs:
        assert rig.text(job.id) == alone(job, spec)


def test_single_flight_does_not_outlive_the_flight() -> None:
    rig = make_rig(limits=EngineLimits(prefill_step_size=8))
    older, younger = make_job("old", "c" * 64 + "o"), make_job("young", "c" * 64 + "y")
    rig.submit(older)
    rig.submit(younger)
    rig.step()
    rig.engine.cancel("old")
    rig.run()
    assert rig.finished("old").reason is FinishReason.CANCELLED
    assert rig.text("young") == alone(younger)


def test_tenants_do_not_share() -> None:
    rig = make_rig()
    mine = make_job("mine", "the same secret prompt, long enough for blocks")
    theirs = replace(mine, id="theirs", root=BlockNamespace("fake", "fake.v1", b"salt").root())
    for job in (mine, theirs):
        rig.submit(job)
    rig.run()
    assert rig.finished("theirs").usage.cache_read_tokens == 0
    assert rig.text("theirs") == alone(theirs)


@pytest.mark.parametrize("depth", [0, 1])
def test_stop_rules(depth: int) -> None:
    free = alone(make_job("free", max_tokens=40))
    middle = free[10:14]
    cases = {
        "string": (StopRules(strings=(middle,), ignore_eos=True), FinishReason.STOP_SEQUENCE),
        "token": (
            StopRules(token_ids=frozenset({ord(free[7])}), ignore_eos=True),
            FinishReason.END_TURN,
        ),
    }
    rig = make_rig(pipeline_depth=1 if depth else 0)
    for name, (stop, _) in cases.items():
        rig.submit(make_job(name, stop=stop, max_tokens=40))
    rig.run()
    for name, (stop, reason) in cases.items():
        assert rig.finished(name).reason is reason
        assert rig.text(name) == alone(make_job(name, stop=stop, max_tokens=40))
    assert rig.finished("string").stop_sequence == middle


def test_the_models_end_token_ends_the_turn() -> None:
    sampling = SamplingParams(temperature=0, seed=0, logit_bias=((END_TOKEN, 100.0),))
    rig = make_rig()
    rig.submit(make_job("a", sampling=sampling, stop=StopRules()))
    rig.run()
    assert rig.finished("a").reason is FinishReason.END_TURN
    assert rig.finished("a").usage.completion_tokens == 1
    assert rig.text("a") == ""


def test_a_stop_string_found_in_the_last_bytes_is_the_reason() -> None:
    bias = SamplingParams(temperature=0, seed=0, logit_bias=((0xC3, 100.0),))
    rig = make_rig()
    rig.submit(make_job("a", sampling=bias, max_tokens=1, stop=StopRules(strings=("\ufffd",))))
    rig.run()
    assert rig.finished("a").reason is FinishReason.STOP_SEQUENCE
    assert rig.text("a") == ""


def test_the_context_ends_a_reply() -> None:
    rig = make_rig(spec=replace(fake_spec(block_tokens=8), max_context=20))
    rig.submit(make_job("a", "x" * 10, max_tokens=100))
    rig.run()
    final = rig.finished("a")
    assert final.reason is FinishReason.CONTEXT_FULL
    assert final.usage.completion_tokens == 10


@pytest.mark.parametrize("depth", [0, 1])
def test_no_token_is_drawn_past_the_last_one_asked_for(depth: Literal[0, 1]) -> None:
    rig = make_rig(pipeline_depth=depth)
    rig.submit(make_job("a", max_tokens=7))
    rig.run()
    assert sum(c.draw is not None for step in rig.backend.steps for c in step.chunks) == 7


@pytest.mark.parametrize("depth", [0, 1])
def test_penalties_count_from_the_end_of_the_prompt(depth: Literal[0, 1]) -> None:
    rig = make_rig(pipeline_depth=depth)
    job = make_job("a")
    rig.submit(job)
    rig.run()
    draws = [c.draw for step in rig.backend.steps for c in step.chunks if c.draw is not None]
    assert {draw.num_prompt for draw in draws} == {len(job.tokens)}


@pytest.mark.parametrize("depth", [0, 1])
def test_same_seed_same_text_whatever_else_runs(depth: int) -> None:
    warm = SamplingParams(temperature=1.3, top_p=0.95, seed=42)
    job = make_job("a", sampling=warm, max_tokens=30)
    rig = make_rig(pipeline_depth=1 if depth else 0)
    rig.submit(job)
    for i in range(6):
        rig.submit(make_job(f"other{i}", f"noise {i}", sampling=SamplingParams(seed=i)))
    rig.run()
    assert rig.text("a") == alone(job)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("after", range(0, 12, 3))
def test_cancel_at_any_point_frees_everything_within_a_step(depth: int, after: int) -> None:
    rig = make_rig(pipeline_depth=1 if depth else 0, limits=EngineLimits(prefill_step_size=8))
    neighbour = make_job("n", "neighbour", max_tokens=30)
    rig.submit(neighbour)
    rig.submit(make_job("a", "p" * 40))
    for _ in range(after):
        rig.step()
    rig.engine.cancel("a")
    rig.engine.cancel("a")
    rig.engine.cancel("unknown")
    rig.step()
    assert rig.finished("a").reason is FinishReason.CANCELLED
    assert rig.backend.num_open <= 1
    rig.run()
    assert rig.text("n") == alone(neighbour)
    assert rig.backend.num_open == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_that_is_cancelled_computes_no_more(depth: Literal[0, 1]) -> None:
    rig = make_rig(pipeline_depth=depth, limits=EngineLimits(prefill_step_size=8))
    rig.submit(make_job("a", "p" * 800))
    for _ in range(3):
        rig.step()
    num_steps = len(rig.backend.steps)
    rig.engine.cancel("a")
    rig.step()
    assert rig.finished("a").reason is FinishReason.CANCELLED
    assert len(rig.backend.steps) == num_steps


def test_deadline() -> None:
    rig = make_rig()
    rig.submit(make_job("late", max_tokens=1000, deadline=rig.now[0] + 0.055))
    rig.submit(make_job("fine"))
    rig.run()
    final = rig.final("late")
    assert isinstance(final, Failed)
    assert isinstance(final.error, GenerationTimeoutError)
    assert 0 < len(rig.text("late")) < 10
    assert rig.finished("fine").reason is FinishReason.MAX_TOKENS


def test_a_deadline_passes_while_waiting_too() -> None:
    rig = make_rig(limits=EngineLimits(max_batch_size=1))
    rig.submit(make_job("a", max_tokens=50))
    rig.submit(make_job("late", deadline=rig.now[0] + 0.055))
    for _ in range(8):
        rig.step()
    final = rig.final("late")
    assert isinstance(final, Failed)
    assert isinstance(final.error, GenerationTimeoutError)


def test_preemption_and_continuation(spec: ModelCacheSpec) -> None:
    rig = make_rig(spec=spec, budget_tokens=140)
    jobs = [make_job(f"j{i}", f"prompt number {i} " * 2, max_tokens=50) for i in range(4)]
    for job in jobs:
        rig.submit(job)
    rig.run()
    opened = max(c.seq for step in rig.backend.steps for c in step.chunks) + 1
    assert opened > len(jobs), "somebody must have been preempted and reopened"
    for job in jobs:
        assert rig.text(job.id) == alone(job, spec)


def test_a_background_job_is_preempted_before_an_interactive_one() -> None:
    rig = make_rig(budget_tokens=120)
    rig.submit(make_job("bg", "b" * 30, max_tokens=60, service_class=ServiceClass.BACKGROUND))
    rig.step()
    rig.submit(make_job("fg", "f" * 30, max_tokens=60))
    rig.run()
    rows = [chunk for step in rig.backend.steps for chunk in step.chunks]
    reopened = [c.seq for c in rows if c.tokens is not LAST_SAMPLED and ord("b") in c.tokens]
    assert len(set(reopened)) > 1
    assert rig.text("bg") == alone(make_job("bg", "b" * 30, max_tokens=60))


def test_what_cannot_fit_alone_is_refused_with_the_maximum() -> None:
    rig = make_rig(budget_tokens=50)
    rig.submit(make_job("big", "x" * 60))
    rig.submit(make_job("small", "x" * 20))
    rig.run()
    final = rig.final("big")
    assert isinstance(final, Failed)
    assert isinstance(final.error, PoolExhaustedError)
    assert "at most 49" in final.error.message
    assert rig.text("small") == alone(make_job("small", "x" * 20))


def test_exhaustion_in_mid_decode_of_the_only_one_is_an_error() -> None:
    rig = make_rig(budget_tokens=50)
    rig.submit(make_job("a", "x" * 30, max_tokens=100))
    rig.run()
    final = rig.final("a")
    assert isinstance(final, Failed)
    assert isinstance(final.error, PoolExhaustedError)
    assert rig.text("a") == alone(make_job("a", "x" * 30, max_tokens=100))[: len(rig.text("a"))]
    assert rig.store.usage().working == 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("where", ["launch", "collect"])
def test_a_failed_step_harms_nobody(depth: int, where: str) -> None:
    rig = make_rig(pipeline_depth=1 if depth else 0)
    jobs = [make_job(f"j{i}", f"prompt {i}" * 3) for i in range(4)]
    for job in jobs:
        rig.submit(job)
    for _ in range(4):
        rig.step()
    failures = iter([True])
    if where == "launch":
        rig.backend.fail_launch = lambda _: next(failures, False)
    else:
        rig.backend.fail_collect = lambda: next(failures, False)
    rig.run()
    for job in jobs:
        assert rig.text(job.id) == alone(job)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_that_breaks_every_step_ends_alone(depth: int) -> None:
    rig = make_rig(pipeline_depth=1 if depth else 0)
    rig.backend.fail_launch = lambda step: any(
        c.tokens is not LAST_SAMPLED and ord("!") in c.tokens for c in step.chunks
    )
    jobs = [make_job(f"j{i}", f"prompt {i}") for i in range(3)]
    for job in jobs:
        rig.submit(job)
    rig.submit(make_job("bad", "poison!"))
    rig.run()
    final = rig.final("bad")
    assert isinstance(final, Failed)
    assert isinstance(final.error, BackendError)
    for job in jobs:
        assert rig.text(job.id) == alone(job)
    assert rig.backend.num_open == 0


class Alternating:
    """Allows a vowel, then a digit, then a vowel again; counts in its own state."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def allowed(self) -> bytes:
        wanted = b"0123456789" if len(self.accepted) % 2 else b"aeiou"
        bits = sum(1 << token for token in wanted)
        return bits.to_bytes(32, "little")

    def accept(self, token: int) -> None:
        self.accepted.append(token)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_constraint_is_obeyed_beside_free_neighbours(depth: int) -> None:
    rig = make_rig(pipeline_depth=1 if depth else 0, budget_tokens=150)
    neighbour = make_job("n", "neighbour", max_tokens=40)
    rig.submit(neighbour)
    rig.submit(replace(make_job("a", "constrained", max_tokens=30), constraint=Alternating()))
    failures = iter([False] * 20 + [True])
    rig.backend.fail_launch = lambda _: next(failures, False)
    rig.run()
    text = rig.text("a")
    assert len(text) == 30
    assert set(text[::2]) <= set("aeiou")
    assert set(text[1::2]) <= set("0123456789")
    assert rig.text("n") == alone(neighbour)


class BrokenAccept(Alternating):
    def accept(self, token: int) -> None:
        raise LookupError(f"no rule for {token}")


class BrokenMask(Alternating):
    def allowed(self) -> bytes:
        raise LookupError("no rule for this state")


@pytest.mark.parametrize("constraint", [BrokenAccept(), BrokenMask()])
def test_a_constraint_that_fails_ends_its_own_request(constraint: Alternating) -> None:
    rig = make_rig()
    rig.submit(replace(make_job("a"), constraint=constraint))
    rig.submit(make_job("n"))
    rig.run()
    final = rig.final("a")
    assert isinstance(final, Failed)
    assert "no rule for" in final.error.message
    assert rig.text("n") == alone(make_job("n"))


class TooComplex(Alternating):
    def accept(self, token: int) -> None:
        raise InvalidRequestError(f"the pattern is too complex after {token}.")


def test_a_request_that_turns_out_wrong_is_refused_and_no_defect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = make_rig()
    rig.submit(replace(make_job("a"), constraint=TooComplex()))
    rig.run()
    final = rig.final("a")
    assert isinstance(final, Failed)
    assert isinstance(final.error, InvalidRequestError)
    assert not caplog.records


def test_progress_is_reported_while_a_prompt_is_computed() -> None:
    rig = make_rig(limits=EngineLimits(prefill_step_size=10))
    rig.submit(make_job("a", "x" * 35))
    rig.run()
    progress = [e for e in rig.events["a"] if isinstance(e, PrefillProgress)]
    assert [p.done for p in progress] == [0, 10, 20, 30]
    assert {(p.total, p.reused) for p in progress} == {(35, 0)}


def test_what_was_found_is_told_before_the_first_token() -> None:
    rig = make_rig()
    rig.submit(make_job("a", "x" * 35))
    rig.run()
    rig.submit(make_job("b", "x" * 35 + "y"))
    rig.run()
    first, *_ = rig.events["b"]
    assert isinstance(first, PrefillProgress)
    final = rig.final("b")
    assert isinstance(final, Finished)
    assert first.done == first.reused == final.usage.cache_read_tokens == 35
    assert first.total - first.reused == final.usage.cache_creation_tokens


def test_limits_change_while_it_runs() -> None:
    rig = make_rig(limits=EngineLimits(max_batch_size=8))
    for i in range(6):
        rig.submit(make_job(f"j{i}", f"p{i}"))
    rig.engine.reconfigure(EngineLimits(max_batch_size=2))
    rig.run()
    assert max(len(step.chunks) for step in rig.backend.steps) == 2


def test_abandon_answers_everyone() -> None:
    rig = make_rig()
    for i in range(20):
        rig.submit(make_job(f"j{i}", f"p{i}"))
    rig.step()
    rig.engine.abandon(BackendError("gone"))
    for i in range(20):
        assert isinstance(rig.final(f"j{i}"), Failed)
    assert not rig.engine.has_work
    assert rig.backend.num_open == 0
    assert rig.store.usage().working == 0
