"""Request bodies of OpenAI's chat and older completions, and their translation."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, StrictInt, StrictStr, field_validator

from semantic.adapters.inbound.openai.custom_tools import (
    CustomFormat,
    custom_arguments,
    custom_tool,
)
from semantic.adapters.inbound.openai.fields import (
    MAX_REPLIES,
    RequestFields,
    StreamOptions,
    call_arguments,
    choice_of,
    inner_call_id,
    thinking_of,
)
from semantic.adapters.inbound.wire import (
    MAX_MESSAGES,
    NO_LIMIT,
    Limited,
    Schema,
    SentImage,
    ToolSchema,
    VariantSchema,
    example,
    image_place,
    limit_parts,
    refuse,
)
from semantic.domain.chat import (
    AgentHint,
    ChatRequest,
    ImagePart,
    JsonFormat,
    Message,
    OutputFormat,
    Part,
    RawPrompt,
    Role,
    TextPart,
    Thinking,
    ThinkingPart,
    ToolResultPart,
    ToolSpec,
    ToolUsePart,
    is_continuable,
)
from semantic.domain.errors import InvalidRequestError
from semantic.domain.sampling import MAX_TOP_LOGPROBS

_TOOL_PARAMETERS = re.compile(r"(tools\[(\d+)\])\.parameters")
_DEFAULT_MAX_TOKENS = 16  # OpenAI's default
_MAX_IDS = 2_000_000
_Ids: TypeAlias = list[StrictInt]
_Prompt: TypeAlias = StrictStr | _Ids | list[StrictStr] | list[_Ids]


# -- messages ----------------------------------------------------------------------------------


class _ImageUrl(Schema):
    url: str


class _Content(VariantSchema):
    needed: ClassVar = {"text": ["text"], "image_url": ["image_url"], "refusal": ["refusal"]}

    type: Literal["text", "image_url", "refusal"]
    text: str | None = None
    image_url: _ImageUrl | None = None
    refusal: str | None = None

    def to_domain(self) -> TextPart | ImagePart:
        if self.type == "image_url" and self.image_url is not None:
            return SentImage.of(self.image_url.url)
        return TextPart(self.text or self.refusal or "")


class _CalledFunction(Schema):
    name: str
    arguments: str | None = None


class _CalledCustom(Schema):
    name: str
    input: str = ""


class _ToolCall(VariantSchema):
    needed: ClassVar = {"function": ["function"], "custom": ["custom"]}

    type: Literal["function", "custom"] = "function"
    id: str = ""
    function: _CalledFunction | None = None
    custom: _CalledCustom | None = None

    def to_domain(self) -> ToolUsePart:
        call_id, custom, function = inner_call_id(self.id), self.custom, self.function
        if self.type == "custom" and custom is not None:
            arguments = custom_arguments(custom.input)
            return ToolUsePart(call_id, custom.name, arguments, is_custom=True)
        arguments = call_arguments((function and function.arguments) or "")
        return ToolUsePart(call_id, function.name if function else "", arguments)


class ChatMessage(VariantSchema):
    """One message of a conversation."""

    needed: ClassVar = {
        **dict.fromkeys(("system", "developer", "user"), ("content",)),
        "tool": ("content", "tool_call_id"),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Content] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Limited[list[_ToolCall] | None] = None
    tool_call_id: str | None = None

    def to_domain(self) -> Message:
        """Translate to a message; `developer` is OpenAI's newer name for `system`."""
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


# -- requests ----------------------------------------------------------------------------------


class _RepliesFields(RequestFields):
    """Fields of bodies that can request several replies, each a choice."""

    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_REPLIES)

    @property
    def num_replies(self) -> int:
        return self.n or 1

    @property
    def has_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class _JsonSchema(Schema):
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class _ResponseFormat(Schema):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: _JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # as in llama.cpp

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


class _ChatFunction(ToolSchema):
    name: str


class _CustomTool(Schema):
    name: str
    description: str | None = None
    format: CustomFormat | None = None


