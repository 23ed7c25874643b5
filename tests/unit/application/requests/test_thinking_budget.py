"""Thinking is counted token by token, and ends when its budget is spent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.application.requests.thinking_budget import ThinkingBudget, ThinkingCounter
from semantic.domain.reply_format import HARMONY, Markers, ReplyFormat

pytestmark = pytest.mark.unit

MARKERS = Markers("<think>", "</think>")
WAY_OUT = tuple(b"\n</think>")


def piece(token: int) -> bytes:
    return bytes((token,))


def counter(*, is_open: bool = False) -> ThinkingCounter:
    return ThinkingCounter(MARKERS, piece, is_open=is_open)


def only(mask: bytes) -> int:
    (token,) = [i for i in range(len(mask) * 8) if mask[i >> 3] >> (i & 7) & 1]
    return token


def reply(budget: int, wish: bytes, *, is_open: bool) -> bytes:
    """What a model writes that wants to write `wish`, and after a forced end the rest of it."""
    constraint = ThinkingBudget(budget, counter(is_open=is_open), WAY_OUT, 256)
    written = bytearray()
    rest = list(wish)
    while rest:
        mask = constraint.allowed()
        token = rest.pop(0) if mask is None else only(mask)
        constraint.accept(token)
        written.append(token)
    return bytes(written)


@pytest.mark.parametrize(
    "text,is_open,num_tokens",
    [
        (b"<think>abc</think>answer", False, 18),
        (b"\n <think>abc</think>answer", False, 20),
        (b"abc</think>answer", True, 11),
        (b"answer with <think>", False, 0),
        (b"<thin", False, 0),
        (b"<think>a</think>\n<think>b</think>answer", False, 33),
        (b"<think>never ends", False, 17),
    ],
)
def test_thinking_is_counted(text: bytes, is_open: bool, num_tokens: int) -> None:
    followed = counter(is_open=is_open)
    for token in text:
        followed.feed(token)
    assert followed.num_tokens == num_tokens


def test_thinking_within_its_budget_is_left_alone() -> None:
    assert reply(50, b"<think>abc</think>answer", is_open=False) == b"<think>abc</think>answer"
    assert reply(3, b"a long answer, no thinking", is_open=False) == b"a long answer, no thinking"


def test_thinking_ends_when_its_budget_is_spent() -> None:
    assert reply(4, b"abcdefgh", is_open=True) == b"abcd\n</think>efgh"
    assert reply(10, b"<think>abcdefgh", is_open=False) == b"<think>abc\n</think>defgh"
    assert reply(0, b"abc", is_open=True) == b"\n</think>abc"


@given(st.binary(max_size=40), st.integers(0, 20))
def test_no_reply_thinks_for_longer(wish: bytes, budget: int) -> None:
    followed = counter(is_open=True)
    for token in reply(budget, wish, is_open=True):
        followed.feed(token)
    assert followed.num_tokens <= budget + len(WAY_OUT)


class Letters:
    """A constraint that allows nothing but letters."""

    def __init__(self) -> None:
        self.accepted = bytearray()

    def allowed(self) -> bytes:
        mask = bytearray(32)
        for token in b"abcdefghijklmnopqrstuvwxyz":
            mask[token >> 3] |= 1 << (token & 7)
        return bytes(mask)

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    def copy(self) -> "Letters":
        other = Letters()
        other.accepted[:] = self.accepted
        return other


def test_an_inner_constraint_comes_before_the_budget() -> None:
    inner = Letters()
    constraint = ThinkingBudget(0, counter(is_open=True), WAY_OUT, 256, inner)
    assert constraint.allowed() == inner.allowed()
    ahead = constraint.copy()
    ahead.accept(ord("b"))
    assert not inner.accepted
    constraint.accept(ord("a"))
    assert inner.accepted == b"a"


def test_channels_are_thinking_too() -> None:
    markers = ReplyFormat(HARMONY).thinking_markers
    assert markers is not None
    followed = ThinkingCounter(markers, piece)
    for token in b"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant":
        followed.feed(token)
    assert followed.num_tokens == len(b"<|channel|>analysis<|message|>Hm.<|end|>")
