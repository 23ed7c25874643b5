"""A draft model beside the served one: replies stay the same, and it is asked where it pays."""

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantic.adapters.outbound.backends.fake import FakeBackend, fake_spec
from semantic.application.engine.request import Job
from semantic.application.engine.speculative import model_source
from semantic.application.settings import EngineLimits
from semantic.domain.errors import BackendError
from semantic.domain.sampling import SamplingParams
from semantic.domain.spec import ModelCacheSpec
from semantic.ports.backend import Chunk, Step, Ticket
from tests.unit.application.engine.test_speculation import SlowBackend, jobs, outcome
from tests.unit.application.engine_rig import FaultyBackend, Rig, make_job, make_rig

pytestmark = pytest.mark.unit

WITHOUT = EngineLimits(draft_tokens=0)


class HalfRight(FaultyBackend):
    """A draft model that is wrong at every so many positions of its sequences."""

    def __init__(self, every: int, spec: ModelCacheSpec | None = None) -> None:
        super().__init__(spec or fake_spec(block_tokens=8))
        self._every = every
        self.now: list[float] | None = None
        self.pass_s = 0.0

    def launch(self, step: Step) -> Ticket:
        if self.now is not None:
            self.now[0] += self.pass_s
        return super().launch(replace(step, chunks=tuple(map(self._distracted, step.chunks))))

    def _distracted(self, chunk: Chunk) -> Chunk:
        position = chunk.start + chunk.num_tokens
        if chunk.draw is None or not self._every or position % self._every:
            return chunk
        wild = replace(chunk.draw, params=SamplingParams(temperature=2, seed=position))
        return replace(chunk, draw=wild)


def drafting_rig(draft: FakeBackend, rig: Rig | None = None) -> Rig:
    rig = rig or make_rig()
    rig.engine.add_draft_model(draft)
    return rig


@settings(max_examples=12)
@given(
    asked=jobs(),
    spec=st.builds(fake_spec, block_tokens=st.sampled_from([4, 8]), window=st.sampled_from([0, 6])),
    depth=st.sampled_from([0, 1]),
    every=st.sampled_from([0, 2, 5]),
    budget=st.sampled_from([110, 100_000]),
    fault=st.sampled_from([None, "launch", "collect"]),
    is_draft_faulty=st.booleans(),
)
def test_a_draft_model_changes_no_reply(
    asked: list[Job],
    spec: ModelCacheSpec,
    depth: Literal[0, 1],
    every: int,
    budget: int,
    fault: str | None,
    is_draft_faulty: bool,
) -> None:
    # Few blocks fit the small budget: rows are preempted, and the draft model gives its memory up.
    wanted = [job for job in asked if job.constraint is None]
    plain = make_rig(spec=spec, limits=WITHOUT)
    plain.serve(*wanted)
    draft = HalfRight(every)
    rig = drafting_rig(draft, make_rig(spec=spec, pipeline_depth=depth, budget_tokens=budget))
    if fault:
        (draft if is_draft_faulty else rig.backend).fail_next(fault, after=6)
    rig.serve(*wanted)
    for job in wanted:
        assert outcome(rig, job) == outcome(plain, job)
        reply = plain.reply_state(job.id).tokens
        later = replace(job, id=f"{job.id}2", tokens=(*job.tokens, *reply, 65, 66))
        for each in (plain, rig):
            each.serve(later)
        assert outcome(rig, later) == outcome(plain, later)
    rig.engine.abandon(BackendError("the end"))
    assert rig.backend.num_open == draft.num_open == 0
    assert rig.store.usage().working == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_draft_model_that_agrees_saves_steps(depth: Literal[0, 1]) -> None:
    rig = drafting_rig(FakeBackend(fake_spec()), make_rig(pipeline_depth=depth))
    plain = make_rig(pipeline_depth=depth, limits=WITHOUT)
    for each in (rig, plain):
        for temperature in (0.0, 0.8):
            sampling = SamplingParams(temperature=temperature, seed=5)
            each.serve(make_job(f"{temperature}", "tell", max_tokens=80, sampling=sampling))
    assert len(rig.backend.steps) < 0.5 * len(plain.backend.steps)
    for name in ("0.0", "0.8"):
        assert rig.text(name) == plain.text(name)
        usage = rig.finished(name).usage
        assert usage.accepted_by_source["draft_model"] > 40
        assert sum(usage.accepted_by_source.values()) == usage.accepted_prediction_tokens