class _ChatTool(VariantSchema):
    needed: ClassVar = {"function": ["function"], "custom": ["custom"]}

    type: Literal["function", "custom"]
    function: _ChatFunction | None = None
    custom: _CustomTool | None = None

    def to_domain(self, index: int) -> ToolSpec:
        if self.custom is not None:
            tool = self.custom
            param = f"tools[{index}].custom.format"
            return custom_tool(tool.name, tool.description, tool.format, param)
        return (self.function or _ChatFunction(name="")).to_domain()


class _ToolName(Schema):
    name: str


class _ChosenTool(VariantSchema):
    needed: ClassVar = {"function": ["function"], "custom": ["custom"]}

    type: Literal["function", "custom"]
    function: _ToolName | None = None
    custom: _ToolName | None = None

    @property
    def name(self) -> str:
        tool = self.function or self.custom
        return tool.name if tool else ""


class _AllowedTools(Schema):
    mode: Literal["auto", "required"]
    tools: Limited[list[_ChosenTool]]


class _ChatToolChoice(_ChosenTool):
    needed: ClassVar = {**_ChosenTool.needed, "allowed_tools": ["allowed_tools"]}

    type: Literal["function", "custom", "allowed_tools"]  # type: ignore[assignment]
    allowed_tools: _AllowedTools | None = None

    @property
    def mode(self) -> str | None:
        return self.allowed_tools.mode if self.allowed_tools else None

    @property
    def allowed(self) -> list[str]:
        return [tool.name for tool in self.allowed_tools.tools] if self.allowed_tools else []


class _TemplateOptions(Schema):
    enable_thinking: bool | None = None


class _PredictedText(Schema):
    type: Literal["text"]
    text: str


class _Prediction(Schema):
    type: Literal["content"]
    content: str | list[_PredictedText]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatCompletionRequest(_RepliesFields):
    """The body of `POST /v1/chat/completions`."""

    model_config = example({"messages": [{"role": "user", "content": "Say hi."}]})

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=NO_LIMIT)
    max_completion_tokens: int | None = Field(None, ge=NO_LIMIT)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Limited[list[_ChatTool] | None] = None
    tool_choice: Literal["none", "auto", "required"] | _ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: _TemplateOptions | None = None
    prediction: _Prediction | None = None
    modalities: Limited[list[Literal["text"]] | None] = None
    functions: Limited[list[Any] | None] = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    echo: bool | None = None
    chat_template: str | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _cap_parts(cls, value: object) -> object:
        return limit_parts(value, "parts of content")

    def to_domain(self, headers: AgentHint) -> ChatRequest:
        refuse(self.functions, "functions", "functions are not supported; send tools.")
        refuse(
            self.chat_template,
            "chat_template",
            "chat_template is not supported: the server uses the model's own.",
        )
        refuse(
            self.echo,
            "echo",
            "echo is not supported: a reply does not repeat the message that it continues.",
        )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs needs logprobs to be true.", param="top_logprobs"
            )
        limit = self.max_completion_tokens
        messages = tuple(message.to_domain() for message in self.messages)
        tools = tuple(tool.to_domain(index) for index, tool in enumerate(self.tools or ()))
        return ChatRequest(
            model=self.model or "",
            messages=messages,
            tools=tools,
            tool_choice=choice_of(self.tool_choice, self.parallel_tool_calls, tools),
            sampling=self.sampling((self.top_logprobs or 0) if self.logprobs else None),
            stop=self.stop_rules(self.max_tokens if limit is None else limit),
            output_format=self.form(self._own_form(), "response_format"),
            thinking=self._thinking(),
            agent=self.hint(headers),
            is_continued=self._is_continued(messages),
            prediction=self.prediction.text if self.prediction else "",
        )

    def client_param(self, param: str | None) -> str | None:
        is_newer = param == "max_tokens" and self.max_completion_tokens is not None
        if is_newer:
            return "max_completion_tokens"
        if param == "response_format":
            return self.form_param(param)
        match = _TOOL_PARAMETERS.fullmatch(param or "")
        if match is None:
            return self._image_field(param) or param
        is_custom = (self.tools or [])[int(match[2])].type == "custom"
        return f"{match[1]}.custom.format" if is_custom else f"{match[1]}.function.parameters"

    def _image_field(self, param: str | None) -> str | None:
        place = image_place(param)
        if place is None:
            return None
        index, position = place
        content = self.messages[index].content
        part = content[position] if isinstance(content, list) and position < len(content) else None
        is_image = part is not None and part.type == "image_url"
        return f"messages[{index}].content[{position}].image_url" if is_image else None

    def _is_continued(self, messages: Sequence[Message]) -> bool:
        """Whether the reply continues the last message.

        Unless the request says otherwise, it does so whenever it can, as in llama.cpp.
        """
        is_new = self.add_generation_prompt
        choice = self.continue_final_message
        refuse(
            choice and is_new,
            "add_generation_prompt",
            "send it or continue_final_message, not both.",
        )
        is_continued = (is_continuable(messages) and not is_new) if choice is None else choice
        refuse(
            is_new is False and not is_continued,
            "add_generation_prompt",
            "it may be false only if the reply continues the last message; leave it out.",
        )
        return is_continued

    def _own_form(self) -> OutputFormat | None:
        return self.response_format.to_domain() if self.response_format else None

    def _thinking(self) -> Thinking | None:
        options = self.chat_template_kwargs
        if options is not None and options.enable_thinking is not None:
            return Thinking(options.enable_thinking)
        return thinking_of(self.reasoning_effort)


