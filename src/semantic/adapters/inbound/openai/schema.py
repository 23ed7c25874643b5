"""OpenAI's chat request as clients send it, and its translation to ours."""

import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator

from semantic.adapters.inbound.openai.fields import (
    MAX_REPLIES,
    RequestFields,
    Schema,
    StreamOptions,
    capped,
    refuse,
    thinking_of,
)
from semantic.adapters.inbound.openai.messages import ChatMessage
from semantic.adapters.inbound.wire import NO_LIMIT
from semantic.domain.chat import (
    AgentHint,
    ChatRequest,
    JsonFormat,
    Message,
    OutputFormat,
    Thinking,
    ToolChoice,
    ToolMode,
    ToolSpec,
    is_continuable,
)
from semantic.domain.errors import InvalidRequestError
from semantic.domain.sampling import MAX_TOP_LOGPROBS

_MAX_MESSAGES = 10_000
_MAX_PARTS = 10_000  # in all messages together
_TOOL_PARAMETERS = re.compile(r"(tools\[\d+\])\.(parameters)")


class _JsonSchema(Schema):
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class _ResponseFormat(Schema):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: _JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # as llama.cpp has it

    def to_domain(self) -> OutputFormat | None:
        nested = self.json_schema
        refuse(
            self.type == "json_schema" and nested is None and self.schema_ is None,
            "response_format.json_schema",
            "a response_format of type json_schema needs it.",
        )
        refuse(
            nested is not None and self.schema_ is not None,
            "response_format.schema",
            "send it or response_format.json_schema, not both.",
        )
        if self.type == "text":
            refuse(nested or self.schema_, "response_format.type", "a schema needs json_schema.")
            return None
        if nested is not None:
            return JsonFormat(nested.schema_, bool(nested.strict))
        return JsonFormat(self.schema_)


class _Function(Schema):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(Schema):
    type: Literal["function"]
    function: _Function

    def to_domain(self) -> ToolSpec:
        function = self.function
        return ToolSpec(
            function.name,
            function.description or "",
            function.parameters or {},
            is_strict=bool(function.strict),
        )


class _FunctionName(Schema):
    name: str


class _NamedTool(Schema):
    type: Literal["function"]
    function: _FunctionName


class _TemplateOptions(Schema):
    enable_thinking: bool | None = None


class ChatCompletionRequest(RequestFields):
    """The body of `POST /v1/chat/completions`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "smollm2-135m-instruct",
                    "messages": [{"role": "user", "content": "Say hi."}],
                }
            ]
        }
    )

    messages: list[ChatMessage] = Field(min_length=1, max_length=_MAX_MESSAGES)
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=NO_LIMIT)
    max_completion_tokens: int | None = Field(None, ge=NO_LIMIT)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    n: int | None = Field(None, ge=1, le=MAX_REPLIES)
    tools: list[_Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: _TemplateOptions | None = None
    functions: list[Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    echo: bool | None = None
    chat_template: str | None = None

    @field_validator("tools", "functions", mode="before")
    @classmethod
    def _cap_tools(cls, value: object) -> object:
        return capped(value)

    @field_validator("messages", mode="before")
    @classmethod
    def _cap_parts(cls, value: object) -> object:
        messages = value if isinstance(value, list) else []
        contents = (message.get("content") for message in messages if isinstance(message, dict))
        num_parts = sum(len(content) for content in contents if isinstance(content, list))
        if num_parts > _MAX_PARTS:
            raise ValueError(f"at most {_MAX_PARTS} parts of content are allowed, not {num_parts}")
        return value

    @property
    def num_replies(self) -> int:
        """How many replies are wanted."""
        return self.n or 1

    @property
    def has_usage(self) -> bool:
        """Whether a stream is to end with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def to_domain(self, said: AgentHint) -> ChatRequest:
        """Translate to our terms.

        Raises:
            InvalidRequestError: a field has a value we cannot honour.
        """
        refuse(self.functions, "functions", "functions are not supported; send tools.")
        refuse(
            self.chat_template, "chat_template", "the model's own template is used; leave it out."
        )
        refuse(self.echo, "echo", "a reply does not repeat the message that it continues.")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs needs logprobs to be true.", param="top_logprobs"
            )
        wanted = self.max_completion_tokens
        messages = tuple(message.to_domain() for message in self.messages)
        return ChatRequest(
            model=self.model or "",
            messages=messages,
            tools=tuple(tool.to_domain() for tool in self.tools or ()),
            tool_choice=self._tool_choice(),
            sampling=self.sampling((self.top_logprobs or 0) if self.logprobs else None),
            stop=self.stop_rules(self.max_tokens if wanted is None else wanted),
            output_format=self.form(self._own_form(), "response_format"),
            thinking=self._thinking(),
            agent=self.hint(said),
            is_continued=self._is_continued(messages),
        )

    def spelled(self, param: str | None) -> str | None:
        """Return our name of a field as this client spelled it."""
        is_newer = param == "max_tokens" and self.max_completion_tokens is not None
        if is_newer:
            return "max_completion_tokens"
        if param == "response_format":
            return self.form_param(param)
        return param and _TOOL_PARAMETERS.sub(r"\1.function.\2", param)

    def _is_continued(self, messages: Sequence[Message]) -> bool:
        """Whether the reply goes on with the last message; said so, or as llama.cpp does."""
        is_new = self.add_generation_prompt
        wanted = self.continue_final_message
        refuse(
            wanted and is_new,
            "add_generation_prompt",
            "send it or continue_final_message, not both.",
        )
        is_continued = (is_continuable(messages) and not is_new) if wanted is None else wanted
        refuse(
            is_new is False and not is_continued,
            "add_generation_prompt",
            "a reply that continues no message needs the generation prompt; leave it out.",
        )
        return is_continued

    def _own_form(self) -> OutputFormat | None:
        return self.response_format.to_domain() if self.response_format else None

    def _tool_choice(self) -> ToolChoice:
        is_parallel = self.parallel_tool_calls is not False
        given = self.tool_choice or "auto"
        if isinstance(given, str):
            return ToolChoice(ToolMode(given), is_parallel=is_parallel)
        return ToolChoice(ToolMode.NAMED, given.function.name, is_parallel)

    def _thinking(self) -> Thinking | None:
        options = self.chat_template_kwargs
        if options is not None and options.enable_thinking is not None:
            return Thinking(options.enable_thinking)
        return thinking_of(self.reasoning_effort)
