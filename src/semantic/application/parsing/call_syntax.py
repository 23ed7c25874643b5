"""How each family begins, ends and separates its tool calls."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from semantic.application.parsing.cursor import Cursor, NoCall
from semantic.application.parsing.gemma_calls import gemma_call
from semantic.application.parsing.python_calls import BracketEnd, python_calls
from semantic.application.parsing.xml_calls import function_end, xml_calls
from semantic.domain.chat import JsonObject, JsonValue, ToolSpec
from semantic.domain.reply_format import ToolFormat

Tools: TypeAlias = Mapping[str, ToolSpec]
Calls: TypeAlias = list[tuple[str, JsonObject]]


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
    """One family's notation.

    Attributes:
        head: Reads what follows an opener.
        openers: Texts that begin calls, wherever they stand; they are not part of the head.
        leading: Texts that begin a call as the first thing of a reply; part of the head.
        again: Texts that begin another call right after one; part of the head.
        closer: What may end a call.
        junk: Characters of no meaning between the arguments and the closer.
    """

    head: Callable[[Cursor, Tools], Head]
    openers: tuple[str, ...] = ()
    leading: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    closer: str = ""
    junk: str = " \t\r\n"


_JSON_JUNK = " \t\r\n}],;"


def _until(end: str) -> Callable[[str, int], int]:
    return lambda text, start: text.find(end, max(0, start))


def _known(name: str, tools: Tools) -> str:
    if name not in tools:
        raise NoCall
    return name


def _json_head(cursor: Cursor, tools: Tools) -> Head:
    """``{"name": "f", "arguments": {``, with a type or id among the keys."""
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
        return BlockCall(_until("</tool_call>"), _json_call, is_ended_by_reply=True)


def _xml_head(cursor: Cursor, tools: Tools) -> Head:
    if cursor.peek() == "<":
        start = cursor.at
        cursor.literal("<function=")
        _known(cursor.until(">").strip(), tools)
        cursor.at = start
        return BlockCall(function_end, xml_calls)
    return _tagged_head(cursor, tools)


def _llama_head(cursor: Cursor, tools: Tools) -> Head:
    cursor.space()
    return _json_head(cursor, tools)


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
        cursor.literal("[")
        if cursor.until("]") == "CALL_ID":
            cursor.until("[")
            cursor.literal("ARGS]")
        cursor.space()
    if cursor.peek() != "{":
        raise NoCall
    return StreamedCall(name)


def _code_head(cursor: Cursor, tools: Tools) -> Head:  # noqa: ARG001 - told by the block
    cursor.space()
    return BlockCall(_until("```"), python_calls)


def _gemma_syntax(start: str, end: str, quote: str) -> CallSyntax:
    def head(cursor: Cursor, tools: Tools) -> Head:
        cursor.space()
        at = cursor.at
        cursor.literal("call:")
        _known(cursor.until("{").strip(), tools)
        cursor.at = at
        return BlockCall(_until(end), lambda text, known: gemma_call(text, quote, known))

    return CallSyntax(head, openers=(start,), closer=end)


SYNTAXES: Mapping[ToolFormat, CallSyntax] = {
    ToolFormat.HERMES: CallSyntax(
        _tagged_head, openers=("<tool_call>",), closer="</tool_call>", junk=_JSON_JUNK
    ),
    ToolFormat.QWEN_XML: CallSyntax(
        _xml_head,
        openers=("<tool_call>",),
        leading=("<function=",),
        again=("<function=",),
        closer="</tool_call>",
        junk=_JSON_JUNK,
    ),
    ToolFormat.LLAMA_JSON: CallSyntax(
        _llama_head, openers=("<|python_tag|>",), leading=("{",), again=("{",), junk=_JSON_JUNK
    ),
    ToolFormat.PYTHONIC: CallSyntax(_python_head, openers=("<|python_tag|>",), leading=("[",)),
    ToolFormat.MISTRAL: CallSyntax(
        _mistral_head, openers=("[TOOL_CALLS]",), again=("{",), junk=_JSON_JUNK
    ),
    ToolFormat.MISTRAL_ARGS: CallSyntax(
        _mistral_head, openers=("[TOOL_CALLS]",), again=("{",), junk=_JSON_JUNK
    ),
    ToolFormat.GEMMA_CODE: CallSyntax(_code_head, openers=("```tool_code",), closer="```"),
    ToolFormat.FUNCTION_GEMMA: _gemma_syntax(
        "<start_function_call>", "<end_function_call>", "<escape>"
    ),
    ToolFormat.GEMMA_4: _gemma_syntax("<|tool_call>", "<tool_call|>", '<|"|>'),
}
