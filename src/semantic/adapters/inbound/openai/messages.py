"""Messages of OpenAI's chat, and their translation to ours."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from semantic.adapters.inbound.openai.fields import (
    Schema,
    call_arguments,
    capped,
    inner_call_id,
)
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


class _ImageUrl(Schema):
    url: str


class _Content(Schema):
    """A part of a message. One class for all types, so that an error names the wrong field."""

    type: Literal["text", "image_url", "refusal"]
    text: str | None = Field(None, validate_default=True)
    image_url: _ImageUrl | None = Field(None, validate_default=True)
    refusal: str | None = Field(None, validate_default=True)

    @field_validator("text", "image_url", "refusal")
    @classmethod
    def _require_own_field(
        cls, value: str | _ImageUrl | None, info: ValidationInfo
    ) -> str | _ImageUrl | None:
        if value is None and info.data.get("type") == info.field_name:
            raise ValueError(f"a part of type {info.field_name} needs it")
        return value

    def to_domain(self) -> TextPart | ImagePart:
        if self.type == "image_url" and self.image_url is not None:
            return ImagePart("image/*", self.image_url.url)
        return TextPart(self.text or self.refusal or "")


class _CalledFunction(Schema):
    name: str
    arguments: str | None = None


class _ToolCall(Schema):
    id: str = ""
    type: Literal["function"] = "function"
    function: _CalledFunction

    def to_domain(self) -> ToolUsePart:
        arguments = call_arguments(self.function.arguments or "")
        return ToolUsePart(inner_call_id(self.id), self.function.name, arguments)


class ChatMessage(Schema):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Content] | None = Field(None, validate_default=True)
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = Field(None, validate_default=True)

    @field_validator("tool_calls", mode="before")
    @classmethod
    def _cap_calls(cls, value: object) -> object:
        return capped(value)

    @field_validator("content")
    @classmethod
    def _require_content(
        cls, value: str | list[_Content] | None, info: ValidationInfo
    ) -> str | list[_Content] | None:
        if value is None and info.data.get("role") not in ("assistant", None):
            raise ValueError("it is required for this role")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _require_call(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("role") == "tool":
            raise ValueError("it is required for this role")
        return value

    def to_domain(self) -> Message:
        """Translate; `developer` is OpenAI's newer word for `system`."""
        content = self._content()
        if self.role == "tool":
            return Message(
                Role.TOOL, (ToolResultPart(inner_call_id(self.tool_call_id or ""), content),)
            )
        if self.role == "assistant":
            return Message(Role.ASSISTANT, self._reply(content))
        role = Role.USER if self.role == "user" else Role.SYSTEM
        return Message(role, content)

    def _content(self) -> tuple[TextPart | ImagePart, ...]:
        if isinstance(self.content, str):
            return (TextPart(self.content),)
        return tuple(part.to_domain() for part in self.content or ())

    def _reply(self, content: tuple[TextPart | ImagePart, ...]) -> tuple[Part, ...]:
        thought = self.reasoning_content or self.reasoning
        thinking = (ThinkingPart(thought),) if thought else ()
        calls = tuple(call.to_domain() for call in self.tool_calls or ())
        is_silent = bool(calls) and self.content in ("", None)
        return (*thinking, *(() if is_silent else content), *calls)
