"""How each model family begins, ends and separates its tool calls."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
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
    """Raised if the text is valid so far and more is needed to decide."""


class NoCall(Exception):  # noqa: N818 - a finding, not an error
    """Raised if text that looked like a call is not one."""


class Cursor:
    """A position in a text.

    Every method raises `NeedMore` at the end of the text, so no result depends on how much text has
    arrived.
    """

    def __init__(self, text: str, at: int = 0) -> None:
        self._text = text
        self.at = at

    def peek(self) -> str:
        if self.at >= len(self._text):
            raise NeedMore
        return self._text[self.at]

    def space(self) -> None:
        while self.peek() in _SPACE:
            self.at += 1

    def literal(self, text: str) -> None:
        """Pass over `text`; raises `NoCall` if something else follows."""
        for char in text:
            if self.peek() != char:
                raise NoCall
            self.at += 1

    def string(self) -> str:
        """Read a short JSON string without escapes: a name or a key."""
        self.literal('"')
        return self.until('"')

    def until(self, stops: str) -> str:
        """Read up to one of these characters, and pass over it.

        Raises `NoCall` at a backslash or line break, and if the result would be too long.
        """
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


_MAX_REPAIRS = 8


@dataclass(frozen=True, slots=True)
class Repair:
    """How to complete a block of calls that was cut off: truncate it and close it.

    Attributes:
        places: Matches where the block may be truncated: after the match, but before a comma or
            line break.
        closers: Texts that may close the block there, each with whether its last call counts as
            cut off.
    """

    places: re.Pattern[str]
    closers: tuple[tuple[str, bool], ...]

    def attempts(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield completed blocks, longest first, each with whether its last call is cut off.

        Tries the last few places and the first one only, since the first attempt mostly succeeds.
        """
        found = list(self.places.finditer(text))
        for match in (*found[: -_MAX_REPAIRS - 1 : -1], *found[:1]):
            kept = text[: match.start() if match[0] in ",\n" else match.end()]
            for closer, is_last_cut in self.closers:
                yield kept + closer, is_last_cut


_PYTHON_REPAIR = Repair(re.compile(r"[,(]"), ((")]", True), ("]", False)))
_CODE_REPAIR = Repair(re.compile(r"[,(\n]"), ((")", True), ("))", True), ("", False)))
_GEMMA_REPAIR = Repair(re.compile(r"[,{]"), (("}", True),))
_XML_REPAIR = Repair(
    re.compile(rf"{QwenTag.PARAMETER_END}|\A\s*{QwenTag.FUNCTION}[^>\n]+>"),
    ((QwenTag.FUNCTION_END, True),),
)


@dataclass(frozen=True, slots=True)
class BlockCall:
    """Calls that can be parsed only once they are complete.

    Attributes:
        find_end: Returns the end of the block, given the text and where to start; -1 if not found.
        parse: Parses the block; None if it contains no valid calls.
        is_ended_by_reply: The end of the reply also ends the block.
        repair: How to complete a block that was cut off; None if that is not possible.
    """

    find_end: Callable[[str, int], int]
    parse: Callable[[str, Tools], Calls | None]
    is_ended_by_reply: bool = False
    repair: Repair | None = None

    def read_cut(self, text: str, tools: Tools) -> tuple[Calls, bool] | None:
        """Parse the complete part of a block that was cut off.

        Returns:
            The calls, and whether the last one is cut off; an empty list if no call is certain;
            None if this is not a block of calls.
        """
        if (calls := self.parse(text, tools)) is not None:
            return calls, False
        if self.repair is None:
            return ([], False) if text.lstrip().startswith("{") else None
        for completed, is_last_cut in self.repair.attempts(text):
            if calls := self.parse(completed, tools):
                return calls, is_last_cut
        return None


Head: TypeAlias = StreamedCall | EmptyCall | BlockCall


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How to parse calls between the markers of `CALL_MARKERS`.

    Attributes:
        head: Parses the beginning of a call, after the start marker.
        leading: Text that begins a call without the marker at the start of a reply; part of the
            head.
        again: Text that begins another call directly after one; part of the head.
        junk: Meaningless characters between the arguments and the end marker.
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
    """Parse ``{"name": "f", "arguments": {``, which may also contain a type or id."""
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
    """Parse a complete JSON call with keys in any order; arguments may be a string or null."""
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
    """Parse what follows ``<tool_call>``: JSON, or Qwen's XML."""
    cursor.space()
    if cursor.peek() == "<":
        return BlockCall(function_end, xml_calls, repair=_XML_REPAIR)
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
        return BlockCall(function_end, xml_calls, repair=_XML_REPAIR)
    return _tagged_head(cursor, tools)


def _python_head(cursor: Cursor, tools: Tools) -> Head:
    cursor.space()
    start = cursor.at
    cursor.literal("[")
    cursor.space()
    _known(cursor.until("( ,]").strip(), tools)
    cursor.at = start
    return BlockCall(BracketEnd(), python_calls, repair=_PYTHON_REPAIR)


def _mistral_head(cursor: Cursor, tools: Tools) -> Head:
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


def _code_head(cursor: Cursor, tools: Tools) -> Head:  # noqa: ARG001 - the block checks tools
    cursor.space()
    find_end = _until(CALL_MARKERS[ToolFormat.GEMMA_CODE].end)
    return BlockCall(find_end, python_calls, repair=_CODE_REPAIR)


def _gemma_head(markers: CallMarkers) -> Callable[[Cursor, Tools], Head]:
    def head(cursor: Cursor, tools: Tools) -> Head:
        cursor.space()
        at = cursor.at
        cursor.literal("call:")
        _known(cursor.until("{").strip(), tools)
        cursor.at = at
        return BlockCall(
            _until(markers.end),
            lambda text, known: gemma_call(text, markers.quote, known),
            repair=_GEMMA_REPAIR,
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
