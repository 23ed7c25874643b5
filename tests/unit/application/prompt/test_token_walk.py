"""Runs of text, encoded once."""

import pytest

from semantic.adapters.outbound.backends.fake import END_TOKEN, START_TOKEN, FakeTokenizer
from semantic.application.prompt.special_text import SpecialText
from semantic.application.prompt.token_walk import RunEncoder, TokenWalk

pytestmark = pytest.mark.unit


class CountingTokenizer(FakeTokenizer):
    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode_plain(self, text: str, *, is_start: bool = False) -> list[int]:
        self.encoded.append(text)
        return super().encode_plain(text, is_start=is_start)


def test_a_run_is_encoded_once_while_it_is_remembered() -> None:
    tokenizer = CountingTokenizer()
    runs = RunEncoder(tokenizer, max_characters=5)
    for run in ("abc", "abc", "de", "abc", "fg", "abc", "de"):
        assert list(runs.encode(run, is_start=False)) == list(run.encode())
    assert tokenizer.encoded == ["abc", "de", "fg", "de"]


def test_the_start_of_a_text_is_another_run() -> None:
    tokenizer = CountingTokenizer()
    runs = RunEncoder(tokenizer)
    runs.encode("a", is_start=True)
    runs.encode("a", is_start=False)
    assert tokenizer.encoded == ["a", "a"]


def walk_along(text: str) -> TokenWalk:
    tokenizer = FakeTokenizer()
    return TokenWalk(text, SpecialText(tokenizer.special_tokens).split(text), RunEncoder(tokenizer))


def test_a_walk_stops_before_a_run_that_would_be_cut() -> None:
    walk = walk_along("<|start|>user<|end|>bye")
    walk.advance(11)
    assert walk.tokens == [START_TOKEN]
    assert list(walk.ahead(11)) == list(b"us")
    walk.advance(100)
    assert walk.tokens == [START_TOKEN, *b"user", END_TOKEN, *b"bye"]


def test_a_walk_goes_on_after_what_was_replaced() -> None:
    walk = walk_along("<|start|>user<|end|>bye")
    walk.advance(9)
    walk.replace(11, [7, 7])
    found = walk.find({END_TOKEN}, 0, 100)
    assert found is not None
    assert found.start == 13
    assert walk.find({END_TOKEN}, 0, 13) is None
    assert walk.find({END_TOKEN}, 14, 100) is None
    walk.advance(100)
    assert walk.tokens == [START_TOKEN, 7, 7, *b"er", END_TOKEN, *b"bye"]
