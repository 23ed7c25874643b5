"""The request body of OpenAI's Responses API, and its translation to a chat request.

Clients send one reply back as several items. Adjacent items of the assistant are merged into one
message again; otherwise its tokens would not match those in the KV cache.
"""

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from semantic.adapters.inbound.http.streaming import Json
from semantic.adapters.inbound.openai.custom_tools import (
    CustomFormat,
    custom_arguments,
    custom_tool,
)
from semantic.adapters.inbound.openai.fields import (
    RequestFields,
    call_arguments,
    choice_of,
    inner_call_id,
    thinking_of,
)
from semantic.adapters.inbound.responses.events import PREFIX
from semantic.adapters.inbound.wire import (
    MAX_MESSAGES,
    NO_LIMIT,
    Limited,
    Schema,
    ToolSchema,
    VariantSchema,
    example,
    limit_entries,
    refuse,
    renumber,
)
from semantic.application.agents.turn_log import turn_id
from semantic.application.requests.compaction.summary import summary_message
from semantic.domain.chat import (
    AgentHint,
    CacheComparison,
    ChatRequest,
    ImagePart,
    JsonFormat,
    Message,
    OutputFormat,
    Part,
    Role,
    TextPart,
    ThinkingPart,
    ToolResultPart,
    ToolSpec,
    ToolUsePart,
    is_continuable,
)
from semantic.domain.errors import ItemNotFoundError
from semantic.domain.sampling import MAX_TOP_LOGPROBS
from semantic.ports.inbound import PastTurn

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

    needed: ClassVar = dict.fromkeys(_TEXTS, ("text",))

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None

    @field_validator("type")
    @classmethod
    def _require_known(cls, value: str) -> str:
        if value not in _TEXTS | {"refusal", "input_image"}:
            raise ValueError(f"parts of type {value!r} are not supported; send input_text")
        return value

    def to_domain(self) -> TextPart | ImagePart:
        """Translate; a refusal counts as text, and rendering the prompt refuses images later."""
        if self.type == "input_image":
            return ImagePart("image/*", self.image_url or "")
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


_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"
_MESSAGE = re.compile(r"messages\[(\d+)\](.*)")


class ResponsesTool(ToolSchema):
    """A tool of any type; only functions and custom tools are offered to the model."""

    type: str
    format: CustomFormat | None = None

    @property
    def is_offered(self) -> bool:
        return self.type in ("function", "custom")

    def to_domain(self, param: str = "tools") -> ToolSpec:
        if self.type == "custom":
            return custom_tool(self.name or "", self.description, self.format, f"{param}.format")
        return super().to_domain()


class _ChosenTool(Schema):
    type: str
    name: str | None = None


