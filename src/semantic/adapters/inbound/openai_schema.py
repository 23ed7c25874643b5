"""OpenAI's chat request as clients send it, and its translation to ours.

Unknown fields are ignored, as OpenAI's own servers do; fields we know and cannot honour are
refused by name. A value must have the type JSON gives it: no number comes from a string.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationInfo, field_validator

from semantic.domain.agents import check_agent_id
from semantic.domain.chat import (
    AgentHint,
    ChatRequest,
    ImagePart,
    JsonFormat,
    Message,
    OutputFormat,
    Part,
    Role,
    TextPart,
    ToolSpec,
)
from semantic.domain.errors import InvalidRequestError
from semantic.domain.sampling import MAX_TOP_LOGPROBS, SamplingParams, StopRules


class _Schema(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


_MAX_MESSAGES = 10_000
_MAX_PARTS = 10_000  # in all messages together
_MAX_ENTRIES = 1024  # in any other list

# Keys of a JSON object are strings, whatever they mean.
_TokenId = Annotated[int, Strict(False)]


class _ImageUrl(_Schema):
    url: str


class _Content(_Schema):
    """A part of a message. One class for all types, so that an error names the wrong field."""

    type: Literal["text", "image_url"]
    text: str | None = Field(None, validate_default=True)
    image_url: _ImageUrl | None = Field(None, validate_default=True)

    @field_validator("text", "image_url")
    @classmethod
    def _require_own_field(
        cls, value: str | _ImageUrl | None, info: ValidationInfo
    ) -> str | _ImageUrl | None:
        if value is None and info.data.get("type") == info.field_name:
            raise ValueError(f"a part of type {info.field_name} needs it")
        return value

    def to_domain(self) -> Part:
        if self.type == "image_url" and self.image_url is not None:
            return ImagePart("image/*", self.image_url.url)
        return TextPart(self.text or "")


class ChatMessage(_Schema):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Content]

    def to_domain(self) -> Message:
        """Translate; `developer` is OpenAI's newer word for `system`."""
        role = Role.SYSTEM if self.role == "developer" else Role(self.role)
        if isinstance(self.content, str):
            return Message.of(role, self.content)
        return Message(role, tuple(part.to_domain() for part in self.content))


class StreamOptions(_Schema):
    """What a stream carries besides the reply."""

    include_usage: bool | None = None


class _ResponseFormat(_Schema):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: dict[str, Any] | None = None


class _Function(_Schema):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(_Schema):
    type: Literal["function"]
    function: _Function


class ChatCompletionRequest(_Schema):
    """The body of `POST /v1/chat/completions`."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1, max_length=_MAX_MESSAGES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[_TokenId, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    n: int | None = None
    tools: list[_Tool] | None = None
    response_format: _ResponseFormat | None = None
    session_id: str | None = Field(None, max_length=512)

    # Before their entries are looked at: a million complaints would keep everyone waiting.
    @field_validator("logit_bias", "stop", "stop_token_ids", "tools", mode="before")
    @classmethod
    def _cap_entries(cls, value: object) -> object:
        if isinstance(value, list | dict) and len(value) > _MAX_ENTRIES:
            raise ValueError(f"at most {_MAX_ENTRIES} entries are allowed, not {len(value)}")
        return value

    @field_validator("messages", mode="before")
    @classmethod
    def _cap_parts(cls, value: object) -> object:
        messages = value if isinstance(value, list) else []
        contents = (message.get("content") for message in messages if isinstance(message, dict))
        num_parts = sum(len(content) for content in contents if isinstance(content, list))
        if num_parts > _MAX_PARTS:
            raise ValueError(f"at most {_MAX_PARTS} parts of content are allowed, not {num_parts}")
        return value

    def to_domain(self, agent_id: str | None) -> ChatRequest:
        """Translate to our terms.

        Raises:
            InvalidRequestError: a field has a value we cannot honour.
        """
        if self.n not in (None, 1):
            raise InvalidRequestError("only one reply a request is supported.", param="n")
        if agent_id is not None:
            check_agent_id(agent_id, "X-Agent-ID")
        return ChatRequest(
            model=self.model,
            messages=tuple(message.to_domain() for message in self.messages),
            tools=tuple(_to_tool(tool) for tool in self.tools or ()),
            sampling=self._sampling(),
            stop=self._stop(),
            output_format=self._output_format(),
            agent=AgentHint(agent_id=agent_id, session=self.session_id),
        )

    def spelled(self, param: str | None) -> str | None:
        """Return our name of a field as this client spelled it."""
        is_newer = param == "max_tokens" and self.max_completion_tokens is not None
        return "max_completion_tokens" if is_newer else param

    def _sampling(self) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs needs logprobs to be true.", param="top_logprobs"
            )
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": self.seed,
            "top_logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }
        bias = tuple((self.logit_bias or {}).items())
        known: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**known, logit_bias=bias)

    def _stop(self) -> StopRules:
        strings = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        wanted = self.max_completion_tokens
        return StopRules(
            max_tokens=self.max_tokens if wanted is None else wanted,
            strings=strings,
            token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )

    def _output_format(self) -> OutputFormat | None:
        if self.response_format is None or self.response_format.type == "text":
            return None
        return JsonFormat((self.response_format.json_schema or {}).get("schema"))


def _to_tool(tool: _Tool) -> ToolSpec:
    function = tool.function
    return ToolSpec(
        function.name,
        function.description or "",
        function.parameters or {},
        is_strict=bool(function.strict),
    )
