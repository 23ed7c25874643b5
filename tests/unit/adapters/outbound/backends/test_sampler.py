import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.adapters.outbound.backends.sampler import Logits, sample, score
from semantic.domain.errors import BackendError
from semantic.domain.sampling import SamplingParams
from semantic.ports.backend import Draw

pytestmark = pytest.mark.unit

GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(temperature=1, seed=1)


def _row(*values: float) -> Logits:
    return np.array(values, np.float32)


def _choose(
    logits: Logits,
    params: SamplingParams,
    history: Sequence[int] = (),
    *,
    num_prompt: int = 0,
    allowed: bytes | None = None,
) -> int:
    return sample(logits, Draw(params, num_prompt, allowed), history)[0]


def _chosen(logits: Logits, params: SamplingParams, *, allowed: bytes | None = None) -> set[int]:
    """Every token that comes up at one of many positions."""
    return {_choose(logits, params, [0] * n, allowed=allowed) for n in range(300)}


# -- choosing -----------------------------------------------------------------------------------


def test_greedy_takes_the_best_token_and_of_equals_the_first() -> None:
    assert _choose(_row(1, 3, 2), GREEDY) == 1
    assert _choose(_row(1, 3, 3), GREEDY) == 1


def test_the_row_is_not_changed() -> None:
    row = _row(1, 3, 2)
    params = replace(SEEDED, repetition_penalty=2, logit_bias=((0, 5),), top_k=2)
    _choose(row, params, [1], allowed=b"\x03")
    assert row.tolist() == [1, 3, 2]


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    row, temperature, num_draws = _row(2, 1, 0.5, 0, -3), 0.7, 4000
    params = replace(SEEDED, temperature=temperature)
    counts = Counter(_choose(row, params, [0] * n) for n in range(num_draws))
    weights = [math.exp(value / temperature) for value in row.tolist()]
    for token, weight in enumerate(weights):
        expected = weight / sum(weights)
        deviation = math.sqrt(expected * (1 - expected) / num_draws)
        assert counts[token] / num_draws == pytest.approx(expected, abs=4 * deviation), token


def test_a_tiny_temperature_is_greedy_and_a_high_one_is_not() -> None:
    row = _row(1, 3, 2.9)
    assert _chosen(row, replace(SEEDED, temperature=5e-324)) == {1}
    assert _chosen(row, replace(SEEDED, temperature=100)) == {0, 1, 2}


def test_the_seed_and_the_position_decide() -> None:
    row = np.zeros(1000, np.float32)
    assert _choose(row, SEEDED, [7] * 5) == _choose(row, SEEDED, [8] * 5)
    assert len({_choose(row, SEEDED, [0] * n) for n in range(20)}) > 15
    assert len({_choose(row, replace(SEEDED, seed=seed), [0]) for seed in range(-10, 10)}) > 15


def test_only_greedy_rows_go_without_a_seed() -> None:
    assert _choose(_row(0, 1), GREEDY) == 1
    with pytest.raises(BackendError, match="seed"):
        _choose(_row(0, 1), SamplingParams(temperature=1))


# -- filters ------------------------------------------------------------------------------------


def test_top_k_keeps_the_best_and_of_equals_the_first() -> None:
    assert _chosen(_row(0, 1, 2, 1), replace(SEEDED, top_k=2)) == {1, 2}
    assert _chosen(_row(0, 1, 2, 1), replace(SEEDED, top_k=100)) == {0, 1, 2, 3}
    assert _chosen(np.tile(_row(0, 1), 500), replace(SEEDED, top_k=3)) == {1, 3, 5}


def test_top_p_keeps_the_smallest_set_with_that_much() -> None:
    row = np.log(np.array([0.1, 0.6, 0.25, 0.05], np.float32))
    assert _chosen(row, replace(SEEDED, top_p=0)) == {1}
    assert _chosen(row, replace(SEEDED, top_p=0.59)) == {1}
    assert _chosen(row, replace(SEEDED, top_p=0.61)) == {1, 2}
    assert _chosen(row, replace(SEEDED, top_p=0.9)) == {0, 1, 2}
    assert _chosen(row, SEEDED) == {0, 1, 2, 3}
    assert _chosen(np.tile(_row(0, 99), 500), replace(SEEDED, top_p=0.005)) == {1, 3, 5}