class CompletionRequest(_RepliesFields):
    """The body of `POST /v1/completions`."""

    model_config = example({"prompt": "The capital of France is"})

    prompt: Annotated[_Prompt, Field(union_mode="left_to_right")]
    max_tokens: int | None = Field(None, ge=NO_LIMIT)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, value: object) -> object:
        """Report one error for an invalid prompt, not one for each type it could have."""
        entries: list[Any] = value if isinstance(value, list) else [value]
        kinds = {type(entry) for entry in entries}
        is_known = kinds in ({str}, {int}) or (
            kinds == {list}
            and all(ids and {type(token) for token in ids} == {int} for ids in entries)
        )
        if not is_known:
            raise ValueError("it must be a string, a list of strings, token ids, or lists of them")
        if len(entries) > (_MAX_IDS if kinds == {int} else MAX_REPLIES):
            raise ValueError(f"at most {MAX_REPLIES} prompts are allowed, not {len(entries)}")
        return value

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        ids = tuple(entry for entry in prompt if isinstance(entry, int))
        if ids:
            return [ids]
        return [p if isinstance(p, str) else tuple(p) for p in prompt if not isinstance(p, int)]

    @property
    def is_prompt_scored(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    def to_domain(self, headers: AgentHint) -> list[ChatRequest]:
        is_text = all(isinstance(prompt, str) for prompt in self.prompts)
        refuse(self.suffix and not is_text, "suffix", "it needs a prompt of text, not token ids.")
        refuse(
            self.suffix and self.is_prompt_scored,
            "suffix",
            "it is not supported with echo and logprobs; leave one of them out.",
        )
        refuse(
            self.best_of not in (None, 1, self.num_replies),
            "best_of",
            "best_of is not supported; leave it out, or set it to n.",
        )
        if len(self.prompts) * self.num_replies > MAX_REPLIES:
            raise InvalidRequestError(
                f"at most {MAX_REPLIES} replies per request are allowed.", param="n"
            )
        output_format = self.form(None, "response_format")
        max_tokens = _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return [
            ChatRequest(
                model=self.model or "",
                messages=(),
                raw_prompt=RawPrompt(prompt, self.suffix or "", is_scored=self.is_prompt_scored),
                sampling=self.sampling(self.logprobs),
                stop=self.stop_rules(max_tokens),
                output_format=output_format,
                agent=self.hint(headers),
            )
            for prompt in self.prompts
        ]

    def client_param(self, param: str | None) -> str | None:
        if param == "response_format":
            return self.form_param(param)
        return "prompt" if param == "messages" else param
