"""What Anthropic's clients are answered, for the OpenAPI document; nothing is checked by it."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Documented(BaseModel):
    model_config = ConfigDict(extra="allow")


class AnthropicErrorDetail(_Documented):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorBody(_Documented):
    """Every refusal and failure."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class AnthropicModel(_Documented):
    """A model that requests may name."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str


class AnthropicModelPage(_Documented):
    """All of them."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str
    last_id: str


class _MessageUsage(_Documented):
    input_tokens: int = Field(ge=0)
    cache_read_input_tokens: int = Field(ge=0)
    cache_creation_input_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)


class AnthropicMessage(_Documented):
    """The answer of `/v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: _MessageUsage
    durable: bool | None = Field(
        None, description="whether the turn is safe on disk; only with durability sync"
    )


class TokenCount(_Documented):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int = Field(ge=1)


ANTHROPIC_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": AnthropicErrorBody, "description": "The request is refused."},
    503: {"model": AnthropicErrorBody, "description": "No model is ready."},
    504: {"model": AnthropicErrorBody, "description": "The request took too long."},
    529: {"model": AnthropicErrorBody, "description": "The queue is full."},
}