class _ResponsesToolChoice(VariantSchema):
    needed: ClassVar = {
        "function": ["name"],
        "custom": ["name"],
        "allowed_tools": ["mode", "tools"],
    }

    type: Literal["function", "custom", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Limited[list[_ChosenTool] | None] = None

    @property
    def allowed(self) -> list[str]:
        return [tool.name for tool in self.tools or () if tool.name is not None]


class _TextFormat(Schema):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class _Text(Schema):
    format: _TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class _Reasoning(Schema):
    effort: str | None = None
    summary: str | None = None


class _PromptCacheOptions(Schema):
    comparison_response_id: str | None = Field(None, max_length=512)


class ResponsesRequest(RequestFields):
    """The body of `POST /v1/responses`."""

    model_config = example({"input": "Say hi."})

    input: str | list[InputItem] | None = Field(None, max_length=None)
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=512)
    store: bool | None = None
    background: bool | None = None
    include: Limited[list[str] | None] = None
    tools: Limited[list[ResponsesTool] | None] = None
    tool_choice: Literal["none", "auto", "required"] | _ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None
    max_output_tokens: int | None = Field(None, ge=NO_LIMIT)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    metadata: Limited[dict[str, str] | None] = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_options: _PromptCacheOptions | None = None
    conversation: Any = None
    prompt: Any = None

    @field_validator("input", mode="before")
    @classmethod
    def _cap_items(cls, value: object) -> object:
        return limit_entries(value, MAX_MESSAGES)

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def wants_handles(self) -> bool:
        """Whether reasoning items include `encrypted_content`, the handle of their thinking."""
        return _ENCRYPTED in (self.include or ())

    @property
    def offered(self) -> list[ResponsesTool]:
        return [tool for tool in self.tools or () if tool.is_offered]

    @property
    def has_references(self) -> bool:
        return any(item.type == "item_reference" for item in self._items)

    def resolve_references(self, find_item: Callable[[str], Json | None]) -> None:
        """Replace references to stored items by the items; mutates the input.

        Raises:
            ItemNotFoundError: an item is not stored.
        """
        for index, item in enumerate(self._items):
            if item.type != "item_reference":
                continue
            found = find_item(item.id or "")
            if found is None:
                raise ItemNotFoundError(
                    f"there is no stored item {item.id!r}; send the item itself. Responses with "
                    "store: false and deleted responses keep no items.",
                    param=f"input[{index}].id",
                )
            self._items[index] = InputItem.model_validate(found)

    @property
    def _items(self) -> list[InputItem]:
        return self.input if isinstance(self.input, list) else []

    def to_domain(self, headers: AgentHint, past: PastTurn | None) -> ChatRequest:
        """Translate to a chat request; `past` is the turn that it continues."""
        refuse(self.conversation, "conversation", "send previous_response_id instead.")
        refuse(self.prompt, "prompt", "stored prompts are not supported; send input.")
        refuse(self.background and not self.is_stored, "background", "it needs store to be true.")
        for index, tool in enumerate(self.tools or ()):
            is_nameless = tool.is_offered and not tool.name
            refuse(is_nameless, f"tools[{index}].name", f"a {tool.type} tool needs it.")
        tools = tuple(
            tool.to_domain(f"tools[{index}]")
            for index, tool in enumerate(self.tools or ())
            if tool.is_offered
        )
        has_logprobs = self.top_logprobs is not None or _LOGPROBS in (self.include or ())
        messages = [sourced.message for sourced in self._messages(past)]
        return ChatRequest(
            model=self.model or "",
            messages=tuple(messages),
            tools=tools,
            tool_choice=choice_of(self.tool_choice, self.parallel_tool_calls, tools),
            sampling=self.sampling((self.top_logprobs or 0) if has_logprobs else None),
            stop=self.stop_rules(self.max_output_tokens),
            output_format=self.form(self._own_form(), "text.format"),
            thinking=thinking_of(self.reasoning.effort if self.reasoning else None),
            agent=replace(
                self.hint(headers),
                previous_turn=past.turn_id if past else None,
                comparison=self._comparison(headers),
            ),
            is_stored=self.is_stored,
            is_continued=bool(self.input) and is_continuable(messages),
        )

    @property
    def comparison_id(self) -> str | None:
        """The response to compare this one's prompt with; None if there is none."""
        options = self.prompt_cache_options
        return options.comparison_response_id if options else None

    def _comparison(self, headers: AgentHint) -> CacheComparison | None:
        if self.comparison_id is None:
            return headers.comparison
        return CacheComparison(turn_id(self.comparison_id.removeprefix(PREFIX)))

    def client_param(self, param: str | None, past: PastTurn | None) -> str | None:
        if param == "response_format":
            return self.form_param("text.format")
        names = {"messages": "input", "max_tokens": "max_output_tokens"}
        match = _MESSAGE.fullmatch(param or "")
        if match is None:
            if param and param.endswith("].parameters"):
                return self._tool_param(param)
            return names.get(param or "", param)
        messages = self._messages(past)
        source = messages[int(match[1])].source
        is_listed = source.startswith("input[") and messages[int(match[1])].message.role in (
            Role.USER,
            Role.SYSTEM,
        )
        return source + (match[2] if is_listed else "")

    def _tool_param(self, param: str) -> str:
        places = [i for i, tool in enumerate(self.tools or ()) if tool.is_offered]
        param = renumber(param, "tools", places)
        index = int(param.partition("[")[2].partition("]")[0])
        is_custom = (self.tools or [])[index].type == "custom"
        return f"tools[{index}].format" if is_custom else param

    def _messages(self, past: PastTurn | None) -> list[SourcedMessage]:
        messages: list[SourcedMessage] = []
        if self.instructions:
            parts = (TextPart(self.instructions),)
            messages.append(
                SourcedMessage(Message(Role.SYSTEM, parts, is_instruction=True), "instructions")
            )
        if past is not None:
            messages += [
                SourcedMessage(message, "previous_response_id") for message in past.messages
            ]
        new_messages = messages_of(self.input or ())
        refuse(not new_messages and past is None, "input", "it must hold at least one item.")
        return messages + new_messages

    def _own_form(self) -> OutputFormat | None:
        text_format = self.text.format if self.text else None
        if text_format is None or text_format.type == "text":
            return None
        is_bare = text_format.type == "json_schema" and text_format.schema_ is None
        refuse(is_bare, "text.format.schema", "a format of type json_schema needs it.")
        if text_format.type == "json_object":
            return JsonFormat()
        return JsonFormat(text_format.schema_, bool(text_format.strict))
