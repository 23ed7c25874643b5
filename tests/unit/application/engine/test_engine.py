from dataclasses import replace
from typing import Literal

import pytest

from semantic.adapters.outbound.backends.fake import END_TOKEN, fake_spec
from semantic.application.settings import EngineLimits
from semantic.domain.chat import ServiceClass
from semantic.domain.errors import (
    BackendError,
    GenerationTimeoutError,
    InvalidRequestError,
    PoolExhaustedError,
    SemanticError,
)
from semantic.domain.events import PrefillProgress
from semantic.domain.sampling import FinishReason, StopRules
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.backend import LAST_SAMPLED, SequenceId, Ticket
from tests.unit.application.engine_rig import GREEDY, FaultyBackend, alone, make_job, make_rig

pytestmark = pytest.mark.unit

SPECS = {
    "full": fake_spec(block_tokens=8),
    "window": fake_spec(block_tokens=8, window=12),
    "state": fake_spec(block_tokens=8, has_state=True),
    "all": fake_spec(block_tokens=8, window=5, has_state=True),
}
Depth = Literal[0, 1]
either_depth = pytest.mark.parametrize("depth", [0, 1])


@pytest.fixture(params=list(SPECS.values()), ids=list(SPECS))
def spec(request: pytest.FixtureRequest) -> ModelCacheSpec:
    assert isinstance(request.param, ModelCacheSpec)
    return request.param


@either_depth
def test_many_jobs_get_what_each_would_get_alone(spec: ModelCacheSpec, depth: Depth) -> None:
    rig = make_rig(spec=spec, pipeline_depth=depth)
    jobs = [make_job(f"j{i}", "x" * (3 * i) + f"prompt {i}", max_tokens=5 + i) for i in range(8)]
    for job in jobs:
        rig.submit(job)
        rig.step()
    rig.run()
    rig.expect_alone(*jobs)
    for job in jobs:
        assert rig.finished(job.id).reason is FinishReason.MAX_TOKENS
        assert rig.finished(job.id).usage.completion_tokens == job.max_tokens
    assert rig.backend.num_open == rig.store.usage().working == 0


@either_depth
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
    spec: ModelCacheSpec, ends: list[int], depth: Depth
) -> None:
    rig = make_rig(spec=spec, pipeline_depth=depth)
    job = make_job("a", "0123456789" * 4, boundaries=(7, 21))
    rig.serve(job)
    chunks = [chunk for step in rig.backend.steps for chunk in step.chunks]
    assert [c.start + c.num_tokens for c in chunks if c.start < 40] == ends
    rig.expect_alone(job)
    for end in (7, 21, 40):
        assert rig.store.plan(job.root, [*job.tokens[:end], 0]).end == end


def test_requests_that_start_together_compute_their_common_prefix_once(
    spec: ModelCacheSpec,
) -> None:
    rig = make_rig(spec=spec, limits=EngineLimits(prefill_step_size=8))
    jobs = [make_job(f"j{i}", "c" * 64 + f" own {i}", boundaries=(64,)) for i in range(5)]
    rig.serve(*jobs)
    own = sum(len(job.tokens) - 64 + job.max_tokens - 1 for job in jobs)
    assert rig.backend.num_computed == 64 + own
    rig.expect_alone(*jobs)


def test_single_flight_does_not_outlive_the_flight() -> None:
    rig = make_rig(limits=EngineLimits(prefill_step_size=8))
    older, younger = make_job("old", "c" * 64 + "o"), make_job("young", "c" * 64 + "y")
    rig.submit(older, younger)
    rig.step()
    rig.engine.cancel("old")
    rig.run()
    assert rig.finished("old").reason is FinishReason.CANCELLED
    rig.expect_alone(younger)


# -- the end of a reply -------------------------------------------------------------------------


@either_depth
def test_stop_rules(depth: Depth) -> None:
    free = alone(make_job("free", max_tokens=40))
    stops = {
        "string": StopRules(strings=(free[10:14],), ignore_eos=True),
        "token": StopRules(token_ids=frozenset({ord(free[7])}), ignore_eos=True),
    }
    rig = make_rig(pipeline_depth=depth)
    jobs = [make_job(name, stop=stop, max_tokens=40) for name, stop in stops.items()]
    rig.serve(*jobs)
    rig.expect_alone(*jobs)
    assert rig.finished("token").reason is FinishReason.END_TURN
    assert rig.finished("string").reason is FinishReason.STOP_SEQUENCE
    assert rig.finished("string").stop_sequence == free[10:14]


