"""The message a reply amounts to, for the log of turns."""

import json
from collections.abc import Iterable

from semantic.domain.chat import (
    Event,
    JsonObject,
    Message,
    Part,
    Role,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingEnded,
    ThinkingPart,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    ToolUsePart,
)


class MessageFold:
    """Collects events into parts, in the order they came."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._text: list[str] = []
        self._thought: list[str] = []
        self._call: ToolCallStarted | None = None
        self._arguments: list[str] = []

    def add(self, event: Event) -> None:
        """Take the next event; those that carry no content are passed over."""
        match event:
            case TextDelta(text):
                self._end_thinking("")
                self._text.append(text)
            case ThinkingDelta(text):
                self._end_text()
                self._thought.append(text)
            case ThinkingEnded(signature):
                self._end_thinking(signature)
            case ToolCallStarted():
                self._end_thinking("")
                self._end_text()
                self._call, self._arguments = event, []
            case ToolCallDelta():
                self._arguments.append(event.arguments)
            case ToolCallEnded():
                self._end_call()
            case _:
                pass

    def message(self) -> Message:
        """The assistant's message so far; a call that has not ended is left out."""
        parts = list(self._parts)
        parts += [ThinkingPart("".join(self._thought))] if self._thought else []
        parts += [TextPart("".join(self._text))] if self._text else []
        return Message(Role.ASSISTANT, tuple(parts))

    def _end_text(self) -> None:
        if self._text:
            self._parts.append(TextPart("".join(self._text)))
            self._text = []

    def _end_thinking(self, signature: str) -> None:
        if self._thought:
            self._parts.append(ThinkingPart("".join(self._thought), signature))
            self._thought = []

    def _end_call(self) -> None:
        if self._call is not None:
            arguments = _object("".join(self._arguments))
            self._parts.append(ToolUsePart(self._call.id, self._call.name, arguments))
            self._call = None


def fold_message(events: Iterable[Event]) -> Message:
    """The assistant's message that a reply's events amount to."""
    fold = MessageFold()
    for event in events:
        fold.add(event)
    return fold.message()


def _object(text: str) -> JsonObject:
    """Parsers give out one JSON object; a call without any arguments gives out nothing."""
    value = json.loads(text or "{}")
    return value if isinstance(value, dict) else {}
