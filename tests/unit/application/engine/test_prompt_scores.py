"""The log-probabilities of a prompt's tokens, which no cached block holds."""

from typing import Any, Literal

import pytest

from semantic.adapters.outbound.backends.fake import END_TOKEN, FakeBackend, fake_spec
from semantic.application.engine.scheduler import ConcurrentScheduler
from semantic.application.settings import EngineLimits
from semantic.domain.events import PromptScored, TextDelta
from semantic.domain.sampling import FinishReason, SamplingParams, StopRules
from semantic.domain.spec import ModelCacheSpec
from semantic.ports.backend import Chunk, Computed, SequenceId, Step
from tests.unit.application.engine_rig import Rig, make_job, make_rig

pytestmark = pytest.mark.unit

SCORED = SamplingParams(temperature=0, seed=0, top_logprobs=2)
PROMPT = "a prompt of some length, which fills a few blocks of eight tokens"
ALL: Any = {"sampling": SCORED, "is_prompt_scored": True, "spelled": {}}
SPECS = {
    "full": fake_spec(block_tokens=8),
    "window": fake_spec(block_tokens=8, window=12),
    "state": fake_spec(block_tokens=8, has_state=True),
}


def _scores(rig: Rig, name: str) -> list[tuple[bytes, float]]:
    """What a job was told, which is told once and before its text."""
    told = [e for e in rig.events[name] if isinstance(e, PromptScored | TextDelta)]
    assert isinstance(told[0], PromptScored)
    assert not any(isinstance(event, PromptScored) for event in told[1:])
    return [(token.text, token.logprob) for token in told[0].rest]


def _expected(prompt: str, spec: ModelCacheSpec) -> list[tuple[bytes, float]]:
    """By the backend itself, in one chunk."""
    backend, tokens = FakeBackend(spec), tuple(prompt.encode())
    backend.open_sequence(SequenceId(0), tokens)
    chunk = Chunk(SequenceId(0), 0, tokens, targets=tokens[1:])
    (row,) = backend.collect(backend.launch(Step((chunk,)))).rows
    assert isinstance(row, Computed)
    return [(bytes((score.token,)), score.logprob) for score in row.scores]


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("max_idle", [0, 4])
@pytest.mark.parametrize("depth", [0, 1])
def test_scores_after_a_cached_prompt_are_those_of_a_fresh_one(
    kind: str, max_idle: int, depth: Literal[0, 1]
) -> None:
    rig = make_rig(spec=SPECS[kind], max_idle=max_idle, pipeline_depth=depth)
    rig.serve(before := make_job("before", PROMPT))
    rig.serve(scored := make_job("scored", PROMPT, **ALL))
    assert _scores(rig, "scored") == _expected(PROMPT, SPECS[kind])
    assert rig.num_reused("scored") == 0
    rig.serve(after := make_job("after", f"{PROMPT} and more"))
    assert rig.num_reused("after") > len(PROMPT) - 9
    rig.expect_alone(before, scored, after)


@pytest.mark.parametrize("kind", SPECS)
def test_what_is_computed_for_scores_is_kept_for_others(kind: str) -> None:
    rig = make_rig(spec=SPECS[kind])
    rig.serve(make_job("scored", PROMPT, max_tokens=0, **ALL))
    rig.serve(after := make_job("after", f"{PROMPT} and more"))
    assert rig.num_reused("after") > len(PROMPT) - 9
    rig.expect_alone(after)


def test_beside_others_and_with_little_memory() -> None:
    """Some jobs are preempted, and go on with the scores they have."""
    limits = EngineLimits(prefill_step_size=64)
    rig = make_rig(budget_tokens=330, limits=limits)
    long = PROMPT * 2
    jobs = [make_job(str(n), f"{n} {long}", max_tokens=40, **ALL) for n in range(2)]
    others = [make_job(f"plain {n}", f"{n} {long}", max_tokens=40) for n in range(2)]
    rig.serve(*jobs, *others)
    assert rig.store.telemetry.counts.engine.preemptions  # else the test shows nothing
    for job in jobs:
        assert _scores(rig, job.id) == _expected(f"{job.id} {long}", SPECS["full"])
    rig.expect_alone(*jobs, *others)


@pytest.mark.parametrize("where", ["launch", "collect"])
def test_a_failed_step_is_repeated(where: str) -> None:
    rig = make_rig(limits=EngineLimits(prefill_step_size=64))
    rig.backend.fail_next(where, after=1)
    rig.serve(job := make_job("scored", PROMPT * 3, **ALL))
    assert _scores(rig, "scored") == _expected(PROMPT * 3, SPECS["full"])
    rig.expect_alone(job)


def test_a_step_scores_a_bounded_number_of_tokens() -> None:
    """Their logits take a vocabulary's worth of memory each."""
    rig = make_rig()
    rig.serve(*(make_job(str(n), f"{n} {PROMPT * 8}", **ALL) for n in range(3)))
    numbers = [sum(len(chunk.targets) for chunk in step.chunks) for step in rig.backend.steps]
    assert 0 < max(numbers) <= ConcurrentScheduler.SCORED_TOKENS
    assert sum(numbers) == sum(len(f"{n} {PROMPT * 8}") - 1 for n in range(3))


@pytest.mark.parametrize("options", [{}, ALL])
@pytest.mark.parametrize("prompt", ["h", "hello", PROMPT])
def test_no_tokens_are_generated_if_none_are_wanted(prompt: str, options: Any) -> None:
    rig = make_rig()
    for name in ("first", "again"):
        rig.serve(make_job(name, prompt, max_tokens=0, **options))
        final = rig.finished(name)
        assert (final.reason, final.usage.completion_tokens) == (FinishReason.MAX_TOKENS, 0)
        assert rig.text(name) == ""
        if options:
            assert _scores(rig, name) == _expected(prompt, SPECS["full"])
    rig.serve(make_job("reply", f"{prompt}."))
    assert rig.finished("reply").usage.completion_tokens == 12


def test_the_end_token_is_listed_only_where_special_tokens_are_spelled() -> None:
    bias = SamplingParams(temperature=0, seed=0, top_logprobs=0, logit_bias=((END_TOKEN, 100),))
    rig = make_rig()
    for name, spelled in (("chat", None), ("raw", {END_TOKEN: b"<|end|>"})):
        rig.serve(make_job(name, sampling=bias, stop=StopRules(), spelled=spelled))
        assert rig.finished(name).reason is FinishReason.END_TURN
    deltas = [event for event in rig.events["raw"] if isinstance(event, TextDelta)]
    assert [(d.text, [token.text for token in d.logprobs]) for d in deltas] == [("", [b"<|end|>"])]
    assert not any(isinstance(event, TextDelta) for event in rig.events["chat"])