@pytest.mark.parametrize(
    "token, stop, reason",
    [
        (END_TOKEN, StopRules(), FinishReason.END_TURN),
        # It is found in the last bytes, which are half a character.
        (0xC3, StopRules(strings=("\ufffd",)), FinishReason.STOP_SEQUENCE),
    ],
)
def test_a_first_token_that_ends_the_reply(
    token: int, stop: StopRules, reason: FinishReason
) -> None:
    rig = make_rig()
    bias = replace(GREEDY, logit_bias=((token, 100.0),))
    rig.serve(make_job("a", sampling=bias, max_tokens=1, stop=stop))
    assert rig.finished("a").reason is reason
    assert rig.finished("a").usage.completion_tokens == 1
    assert rig.text("a") == ""


def test_the_context_ends_a_reply() -> None:
    rig = make_rig(spec=replace(fake_spec(block_tokens=8), max_context=20))
    rig.serve(make_job("a", "x" * 10, max_tokens=100))
    assert rig.finished("a").reason is FinishReason.CONTEXT_FULL
    assert rig.finished("a").usage.completion_tokens == 10


@either_depth
def test_as_many_tokens_are_drawn_as_were_asked_for_and_penalties_count_from_the_first(
    depth: Depth,
) -> None:
    rig = make_rig(pipeline_depth=depth)
    job = make_job("a", max_tokens=7)
    rig.serve(job)
    draws = [c.draw for step in rig.backend.steps for c in step.chunks if c.draw is not None]
    assert [draw.num_prompt for draw in draws] == [len(job.tokens)] * 7


# -- cancelled, late ----------------------------------------------------------------------------


@either_depth
@pytest.mark.parametrize("after", range(0, 12, 3))
def test_cancel_at_any_point_frees_everything_within_a_step(depth: Depth, after: int) -> None:
    rig = make_rig(pipeline_depth=depth, limits=EngineLimits(prefill_step_size=8))
    neighbour = make_job("n", "neighbour", max_tokens=30)
    rig.submit(neighbour, make_job("a", "p" * 40))
    rig.step(after)
    for name in ("a", "a", "unknown"):
        rig.engine.cancel(name)
    rig.step()
    assert rig.finished("a").reason is FinishReason.CANCELLED
    assert rig.backend.num_open <= 1
    rig.run()
    rig.expect_alone(neighbour)
    assert rig.backend.num_open == 0


@either_depth
def test_a_prompt_that_is_cancelled_computes_no_more(depth: Depth) -> None:
    rig = make_rig(pipeline_depth=depth, limits=EngineLimits(prefill_step_size=8))
    rig.submit(make_job("a", "p" * 800))
    rig.step(3)
    num_steps = len(rig.backend.steps)
    rig.engine.cancel("a")
    rig.step()
    assert rig.finished("a").reason is FinishReason.CANCELLED
    assert len(rig.backend.steps) == num_steps


@pytest.mark.parametrize("max_batch_size", [8, 1])
def test_a_deadline_passes_while_running_and_while_waiting(max_batch_size: int) -> None:
    rig = make_rig(limits=EngineLimits(max_batch_size=max_batch_size))
    fine = make_job("fine", max_tokens=50)
    rig.submit(fine, make_job("late", max_tokens=1000, deadline=rig.now[0] + 0.055))
    rig.step(8)
    rig.error("late", GenerationTimeoutError)
    assert len(rig.text("late")) in (range(1, 10) if max_batch_size > 1 else [0])
    rig.run()
    rig.expect_alone(fine)


# -- memory -------------------------------------------------------------------------------------


def test_a_background_job_is_preempted_before_an_interactive_one() -> None:
    rig = make_rig(budget_tokens=120)
    job = make_job("bg", "b" * 30, max_tokens=60, service_class=ServiceClass.BACKGROUND)
    rig.submit(job)
    rig.step()
    rig.serve(make_job("fg", "f" * 30, max_tokens=60))
    rows = [chunk for step in rig.backend.steps for chunk in step.chunks]
    reopened = [c.seq for c in rows if c.tokens is not LAST_SAMPLED and ord("b") in c.tokens]
    assert len(set(reopened)) > 1
    rig.expect_alone(job)


def test_what_cannot_fit_alone_is_refused_with_the_maximum() -> None:
    rig = make_rig(budget_tokens=50)
    small = make_job("small", "x" * 20)
    rig.serve(make_job("big", "x" * 60), small)
    assert "the limit is 49" in rig.error("big", PoolExhaustedError)
    rig.expect_alone(small)


def test_exhaustion_in_mid_decode_of_the_only_one_is_an_error() -> None:
    rig = make_rig(budget_tokens=50)
    job = make_job("a", "x" * 30, max_tokens=100)
    rig.serve(job)
    rig.error("a", PoolExhaustedError)
    assert alone(job).startswith(rig.text("a"))
    assert rig.store.usage().working == 0


