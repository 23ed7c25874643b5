"""Anthropic's messages as clients send them, and their translation to ours.

One class for all types of block, so that an error names the wrong field and not every type it
might have been. `citations` and other fields that change no prompt are ignored; `cache_control`
changes only how tokens are counted: everything is kept in any case.
"""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from semantic.domain.chat import (
    ImagePart,
    Message,
    Part,
    Role,
    TextPart,
    ThinkingPart,
    ToolReferencePart,
    ToolResultPart,
    ToolUsePart,
)
from semantic.domain.errors import InvalidRequestError

TOOL_ID_PREFIX = "toolu_"
_BILLING_PREFIX = "x-anthropic-billing-header:"

_REQUIRED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "tool_reference": ("tool_name",),
    "image": ("source",),
    "document": ("source",),
}


class Schema(BaseModel):
    """What clients send: unknown fields are ignored, values have the types JSON gives them."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Block(Schema):
    """A block of content, of any type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    is_error: bool | None = None
    tool_name: str | None = None
    title: str | None = None
    cache_control: dict[str, Any] | None = None
    source: dict[str, Any] | str | None = None

    @property
    def marks_cache(self) -> bool:
        """Whether it, or a block in it, is to be kept for later requests."""
        inner = self.content if isinstance(self.content, list) else []
        return bool(self.cache_control) or any(block.marks_cache for block in inner)

    @model_validator(mode="after")
    def _require_own_fields(self) -> Self:
        for name in _REQUIRED.get(self.type, ()):
            if getattr(self, name) is None:
                raise ValueError(f"a block of type {self.type} needs the field {name}")
        return self

    def to_text(self, where: str) -> TextPart | ImagePart:
        """Translate what anyone may say.

        Raises:
            InvalidRequestError: it is a block of another kind.
        """
        match self.type:
            case "text":
                return TextPart(self.text or "")
            case "image":
                return self._image()
            case "document":
                return self._document(where)
            case "search_result" if not isinstance(self.content, str):
                texts = [block.text or "" for block in self.content or ()]
                return TextPart("\n".join([self.title or "", *texts]).strip())
            case _:
                raise InvalidRequestError(
                    f"a block of type {self.type!r} does not belong here.", param=where
                )

    def to_reply(self) -> Part | None:
        """Translate what the model said; None for what only a vendor's own tools leave behind."""
        match self.type:
            case "text":
                return TextPart(self.text or "")
            case "thinking":
                # Where a client keeps no thinking, its signature still tells which it was.
                text, signature = self.thinking or "", self.signature or ""
                return ThinkingPart(text, signature, is_redacted=not text and bool(signature))
            case "redacted_thinking":
                return ThinkingPart("", self.data or "", is_redacted=True)
            case "tool_use":
                return ToolUsePart(_own_id(self.id or ""), self.name or "", self.input or {})
            case _:
                return None

    def to_result(self, where: str) -> ToolResultPart:
        """Translate what a call returned.

        Raises:
            InvalidRequestError: a block in it does not belong there.
        """
        content: tuple[TextPart | ImagePart | ToolReferencePart, ...]
        if isinstance(self.content, str):
            content = (TextPart(self.content),)
        else:
            content = tuple(
                ToolReferencePart(block.tool_name or "")
                if block.type == "tool_reference"
                else block.to_text(f"{where}.content[{index}]")
                for index, block in enumerate(self.content or ())
            )
        return ToolResultPart(_own_id(self.tool_use_id or ""), content, bool(self.is_error))

    def _image(self) -> ImagePart:
        source = self.source if isinstance(self.source, dict) else {}
        data = source.get("data") or source.get("url") or source.get("file_id") or ""
        return ImagePart(str(source.get("media_type", "image/*")), str(data))

    def _document(self, where: str) -> TextPart:
        source = self.source if isinstance(self.source, dict) else {}
        text = source.get("data") if source.get("type") == "text" else source.get("content")
        if isinstance(text, list):
            text = "\n".join(str(part.get("text", "")) for part in text if isinstance(part, dict))
        if not isinstance(text, str):
            raise InvalidRequestError(
                "only documents of plain text are supported; send their text.", param=where
            )
        return TextPart("\n".join(filter(None, (self.title, text))))


class InputMessage(Schema):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    def to_domain(self, index: int) -> Message:
        """Translate.

        Raises:
            InvalidRequestError: a block does not belong where it stands.
        """
        role = Role(self.role)
        if isinstance(self.content, str):
            return Message.of(role, self.content)
        if role is Role.SYSTEM:
            return Message(role, system_parts(self.content, f"messages[{index}].content"))
        if role is Role.ASSISTANT:
            parts = (block.to_reply() for block in self.content)
            return Message(role, tuple(part for part in parts if part is not None))
        return Message(role, tuple(self._inputs(index)))

    def _inputs(self, index: int) -> list[Part]:
        parts: list[Part] = []
        for position, block in enumerate(self.content):
            where = f"messages[{index}].content[{position}]"
            if isinstance(block, Block):
                is_result = block.type == "tool_result"
                parts.append(block.to_result(where) if is_result else block.to_text(where))
        return parts


def system_parts(system: str | list[Block], where: str = "system") -> tuple[Part, ...]:
    """Translate a system prompt, without the line that only counts for billing.

    Raises:
        InvalidRequestError: a block is not text.
    """
    if isinstance(system, str):
        parts: list[Part] = [TextPart(system)]
    else:
        parts = [block.to_text(f"{where}[{index}]") for index, block in enumerate(system)]
    if parts and isinstance(parts[0], TextPart):
        parts[0] = TextPart(_without_billing_line(parts[0].text))
    return tuple(part for part in parts if part != TextPart(""))


def _without_billing_line(text: str) -> str:
    r"""Leave out a first line that only counts for a vendor's billing.

    Example:
        >>> _without_billing_line("x-anthropic-billing-header: cc_version=2; cch=1f;\nBe terse.")
        'Be terse.'
    """
    if not text.lstrip().lower().startswith(_BILLING_PREFIX):
        return text
    return text.lstrip().partition("\n")[2].lstrip("\n")


def _own_id(given: str) -> str:
    """A call's id as we gave it, before it was put in Anthropic's form."""
    return given.removeprefix(TOOL_ID_PREFIX)
