"""Sampling depends on the sequence's own tokens and parameters, and on nothing else."""

import math
from dataclasses import replace

import pytest

from semantic.domain.sampling import SamplingParams, TokenLogprob
from semantic.ports.backend import ModelBackendPort, SequenceId
from tests.contract.conftest import Alone, each_kind
from tests.contract.driver import (
    GREEDY,
    Run,
    advance,
    begin,
    finish,
    mask,
    prompt,
    restored,
    sampled,
    step,
)

pytestmark = [pytest.mark.contract, each_kind]

SEEDED = SamplingParams(temperature=1, seed=1234)
PENALISED = SamplingParams(
    temperature=0, repetition_penalty=1.8, presence_penalty=1, frequency_penalty=1.5
)


def _first_logprob(backend: ModelBackendPort, seq: int, allowed: bytes | None) -> TokenLogprob:
    run = begin(backend, seq, prompt(9), replace(GREEDY, top_logprobs=0))
    logprob = sampled(*step(backend, run.chunk(allowed=allowed))).logprob
    assert logprob is not None
    return logprob


# -- seeds --------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_reply_in_any_batch(backend: ModelBackendPort, alone: Alone) -> None:
    run = begin(backend, 0, prompt(12), SEEDED)
    others = [begin(backend, n, prompt(n, seed=n), replace(SEEDED, seed=n)) for n in (3, 21)]
    advance([others[0], run, others[1]], [2, 5, 7])
    finish([*others, run])
    assert run.reply == alone(prompt(12), SEEDED)


def test_a_seed_gives_the_same_reply_after_a_restore(
    backend: ModelBackendPort, alone: Alone
) -> None:
    run = begin(backend, 0, prompt(12), SEEDED)
    run.finish(3)
    assert restored(run, seq=1).finish() == alone(prompt(12), SEEDED)


def test_another_seed_gives_another_reply(alone: Alone) -> None:
    replies = {tuple(alone(prompt(12), replace(SEEDED, seed=seed))) for seed in range(6)}
    assert len(replies) == 6


# -- penalties ----------------------------------------------------------------------------------


def test_penalties_matter(alone: Alone) -> None:
    """Otherwise the tests below could not fail."""
    plain = alone(prompt(12), GREEDY, 30)
    penalised = alone(prompt(12), PENALISED, 30)
    assert penalised != plain
    assert len(set(penalised)) > len(set(plain))


@pytest.mark.parametrize("num_before", [0, 4])
def test_penalties_remember_what_was_restored(
    backend: ModelBackendPort, alone: Alone, num_before: int
) -> None:
    run = begin(backend, 0, prompt(12), PENALISED)
    if num_before:
        run.finish(num_before)
    else:
        run.compute(11)
    assert restored(run, seq=1).finish(30) == alone(prompt(12), PENALISED, 30)


def test_a_fork_has_its_own_history(backend: ModelBackendPort, alone: Alone) -> None:
    source = begin(backend, 0, prompt(12), PENALISED)
    source.compute(11)
    assert backend.fork(source.seq, SequenceId(1), 11)
    fork = Run(backend, SequenceId(1), [*prompt(12)[:11], 5], 12, PENALISED, num_held=11)
    finish([source, fork], 20)
    assert source.reply == alone(prompt(12), PENALISED, 20)
    assert fork.reply == alone([*prompt(12)[:11], 5], PENALISED, 20)


# -- log-probabilities and masks ----------------------------------------------------------------


def test_logprobs_are_reported_when_asked_for(backend: ModelBackendPort) -> None:
    run = begin(backend, 0, prompt(9), replace(GREEDY, top_logprobs=5))
    for _ in range(4):
        chunk = run.chunk()
        row = sampled(*step(backend, chunk))
        run.take(chunk, row)
        assert row.logprob is not None
        values = [value for _, value in row.logprob.top]
        assert len({token for token, _ in row.logprob.top}) == 5
        assert values == sorted(values, reverse=True)
        assert row.logprob.top[0] == (row.token, row.logprob.logprob)
        assert 0 < sum(map(math.exp, values)) <= 1 + 1e-6


def test_logprobs_of_the_chosen_token_alone(backend: ModelBackendPort) -> None:
    logprob = _first_logprob(backend, 0, None)
    assert logprob.top == ()
    assert logprob.logprob < 0


def test_no_logprobs_unless_asked_for(backend: ModelBackendPort) -> None:
    assert sampled(*step(backend, begin(backend, 0, prompt(9)).chunk())).logprob is None


def test_a_mask_leaves_the_best_token_it_allows(backend: ModelBackendPort) -> None:
    candidates = (3, 7, 50, 81)
    each = [_first_logprob(backend, token, mask(token)) for token in candidates]
    assert [logprob.token for logprob in each] == list(candidates)
    best = max(each, key=lambda logprob: logprob.logprob)
    assert _first_logprob(backend, 0, mask(*candidates)) == best


def test_a_mask_holds_for_sampled_tokens_too(backend: ModelBackendPort) -> None:
    params = SamplingParams(temperature=5, seed=0)
    run = begin(backend, 0, prompt(9), params)
    allowed = {2, 40, 95}
    for _ in range(12):
        chunk = run.chunk(allowed=mask(*allowed))
        run.take(chunk, *step(backend, chunk))
    assert set(run.reply) == allowed


def test_a_mask_is_of_its_own_row(backend: ModelBackendPort, alone: Alone) -> None:
    run, masked = begin(backend, 0, prompt(9)), begin(backend, 1, prompt(9))
    rows = step(backend, masked.chunk(allowed=mask(4)), run.chunk())
    assert [sampled(row).token for row in rows] == [4, alone(prompt(9))[0]]


# -- drafts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"]
)
def test_no_draft_changes_a_reply(
    shared_backend: ModelBackendPort, alone: Alone, params: SamplingParams
) -> None:
    """Right drafts, wrong ones and none, in one batch."""
    backend = shared_backend
    if not backend.traits.max_draft:
        pytest.skip("its layers cannot be cut back")
    scored = replace(params, top_logprobs=1) if params is SEEDED else params
    expected = {size: alone(prompt(size), scored, 12) for size in (4, 9)}
    runs = [begin(backend, 900 + size, prompt(size), scored) for size in expected]
    other = begin(backend, 990, prompt(6))
    num_accepted = 0
    advance([*runs, other])
    for wrong in (2, 0, 9, 1, 9, 0):
        going = [run for run in runs if len(run.reply) < 12]
        chunks = []
        for run in going:
            reply = expected[run.num_prompt]
            room = backend.traits.draft_end - len(run.tokens)
            draft = reply[len(run.reply) : len(run.reply) + max(0, min(4, room))]
            draft[wrong : wrong + 1] = [95] * (wrong < len(draft))
            masks = (None,) * len(draft)
            chunks.append(replace(run.chunk(), draft=tuple(draft), masks=masks))
        rows = step(backend, *chunks, other.chunk())
        other.take(other.chunk(), rows[-1])
        for run, chunk, row in zip(going, chunks, rows, strict=False):
            drawn = (*sampled(row).accepted, sampled(row))
            num_accepted += len(drawn) - 1
            run.tokens += [each.token for each in drawn]
            run.num_held += len(drawn)
            assert all((each.logprob is None) == (scored is params) for each in drawn)
            assert len(chunk.draft) >= len(drawn) - 1
    assert num_accepted > 6
    for run in runs:
        assert run.finish(12)[:12] == expected[run.num_prompt]
    assert other.reply == alone(prompt(6), GREEDY, 7)
    for run in (*runs, other):
        backend.close_sequence(run.seq)
