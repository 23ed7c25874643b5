import re

import pytest

from semantic.domain import errors
from semantic.domain.errors import ContextLengthError, SemanticError

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
def test_every_error_has_a_docstring(error: type[SemanticError]) -> None:
    assert issubclass(error, SemanticError)
    assert error.__doc__


def test_a_prompt_too_long_on_its_own() -> None:
    error = ContextLengthError(num_prompt=5000, limit=4096, param="messages")

    assert error.message == (
        "the prompt of 5000 tokens, with room for a reply, exceeds the model's context of 4096 "
        "tokens. Shorten the conversation."
    )
    assert (error.num_prompt, error.limit) == (5000, 4096)
    assert error.param == "messages"
