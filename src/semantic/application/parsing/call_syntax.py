"""How to read the head and the tail of calls in each notation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from semantic.application.parsing.call_blocks import ARGUMENT_KEYS, NAME_KEYS, Tools
from semantic.application.parsing.cursor import SPACE, Cursor, NoCall
from semantic.application.parsing.json_arguments import ArgumentParser, JsonArguments
from semantic.application.parsing.literal_arguments import (
    GemmaArguments,
    PythonArguments,
    python_scalar,
)
from semantic.application.parsing.tag_arguments import TagArguments
from semantic.domain.reply_format import (
    HERMES,
    PYTHON_TAG,
    QWEN_XML,
    ArgumentStyle,
    CallNotation,
)

JSON_JUNK = SPACE + "}],;"  # meaningless after the arguments of a call
_PYTHON_JUNK = SPACE + ")],;"
_PRINT = "print("  # Gemma often wraps a call in it


@dataclass(frozen=True, slots=True)
class StreamedCall:
    """A call whose arguments begin at the cursor.

    Attributes:
        closers: Texts that may follow the arguments, in this order; None: those of the syntax.
        junk: Characters that are meaningless after the arguments.
    """

    name: str
    arguments: ArgumentParser
    closers: Sequence[str] | None = None
    junk: str = JSON_JUNK


@dataclass(frozen=True, slots=True)
class EmptyCall:
    """A call without arguments."""

    name: str


@dataclass(frozen=True, slots=True)
class BlockCall:
    """A call that can be parsed only once it is complete; `closer` or the reply's end ends it."""

    closer: str


@dataclass(frozen=True, slots=True)
class TextHead:
    """No call: what precedes text in a notation with markup around text too."""


Head: TypeAlias = StreamedCall | EmptyCall | BlockCall | TextHead
ReadHead: TypeAlias = Callable[[Cursor, Tools], Head]


class CallSyntax:
    """How to find and parse calls in one notation.

    Attributes:
        opener: The marker that begins a call anywhere in the text; empty if there is none.
        leading: Texts that begin a call without the opener at the start of a reply.
        again: Texts that begin another call directly after one.
        closers: Texts that may follow the arguments, in this order.
        ends: Texts that may follow the last call.
        begins_in_head: The prompt ends with the opener.
    """

    def __init__(self, notation: CallNotation, tools: Tools) -> None:
        self.opener = notation.opener or PYTHON_TAG
        self.begins_in_head = bool(notation.before_text)
        inner = notation.inner_opener
        self.again: tuple[str, ...] = (inner,) if inner else ()
        self.leading: tuple[str, ...] = self.again if inner != "{" else ()
        if not notation.opener:
            self.leading = (inner or "[",)
        if notation.style is ArgumentStyle.PYTHON:
            self.again = (*tools, _PRINT)
        closing, ends = notation.after_arguments, notation.end
        if notation.is_json_object:
            closing, ends = closing.rpartition("}")[2], ends.lstrip(JSON_JUNK)
        elif notation.style is ArgumentStyle.PYTHON:
            ends = ends.removeprefix("]")
        elif notation.style is ArgumentStyle.GEMMA:
            closing = closing.removeprefix("}")
        self.closers, self.ends = closing.split(), ends.split()
        self._has_members = notation.is_json_object
        self._heads = [_head_of(notation)]
        if self.opener == HERMES.opener:  # models mix up the notations with this marker
            others = (other for other in (QWEN_XML, HERMES) if other != notation)
            self._heads += map(_head_of, others)

    def head(self, cursor: Cursor, tools: Tools) -> Head:
        """Parse the beginning of a call, from its marker on."""
        start = cursor.at
        for head in self._heads[:-1]:
            try:
                return head(cursor, tools)
            except NoCall:
                cursor.at = start
        return self._heads[-1](cursor, tools)

    def pass_members(self, cursor: Cursor) -> None:
        """Pass over members after the arguments in a call's object, such as an id."""
        while self._has_members:
            start = cursor.at
            try:
                cursor.space()
                cursor.literal(",")
                cursor.space()
                cursor.string()
                cursor.space()
                cursor.literal(":")
                cursor.space()
                cursor.scalar()
            except NoCall:
                cursor.at = start
                return


def _head_of(notation: CallNotation) -> ReadHead:
    match notation.style:
        case ArgumentStyle.PYTHON:
            return partial(_python_head, notation)
        case ArgumentStyle.GEMMA:
            return partial(_gemma_head, notation)
        case _ if notation.before_text:
            return partial(_addressed_head, notation)
        case _ if notation.opener == _MISTRAL:
            return _mistral_head
        case _ if notation.is_json_object:
            return partial(_json_head, notation)
        case _:
            return partial(_named_head, notation)


def _known(name: str, tools: Tools) -> str:
    if name not in tools:
        raise NoCall
    return name


def _pass_first(cursor: Cursor, phrases: Sequence[str]) -> None:
    """Pass over the first of the phrases that follows."""
    start = cursor.at
    for phrase in phrases:
        try:
            cursor.phrase(phrase)
        except NoCall:
            cursor.at = start
        else:
            return
    raise NoCall


