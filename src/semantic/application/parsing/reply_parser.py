"""The events of a reply, from the events of the engine."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from semantic.application.parsing.call_syntax import SYNTAXES
from semantic.application.parsing.harmony import HarmonySplitter
from semantic.application.parsing.thinking import ThinkingSplitter
from semantic.application.parsing.tool_calls import CallNumbers, CallSplitter
from semantic.domain.chat import Event, Failed, Finished, TextDelta, ToolCallEnded, ToolSpec
from semantic.domain.reply_format import ReplyFormat, ToolFormat
from semantic.domain.sampling import FinishReason


class _Splitter(Protocol):
    def feed(self, delta: TextDelta) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


def _random_id() -> str:
    return secrets.token_hex(12)


class ReplyParser:
    """Turns one reply's plain text into thinking, text and tool calls. Not thread-safe.

    Example:
        >>> parser = ReplyParser(ReplyFormat(), new_id=lambda: "1")
        >>> parser.push(TextDelta("Hi"))
        [TextDelta(text='Hi', logprobs=())]
    """

    def __init__(
        self,
        reply_format: ReplyFormat,
        tools: Sequence[ToolSpec] = (),
        *,
        is_thinking_open: bool = False,
        is_parallel: bool = True,
        new_id: Callable[[], str] = _random_id,
        sign: Callable[[], str] = _random_id,
    ) -> None:
        """Make a parser for one reply.

        Args:
            reply_format: How the model writes.
            tools: Those that may be called; without any, their markup is text.
            is_thinking_open: The prompt ended inside thinking.
            is_parallel: More than one call is wanted; if not, what follows the first is dropped.
            new_id: Makes the ids of calls.
            sign: Makes the handles of thinking.
        """
        self._is_parallel = is_parallel
        self._is_over = False
        self._numbers = CallNumbers(new_id)
        self._splitters: list[_Splitter] = []
        if reply_format.tools is ToolFormat.HARMONY:
            self._splitters.append(HarmonySplitter(tools, self._numbers, sign))
            return
        if reply_format.thinking is not None:
            thinking = ThinkingSplitter(reply_format.thinking, is_open=is_thinking_open, sign=sign)
            self._splitters.append(thinking)
        if tools:
            syntax = SYNTAXES[reply_format.tools]
            self._splitters.append(CallSplitter(syntax, tools, self._numbers))

    def push(self, event: Event) -> list[Event]:
        """Take an event of the engine; returns the events it makes certain, if any."""
        match event:
            case TextDelta():
                events: list[Event] = [event]
                for splitter in self._splitters:
                    events = _through(splitter, events)
                return self._wanted(events)
            case Finished(reason):
                events = self._flush()
                if reason is FinishReason.END_TURN and self._numbers.num_calls:
                    reason = FinishReason.TOOL_USE
                return [*events, replace(event, reason=reason)]
            case Failed():
                return [*self._flush(), event]
            case _:
                return [event]

    def _flush(self) -> list[Event]:
        events: list[Event] = []
        for splitter in self._splitters:
            events = [*_through(splitter, events), *splitter.finish()]
        return self._wanted(events)

    def _wanted(self, events: list[Event]) -> list[Event]:
        if self._is_parallel:
            return events
        wanted: list[Event] = []
        for event in events:
            wanted += [] if self._is_over else [event]
            self._is_over |= isinstance(event, ToolCallEnded)
        return wanted


def _through(splitter: _Splitter, events: list[Event]) -> list[Event]:
    out: list[Event] = []
    for event in events:
        out += splitter.feed(event) if isinstance(event, TextDelta) else [event]
    return out
