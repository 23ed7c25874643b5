"""Input items of OpenAI's Responses API, and their translation to messages.

Clients send one reply back as several items. Adjacent items of the assistant are merged into one
message again; otherwise its tokens would not match those in the KV cache.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from semantic.adapters.inbound.openai.custom_tools import custom_arguments
from semantic.adapters.inbound.openai.fields import call_arguments, inner_call_id
from semantic.adapters.inbound.wire import Limited, SentImage, VariantSchema
from semantic.application.requests.compaction.summary import summary_message
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
        "custom_tool_call_output", "item_reference", "compaction",
    }
)  # fmt: skip
# Records of tools that run elsewhere; the server does not offer these tools, and drops the items.
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


_SUMMARY = "semantic.compaction.v1\n"


def encode_summary(text: str) -> str:
    """Encode a summary for a compaction item.

    It is not encrypted: it holds what the client sent, only shorter.
    """
    return base64.urlsafe_b64encode((_SUMMARY + text).encode()).decode()


def read_summary(encoded: str) -> str:
    """Decode the result of `encode_summary`; raises ValueError if it is something else."""
    try:
        text = base64.urlsafe_b64decode(encoded.encode()).decode()
    except ValueError:
        text = ""
    if not text.startswith(_SUMMARY):
        raise ValueError("this server did not write this compaction item; send the conversation")
    return text.removeprefix(_SUMMARY)


class ItemContent(VariantSchema):
    """Text, a refusal or an image inside an input item."""

    needed: ClassVar = {**dict.fromkeys(_TEXTS, ("text",)), "input_image": ("image_url",)}

    type: str
    text: str | None = None
    refusal: str | None = None
    file_id: str | None = None
    image_url: str | None = None

    @field_validator("type")
    @classmethod
    def _require_known(cls, value: str) -> str:
        if value not in _TEXTS | {"refusal", "input_image"}:
            raise ValueError(
                f"parts of type {value!r} are not supported; send input_text or input_image"
            )
        return value

    @field_validator("file_id")
    @classmethod
    def _refuse_file(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("this server stores no files; send image_url with a data URI")
        return value

    def to_domain(self) -> TextPart | ImagePart:
        """Translate; a refusal counts as text."""
        if self.type == "input_image":
            return SentImage.of(self.image_url or "")
        return TextPart(self.text or self.refusal or "")


class InputItem(VariantSchema):
    """One input item of any type."""

    needed: ClassVar = {
        "item_reference": ("id",),
        "message": ("role", "content"),
        "function_call": ("call_id", "name"),
        "custom_tool_call": ("call_id", "name"),
        "function_call_output": ("call_id", "output"),
        "custom_tool_call_output": ("call_id", "output"),
        "compaction": ("encrypted_content",),
    }

    type: str = "message"
    id: str | None = Field(None, max_length=512)
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Limited[str | list[ItemContent] | None] = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: Limited[str | list[ItemContent] | None] = None
    summary: Limited[list[ItemContent] | None] = None
    encrypted_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _complete_reference(cls, value: object) -> object:
        """Add the type of a reference, which clients may leave out."""
        if isinstance(value, dict) and "id" in value and not value.keys() & {"role", "content"}:
            return {**value, "type": value.get("type") or "item_reference"}
        return value

    @field_validator("type")
    @classmethod
    def _require_known(cls, value: str) -> str:
        if value not in _KNOWN | _SKIPPED:
            raise ValueError(f"items of type {value!r} are not supported")
        return value

    @field_validator("encrypted_content")
    @classmethod
    def _require_readable(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("type") == "compaction":
            read_summary(value)
        return value

    @property
    def is_skipped(self) -> bool:
        return self.type in _SKIPPED

    @property
    def is_reply(self) -> bool:
        is_said = self.type == "message" and self.role == "assistant"
        return is_said or self.type in ("reasoning", "function_call", "custom_tool_call")

    def reply_parts(self) -> tuple[Part, ...]:
        if self.type == "reasoning":
            return self._thinking()
        if self.type == "message":
            return _parts(self.content)
        is_custom = self.type == "custom_tool_call"
        arguments = (
            custom_arguments(self.input or "")
            if is_custom
            else call_arguments(self.arguments or "")
        )
        call_id = inner_call_id(self.call_id or "")
        return (ToolUsePart(call_id, self.name or "", arguments, is_custom=is_custom),)

    def message(self) -> Message:
        """Translate to a message of its own; not for items of the assistant."""
        if self.type == "compaction":
            return summary_message(read_summary(self.encrypted_content or ""))
        if self.type == "message":
            role = Role.USER if self.role == "user" else Role.SYSTEM
            return Message(role, _parts(self.content))
        result = ToolResultPart(inner_call_id(self.call_id or ""), _parts(self.output))
        return Message(Role.TOOL, (result,))

    def _thinking(self) -> tuple[Part, ...]:
        content = self.content if isinstance(self.content, list) else []
        text = "".join(part.text or "" for part in content or self.summary or ())
        handle = self.encrypted_content or ""
        if text:
            return (ThinkingPart(text, handle),)
        return (ThinkingPart("", handle, is_redacted=True),) if handle else ()


@dataclass(frozen=True, slots=True)
class SourcedMessage:
    """A message, and the field of the request that it came from."""

    message: Message
    source: str


def messages_of(given: str | Sequence[InputItem]) -> list[SourcedMessage]:
    """Translate a request's input to messages."""
    if isinstance(given, str):
        return [SourcedMessage(Message.of(Role.USER, given), "input")]
    made: list[SourcedMessage] = []
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
            made.append(SourcedMessage(Message(Role.ASSISTANT, tuple(parts)), f"input[{start}]"))
            parts = []
        made.append(SourcedMessage(item.message(), f"input[{index}]"))
    if parts:
        made.append(SourcedMessage(Message(Role.ASSISTANT, tuple(parts)), f"input[{start}]"))
    return made


def _parts(content: str | list[ItemContent] | None) -> tuple[TextPart | ImagePart, ...]:
    if isinstance(content, str):
        return (TextPart(content),)
    return tuple(part.to_domain() for part in content or ())
