"""How each family begins, ends and separates its tool calls."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from semantic.application.parsing.call_blocks import (
    BracketEnd,
    Calls,
    Tools,
    function_end,
    gemma_call,
    python_calls,
    xml_calls,
)
from semantic.domain.chat import JsonObject, JsonValue
from semantic.domain.reply_format import CALL_MARKERS, CallMarkers, QwenTag, ToolFormat

_MAX_STRING = 256
_SPACE = " \t\r\n"


class NeedMore(Exception):  # noqa: N818 - a state, not an error
    """What is there fits so far."""


class NoCall(Exception):  # noqa: N818 - a finding, not an error
    """Raised where what looked like a call turns out to be text."""


class Cursor:
    """A place in a text.

    Every method raises `NeedMore` at the text's end, so no answer depends on how much of it has
    come in yet.
    """

    def __init__(self, text: str, at: int = 0) -> None:
        self._text = text
        self.at = at

    def peek(self) -> str:
        """The next character."""
        if self.at >= len(self._text):
            raise NeedMore
        return self._text[self.at]

    def space(self) -> None:
        """Pass over whitespace, up to something else."""
        while self.peek() in _SPACE:
            self.at += 1

    def literal(self, text: str) -> None:
        """Pass over exactly this."""
        for char in text:
            if self.peek() != char:
                raise NoCall
            self.at += 1

    def string(self) -> str:
        """Read a short JSON string without escapes: a name or a key."""
        self.literal('"')
        return self.until('"')

    def until(self, stops: str) -> str:
        """Read up to one of these characters and pass over it."""
        start = self.at
        while self.peek() not in stops:
            if self._text[self.at] in "\\\n" or self.at - start > _MAX_STRING:
                raise NoCall
            self.at += 1
        self.at += 1
        return self._text[start : self.at - 1]


@dataclass(frozen=True, slots=True)
class StreamedCall:
    """A call whose arguments, a JSON object, begin at the cursor."""

    name: str


@dataclass(frozen=True, slots=True)
class EmptyCall:
    """A call without arguments."""

    name: str


@dataclass(frozen=True, slots=True)
class BlockCall:
    """Calls that can be read only once they are complete.

    Attributes:
        find_end: Where the block ends, given the text and where to look from; -1 if not yet.
        parse: Reads the block; None if it holds no calls.
        is_ended_by_reply: The end of the reply ends the block too.
    """

    find_end: Callable[[str, int], int]
    parse: Callable[[str, Tools], Calls | None]
    is_ended_by_reply: bool = False


Head: TypeAlias = StreamedCall | EmptyCall | BlockCall


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How calls are read between the markers of `CALL_MARKERS`.

    Attributes:
        head: Reads what follows the start marker.
        leading: Begins a call without the marker as the first thing of a reply; part of the head.
        again: Begins another call right after one; part of the head.
        junk: Characters of no meaning between the arguments and the end marker.
    """

    head: Callable[[Cursor, Tools], Head]
    leading: str = ""
    again: str = ""
    junk: str = " \t\r\n"


def _until(end: str) -> Callable[[str, int], int]:
    return lambda text, start: text.find(end, max(0, start))


def _known(name: str, tools: Tools) -> str:
    if name not in tools:
        raise NoCall
    return name


def _json_head(cursor: Cursor, tools: Tools) -> Head:
    """``{"name": "f", "arguments": {``, with a type or id among the keys."""
    cursor.space()
    cursor.literal("{")
    name = ""
    while True:
        cursor.space()
        key = cursor.string()
        cursor.space()
        cursor.literal(":")
        cursor.space()
        if key in ("arguments", "parameters") and name:
            if cursor.peek() != "{":
                raise NoCall
            return StreamedCall(name)
        if key not in ("name", "type", "id"):
            raise NoCall
        value = cursor.string()
        name = _known(value, tools) if key == "name" else name
        cursor.space()
        if cursor.peek() == "}" and name:
            return EmptyCall(name)
        cursor.literal(",")


def _json_call(text: str, tools: Tools) -> Calls | None:
    """A whole call as JSON: its keys in any order, its arguments perhaps a string or null."""
    try:
        call = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or call.get("name") not in tools:
        return None
    arguments = _as_object(call.get("arguments", call.get("parameters")))
    return None if arguments is None else [(str(call["name"]), arguments)]


