"""How to read the head and the tail of calls in each notation."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from semantic.application.parsing.call_blocks import (
    ARGUMENT_KEYS,
    NAME_KEYS,
    BracketEnd,
    Calls,
    Tools,
    gemma_call,
    json_call,
    python_calls,
)
from semantic.domain.reply_format import (
    HERMES,
    PYTHON_TAG,
    QWEN_XML,
    SLOT,
    ArgumentStyle,
    CallNotation,
)

_MAX_STRING = 256
SPACE = " \t\r\n"
JSON_JUNK = SPACE + "}],;"  # meaningless after the arguments of a call


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
        while self.peek() in SPACE:
            self.at += 1

    def literal(self, text: str) -> None:
        """Pass over `text`; raises `NoCall` if something else follows."""
        for char in text:
            if self.peek() != char:
                raise NoCall
            self.at += 1

    def phrase(self, text: str) -> None:
        """Pass over `text` with any white space before and between its words."""
        for word in text.split():
            self.space()
            first, *others = word.split(SLOT)
            self.literal(first)
            for part in others:
                while self.peek().isalnum() or self.peek() in "_-":
                    self.at += 1
                self.literal(part)

    def skip(self, text: str, junk: str) -> None:
        """Pass over junk, and over `text` if it follows."""
        while self.peek() in junk:
            self.at += 1
        if self.starts(text):
            self.at += len(text)

    def require(self, texts: Sequence[str]) -> None:
        """Check that one of these texts follows, without passing over it."""
        rest = self._text[self.at : self.at + max(map(len, texts), default=0)]
        if not any(map(rest.startswith, texts)):
            raise NeedMore if any(text.startswith(rest) for text in texts) else NoCall

    def string(self) -> str:
        """Read a short JSON string without escapes: a name or a key."""
        self.literal('"')
        return self.until('"')

    def starts(self, text: str) -> bool:
        """Whether `text` follows; raises `NeedMore` if that is not decided yet."""
        try:
            self.require((text,))
        except NoCall:
            return False
        return True

    def scalar(self) -> str:
        """Read a short JSON string, or a number or literal as it is written."""
        if self.peek() == '"':
            return self.string()
        return self.word(set(",}]"))

    def word(self, stops: set[str]) -> str:
        """Read up to white space or one of these characters; raises `NoCall` if it is empty."""
        start = self.at
        while self.peek() not in stops and not self.peek().isspace():
            if self.at - start > _MAX_STRING:
                raise NoCall
            self.at += 1
        if self.at == start:
            raise NoCall
        return self._text[start : self.at]

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
class TaggedCall:
    """A call whose arguments, written as tags, begin at the cursor."""

    name: str
    notation: CallNotation


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


Head: TypeAlias = StreamedCall | TaggedCall | EmptyCall | BlockCall
ReadHead: TypeAlias = Callable[[Cursor, Tools], Head]


class CallSyntax:
    """How to find and parse calls in one notation.

    Attributes:
        opener: The marker that begins a call anywhere in the text; empty if there is none.
        leading: Begins a call without the opener at the start of a reply.
        again: Begins another call directly after one.
        closers: Texts that may follow the arguments, in this order.
        ends: Texts that may follow the last call.
    """

    def __init__(self, notation: CallNotation) -> None:
        self.opener = notation.opener or PYTHON_TAG
        self.again = notation.inner_opener
        self.leading = self.again if self.again != "{" else ""
        if not notation.opener:
            self.leading = self.again or "["
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
        case _ if notation.opener == _MISTRAL:
            return _mistral_head
        case _ if notation.is_json_object:
            return partial(_json_head, notation)
        case _:
            return partial(_named_head, notation)


def _until(end: str) -> Callable[[str, int], int]:
    return lambda text, start: text.find(end, max(0, start))


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
        return TaggedCall(name, notation)
    cursor.space()
    if cursor.peek() != "{":
        raise NoCall
    return StreamedCall(name)


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
        return BlockCall(_until(closer), json_call, is_ended_by_reply=True)


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
            return StreamedCall(_known(key, tools))
        if key in ARGUMENT_KEYS and name and cursor.peek() == "{":
            return StreamedCall(name)
        if key in ARGUMENT_KEYS or cursor.peek() in "{[":
            raise NoCall
        value = cursor.scalar()
        name = _known(value, tools) if key in NAME_KEYS else name
        cursor.space()
        if cursor.peek() == "}" and name:
            return EmptyCall(name)
        cursor.literal(",")


def _python_head(notation: CallNotation, cursor: Cursor, tools: Tools) -> Head:
    opener = notation.opener or PYTHON_TAG
    if cursor.starts(opener):
        cursor.phrase(opener)
    cursor.space()
    if not notation.start.endswith("["):
        return BlockCall(_until(notation.end.strip()), python_calls, repair=_CODE_REPAIR)
    start = cursor.at
    cursor.literal("[")
    cursor.space()
    _known(cursor.until("( ,]").strip(), tools)
    cursor.at = start
    return BlockCall(BracketEnd(), python_calls, repair=_PYTHON_REPAIR)


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
    if cursor.peek() != "{":
        raise NoCall
    return StreamedCall(name)


def _gemma_head(notation: CallNotation, cursor: Cursor, tools: Tools) -> Head:
    cursor.literal(notation.opener)
    cursor.phrase(notation.before_name.removeprefix(notation.opener))
    start = cursor.at
    _known(cursor.until("{").strip(), tools)
    cursor.at = start
    return BlockCall(
        _until(notation.after_arguments.removeprefix("}")),
        lambda text, known: gemma_call(text, notation.quote, known),
        repair=_GEMMA_REPAIR,
    )
