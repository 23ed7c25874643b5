"""What differs between consecutive prompts: the span, its kind, and its cost."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.domain.blocks import common_prefix
from semantic.domain.volatile.spans import (
    SpanChange,
    SpanKind,
    compare_prompts,
    volatile_spans,
)

pytestmark = pytest.mark.unit

words = st.lists(st.sampled_from(["one", "two", "a-b", "7", "é", " ", "\n", ", "]), max_size=60)


def tokens(text: str) -> list[bytes]:
    """One token per word or character between words."""
    return [token.encode() for token in re.findall(r"\w+|\W", text)]


@given(words, words)
def test_a_prompt_that_only_grows_has_no_change(old: list[str], more: list[str]) -> None:
    assert compare_prompts(tokens("".join(old)), tokens("".join(old)) + tokens("".join(more))) == ()


@given(words, words)
def test_everything_before_the_first_change_is_equal(old: list[str], new: list[str]) -> None:
    before, after = tokens("".join(old)), tokens("".join(new))
    changes = compare_prompts(before, after)
    shared = common_prefix(b"".join(before), b"".join(after))
    if changes:
        first = changes[0]
        assert (
            b"".join(after[: first.index])
            == b"".join(before)[: len(b"".join(after[: first.index]))]
        )
        assert 0 <= first.num_recomputed <= len(before)
        assert all(change.before != change.after for change in changes)
        assert [change.index for change in changes] == sorted(change.index for change in changes)
    else:  # one of them continues the other
        assert shared in (len(b"".join(before)), len(b"".join(after)))


LINES = [
    (SpanKind.DATE, "Today's date is 2026-11-16.", "Today's date is 2026-11-17."),
    (SpanKind.DATE, "It is Monday, Nov 16, 2026.", "It is Tuesday, Nov 17, 2026."),
    (SpanKind.DATE, "Now: 2026-11-16T10:11:12Z", "Now: 2026-11-16T10:12:40Z"),
    (SpanKind.DATE, "The time is 9:05 PM", "The time is 9:06 PM"),
    (
        SpanKind.BILLING_HEADER,
        "x-anthropic-billing-header: cc_version=2.1.197.a1f; cc_entrypoint=cli; cch=0e1c2;",
        "x-anthropic-billing-header: cc_version=2.1.197.b22; cc_entrypoint=cli; cch=77a01;",
    ),
    (SpanKind.PATH, "Scratchpad directory: /tmp/s-ab12/x", "Scratchpad directory: /tmp/s-cd34/x"),
    (
        SpanKind.IDENTIFIER,
        "session 6f1c2a3b-1111-4222-8333-944444444444",
        "session 0a0b0c0d-5555-4666-8777-988888888888",
    ),
    (SpanKind.COUNTER, "Token usage: 35,000 of 200,000", "Token usage: 41,250 of 200,000"),
    (SpanKind.TEXT, "You are in the branch main.", "You are in the branch fix."),
]


@pytest.mark.parametrize("kind, old, new", LINES)
def test_the_kind_of_a_change(kind: SpanKind, old: str, new: str) -> None:
    rest = "\nYou are a coder.\nBe terse.\n" * 20
    (change,) = compare_prompts(tokens(f"Hi.\n{old}{rest}"), tokens(f"Hi.\n{new}{rest}And then?"))
    assert change.kind is kind
    assert (change.old_line, change.line) == (old, new)
    assert change.before in old and change.after in new  # noqa: PT018 - one statement
    assert 3 <= change.index < 3 + len(tokens(new))
    assert change.num_recomputed >= len(tokens(rest))


TOOL = '{"type": "function", "function": {"name": "%s", "description": "Does it."}}'


@pytest.mark.parametrize("between", ["\n", ", "])
@pytest.mark.parametrize(
    "kind, old, new",
    [
        (SpanKind.TOOL_ORDER, "abc", "bca"),
        (SpanKind.TOOLS, "abc", "abxc"),
        (SpanKind.TOOLS, "abc", "ac"),
    ],
)
def test_changed_tools_are_one_change(kind: SpanKind, old: str, new: str, between: str) -> None:
    texts = [between.join(TOOL % name for name in names) for names in (old, new)]
    first, second = (tokens(f"# Tools\n[{text}]\nYou are a coder.\n") for text in texts)
    (change,) = compare_prompts(first, second)
    assert change.kind is kind
    assert change.index <= common_prefix(first, second)
    if kind is SpanKind.TOOL_ORDER:
        assert sorted(change.before) == sorted(change.after)


def test_two_changes_in_one_prompt_are_two() -> None:
    old = tokens("Date: 2026-11-16.\nBe terse.\nLeft: 500 tokens.\nBye.\n")
    new = tokens("Date: 2026-11-17.\nBe terse.\nLeft: 400 tokens.\nBye.\n")
    kinds = [change.kind for change in compare_prompts(old, new)]
    assert kinds == [SpanKind.DATE, SpanKind.COUNTER]


def dated(day: int, text: str = "Be terse.") -> list[bytes]:
    return tokens(f"Date: 2026-11-{day}.\n{text}\nYou are a coder.\n")


def compared(*prompts: list[bytes]) -> list[tuple[SpanChange, ...]]:
    return [compare_prompts(old, new) for old, new in itertools.pairwise(prompts)]


def test_a_span_that_changes_each_turn_is_volatile() -> None:
    comparisons = compared(dated(16), dated(17), dated(18), dated(19))
    (span,) = volatile_spans(comparisons)
    assert (span.num_changes, span.num_compared, span.is_volatile) == (3, 3, True)
    assert span.num_recomputed == sum(changes[0].num_recomputed for changes in comparisons)
    assert span.latest.after.startswith("2026-11-19")


def test_a_span_that_changes_once_is_an_edit() -> None:
    comparisons = compared(dated(16), dated(16, "Be kind."), dated(16, "Be kind."))
    (span,) = volatile_spans(comparisons)
    assert (span.num_changes, span.num_compared, span.is_volatile) == (1, 2, False)


def test_only_the_first_change_is_charged() -> None:
    comparisons = compared(dated(16, "7 left."), dated(17, "6 left."), dated(18, "5 left."))
    first, second = volatile_spans(comparisons)
    assert (first.latest.kind, second.latest.kind) == (SpanKind.DATE, SpanKind.COUNTER)
    assert first.num_recomputed > 0 == second.num_recomputed
    assert second.is_volatile
