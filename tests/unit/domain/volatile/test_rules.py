"""Texts that rules find, replace and remove."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.domain.volatile.rules import (
    CallingClient,
    RepairAction,
    RepairPlace,
    RepairRule,
    found_texts,
    with_texts,
    without_texts,
)

pytestmark = pytest.mark.unit

texts = st.text(alphabet="ab1 2\n", max_size=40)


def digits(text: str) -> Sequence[tuple[int, int]]:
    return [match.span() for match in re.finditer(r"\d+", text)]


@given(texts)
def test_found_texts_put_back_give_the_same_text(text: str) -> None:
    assert with_texts(text, digits, found_texts(text, digits)) == text


@given(texts)
def test_no_found_text_remains(text: str) -> None:
    left = without_texts(text, digits)
    assert not re.search(r"\d", left)
    assert left.replace("\n", "") == re.sub(r"\d", "", text).replace("\n", "")
    assert left.count("\n") == text.count("\n") - len(re.findall(r"(?m)^\d+\n", text))


@given(texts, texts)
def test_texts_that_differ_only_in_what_is_found_become_equal(text: str, other: str) -> None:
    frozen = ["7"] * len(digits(text))
    changed = with_texts(text, digits, [f"{len(other)}"] * len(frozen))
    assert with_texts(changed, digits, frozen) == with_texts(text, digits, frozen)


@pytest.mark.parametrize(
    "client, protocol, is_for",
    [
        ("claude", None, True),
        ("claude", "anthropic", True),
        ("claude", "openai", False),
        ("codex", "anthropic", False),
    ],
)
def test_a_rule_is_for_its_clients(client: str, protocol: str | None, is_for: bool) -> None:
    rule = RepairRule(
        "x",
        RepairAction.DROP,
        RepairPlace.SYSTEM,
        digits,
        lambda user_agent: user_agent.startswith(client),
        protocol,
    )
    assert rule.is_for(CallingClient("claude-cli/2.1", "anthropic")) is is_for
