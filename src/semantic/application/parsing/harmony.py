"""Parses GPT-OSS replies: messages on channels, each with a header and a body.

``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…``
"""

import enum
import re
from collections.abc import Callable, Sequence

from semantic.application.parsing.call_splitter import CallNumbers
from semantic.application.parsing.json_arguments import JsonArguments
from semantic.application.parsing.splitter import Splitter, find_first
from semantic.domain.chat import ToolSpec
from semantic.domain.events import Event, ThinkingDelta, ThinkingEnded
from semantic.domain.reply_format import Harmony
from semantic.domain.sampling import num_undecided

_HEADERS = (Harmony.START, Harmony.CHANNEL)
_ENDS = (Harmony.END, Harmony.CALL, Harmony.RETURN)
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_CHANNEL = re.compile(re.escape(Harmony.CHANNEL) + r"\s*(\w+)")
_MAX_HEADER = 512
_EARLY_RECIPIENT = " to="  # of a reply whose header began in the prompt


class _BodyKind(enum.Enum):
    TEXT = enum.auto()
    THINKING = enum.auto()
    CALL = enum.auto()  # announced once its arguments begin
    ARGUMENTS = enum.auto()


class HarmonySplitter(Splitter):
    """Splits a reply: a message to a known tool is a call, analysis is thinking, the rest text."""

    def __init__(
        self, tools: Sequence[ToolSpec], new_id: Callable[[], str], sign: Callable[[], str]
    ) -> None:
        super().__init__()
        self._names = {tool.name for tool in tools}
        self._numbers = CallNumbers(new_id)
        self._sign = sign
        self._body = _BodyKind.TEXT
        self._is_header = False
        self._has_begun = False
        self._has_thought = False
        self._name = ""
        self._arguments = JsonArguments()

    def _run(self, *, is_final: bool) -> list[Event]:
        events: list[Event] = []
        if not self._has_begun and not self._begin(is_final=is_final):
            return events
        while True:
            before = (self._is_header, self._body, len(self._pending.text))
            events += self._header() if self._is_header else self._read(is_final=is_final)
            if before == (self._is_header, self._body, len(self._pending.text)):
                break
        if is_final:
            is_cut_call = self._is_cut and self._body is _BodyKind.CALL
            events += [] if is_cut_call else self._end_body()
            self._pending.drop(len(self._pending.text))  # an incomplete header
        return events

    def _begin(self, *, is_final: bool) -> bool:
        """Decide whether the reply begins inside a header; False if that is undecided."""
        text = self._pending.text
        self._is_header = text.startswith(_EARLY_RECIPIENT)
        self._has_begun = is_final or not _EARLY_RECIPIENT.startswith(text) or self._is_header
        return self._has_begun

    # -- headers --------------------------------------------------------------------------------

    def _header(self) -> list[Event]:
        text = self._pending.text
        end = text.find(Harmony.MESSAGE, 0, _MAX_HEADER)
        if end < 0 and len(text) >= _MAX_HEADER:
            self._is_header, self._body = False, _BodyKind.TEXT
            marker = find_first(text, _HEADERS)
            return [*self._pending.take(len(marker[1]) if marker else 1)]
        if end >= 0:
            self._begin_body(self._pending.drop(end + len(Harmony.MESSAGE)))
        return []

    def _begin_body(self, header: str) -> None:
        self._is_header = False
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        self._name = recipient[1] if recipient else ""
        if self._name in self._names:
            self._body = _BodyKind.CALL
        elif channel and channel[1] == "analysis":
            self._body = _BodyKind.THINKING
        else:
            self._body = _BodyKind.TEXT

    # -- bodies ---------------------------------------------------------------------------------

    def _read(self, *, is_final: bool) -> list[Event]:
        text = self._pending.text
        found = find_first(text, (*_HEADERS, *_ENDS))
        if found is None:
            held = 0 if is_final else num_undecided(text, (*_HEADERS, *_ENDS))
            return self._content(len(text) - held, is_final=is_final)
        events = self._content(found[0], is_final=True)
        if len(self._pending.text) > len(text) - found[0]:
            return events  # the kind of body was just decided; the next iteration reads it
        events += self._end_body()
        if found[1] in _HEADERS:
            self._is_header = True
        else:
            self._pending.drop(len(found[1]))
        return events

    def _content(self, size: int, *, is_final: bool) -> list[Event]:
        match self._body:
            case _BodyKind.TEXT:
                return [*self._pending.take(size)]
            case _BodyKind.THINKING:
                thought = self._pending.drop(size)
                self._has_thought = self._has_thought or bool(thought)
                return [ThinkingDelta(thought)] if thought else []
            case _BodyKind.CALL:
                return self._begin_call(size, is_final=is_final)
            case _BodyKind.ARGUMENTS:
                return self._more_arguments(size, is_final=is_final)

    def _begin_call(self, size: int, *, is_final: bool) -> list[Event]:
        beginning = self._pending.text[:size].lstrip()
        if not beginning:
            self._pending.drop(size if is_final else 0)
            return []
        if not beginning.startswith("{"):
            self._body = _BodyKind.TEXT
            return []
        self._arguments, self._body = JsonArguments(), _BodyKind.ARGUMENTS
        return [self._numbers.start(self._name)]

    def _more_arguments(self, size: int, *, is_final: bool) -> list[Event]:
        if self._arguments.is_done:
            self._pending.drop(size)  # whitespace, or text after the arguments
            return []
        if is_final and self._is_cut and size == len(self._pending.text):
            return self._numbers.read_cut(self._arguments, self._pending)
        events = self._numbers.read(self._arguments, self._pending, size, is_final=is_final)
        if self._arguments.is_broken:
            self._body = _BodyKind.TEXT
        return events

    def _end_body(self) -> list[Event]:
        body = self._body
        self._body = _BodyKind.TEXT
        if body is _BodyKind.CALL:
            return self._numbers.whole(self._name, "{}")
        if body is _BodyKind.THINKING and self._has_thought:
            self._has_thought = False
            return [ThinkingEnded(self._sign())]
        return []
