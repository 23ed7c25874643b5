"""Scores of given tokens depend on the tokens before them, and on nothing else."""

from dataclasses import replace

import pytest

from semantic.domain.sampling import TokenLogprob
from semantic.ports.backend import Chunk, Computed, ModelBackendPort, RowFailed
from tests.contract.conftest import Alone, each_kind
from tests.contract.driver import (
    GREEDY,
    NUM_REPLY,
    Run,
    begin,
    prompt,
    sampled,
    scored_chunk,
    scores_of,
    step,
)

pytestmark = [pytest.mark.contract, each_kind]

TOKENS = prompt(29)
ENDS = (1, 9, 10, 24, len(TOKENS))


def _scored(run: Run, *ends: int) -> list[TokenLogprob]:
    """Compute a run up to each end; returns the scores of its prompt's tokens on the way."""
    scores: list[TokenLogprob] = []
    for end in ends:
        chunk = scored_chunk(run, end, num_top=2)
        (row,) = step(run.backend, chunk)
        scores += scores_of(row)
        run.take(chunk, row)
    return scores


def _check_equal(scores: list[TokenLogprob], expected: list[TokenLogprob]) -> None:
    assert [score.token for score in scores] == [score.token for score in expected]
    for score, other in zip(scores, expected, strict=True):
        assert score.logprob == pytest.approx(other.logprob, abs=1e-4)
        values, others = ([value for _, value in each.top] for each in (score, other))
        assert values == pytest.approx(others, abs=1e-4)
        assert values == sorted(values, reverse=True)


def test_scores_do_not_depend_on_chunks_and_the_reply_is_the_same(
    backend: ModelBackendPort, alone: Alone
) -> None:
    whole, run = begin(backend, 0, TOKENS), begin(backend, 1, TOKENS)
    expected = _scored(whole, len(TOKENS))
    assert [score.token for score in expected] == TOKENS[1:]
    _check_equal(_scored(run, *ENDS), expected)
    assert whole.finish() == run.finish() == alone(TOKENS, num_reply=NUM_REPLY)


def test_scores_after_a_restored_prefix_are_those_of_a_computed_one(
    backend: ModelBackendPort,
) -> None:
    expected = _scored(begin(backend, 0, TOKENS), len(TOKENS))
    blocks = begin(backend, 1, TOKENS).seal(8, 16)
    run = begin(backend, 2, TOKENS)
    run.load(blocks)
    _check_equal(_scored(run, 20, len(TOKENS)), expected[16:])


def test_a_greedy_token_has_the_best_score(backend: ModelBackendPort) -> None:
    run = begin(backend, 0, prompt(9), replace(GREEDY, top_logprobs=1))
    first = sampled(*step(backend, run.chunk()))
    assert first.logprob is not None
    again = begin(backend, 1, [*prompt(9), first.token])
    (row,) = step(backend, scored_chunk(again, 9, num_top=1))
    assert isinstance(row, Computed)
    last = row.scores[-1]
    assert (last.token, last.top[0][0]) == (first.token, first.token)
    assert last.logprob == last.top[0][1] == pytest.approx(first.logprob.logprob, abs=1e-4)


@pytest.mark.parametrize("targets", [(1, 2, 3), (10**6,), (-1,)])
def test_impossible_targets_fail_their_row_alone(
    backend: ModelBackendPort, targets: tuple[int, ...]
) -> None:
    run, other = begin(backend, 0, prompt(9)), begin(backend, 1, prompt(9))
    rows = step(backend, Chunk(run.seq, 0, (1, 2), targets=targets), other.chunk())
    assert isinstance(rows[0], RowFailed)
    sampled(rows[1])
    assert scores_of(*step(backend, scored_chunk(run, 9)))