def test_memory_goes_first_where_it_is_sure() -> None:
    rig = drafting_rig(HalfRight(2))
    for name in ("first", "second", "third"):
        rig.serve(make_job(name, "say it again", max_tokens=80))
    first, third = (rig.finished(name).usage.accepted_by_source for name in ("first", "third"))
    assert first["draft_model"] > first.get("memory", 0)
    assert third["memory"] > third.get("draft_model", 0)


@pytest.mark.parametrize("every, pass_s, most", [(1, 0.3, 1.02), (2, 1.0, 1.02), (0, 0.1, 0.5)])
def test_a_draft_model_that_does_not_pay_is_not_asked(
    every: int, pass_s: float, most: float
) -> None:
    """A step takes a second and a tenth for each further token; what a draft takes varies."""
    took = []
    for has_draft in (True, False):
        now = [0.0]
        rig = make_rig(backend=SlowBackend(now, token_s=0.1))
        rig.now = now
        if has_draft:
            draft = HalfRight(every)
            draft.now, draft.pass_s = now, pass_s
            rig.engine.add_draft_model(draft)
        for number in range(5):
            sampling = SamplingParams(temperature=1, seed=number)
            job = make_job(f"{number}", f"say {number}", max_tokens=120, sampling=sampling)
            rig.serve(job)
        took.append(now[0])
    assert took[0] < most * took[1]


def test_long_texts_are_followed_from_near_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake model needs the whole text to agree, so no draft is right after the limit."""
    monkeypatch.setattr(model_source, "_CONTEXT", 24)
    monkeypatch.setattr(model_source, "_MAX_LENGTH", 48)
    monkeypatch.setattr(model_source, "_PIECE", 8)
    monkeypatch.setattr(model_source, "_SHORT", 4)
    draft = HalfRight(0)
    rig = drafting_rig(draft)
    rig.serve(job := make_job("a", "a text " * 8, max_tokens=60))
    rig.expect_alone(job)
    fed = [chunk for step in draft.steps for chunk in step.chunks]
    assert fed
    assert max(chunk.start + chunk.num_tokens for chunk in fed) <= 48
    assert max(chunk.num_tokens for chunk in fed) <= 8


def test_tokens_that_the_draft_model_lacks_are_left_out() -> None:
    small = replace(fake_spec(block_tokens=8), vocab_size=200)
    draft = HalfRight(0, small)
    rig = drafting_rig(draft)
    rig.serve(job := make_job("a", "some ÿÿ text", max_tokens=40))
    rig.expect_alone(job)
    rig.serve(job := make_job("b", "some ÿÿ", max_tokens=40))
    rig.expect_alone(job)
    assert draft.steps
    assert draft.num_open == 0


def test_a_draft_model_that_fails_is_not_used_any_more(caplog: pytest.LogCaptureFixture) -> None:
    draft = HalfRight(0)
    draft.fail_next("launch", after=4)
    rig = drafting_rig(draft)
    for name in ("a", "b"):
        rig.serve(job := make_job(name, f"say {name}", max_tokens=40))
        rig.expect_alone(job)
    assert len(draft.steps) == 5
    assert draft.num_open == 0
    assert "draft model failed" in caplog.text


def test_sequences_of_the_draft_model_count_against_the_budget() -> None:
    rig = drafting_rig(HalfRight(0))
    rig.submit(make_job("a", max_tokens=60))
    while not rig.text("a"):
        rig.step()
    before = rig.store.usage().working
    rig.step(6)
    after = rig.store.usage().working
    needed = rig.backend.bytes_for([model_source._PIECE])
    assert after - before >= needed
    rig.run()
    assert rig.store.usage().working == 0
