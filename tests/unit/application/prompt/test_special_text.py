"""Special tokens in text: none comes from outside, and nothing is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.application.prompt.special_text import Span, SpecialText
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
    assert SPECIAL.split("x<|ab|>y") == [Span(0, 1, None), Span(1, 7, 1), Span(7, 8, None)]


def test_white_space_can_belong_to_a_token() -> None:
    special = SpecialText([SpecialToken(7, "<u>", strips_right=True), SpecialToken(8, "<m>", True)])
    assert special.split("a <u> \nb <m> c") == [
        Span(0, 2, None), Span(2, 7, 7), Span(7, 8, None), Span(8, 12, 8), Span(12, 14, None),
    ]  # fmt: skip


def test_json_is_guarded_all_through() -> None:
    guarded = SPECIAL.guard_object({"<s>": ["<s>", 1, None, {"k": "x<|a|>"}]})
    assert tokens_in(str(guarded)) == []


def test_a_tokenizer_may_have_none() -> None:
    special = SpecialText([])
    assert special.guard("<s>") == "<s>"
    assert special.split("<s>") == [Span(0, 3, None)]
    assert special.split("") == []
