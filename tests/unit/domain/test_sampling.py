import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from semantic.domain.errors import InvalidRequestError
from semantic.domain.sampling import (
    MAX_REPLY_TOKENS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
    StopMatcher,
    StopRules,
    uniform,
)

pytestmark = pytest.mark.unit

quick = settings(deadline=None, max_examples=200)

FLOAT_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
INT_RANGES = {
    "top_k": (0, 2**31),
    "seed": (-(2**63), 2**64 - 1),
    "top_logprobs": (0, MAX_TOP_LOGPROBS),
}


def params_with(name: str, value: float) -> SamplingParams:
    numbers = {name: value}
    return SamplingParams(**numbers)  # type: ignore[arg-type]


# -- parameters -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLOAT_RANGES)
def test_floats_outside_their_range_are_refused(name: str) -> None:
    low, high = FLOAT_RANGES[name]

    for value in (low, (low + high) / 2, high):
        assert getattr(params_with(name, value), name) == value
    for value in (low - 0.001, high + 0.001, math.nan, math.inf, -math.inf):
        with pytest.raises(InvalidRequestError) as refused:
            params_with(name, value)
        assert refused.value.message == f"{name} must be between {low:g} and {high:g}, got {value}."
        assert refused.value.param == name


@pytest.mark.parametrize("name", INT_RANGES)
def test_integers_outside_their_range_are_refused(name: str) -> None:
    low, high = INT_RANGES[name]

    for value in (low, high):
        assert getattr(params_with(name, value), name) == value
    for value in (low - 1, high + 1, 10**400):
        with pytest.raises(InvalidRequestError, match=f"got {value}.") as refused:
            params_with(name, value)
        assert refused.value.param == name


@pytest.mark.parametrize("bias", [-100.5, 100.5, math.nan, math.inf])
def test_every_logit_bias_is_checked(bias: float) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(logit_bias=((1, 100.0), (2, -100.0), (3, bias)))

    assert refused.value.param == "logit_bias"


def test_only_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(top_k=1).is_greedy


@pytest.mark.parametrize(
    "params, expected",
    [
        (SamplingParams(), False),
        (SamplingParams(logit_bias=((1, 5.0),)), False),
        (SamplingParams(repetition_penalty=1.1), True),
        (SamplingParams(presence_penalty=-0.1), True),
        (SamplingParams(frequency_penalty=0.1), True),
    ],
)
def test_penalties_make_a_choice_depend_on_the_past(params: SamplingParams, expected: bool) -> None:
    assert params.has_penalties is expected


# -- stop rules -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "max_tokens, strings, param",
    [
        (-1, (), "max_tokens"),
        (MAX_REPLY_TOKENS + 1, (), "max_tokens"),
        (10**18, (), "max_tokens"),
        (None, ("",), "stop"),
        (None, ("END", ""), "stop"),
        (None, ("x",) * (MAX_STOP_STRINGS + 1), "stop"),
        (None, ("x" * (MAX_STOP_CHARS + 1),), "stop"),
    ],
)
def test_stop_rules_that_make_no_sense(
    max_tokens: int | None, strings: tuple[str, ...], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        StopRules(max_tokens, strings)

    assert refused.value.param == param


def test_stop_rules_at_their_limits() -> None:
    assert StopRules(max_tokens=1).max_tokens == 1
    assert StopRules(max_tokens=MAX_REPLY_TOKENS).max_tokens == MAX_REPLY_TOKENS
    assert len(StopRules(strings=("x",) * MAX_STOP_STRINGS).strings) == MAX_STOP_STRINGS
    assert StopRules() == StopRules(None, (), frozenset(), ignore_eos=False)


# -- stop strings -----------------------------------------------------------------------------

# Two letters, so that stop strings overlap themselves and each other.
texts = st.text("ab", max_size=24)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def expected_match(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Look at ever longer beginnings of the text; the longest stop that ends one wins."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def feed_all(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        if matcher.stop is not None:
            assert matcher.flush() == "", "nothing is held once a stop was found"
            return shown, matcher.stop
    return shown + matcher.flush(), None


@quick
@given(texts, stop_lists, st.lists(st.integers(0, 100), max_size=8))
@example("xab", ["xaby", "ab"], [1, 2])
@example("aab", ["ab", "aab"], [1, 2])
@example("aaab", ["aab"], [1, 2, 3])
@example("a longer", ["longer", "on"], [])
@example("the end", ["end", "nd"], [])
@example("né€", ["é€"], [])
def test_pieces_give_what_the_whole_text_gives(
    text: str, stops: list[str], places: list[int]
) -> None:
    expected = expected_match(text, stops)

    assert feed_all([text], stops) == expected
    assert feed_all(list(text), stops) == expected
    assert feed_all(cut(text, places), stops) == expected


@quick
@given(texts, stop_lists, st.lists(st.integers(0, 100), max_size=8))
def test_exactly_what_may_become_a_stop_string_is_held_back(
    text: str, stops: list[str], places: list[int]
) -> None:
    matcher = StopMatcher(stops)
    fed = shown = ""

    for piece in cut(text, places):
        piece_shown = matcher.feed(piece)
        if matcher.stop is not None:
            return
        fed += piece
        shown += piece_shown
        beginnings = [fed[start:] for start in range(len(fed) + 1)]
        held = next(b for b in beginnings if not b or any(s.startswith(b) for s in stops))
        assert shown + held == fed

    assert matcher.flush() == fed[len(shown) :]
    assert matcher.flush() == ""


# -- chance -----------------------------------------------------------------------------------

seeds = st.integers(-(2**63), 2**64 - 1)
positions = st.integers(0, 2**31)


@quick
@given(seeds, positions)
@example(-1, 0)
@example(-(2**63), 0)
@example(2**64 - 1, 0)
def test_chance_is_a_function_into_the_unit_interval(seed: int, position: int) -> None:
    number = uniform(seed, position)

    assert 0 <= number < 1
    assert number == uniform(seed, position)


@quick
@given(seeds, positions, positions)
def test_another_position_is_another_number(seed: int, one: int, other: int) -> None:
    assert (uniform(seed, one) == uniform(seed, other)) == (one == other)


def test_chance_is_the_same_in_every_release() -> None:
    assert uniform(0, 0) == 0.321543039748194
    assert uniform(42, 7) == 0.22935545744979002
    assert uniform(-1, 3) == 0.05508777280434474


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63])
def test_chance_is_roughly_uniform(seed: int) -> None:
    numbers = [uniform(seed, position) for position in range(10_000)]
    tenths = Counter(int(10 * number) for number in numbers)
    # Of neighbours, too: the next number does not follow from the last one.
    pairs = Counter((int(3 * a), int(3 * b)) for a, b in pairwise(numbers))

    assert len(set(numbers)) == len(numbers)
    assert sorted(tenths) == list(range(10))
    assert all(850 < count < 1150 for count in tenths.values())
    assert len(pairs) == 9
    assert all(950 < count < 1270 for count in pairs.values())


def test_seeds_differ() -> None:
    assert len({uniform(seed, 0) for seed in range(-500, 500)}) == 1000
