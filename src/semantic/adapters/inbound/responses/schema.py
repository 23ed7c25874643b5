"""OpenAI's Responses request as clients send it, and its translation to ours."""

import re
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from semantic.adapters.inbound.openai.fields import (
    RequestFields,
    Schema,
    capped,
    refuse,
    thinking_of,
)
from semantic.adapters.inbound.responses.items import InputItem, Sourced, messages_of
from semantic.adapters.inbound.wire import NO_LIMIT
from semantic.domain.chat import (
    AgentHint,
    ChatRequest,
    JsonFormat,
    Message,
    OutputFormat,
    Role,
    TextPart,
    ToolChoice,
    ToolMode,
    ToolSpec,
    is_continuable,
)
from semantic.domain.sampling import MAX_TOP_LOGPROBS
from semantic.ports.inbound import PastTurn

_MAX_ITEMS = 10_000
_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"
_MESSAGE = re.compile(r"messages\[(\d+)\](.*)")


class _Tool(Schema):
    """A tool of any type; all but functions are skipped."""

    type: str
    name: str | None = Field(None, validate_default=True)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("name")
    @classmethod
    def _require_name(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("type") == "function":
            raise ValueError("a function needs it")
        return value

    def to_domain(self) -> ToolSpec:
        return ToolSpec(
            self.name or "",
            self.description or "",
            self.parameters or {},
            is_strict=bool(self.strict),
        )


class _NamedTool(Schema):
    type: Literal["function"]
    name: str


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


class ResponsesRequest(RequestFields):
    """The body of `POST /v1/responses`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "smollm2-135m-instruct",
                    "input": "Say hi.",
                }
            ]
        }
    )

    input: str | list[InputItem] | None = Field(None, max_length=None)
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=512)
    store: bool | None = None
    background: bool | None = None
    include: list[str] | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None
    max_output_tokens: int | None = Field(None, ge=NO_LIMIT)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    conversation: Any = None
    prompt: Any = None

    @field_validator("tools", "include", "metadata", mode="before")
    @classmethod
    def _cap(cls, value: object) -> object:
        return capped(value)

    @field_validator("input", mode="before")
    @classmethod
    def _cap_items(cls, value: object) -> object:
        return capped(value, _MAX_ITEMS)

    @property
    def is_stored(self) -> bool:
        """Whether the response may be asked for later."""
        return self.store is not False

    @property
    def wants_handles(self) -> bool:
        """Whether thinking comes with a handle that stands for it."""
        return _ENCRYPTED in (self.include or ())

    @property
    def functions(self) -> list[_Tool]:
        """The tools that the model is offered."""
        return [tool for tool in self.tools or () if tool.type == "function"]

    def to_domain(self, said: AgentHint, past: PastTurn | None) -> ChatRequest:
        """Translate to our terms.

        Args:
            said: What the headers say about who is asking.
            past: The turn this goes on from.

        Raises:
            InvalidRequestError: a field has a value we cannot honour.
        """
        refuse(self.conversation, "conversation", "send previous_response_id instead.")
        refuse(self.prompt, "prompt", "stored prompts are not supported; send input.")
        refuse(self.background and not self.is_stored, "background", "it needs store to be true.")
        has_logprobs = self.top_logprobs is not None or _LOGPROBS in (self.include or ())
        hint = self.hint(said)
        messages = [sourced.message for sourced in self._messages(past)]
        agent = AgentHint(
            hint.agent_id, hint.session, hint.client_key, past.turn_id if past else None
        )
        return ChatRequest(
            model=self.model or "",
            messages=tuple(messages),
            tools=tuple(tool.to_domain() for tool in self.functions),
            tool_choice=self._tool_choice(),
            sampling=self.sampling((self.top_logprobs or 0) if has_logprobs else None),
            stop=self.stop_rules(self.max_output_tokens),
            output_format=self.form(self._own_form(), "text.format"),
            thinking=thinking_of(self.reasoning.effort if self.reasoning else None),
            agent=agent,
            is_stored=self.is_stored,
            is_continued=bool(self.input) and is_continuable(messages),
        )

    def spelled(self, param: str | None, past: PastTurn | None) -> str | None:
        """Return our name of a field as this client spelled it."""
        if param == "response_format":
            return self.form_param("text.format")
        names = {"messages": "input", "max_tokens": "max_output_tokens"}
        found = _MESSAGE.fullmatch(param or "")
        if found is None:
            return names.get(param or "", param)
        messages = self._messages(past)
        source = messages[int(found[1])].source
        is_listed = source.startswith("input[") and messages[int(found[1])].message.role in (
            Role.USER,
            Role.SYSTEM,
        )
        return source + (found[2] if is_listed else "")

    def _messages(self, past: PastTurn | None) -> list[Sourced]:
        told: list[Sourced] = []
        if self.instructions:
            parts = (TextPart(self.instructions),)
            told.append(Sourced(Message(Role.SYSTEM, parts, is_instruction=True), "instructions"))
        if past is not None:
            told += [Sourced(message, "previous_response_id") for message in past.messages]
        given = messages_of(self.input or ())
        refuse(not given and past is None, "input", "it must hold at least one item.")
        return told + given

    def _tool_choice(self) -> ToolChoice:
        is_parallel = self.parallel_tool_calls is not False
        given = self.tool_choice or "auto"
        if isinstance(given, str):
            return ToolChoice(ToolMode(given), is_parallel=is_parallel)
        return ToolChoice(ToolMode.NAMED, given.name, is_parallel)

    def _own_form(self) -> OutputFormat | None:
        wanted = self.text.format if self.text else None
        if wanted is None or wanted.type == "text":
            return None
        is_bare = wanted.type == "json_schema" and wanted.schema_ is None
        refuse(is_bare, "text.format.schema", "a format of type json_schema needs it.")
        if wanted.type == "json_object":
            return JsonFormat()
        return JsonFormat(wanted.schema_, bool(wanted.strict))
