"""Gemma's calls: ``call:f{a:<escape>x<escape>,b:[1,2]}``, with a marker for quotes."""

import json
import re
from collections.abc import Mapping

from semantic.domain.chat import JsonObject, JsonValue, ToolSpec

_CALL = re.compile(r"\s*call:([^{\s]+)\s*\{")
_WORD = re.compile(r"[^,}\]\s]+")
_MAX_DEPTH = 64


def gemma_call(
    text: str, quote: str, tools: Mapping[str, ToolSpec]
) -> list[tuple[str, JsonObject]] | None:
    """Read one call; None if it is malformed or unknown."""
    match = _CALL.match(text)
    if match is None or match[1] not in tools:
        return None
    reader = _Reader(text, match.end() - 1, quote)
    try:
        arguments = reader.object(0)
    except (ValueError, IndexError, RecursionError):
        return None
    return None if text[reader.at :].strip() else [(match[1], arguments)]


class _Reader:
    """Recursive descent; a malformed text raises ValueError or IndexError."""

    def __init__(self, text: str, at: int, quote: str) -> None:
        self._text, self.at, self._quote = text, at, quote

    def object(self, depth: int) -> JsonObject:
        values: JsonObject = {}
        self._pass("{")
        while self._peek() != "}":
            key = self._key()
            self._pass(":")
            values[key] = self._value(depth)
            if self._peek() != "}":
                self._pass(",")
        self._pass("}")
        return values

    def _list(self, depth: int) -> list[JsonValue]:
        values: list[JsonValue] = []
        self._pass("[")
        while self._peek() != "]":
            values.append(self._value(depth))
            if self._peek() != "]":
                self._pass(",")
        self._pass("]")
        return values

    def _value(self, depth: int) -> JsonValue:
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        char = self._peek()
        if self._text.startswith(self._quote, self.at):
            return self._quoted()
        if char == "{":
            return self.object(depth + 1)
        return self._list(depth + 1) if char == "[" else self._word()

    def _quoted(self) -> str:
        start = self.at + len(self._quote)
        end = self._text.index(self._quote, start)
        self.at = end + len(self._quote)
        return self._text[start:end]

    def _word(self) -> JsonValue:
        match = _WORD.match(self._text, self.at)
        if match is None:
            raise ValueError("a value is missing")
        self.at = match.end()
        try:
            value: JsonValue = json.loads(match[0])
        except ValueError:
            return match[0]
        # Python reads NaN and infinities, which JSON has not.
        return value if match[0][-1] not in "Ny" else match[0]

    def _key(self) -> str:
        if self._text.startswith(self._quote, self.at):
            return self._quoted()
        end = self._text.index(":", self.at)
        key = self._text[self.at : end].strip()
        self.at = end
        return key

    def _peek(self) -> str:
        while self._text[self.at].isspace():
            self.at += 1
        return self._text[self.at]

    def _pass(self, char: str) -> None:
        if self._peek() != char:
            raise ValueError(f"{char} is missing")
        self.at += 1