def test_min_p_is_a_fraction_of_the_best() -> None:
    row = np.log(np.array([0.1, 0.6, 0.25, 0.05], np.float32))
    assert _chosen(row, replace(SEEDED, min_p=0.4)) == {1, 2}
    assert _chosen(row, replace(SEEDED, min_p=0.1)) == {0, 1, 2}
    assert _chosen(row, replace(SEEDED, min_p=1)) == {1}


def test_top_p_counts_what_top_k_left() -> None:
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert _chosen(row, replace(SEEDED, top_p=0.65)) == {0, 1}
    assert _chosen(row, replace(SEEDED, top_p=0.55, top_k=2)) == {0}


def test_masks() -> None:
    row = _row(*range(10))
    assert _choose(row, GREEDY, allowed=b"\xff\x01") == 8
    assert _choose(row, GREEDY, allowed=b"\xff") == 7  # ids beyond the mask are not allowed
    assert _choose(row, GREEDY, allowed=b"\xff" * 100) == 9
    assert _chosen(row, replace(SEEDED, temperature=50), allowed=b"\x05\x02") == {0, 2, 9}
    assert _chosen(row, replace(SEEDED, temperature=50, top_k=2), allowed=b"\x05\x02") == {2, 9}


@pytest.mark.parametrize(
    "params", [GREEDY, SEEDED, replace(SEEDED, min_p=0.5), replace(SEEDED, top_k=1, top_p=0.5)]
)
def test_a_mask_that_allows_nothing(params: SamplingParams) -> None:
    with pytest.raises(BackendError, match="allows no token"):
        _choose(_row(1, 2), params, allowed=b"\x00")


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_rows_that_are_not_numbers(params: SamplingParams) -> None:
    for value in (math.nan, math.inf):
        with pytest.raises(BackendError, match="NaN or infinite"):
            _choose(_row(0, value, 1), params)
    with pytest.raises(BackendError, match="NaN or infinite"):
        _choose(_row(-math.inf, -math.inf), params)
    assert _choose(_row(-math.inf, 0), params) == 1


# -- penalties and biases -----------------------------------------------------------------------


def test_the_repetition_penalty_lowers_negative_numbers_too() -> None:
    params = replace(GREEDY, repetition_penalty=2)
    assert _choose(_row(-1, -1.5), params, [0]) == 1
    assert _choose(_row(-1, -1.5), params, [1]) == 0


def test_biases_are_added_and_do_not_lift_a_mask() -> None:
    assert _choose(_row(2, 1.5), replace(GREEDY, logit_bias=((1, 1),))) == 1
    assert _choose(_row(2, 1.5), replace(GREEDY, logit_bias=((0, -100), (0, 100)))) == 0
    assert _choose(_row(2, 1.5), replace(GREEDY, logit_bias=((-1, 100), (2, 100)))) == 0
    assert _choose(_row(2, 1), replace(GREEDY, logit_bias=((1, 100),)), allowed=b"\x01") == 0


# -- log-probabilities --------------------------------------------------------------------------


def test_logprobs_are_the_models_own() -> None:
    row = np.log(np.array([0.5, 0.125, 0.25, 0.125], np.float32)) + 3
    params = replace(
        SEEDED, temperature=0.1, logit_bias=((1, 50),), repetition_penalty=2, top_logprobs=3
    )
    token, logprob = sample(row, Draw(params, 0, b"\x0e"), [0])
    assert logprob is not None
    assert token == logprob.token == 1
    assert logprob.logprob == pytest.approx(math.log(0.125))
    assert [token for token, _ in logprob.top] == [0, 2, 1]
    assert [math.exp(value) for _, value in logprob.top] == pytest.approx([0.5, 0.25, 0.125])


def test_scores_are_log_probabilities_of_the_given_tokens() -> None:
    rows = np.array([[1, 3, 3, 2], [0, -np.inf, 1, 0]], np.float32)
    first, second = score(rows, [3, 1], 2)
    expected = 2 - math.log(math.e + 2 * math.e**3 + math.e**2)
    assert (first.token, [token for token, _ in first.top]) == (3, [1, 2])
    assert first.logprob == pytest.approx(expected)
    assert first.top[0][1] == pytest.approx(expected + 1)
    assert (second.logprob, [token for token, _ in second.top]) == (-math.inf, [2, 0])
    with pytest.raises(BackendError, match="NaN"):
        score(np.array([[1, np.nan]], np.float32), [0], 0)


