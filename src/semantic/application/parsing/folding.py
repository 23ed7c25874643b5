"""The message a reply amounts to, for the log of turns."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

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
    ToolCallStarted,
    ToolUsePart,
)


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
        """Take the next event; those that carry no content are passed over."""
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
