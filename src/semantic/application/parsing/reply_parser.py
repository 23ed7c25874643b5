"""The events of a reply, from the events of the engine, and the message they amount to."""

import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from semantic.application.parsing.call_splitter import CallNumbers, CallSplitter
from semantic.application.parsing.harmony import HarmonySplitter
from semantic.application.parsing.splitter import Splitter, ThinkingSplitter
from semantic.domain.chat import (
    JsonObject,
    Message,
    Part,
    Role,
    TextPart,
    ThinkingPart,
    ToolSpec,
    ToolUsePart,
)
from semantic.domain.events import (
    Event,
    Failed,
    Finished,
    TextDelta,
    ThinkingDelta,
    ThinkingEnded,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from semantic.domain.reply_format import ReplyFormat, ToolFormat
from semantic.domain.sampling import FinishReason


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
        self._splitters: list[Splitter] = []
        if reply_format.tools is ToolFormat.HARMONY:
            self._splitters.append(HarmonySplitter(tools, self._numbers, sign))
            return
        if reply_format.thinking is not None:
            thinking = ThinkingSplitter(reply_format.thinking, is_open=is_thinking_open, sign=sign)
            self._splitters.append(thinking)
        if tools:
            self._splitters.append(CallSplitter(reply_format.tools, tools, self._numbers))

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


def _through(splitter: Splitter, events: list[Event]) -> list[Event]:
    out: list[Event] = []
    for event in events:
        out += splitter.feed(event) if isinstance(event, TextDelta) else [event]
    return out


@dataclass(slots=True)
class _Draft:
    """A part that may still grow; `event` is the one it began with."""

    event: TextDelta | ThinkingDelta | ToolCallStarted
    pieces: list[str] = field(default_factory=list)
    signature: str = ""

    def part(self) -> Part:
        written = "".join(self.pieces)
        match self.event:
            case TextDelta():
                return TextPart(written)
            case ThinkingDelta():
                return ThinkingPart(written, self.signature)
            case ToolCallStarted():
                return ToolUsePart(self.event.id, self.event.name, _object(written))


class MessageFold:
    """Collects events into parts, in the order they came."""

    def __init__(self) -> None:
        self._drafts: list[_Draft] = []
        self._calls: dict[int, _Draft] = {}

    def add(self, event: Event) -> None:
        """Take the next event; those without content are ignored."""
        last = self._drafts[-1] if self._drafts else None
        match event:
            case TextDelta() | ThinkingDelta():
                if last is None or type(last.event) is not type(event):
                    last = self._begin(event)
                last.pieces.append(event.text)
            case ThinkingEnded(signature) if last and isinstance(last.event, ThinkingDelta):
                last.signature = signature
            case ToolCallStarted():
                self._calls[event.index] = self._begin(event)
            case ToolCallDelta():
                self._calls[event.index].pieces.append(event.arguments)
            case _:
                pass

    def message(self) -> Message:
        """The assistant's message so far."""
        return Message(Role.ASSISTANT, tuple(draft.part() for draft in self._drafts))

    def _begin(self, event: TextDelta | ThinkingDelta | ToolCallStarted) -> _Draft:
        self._drafts.append(_Draft(event))
        return self._drafts[-1]


def fold_message(events: Iterable[Event]) -> Message:
    """The assistant's message that a reply's events amount to."""
    fold = MessageFold()
    for event in events:
        fold.add(event)
    return fold.message()


def _object(text: str) -> JsonObject:
    """Parsers give out one JSON object, or nothing; one that was cut off is left out."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
