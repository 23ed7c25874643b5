"""Puts a reply's events together to the message they make."""

import json

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


class ReplyParts:
    """Collects parts in their order."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._arguments: dict[int, str] = {}
        self._calls: dict[int, int] = {}

    def add(self, event: Event) -> None:
        """Take an event; those that are no content are passed over."""
        last = self._parts[-1] if self._parts else None
        match event:
            case TextDelta(text):
                if isinstance(last, TextPart):
                    self._parts[-1] = TextPart(last.text + text)
                else:
                    self._parts.append(TextPart(text))
            case ThinkingDelta(text):
                if isinstance(last, ThinkingPart):
                    self._parts[-1] = ThinkingPart(last.text + text)
                else:
                    self._parts.append(ThinkingPart(text))
            case ThinkingEnded(signature) if isinstance(last, ThinkingPart):
                self._parts[-1] = ThinkingPart(last.text, signature)
            case ToolCallStarted(index, call_id, name):
                self._calls[index] = len(self._parts)
                self._parts.append(ToolUsePart(call_id, name, {}))
            case ToolCallDelta(index, arguments):
                self._arguments[index] = self._arguments.get(index, "") + arguments
            case _:
                return

    def message(self) -> Message:
        """What the events make."""
        parts = list(self._parts)
        for index, place in self._calls.items():
            call = parts[place]
            if isinstance(call, ToolUsePart):
                parts[place] = ToolUsePart(call.id, call.name, self._parsed(index))
        return Message(Role.ASSISTANT, tuple(parts) or (TextPart(""),))

    def _parsed(self, index: int) -> JsonObject:
        try:
            arguments = json.loads(self._arguments.get(index) or "{}")
        except ValueError:
            return {}
        return arguments if isinstance(arguments, dict) else {}
