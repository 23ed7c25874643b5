import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantic.domain import errors
from semantic.domain.errors import (
    ContextLengthError,
    InvalidRequestError,
    PoolExhaustedError,
    SemanticError,
)

pytestmark = pytest.mark.unit

CLASSES = [value for value in vars(errors).values() if isinstance(value, type)]


def drawn_tree() -> dict[str, str]:
    """Read each error's parent off the module's drawing, by indentation."""
    parents: dict[str, str] = {}
    above: dict[int, str] = {}
    for indent, name in re.findall(r"^( +)(\w+Error)\b", errors.__doc__ or "", re.MULTILINE):
        above[len(indent)] = name
        parents[name] = above.get(len(indent) - 2, "Exception")
    return parents


def test_the_tree_is_as_drawn() -> None:
    assert {error.__name__: error.__bases__[0].__name__ for error in CLASSES} == drawn_tree()


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_says_what_it_means(error: type[SemanticError]) -> None:
    assert issubclass(error, SemanticError)
    assert error.__doc__


def test_an_error_carries_its_message_and_when_to_try_again() -> None:
    error = PoolExhaustedError("memory is full", retry_after_s=2.5)

    assert str(error) == error.message == "memory is full"
    assert error.retry_after_s == 2.5
    assert PoolExhaustedError("memory is full").retry_after_s is None


def test_a_wrong_request_names_the_field_and_is_not_worth_repeating() -> None:
    error = InvalidRequestError("no such role", param="messages[0].role")

    assert error.param == "messages[0].role"
    assert error.retry_after_s is None
    assert InvalidRequestError("nonsense").param is None


def test_a_prompt_too_long_on_its_own() -> None:
    error = ContextLengthError(num_prompt=5000, limit=4096, param="messages")

    assert error.message == (
        "the prompt's 5000 tokens, with room for a reply, exceed the model's context of 4096. "
        "Shorten the conversation."
    )
    assert (error.num_prompt, error.max_tokens, error.limit) == (5000, 0, 4096)
    assert error.param == "messages"


def test_a_prompt_too_long_with_its_reply() -> None:
    error = ContextLengthError(num_prompt=4000, max_tokens=200, limit=4096, param="max_tokens")

    assert error.message == (
        "prompt (4000) and reply (200) tokens together exceed the model's context of 4096. "
        "Ask for at most 96 reply tokens, or shorten the prompt."
    )
    assert error.max_tokens == 200


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(1, 10_000))
def test_the_advice_can_be_followed(num_prompt: int, max_tokens: int, limit: int) -> None:
    error = ContextLengthError(
        num_prompt=num_prompt, max_tokens=max_tokens, limit=limit, param="messages"
    )

    advice = re.search(r"at most (-?\d+) reply tokens", error.message)
    if advice:
        assert 0 < int(advice[1]) <= limit - num_prompt
    else:
        assert "Shorten the conversation." in error.message