def _as_object(value: JsonValue) -> JsonObject | None:
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value, strict=False)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def _tagged_head(cursor: Cursor, tools: Tools) -> Head:
    """What follows ``<tool_call>``: JSON, or Qwen's XML."""
    cursor.space()
    if cursor.peek() == "<":
        return BlockCall(function_end, xml_calls)
    start = cursor.at
    try:
        return _json_head(cursor, tools)
    except NoCall:
        cursor.at = start
        end = CALL_MARKERS[ToolFormat.HERMES].end
        return BlockCall(_until(end), _json_call, is_ended_by_reply=True)


def _xml_head(cursor: Cursor, tools: Tools) -> Head:
    if cursor.peek() == "<":
        start = cursor.at
        cursor.literal(QwenTag.FUNCTION)
        _known(cursor.until(">").strip(), tools)
        cursor.at = start
        return BlockCall(function_end, xml_calls)
    return _tagged_head(cursor, tools)


def _python_head(cursor: Cursor, tools: Tools) -> Head:
    cursor.space()
    start = cursor.at
    cursor.literal("[")
    cursor.space()
    _known(cursor.until("( ,]").strip(), tools)
    cursor.at = start
    return BlockCall(BracketEnd(), python_calls)


def _mistral_head(cursor: Cursor, tools: Tools) -> Head:
    """A list of calls, or a name and its arguments."""
    cursor.space()
    if cursor.peek() == "[":
        cursor.literal("[")
        cursor.space()
    if cursor.peek() == "{":
        return _json_head(cursor, tools)
    name = _known(cursor.until("[{").strip(), tools)
    cursor.at -= 1
    if cursor.peek() == "[":
        markers = CALL_MARKERS[ToolFormat.MISTRAL_ARGS]
        if cursor.until("]") == markers.call_id.removesuffix("]"):
            cursor.until("[")
            cursor.at -= 1
            cursor.literal(markers.arguments)
        cursor.space()
    if cursor.peek() != "{":
        raise NoCall
    return StreamedCall(name)


def _code_head(cursor: Cursor, tools: Tools) -> Head:  # noqa: ARG001 - told by the block
    cursor.space()
    return BlockCall(_until(CALL_MARKERS[ToolFormat.GEMMA_CODE].end), python_calls)


def _gemma_head(markers: CallMarkers) -> Callable[[Cursor, Tools], Head]:
    def head(cursor: Cursor, tools: Tools) -> Head:
        cursor.space()
        at = cursor.at
        cursor.literal("call:")
        _known(cursor.until("{").strip(), tools)
        cursor.at = at
        return BlockCall(
            _until(markers.end), lambda text, known: gemma_call(text, markers.quote, known)
        )

    return head


_JSON_JUNK = " \t\r\n}],;"
_MISTRAL = CallSyntax(_mistral_head, again="{", junk=_JSON_JUNK)

SYNTAXES: Mapping[ToolFormat, CallSyntax] = {
    ToolFormat.HERMES: CallSyntax(_tagged_head, junk=_JSON_JUNK),
    ToolFormat.QWEN_XML: CallSyntax(
        _xml_head, leading=QwenTag.FUNCTION, again=QwenTag.FUNCTION, junk=_JSON_JUNK
    ),
    ToolFormat.LLAMA_JSON: CallSyntax(_json_head, leading="{", again="{", junk=_JSON_JUNK),
    ToolFormat.PYTHONIC: CallSyntax(_python_head, leading="["),
    ToolFormat.MISTRAL: _MISTRAL,
    ToolFormat.MISTRAL_ARGS: _MISTRAL,
    ToolFormat.GEMMA_CODE: CallSyntax(_code_head),
    ToolFormat.FUNCTION_GEMMA: CallSyntax(_gemma_head(CALL_MARKERS[ToolFormat.FUNCTION_GEMMA])),
    ToolFormat.GEMMA_4: CallSyntax(_gemma_head(CALL_MARKERS[ToolFormat.GEMMA_4])),
}