def _named_head(notation: CallNotation, cursor: Cursor, tools: Tools) -> Head:
    """Parse a name between markers: ``<tool_call>f<arg_key>``, ``<function=f>``."""
    name_first = notation.before_name
    inner = name_first[max(0, name_first.find(notation.inner_opener)) :]
    _pass_first(cursor, (f"{notation.start} {name_first}", name_first, inner))
    cursor.space()
    follows = (notation.after_name, notation.before_key, notation.after_arguments)
    name = _known(cursor.word({text.lstrip()[0] for text in follows if text.strip()}), tools)
    cursor.phrase(notation.after_name)
    if notation.style is ArgumentStyle.TAGS:
        arguments = TagArguments(notation, tools[name])
        return StreamedCall(name, arguments, notation.after_arguments.split(), SPACE)
    return _json_arguments(name, cursor)


def _json_arguments(name: str, cursor: Cursor) -> StreamedCall:
    cursor.space()
    if cursor.peek() != "{":
        raise NoCall
    return StreamedCall(name, JsonArguments())


def _addressed_head(notation: CallNotation, cursor: Cursor, tools: Tools) -> Head:
    """Parse ``>>>f`` and a line break, or what precedes text; the marker may be in the prompt."""
    if cursor.starts(notation.before_name):
        cursor.literal(notation.before_name)
    if cursor.starts(notation.before_text):
        cursor.literal(notation.before_text)
        return TextHead()
    cursor.require([name + notation.after_name for name in tools])
    name = cursor.until(notation.after_name[0])
    return _json_arguments(name, cursor)


def _json_head(notation: CallNotation, cursor: Cursor, tools: Tools) -> Head:
    """Parse a call that is a JSON object, in a list or not."""
    if cursor.starts(notation.opener or PYTHON_TAG):
        cursor.phrase(notation.opener or PYTHON_TAG)
    cursor.space()
    if cursor.peek() == "[":
        cursor.literal("[")
        cursor.space()
    start = cursor.at
    try:
        return _object_head(cursor, tools, is_name_key=notation.before_name.endswith('{"'))
    except NoCall:
        cursor.at = start
        closer = notation.after_arguments.rpartition("}")[2].strip()
        if not closer or cursor.peek() == "<":
            raise
        return BlockCall(closer)


def _object_head(cursor: Cursor, tools: Tools, *, is_name_key: bool = False) -> Head:
    """Parse ``{"name": "f", "arguments": {``, which may also hold an id.

    `is_name_key` parses ``{"f": {``.
    """
    cursor.literal("{")
    name = ""
    while True:
        cursor.space()
        key = cursor.string()
        cursor.space()
        cursor.literal(":")
        cursor.space()
        if cursor.peek() == "{" and is_name_key:
            return StreamedCall(_known(key, tools), JsonArguments())
        if key in ARGUMENT_KEYS and name and cursor.peek() == "{":
            return StreamedCall(name, JsonArguments())
        if key in ARGUMENT_KEYS or cursor.peek() in "{[":
            raise NoCall
        value = cursor.scalar()
        name = _known(value, tools) if key in NAME_KEYS else name
        cursor.space()
        if cursor.peek() == "}" and name:
            return EmptyCall(name)
        cursor.literal(",")


def _python_head(notation: CallNotation, cursor: Cursor, tools: Tools) -> Head:
    """Parse ``[f(``, or ``f(`` in code and after another call, up to the first value."""
    opener = notation.opener or PYTHON_TAG
    if cursor.starts(opener):
        cursor.phrase(opener)
    cursor.space()
    if cursor.peek() == "[":
        cursor.literal("[")
        cursor.space()
    if "print" not in tools and cursor.starts(_PRINT):
        cursor.literal(_PRINT)
        cursor.space()
    cursor.require([*tools])
    name = _known(cursor.word({"("}), tools)
    cursor.space()
    start = cursor.at
    cursor.literal("(")
    cursor.space()
    if cursor.peek() != ")":
        _pass_first_keyword(cursor)
    cursor.at = start
    return StreamedCall(name, PythonArguments(), junk=_PYTHON_JUNK)


def _pass_first_keyword(cursor: Cursor) -> None:
    """Pass over ``key=`` and the beginning of a literal; raises `NoCall` if it is none."""
    if not cursor.word({"=", ")", "(", ","}).isidentifier():
        raise NoCall
    cursor.space()
    cursor.literal("=")
    cursor.space()
    if cursor.peek() in "\"'[({":
        return
    word = cursor.word({*"\"',)]}("})
    is_string = word in ("r", "R", "u", "U") and cursor.peek() in "\"'"
    if not is_string and not python_scalar(word):
        raise NoCall


_MISTRAL, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _mistral_head(cursor: Cursor, tools: Tools) -> Head:
    """Parse a list of objects, or ``f[CALL_ID]…[ARGS]{``: a template may not show which it is."""
    if cursor.starts(_MISTRAL):
        cursor.literal(_MISTRAL)
    cursor.space()
    if cursor.peek() == "[":
        cursor.literal("[")
        cursor.space()
    if cursor.peek() == "{":
        return _object_head(cursor, tools)
    name = _known(cursor.until("[{").strip(), tools)
    cursor.at -= 1
    if cursor.peek() == "[":
        if cursor.until("]") == _CALL_ID[:-1]:
            cursor.until("[")
            cursor.at -= 1
            cursor.literal(_ARGS)
        cursor.space()
    return _json_arguments(name, cursor)


def _gemma_head(notation: CallNotation, cursor: Cursor, tools: Tools) -> Head:
    cursor.literal(notation.opener)
    cursor.phrase(notation.before_name.removeprefix(notation.opener))
    name = _known(cursor.until("{").strip(), tools)
    cursor.at -= 1
    return StreamedCall(name, GemmaArguments(notation.quote))
