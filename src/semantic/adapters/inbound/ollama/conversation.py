"""Messages of Ollama's conversations, and their translation.

Ollama's tool calls have an id only in newer versions, and many clients drop it. A call without one
gets an id from its place in the conversation, so the same conversation always has the same ids. A
result without an id belongs to the first unanswered call of its tool, or of any tool.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

from semantic.adapters.inbound.openai.fields import call_arguments, inner_call_id
from semantic.adapters.inbound.wire import Limited, Schema, SentImage, ToolSchema
from semantic.domain.chat import (
    ImagePart,
    Message,
    Part,
    Role,
    TextPart,
    ThinkingPart,
    ToolResultPart,
    ToolUsePart,
)


class _CalledFunction(Schema):
    name: str
    arguments: dict[str, Any] | str | None = None


class _ToolCall(Schema):
    id: str | None = None
    function: _CalledFunction

    def to_domain(self, place: str) -> ToolUsePart:
        call_id = inner_call_id(self.id or "") or hashlib.sha256(place.encode()).hexdigest()[:24]
        arguments = self.function.arguments
        if not isinstance(arguments, dict):
            arguments = call_arguments(arguments or "")
        return ToolUsePart(call_id, self.function.name, arguments)


class OllamaMessage(Schema):
    """One message of a conversation; images are base64 without a prefix."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Limited[list[str] | None] = None
    tool_calls: Limited[list[_ToolCall] | None] = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    @property
    def content_parts(self) -> tuple[TextPart | ImagePart, ...]:
        return (TextPart(self.content or ""), *images_of(self.images))

    def reply_parts(self, number: int) -> tuple[Part, ...]:
        """The parts of the assistant's message with this number in the conversation."""
        thinking = (ThinkingPart(self.thinking),) if self.thinking else ()
        calls = [
            call.to_domain(f"{number}.{index}") for index, call in enumerate(self.tool_calls or ())
        ]
        is_silent = bool(calls) and not self.content
        return (*thinking, *(() if is_silent else self.content_parts), *calls)


class _Function(ToolSchema):
    name: str


class OllamaTool(Schema):
    """A function that the model may call, as in OpenAI's API."""

    type: str | None = None
    function: _Function


def images_of(images: Sequence[str] | None) -> tuple[ImagePart, ...]:
    """Translate images: base64, or data URIs."""
    return tuple(SentImage.of(image) for image in images or ())


def conversation_of(messages: Sequence[OllamaMessage]) -> tuple[Message, ...]:
    """Translate a conversation."""
    made: list[Message] = []
    unanswered: list[ToolUsePart] = []
    for number, message in enumerate(messages):
        role = Role(message.role)
        parts: tuple[Part, ...] = message.content_parts
        if role is Role.ASSISTANT:
            parts = message.reply_parts(number)
            unanswered = [part for part in parts if isinstance(part, ToolUsePart)]
        elif role is Role.TOOL:
            parts = (ToolResultPart(_answered_call(message, unanswered), message.content_parts),)
        made.append(Message(role, parts))
    return tuple(made)


def _answered_call(result: OllamaMessage, unanswered: list[ToolUsePart]) -> str:
    """Return the id of the call that a result answers, and remove it from the unanswered ones."""
    call_id = inner_call_id(result.tool_call_id or "")
    named = [call for call in unanswered if call.id == call_id or call.name == result.tool_name]
    for call in (named or unanswered)[:1]:
        unanswered.remove(call)
        return call_id or call.id
    return call_id
