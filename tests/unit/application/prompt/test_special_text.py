"""Special tokens in text: none comes from outside, and nothing is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.adapters.outbound.backends.fake import END_TOKEN, START_TOKEN, FakeTokenizer
from semantic.application.prompt.special_text import RunEncoder, SpecialText, TokenWalk
from semantic.ports.text import SpecialToken

pytestmark = pytest.mark.unit

TOKENS = ["<|a|>", "<|ab|>", "<s>", "</s>", "[A]", "aba"]
SPECIAL = SpecialText([SpecialToken(i, text) for i, text in enumerate(TOKENS)])
MARKS = ["\ufdd0", "\ufdd1", "\ufdd2"]
texts = st.lists(st.sampled_from([*TOKENS, *MARKS, *"<|>/[]abs \n"]), max_size=12).map("".join)


def tokens_in(text: str) -> list[int]:
    return [span.token for span in SPECIAL.split(text) if span.token is not None]


@given(texts)
def test_no_text_from_outside_holds_a_token(text: str) -> None:
    assert tokens_in(SPECIAL.guard(text)) == []
    assert SpecialText.reveal(SPECIAL.guard(text)) == text


@given(texts.filter(str.strip), st.sampled_from(TOKENS), st.data())
def test_none_comes_of_text_and_its_surroundings(
    text: str, token: str, data: st.DataObject
) -> None:
    first, last = sorted(data.draw(st.integers(0, len(token))) for _ in range(2))
    before, after = token[:first], token[last:]
    for shown in (SPECIAL.guard(text), SPECIAL.guard(text).strip()):
        assert tokens_in(before + shown + after) == tokens_in(before) + tokens_in(after)


@given(texts)
def test_spans_cover_the_text(text: str) -> None:
    spans = SPECIAL.split(text)
    assert "".join(text[span.start : span.end] for span in spans) == text
    for span in spans:
        if span.token is not None:
            assert text[span.start : span.end] == TOKENS[span.token]


def test_the_longer_token_wins() -> None:
    assert SPECIAL.split("x<|ab|>y") == [(0, 1, None), (1, 7, 1), (7, 8, None)]


def test_white_space_can_belong_to_a_token() -> None:
    special = SpecialText([SpecialToken(7, "<u>", strips_right=True), SpecialToken(8, "<m>", True)])
    assert special.split("a <u> \nb <m> c") == [
        (0, 2, None), (2, 7, 7), (7, 8, None), (8, 12, 8), (12, 14, None),
    ]  # fmt: skip


def test_json_is_guarded_all_through() -> None:
    guarded = SPECIAL.guard_object({"<s>": ["<s>", 1, None, {"k": "x<|a|>"}]})
    assert tokens_in(str(guarded)) == []


def test_a_tokenizer_may_have_none() -> None:
    special = SpecialText([])
    assert special.guard("<s>") == "<s>"
    assert special.split("<s>") == [(0, 3, None)]
    assert special.split("") == []


# -- runs of text, encoded once --------------------------------------------------------------------


class CountingTokenizer(FakeTokenizer):
    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode_plain(self, text: str, *, is_start: bool = False) -> list[int]:
        self.encoded.append(text)
        return super().encode_plain(text, is_start=is_start)


def test_a_run_is_encoded_once_while_it_is_remembered() -> None:
    tokenizer = CountingTokenizer()
    runs = RunEncoder(tokenizer, max_bytes=2 * 300 + 130)
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
    assert list(walk.tokens) == [START_TOKEN]
    assert list(walk.ahead(11)) == list(b"us")
    walk.advance(100)
    assert list(walk.tokens) == [START_TOKEN, *b"user", END_TOKEN, *b"bye"]


def test_a_walk_goes_on_after_what_was_replaced() -> None:
    walk = walk_along("<|start|>user<|end|>bye")
    walk.advance(9)
    walk.replace(11, [7, 7])
    found = walk.find_special({END_TOKEN}, 0, 100)
    assert found is not None
    assert found.start == 13
    assert walk.find_special({END_TOKEN}, 0, 13) is None
    assert walk.find_special({END_TOKEN}, 14, 100) is None
    walk.advance(100)
    assert list(walk.tokens) == [START_TOKEN, 7, 7, *b"er", END_TOKEN, *b"bye"]