# -- constraints --------------------------------------------------------------------------------


class Failing:
    """Allows everything, until one of its methods fails."""

    def __init__(self, error: Exception, fails_in: str) -> None:
        self._errors = {fails_in: error}

    def allowed(self) -> bytes:
        self._fail("allowed")
        return b"\xff" * 32

    def accept(self, token: int) -> None:  # noqa: ARG002
        self._fail("accept")

    def copy(self) -> "Failing":
        return self

    def _fail(self, method: str) -> None:
        if method in self._errors:
            raise self._errors[method]


@pytest.mark.parametrize(
    "error, fails_in, kind",
    [
        (LookupError("no rule"), "accept", BackendError),
        (LookupError("no rule"), "allowed", BackendError),
        # The request turned out wrong, which is no defect and not logged as one.
        (InvalidRequestError("no rule"), "accept", InvalidRequestError),
    ],
)
def test_a_constraint_that_fails_ends_its_own_request(
    error: Exception, fails_in: str, kind: type[SemanticError], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig()
    neighbour = make_job("n")
    rig.serve(replace(make_job("a"), constraint=Failing(error, fails_in)), neighbour)
    assert "no rule" in rig.error("a", kind)
    assert kind is BackendError or not caplog.records
    rig.expect_alone(neighbour)


# -- what is told, and changed, while it runs -----------------------------------------------------


def test_progress_is_reported_while_a_prompt_is_computed() -> None:
    rig = make_rig(limits=EngineLimits(prefill_step_size=10))
    rig.serve(make_job("a", "x" * 35))
    progress = [e for e in rig.events["a"] if isinstance(e, PrefillProgress)]
    assert [p.done for p in progress] == [0, 10, 20, 30]
    assert {(p.total, p.reused) for p in progress} == {(35, 0)}


def test_reuse_is_reported_before_the_first_token() -> None:
    rig = make_rig()
    rig.serve(make_job("a", "x" * 35))
    rig.serve(make_job("b", "x" * 35 + "y"))
    assert rig.events["b"][0] == PrefillProgress(35, 36, 35)
    assert rig.num_reused("b") == 35
    assert rig.finished("b").usage.cache_creation_tokens == 1


def test_the_first_token_is_emitted_before_the_next_step_is_prepared() -> None:
    rig = make_rig(pipeline_depth=1)
    for name in ("a", "b"):
        rig.submit(make_job(name, f"{name}: a prompt", max_tokens=4))
    rig.step()
    assert all(rig.text(name) for name in ("a", "b"))
    rig.submit(make_job("c", "c: a prompt", max_tokens=4))
    rig.step()
    assert not rig.text("c")  # others decode, and the device has work meanwhile
    rig.run()


def test_limits_change_while_it_runs() -> None:
    rig = make_rig(limits=EngineLimits(max_batch_size=8))
    rig.submit(*(make_job(f"j{i}", f"p{i}") for i in range(6)))
    rig.engine.reconfigure(EngineLimits(max_batch_size=2))
    rig.run()
    assert max(len(step.chunks) for step in rig.backend.steps) == 2


@either_depth
def test_abandon_answers_every_request_and_leaves_a_working_engine(depth: Depth) -> None:
    rig = make_rig(pipeline_depth=depth)
    rig.submit(*(make_job(f"j{i}", f"p{i}", max_tokens=50) for i in range(20)))
    rig.step()
    rig.engine.abandon(BackendError("gone"))
    for i in range(20):
        assert rig.error(f"j{i}") == "gone"
    assert not rig.engine.has_work
    assert rig.backend.num_open == rig.store.usage().working == 0
    after = make_job("after")
    rig.serve(after)
    rig.expect_alone(after)


class PutsOff(FaultyBackend):
    """Counts snapshots that were asked for and not begun."""

    num_asked = num_put_off = 0

    def snapshot(self, seq: SequenceId, start: int, end: int, kind: LayerKind) -> Ticket:
        self.num_asked += 1
        self.num_put_off += 1
        return super().snapshot(seq, start, end, kind)

    def flush(self) -> None:
        self.num_put_off = 0


def test_deferred_work_starts_by_the_end_of_a_step() -> None:
    backend = PutsOff(fake_spec(block_tokens=8))
    rig = make_rig(backend=backend)
    rig.engine.submit(make_job("a", "x" * 40, max_tokens=20))
    while rig.engine.has_work:
        rig.step()
        assert not backend.num_put_off
    assert backend.num_asked >= 5