def test_logprobs_as_many_as_asked_for() -> None:
    row = _row(1000, 0, -1000)
    assert sample(row, Draw(GREEDY, 0), [])[1] is None
    for num_top, num_reported in ((0, 0), (2, 2), (20, 3)):
        _, logprob = sample(row, Draw(replace(GREEDY, top_logprobs=num_top), 0), [])
        assert logprob is not None
        assert len(logprob.top) == num_reported
        assert logprob.logprob == 0


# -- against a plain reference ------------------------------------------------------------------

_LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=2, max_size=12)


def _candidates(logits: Sequence[float], params: SamplingParams, allowed: set[int]) -> set[int]:
    """The tokens that may come up; limits are a hair wider, for the last bit of `exp`."""
    best = max(logits[token] for token in allowed)
    weights = {t: math.exp((logits[t] - best) / params.temperature) for t in allowed}
    ranked = sorted(allowed, key=lambda token: (-logits[token], token))
    ranked = [token for token in ranked if weights[token] >= params.min_p * (1 - 1e-9)]
    ranked = ranked[: params.top_k or None]
    wanted = params.top_p * sum(weights[token] for token in ranked) * (1 + 1e-9)
    kept: set[int] = set()
    total = 0.0
    for token in ranked:
        if kept and params.top_p < 1 and total >= wanted:
            break
        kept.add(token)
        total += weights[token]
    return {token for token in kept if weights[token] > 0}


@given(logits=_LOGITS, data=st.data(), seed=st.integers(0, 2**64 - 1), position=st.integers(0, 50))
def test_the_choice_is_among_the_candidates(
    logits: list[float], data: st.DataObject, seed: int, position: int
) -> None:
    params = SamplingParams(
        temperature=data.draw(st.floats(0.01, 5)),
        top_p=data.draw(st.floats(0, 1)),
        top_k=data.draw(st.integers(0, 6)),
        min_p=data.draw(st.floats(0, 1)),
        seed=seed,
    )
    ids = range(len(logits))
    allowed = data.draw(st.none() | st.sets(st.sampled_from(ids), min_size=1))
    bits = None if allowed is None else sum(1 << token for token in allowed).to_bytes(2, "little")
    token = _choose(_row(*logits), params, [0] * position, allowed=bits)
    assert token in _candidates(logits, params, set(ids) if allowed is None else allowed)


@given(logits=_LOGITS, data=st.data())
def test_greedy_is_the_best_after_penalties(logits: list[float], data: st.DataObject) -> None:
    """All numbers are exact in float32."""
    ids = st.integers(0, len(logits) - 1)
    history = data.draw(st.lists(ids, max_size=6))
    num_prompt = data.draw(st.integers(0, len(history)))
    bias = data.draw(st.dictionaries(ids, st.integers(-4, 4)))
    params = SamplingParams(
        temperature=0,
        repetition_penalty=data.draw(st.sampled_from([0.5, 1, 2])),
        presence_penalty=data.draw(st.sampled_from([-1, 0, 0.5])),
        frequency_penalty=data.draw(st.sampled_from([-0.5, 0, 0.25])),
        logit_bias=tuple(bias.items()),
    )
    counts = Counter(history[num_prompt:])
    adjusted = []
    for token, value in enumerate(logits):
        factor = params.repetition_penalty if token in history else 1
        penalised = value / factor if value > 0 else value * factor
        penalised -= params.presence_penalty * (token in counts)
        penalised -= params.frequency_penalty * counts[token]
        adjusted.append(penalised + bias.get(token, 0))
    expected = adjusted.index(max(adjusted))
    assert _choose(_row(*logits), params, history, num_prompt=num_prompt) == expected


# -- history ------------------------------------------------------------------------------------


class UnreadTokens(Sequence[int]):
    """A long conversation that must not be read or copied."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: object) -> NoReturn:
        raise AssertionError(f"token {index} was read")


@pytest.mark.parametrize("params", [GREEDY, SEEDED, replace(SEEDED, top_k=2, top_p=0.9)])
def test_without_penalties_no_token_of_the_history_is_read(params: SamplingParams) -> None:
    draw, row = Draw(params, 0), _row(1, 3, 2)
    expected = sample(row, draw, [0] * 5)
    assert sample(row, draw, UnreadTokens(), 5) == expected


def test_penalties_count_tokens_before_the_position_only() -> None:
    params = replace(GREEDY, presence_penalty=2.0)
    assert sample(_row(1, 3, 2), Draw(params, 0), [0, 1, 1], 1)[0] == 1
    assert sample(_row(1, 3, 2), Draw(params, 0), [0, 1, 1], 2)[0] == 2
