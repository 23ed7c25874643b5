"""OpenAI's chat request as clients send it, and its translation to ours.

Unknown fields are ignored, as OpenAI's own servers do; fields we know and cannot honour are
refused by name.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

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
    model_config = ConfigDict(extra="ignore")


class _TextContent(_Schema):
    type: Literal["text"]
    text: str


class _ImageUrl(_Schema):
    url: str


class _ImageContent(_Schema):
    type: Literal["image_url"]
    image_url: _ImageUrl


_Content = Annotated[_TextContent | _ImageContent, Field(discriminator="type")]


class ChatMessage(_Schema):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Content]

    def to_domain(self) -> Message:
        """Translate; `developer` is OpenAI's newer word for `system`."""
        role = Role.SYSTEM if self.role == "developer" else Role(self.role)
        if isinstance(self.content, str):
            return Message.of(role, self.content)
        parts: list[Part] = []
        for content in self.content:
            if isinstance(content, _TextContent):
                parts.append(TextPart(content.text))
            else:
                parts.append(ImagePart("image/*", content.image_url.url))
        return Message(role, tuple(parts))


class StreamOptions(_Schema):
    """What a stream carries besides the reply."""

    include_usage: bool = False


class _ResponseFormat(_Schema):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: dict[str, Any] | None = None


class _Function(_Schema):
    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = None


class _Tool(_Schema):
    type: Literal["function"]
    function: _Function


class ChatCompletionRequest(_Schema):
    """The body of `POST /v1/chat/completions`."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    n: int | None = None
    tools: list[_Tool] | None = None
    response_format: _ResponseFormat | None = None
    session_id: str | None = None

    def to_domain(self, agent_id: str | None) -> ChatRequest:
        """Translate to our terms.

        Raises:
            InvalidRequestError: a field has a value we cannot honour.
        """
        if self.n not in (None, 1):
            raise InvalidRequestError("only one reply a request is supported.", param="n")
        return ChatRequest(
            model=self.model,
            messages=tuple(message.to_domain() for message in self.messages),
            tools=tuple(_to_tool(tool) for tool in self.tools or ()),
            sampling=self._sampling(),
            stop=self._stop(),
            output_format=self._output_format(),
            agent=AgentHint(agent_id=agent_id, session=self.session_id),
        )

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
            ignore_eos=self.ignore_eos,
        )

    def _output_format(self) -> OutputFormat | None:
        if self.response_format is None or self.response_format.type == "text":
            return None
        return JsonFormat((self.response_format.json_schema or {}).get("schema"))


def _to_tool(tool: _Tool) -> ToolSpec:
    function = tool.function
    return ToolSpec(
        function.name, function.description, function.parameters, is_strict=bool(function.strict)
    )
