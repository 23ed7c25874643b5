"""What `/v1/responses` answers, for the OpenAPI document; nothing is checked against it here."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Documented(BaseModel):
    model_config = ConfigDict(extra="allow")


class _InputDetails(_Documented):
    cached_tokens: int = Field(ge=0)
    cache_write_tokens: int = Field(ge=0)


class _OutputDetails(_Documented):
    reasoning_tokens: int = Field(ge=0)


class _Usage(_Documented):
    input_tokens: int = Field(ge=1)
    input_tokens_details: _InputDetails
    output_tokens: int = Field(ge=0)
    output_tokens_details: _OutputDetails
    total_tokens: int = Field(ge=1)


class _OutputItem(_Documented):
    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["completed", "incomplete"]


class _Failure(_Documented):
    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class ResponseBody(_Documented):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "failed", "in_progress", "cancelled", "incomplete"]
    model: str
    output: list[_OutputItem]
    error: _Failure | None
    incomplete_details: dict[str, str] | None
    usage: _Usage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    durable: bool | None = Field(
        None, description="whether the turn is safe on disk; only with durability sync"
    )


class DeletedResponse(_Documented):
    """A response that is gone."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]
