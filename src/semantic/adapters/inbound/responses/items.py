"""Input items of OpenAI's Responses, and their translation to messages.

What we reply as one message, clients send again as several items: neighbours that are the
assistant's become one message again, or its tokens could not be found.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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

_KNOWN = frozenset(
    {
        "message", "reasoning", "function_call", "function_call_output", "custom_tool_call",
        "custom_tool_call_output",
    }
)  # fmt: skip
# Records of tools that run elsewhere: the model is not offered them, and cannot be shown them.
_SKIPPED = frozenset(
    {
        "web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call",
        "computer_call", "computer_call_output", "local_shell_call", "local_shell_call_output",
        "shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output",
        "mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response",
        "tool_search_call", "tool_search_output",
    }
)  # fmt: skip
_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


class ItemContent(Schema):
    """A part of an item."""

    type: str
    text: str | None = Field(None, validate_default=True)
    refusal: str | None = None
    image_url: str | None = None

    @field_validator("type")
    @classmethod
    def _require_known(cls, value: str) -> str:
        if value not in _TEXTS | {"refusal", "input_image"}:
            raise ValueError(f"parts of type {value!r} are not supported; send input_text")
        return value

    @field_validator("text")
    @classmethod
    def _require_text(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("type") in _TEXTS:
            raise ValueError("a part of text needs it")
        return value

    def to_domain(self) -> TextPart | ImagePart:
        """Translate."""
        if self.type == "input_image":
            return ImagePart("image/*", self.image_url or "")
        return TextPart(self.text or self.refusal or "")


class InputItem(Schema):
    """One item of any type, so that an error names the wrong field."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = Field(
        None, validate_default=True
    )
    content: str | list[ItemContent] | None = Field(None, validate_default=True)
    call_id: str | None = Field(None, validate_default=True)
    name: str | None = Field(None, validate_default=True)
    arguments: str | None = None
    input: str | None = None
    output: str | list[ItemContent] | None = Field(None, validate_default=True)
    summary: list[ItemContent] | None = None
    encrypted_content: str | None = None

    @field_validator("content", "output", "summary", mode="before")
    @classmethod
    def _cap_parts(cls, value: object) -> object:
        return capped(value)

    @field_validator("type")
    @classmethod
    def _require_known(cls, value: str) -> str:
        if value == "item_reference":
            raise ValueError("references are not supported; send the item itself")
        if value not in _KNOWN | _SKIPPED:
            raise ValueError(f"items of type {value!r} are not supported")
        return value

    @field_validator("role", "content", "call_id", "name", "output")
    @classmethod
    def _require_own_fields(cls, value: object, info: ValidationInfo) -> object:
        kind = info.data.get("type")
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name"),
            "custom_tool_call": ("call_id", "name"),
            "function_call_output": ("call_id", "output"),
            "custom_tool_call_output": ("call_id", "output"),
        }.get(kind or "", ())
        if value is None and info.field_name in needed:
            raise ValueError(f"an item of type {kind} needs it")
        return value

    @property
    def is_skipped(self) -> bool:
        """Whether the model cannot be shown it."""
        return self.type in _SKIPPED

    @property
    def is_reply(self) -> bool:
        """Whether the assistant said it."""
        is_said = self.type == "message" and self.role == "assistant"
        return is_said or self.type in ("reasoning", "function_call", "custom_tool_call")

    def reply_parts(self) -> tuple[Part, ...]:
        """What it adds to the assistant's message."""
        if self.type == "reasoning":
            return self._thinking()
        if self.type == "message":
            return _parts(self.content)
        if self.type == "custom_tool_call":
            arguments = call_arguments(self.arguments or "") | {"input": self.input or ""}
        else:
            arguments = call_arguments(self.arguments or "")
        return (ToolUsePart(inner_call_id(self.call_id or ""), self.name or "", arguments),)

    def message(self) -> Message:
        """It as a message of its own; not for replies."""
        if self.type == "message":
            role = Role.USER if self.role == "user" else Role.SYSTEM
            return Message(role, _parts(self.content))
        result = ToolResultPart(inner_call_id(self.call_id or ""), _parts(self.output))
        return Message(Role.TOOL, (result,))

    def _thinking(self) -> tuple[Part, ...]:
        """Thinking as we gave it out: its text, or only the handle of it."""
        content = self.content if isinstance(self.content, list) else []
        text = "".join(part.text or "" for part in content or self.summary or ())
        handle = self.encrypted_content or ""
        if text:
            return (ThinkingPart(text, handle),)
        return (ThinkingPart("", handle, is_redacted=True),) if handle else ()


@dataclass(frozen=True, slots=True)
class Sourced:
    """A message and where in the request it came from."""

    message: Message
    source: str


def messages_of(given: str | Sequence[InputItem]) -> list[Sourced]:
    """Translate a request's input."""
    if isinstance(given, str):
        return [Sourced(Message.of(Role.USER, given), "input")]
    made: list[Sourced] = []
    parts: list[Part] = []
    start = 0
    for index, item in enumerate(given):
        if item.is_skipped:
            continue
        if item.is_reply:
            start = start if parts else index
            parts += item.reply_parts()
            continue
        if parts:
            made.append(Sourced(Message(Role.ASSISTANT, tuple(parts)), f"input[{start}]"))
            parts = []
        made.append(Sourced(item.message(), f"input[{index}]"))
    if parts:
        made.append(Sourced(Message(Role.ASSISTANT, tuple(parts)), f"input[{start}]"))
    return made


def _parts(content: str | list[ItemContent] | None) -> tuple[TextPart | ImagePart, ...]:
    if isinstance(content, str):
        return (TextPart(content),)
    return tuple(part.to_domain() for part in content or ())
