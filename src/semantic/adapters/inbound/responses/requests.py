"""The request body of OpenAI's Responses API, and its translation to a chat request."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from semantic.adapters.inbound.http.streaming import Json
from semantic.adapters.inbound.openai.custom_tools import CustomFormat, custom_tool
from semantic.adapters.inbound.openai.fields import RequestFields, choice_of, thinking_of
from semantic.adapters.inbound.responses.events import PREFIX
from semantic.adapters.inbound.responses.items import (
    InputItem,
    ItemContent,
    SourcedMessage,
    messages_of,
)
from semantic.adapters.inbound.wire import (
    MAX_MESSAGES,
    NO_LIMIT,
    Limited,
    Schema,
    ToolSchema,
    VariantSchema,
    example,
    image_place,
    limit_entries,
    refuse,
    renumber,
)
from semantic.application.agents.turn_log import turn_id
from semantic.domain.chat import (
    AgentHint,
    CacheComparison,
    ChatRequest,
    JsonFormat,
    Message,
    OutputFormat,
    Role,
    TextPart,
    ToolSpec,
    is_continuable,
)
from semantic.domain.errors import ItemNotFoundError
from semantic.domain.sampling import MAX_TOP_LOGPROBS
from semantic.ports.inbound import PastTurn

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
        if field := self._image_field(source, param):
            return field
        is_listed = source.startswith("input[") and messages[int(match[1])].message.role in (
            Role.USER,
            Role.SYSTEM,
        )
        return source + (match[2] if is_listed else "")

    def _image_field(self, source: str, param: str | None) -> str | None:
        place = image_place(param)
        if place is None or not source.startswith("input["):
            return None
        item, position = self._items[int(source[6:-1])], place[1]
        name = "content" if item.type == "message" else "output"
        parts: str | list[ItemContent] | None = getattr(item, name)
        part = parts[position] if isinstance(parts, list) and position < len(parts) else None
        is_image = part is not None and part.type == "input_image"
        return f"{source}.{name}[{position}].image_url" if is_image else None

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
