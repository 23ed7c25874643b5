"""What OpenAI's clients are answered, for the OpenAPI document; nothing is checked against it here.

The documents say what is always there; replies may hold more.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Documented(BaseModel):
    model_config = ConfigDict(extra="allow")


class ErrorDetail(_Documented):
    """What went wrong, and by which field."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(_Documented):
    """Every refusal and failure."""

    error: ErrorDetail


class _PromptDetails(_Documented):
    cached_tokens: int = Field(ge=0)
    cache_write_tokens: int = Field(ge=0)


class _CompletionDetails(_Documented):
    reasoning_tokens: int = Field(ge=0)


class ReplyUsage(_Documented):
    """Tokens of a request."""

    prompt_tokens: int = Field(ge=1)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=1)
    prompt_tokens_details: _PromptDetails
    completion_tokens_details: _CompletionDetails


class _CalledFunction(_Documented):
    name: str
    arguments: str


class _ToolCall(_Documented):
    id: str
    type: Literal["function"]
    function: _CalledFunction


class _ReplyMessage(_Documented):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[_ToolCall] = []


class _ChatChoice(_Documented):
    index: int = Field(ge=0)
    message: _ReplyMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(_Documented):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[_ChatChoice] = Field(min_length=1)
    usage: ReplyUsage
    durable: bool | None = Field(
        None, description="whether the turn is safe on disk; only with durability sync"
    )


class _CompletionLogprobs(_Documented):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class _CompletionChoice(_Documented):
    index: int = Field(ge=0)
    text: str
    logprobs: _CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(_Documented):
    """The answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[_CompletionChoice] = Field(min_length=1)
    usage: ReplyUsage
    durable: bool | None = Field(
        None, description="whether the turn is safe on disk; only with durability sync"
    )


class Model(_Documented):
    """A model that requests may name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_context: int
    max_model_len: int


class ModelList(_Documented):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is refused."},
    503: {"model": ErrorBody, "description": "No model is ready, or the queue is full."},
    504: {"model": ErrorBody, "description": "The request took too long."},
}


def reply_or_stream(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Document an answer that is an object, or a stream of events."""
    stream = {"text/event-stream": {"schema": {"description": "Server-sent events."}}}
    return {200: {"model": model, "content": stream, "description": "The reply."}}
