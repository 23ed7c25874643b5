"""Custom tools: the model calls them as functions, and clients receive the input as plain text.

The model sees a function with one string argument. A regular expression for the input becomes the
pattern of that string. A Lark grammar is refused: a call's arguments are JSON in most models'
notations, and a grammar of the plain text does not describe its escaped form.
"""

import json
import re
from typing import Any, Literal

from pydantic import Field

from semantic.adapters.inbound.wire import Schema, refuse
from semantic.domain.chat import JsonObject, ToolSpec

_INPUT = "input"
_HEAD = f'{{"{_INPUT}": "'
_CHARACTERS = re.compile(r'(?:[^"\\]|\\(?:u[0-9a-fA-F]{4}|[^u]))*')
_TRAILING_ANCHOR = re.compile(r"(?<!\\)((?:\\\\)*)\$\Z")
_MAX_PATTERN = 10_000


class CustomGrammar(Schema):
    """A grammar of a custom tool's input."""

    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = Field(None, max_length=_MAX_PATTERN)


class CustomFormat(CustomGrammar):
    """The form of a custom tool's input; Chat Completions nests the grammar once more."""

    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None

    def pattern(self, param: str) -> str | None:
        """The expression that the input must match; None if it is free text."""
        if self.type == "text":
            return None
        given = self.grammar or self
        field = f"{param}.grammar" if self.grammar else param
        refuse(given.syntax is None, f"{field}.syntax", "a grammar needs it: regex.")
        refuse(given.definition is None, f"{field}.definition", "a grammar needs it.")
        refuse(
            given.syntax == "lark",
            f"{field}.syntax",
            "a Lark grammar cannot be enforced inside the JSON arguments of a call; send a regex, "
            "or the format {type: text} and the rules in the description.",
        )
        return _TRAILING_ANCHOR.sub(r"\1", (given.definition or "").removeprefix("^"))


def custom_tool(
    name: str, description: str | None, form: CustomFormat | None, param: str
) -> ToolSpec:
    """Describe a custom tool as a function; `param` is the field of its format, for errors."""
    text: JsonObject = {"type": "string"}
    pattern = form.pattern(param) if form else None
    if pattern is not None:
        text["pattern"] = f"^(?:{pattern})$"
    parameters: JsonObject = {
        "type": "object",
        "properties": {_INPUT: text},
        "required": [_INPUT],
        "additionalProperties": False,
    }
    is_strict = pattern is not None
    return ToolSpec(name, description or "", parameters, is_strict=is_strict, is_custom=True)


def custom_arguments(text: str) -> JsonObject:
    """Return the arguments of a call with that input."""
    return {_INPUT: text}


def input_text(arguments: str) -> str:
    """Return the input in the complete or cut off arguments of a call."""
    reader = CustomInput()
    return reader.feed(arguments) + reader.finish()


class CustomInput:
    """Reads the input from a call's arguments while they stream.

    Example:
        >>> reader = CustomInput()
        >>> reader.feed('{"input": "two'), reader.feed(' words"}'), reader.finish()
        ('two', ' words', '')
    """

    def __init__(self) -> None:
        self._unread = ""
        self._is_begun = False

    def feed(self, arguments: str) -> str:
        """Add a piece of the arguments; return the text that it adds to the input."""
        self._unread += arguments
        if not self._is_begun:
            if not self._unread.startswith(_HEAD):
                return ""
            self._is_begun = True
            self._unread = self._unread.removeprefix(_HEAD)
        # The closing quote stays unread, so nothing after it is taken for input.
        whole = _CHARACTERS.match(self._unread)
        written = whole[0] if whole else ""
        self._unread = self._unread[len(written) :]
        text: str = json.loads(f'"{written}"', strict=False)
        return text

    def finish(self) -> str:
        """Return the rest: all arguments if the model wrote other ones than the input."""
        is_other = not self._is_begun and self._unread != "{}"
        return self._unread if is_other else ""


def format_json(form: CustomFormat | None) -> dict[str, Any]:
    """Write a format as responses repeat it."""
    return form.model_dump(exclude_none=True) if form else {"type": "text"}
