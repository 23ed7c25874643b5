"""Error responses: one table maps errors to statuses and to the vendors' formats."""

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from semantic.adapters.inbound.http.streaming import CLIENT_LEFT
from semantic.adapters.validation import field_path, most_telling, plain_reason
from semantic.domain import errors
from semantic.domain.access import Allowance


class _Row(NamedTuple):
    error: type[errors.SemanticError]
    status: int
    type: str
    code: str
    anthropic_status: int
    anthropic_type: str


_INVALID, _LIMIT, _FAULT = "invalid_request_error", "rate_limit_error", "server_error"
_AUTH = "authentication_error"
# The first matching row applies, so subclasses come before their base.
_TABLE = (
    _Row(errors.ContextLengthError, 400, _INVALID, "context_length_exceeded", 400, _INVALID),
    _Row(errors.ConflictError, 409, _INVALID, "conflict", 400, _INVALID),
    _Row(errors.ItemNotFoundError, 404, _INVALID, "item_not_found", 404, "not_found_error"),
    _Row(errors.InvalidRequestError, 400, _INVALID, "invalid_request", 400, _INVALID),
    _Row(errors.AuthenticationError, 401, _AUTH, "invalid_api_key", 401, _AUTH),
    _Row(errors.AgentNotFoundError, 404, _INVALID, "agent_not_found", 404, "not_found_error"),
    _Row(errors.ModelNotFoundError, 404, _INVALID, "model_not_found", 404, "not_found_error"),
    _Row(errors.RateLimitedError, 429, _LIMIT, "rate_limit_exceeded", 429, _LIMIT),
    _Row(errors.QuotaExceededError, 429, _LIMIT, "quota_exceeded", 429, _LIMIT),
    _Row(errors.PoolExhaustedError, 429, _LIMIT, "memory_exhausted", 429, _LIMIT),
    _Row(errors.OverloadedError, 503, _FAULT, "overloaded", 529, "overloaded_error"),
    _Row(errors.ModelSwapError, 503, _FAULT, "model_not_ready", 503, "api_error"),
    _Row(errors.DrainingError, 503, _FAULT, "shutting_down", 503, "api_error"),
    _Row(errors.CachePersistenceError, 503, _FAULT, "not_written", 503, "api_error"),
    _Row(errors.GenerationTimeoutError, 504, _FAULT, "timeout", 504, "timeout_error"),
    _Row(errors.SemanticError, 500, _FAULT, "internal_error", 500, "api_error"),
)
# The vendors' error types for responses that do not come from a `SemanticError`.
_OPENAI_TYPES = {401: _AUTH, 429: _LIMIT}
_ANTHROPIC_TYPES = {
    401: _AUTH,
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# Our field names that differ from Anthropic's.
_ANTHROPIC_FIELDS = {"stop": "stop_sequences", "response_format": "output_config.format"}
_MEANINGS: dict[int | str, str] = {
    "4XX": "The server refuses the request.",
    400: "the request is invalid",
    404: "there is no such agent or turn",
    409: "the request conflicts with the current state",
    413: "the body is too large",
    429: "a quota or a rate limit is exceeded",
    501: "the server does not manage models in this way",
    503: "no model is loaded, the queue is full, the disk cannot be written, or the server stops",
    504: "the request took too long",
    529: "the queue is full",
}


# Models, whose schemas pydantic builds once: that of a TypedDict is built again for every route.


class ErrorDetail(BaseModel, extra="forbid"):
    """The error, and the field that caused it."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel, extra="forbid"):
    """The body of every error response."""

    error: ErrorDetail


class OllamaErrorBody(BaseModel):
    """The body of every error response to Ollama's clients."""

    error: str


class AnthropicErrorDetail(BaseModel):
    """The error, for Anthropic's clients."""

    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """The body of every error response to Anthropic's clients."""

    type: Literal["error"]
    error: AnthropicErrorDetail


def refusals(
    *statuses: int | str, body: type[BaseModel] = ErrorBody
) -> dict[int | str, dict[str, Any]]:
    """Document the error responses of an endpoint.

    The first one defines the schema of the body. The others refer to it, because FastAPI builds a
    validator for every model that it is given.
    """
    reference = {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}
    known = {"content": {"application/json": reference}}
    return {
        status: {"description": _MEANINGS[status], **(known if place else {"model": body})}
        for place, status in enumerate(statuses)
    }


def openai_body(error: errors.SemanticError) -> dict[str, Any]:
    """Format an error for OpenAI's clients, in a response or in a stream."""
    row, message, param = _row(error), error.message, None
    if isinstance(error, errors.ModelNotFoundError):
        param = "model"
    elif isinstance(error, errors.InvalidRequestError):
        param = error.param
    # Many clients show only the message, so it names the field.
    if param is not None and param.rpartition(".")[2].partition("[")[0] not in message:
        message = f"{param}: {message}"
    return _openai(message, row.type, row.code, param)


def anthropic_body(error: errors.SemanticError) -> dict[str, Any]:
    """Format an error for Anthropic's clients, in a response or in a stream."""
    message = error.message
    if isinstance(error, errors.ContextLengthError):
        # Clients parse the numbers in this sentence to shorten the next request.
        message = f"prompt is too long: {error.num_prompt} tokens > {error.limit - 1} maximum"
    elif isinstance(error, errors.InvalidRequestError) and error.param is not None:
        message = f"{_anthropic_field(error.param)}: {message}"
    return _anthropic(_row(error).anthropic_type, message)


def _row(error: errors.SemanticError) -> _Row:
    return next(row for row in _TABLE if isinstance(error, row.error))


def _openai(message: str, kind: str, code: str, param: str | None) -> dict[str, Any]:
    detail = ErrorDetail(message=_plain(message), type=kind, param=param, code=code)
    return ErrorBody(error=detail).model_dump()


def _anthropic(kind: str, message: str) -> dict[str, Any]:
    detail = AnthropicErrorDetail(type=kind, message=_plain(message))
    return AnthropicErrorBody(type="error", error=detail).model_dump()


def _plain(message: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot express: a message may quote what was sent."""
    return message.encode(errors="backslashreplace").decode()


def _anthropic_field(param: str) -> str:
    """Translate a field name to Anthropic's.

    Example:
        >>> _anthropic_field("tools[0].parameters"), _anthropic_field("stop")
        ('tools[0].input_schema', 'stop_sequences')
    """
    if param.endswith("].parameters"):
        return f"{param.removesuffix('parameters')}input_schema"
    return _ANTHROPIC_FIELDS.get(param, param)


class _VendorResponse(Response):
    """An error in the format of the client's vendor, which is chosen when it is sent.

    Ollama's clients get the status and the message that OpenAI's get; its body has no other field.
    """

    def __init__(self, openai: JSONResponse, status: int, anthropic: dict[str, Any]) -> None:
        super().__init__(status_code=openai.status_code)
        self._openai = openai
        self._status = status
        self._anthropic = anthropic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._openai
        headers = {k: v for k, v in response.headers.items() if not k.startswith("content-")}
        if _is_anthropic(scope):
            request_id = scope.get("state", {}).get("request_id")
            body = {**self._anthropic, "request_id": request_id}
            response = JSONResponse(body, self._status, headers)
        elif scope["path"].startswith("/api/"):
            error = json.loads(bytes(response.body))["error"]
            message, param = error["message"], error["param"] or ""
            if "[" in param and param not in message:  # one of several entries
                message = f"{param}: {message}"
            response = JSONResponse({"error": message}, response.status_code, headers)
        await response(scope, receive, send)


def _is_anthropic(scope: Scope) -> bool:
    path: str = scope["path"]
    own = ("/v1/messages", "/api/hello", "/api/event_logging")
    return path.startswith(own) or "anthropic-version" in Headers(scope=scope)


def error_response(
    status: int,
    message: str,
    code: str,
    *,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Build an error response without a `SemanticError`, such as for an unknown path."""
    kind = _OPENAI_TYPES.get(status, _FAULT if status >= 500 else _INVALID)
    openai = JSONResponse(_openai(message, kind, code, param), status, headers)
    usual = "api_error" if status >= 500 else _INVALID
    return _VendorResponse(openai, status, _anthropic(_ANTHROPIC_TYPES.get(status, usual), message))


def allowance_headers(left: Allowance) -> dict[str, str]:
    """Format the remaining rate limit as headers for OpenAI's and Anthropic's clients.

    Example:
        >>> headers = allowance_headers(Allowance("tokens", 1000, 400, 36.0))
        >>> headers["x-ratelimit-remaining-tokens"], headers["x-ratelimit-reset-tokens"]
        ('400', '36s')
    """
    minutes, seconds = divmod(math.ceil(left.reset_s), 60)
    again = datetime.now(UTC) + timedelta(seconds=math.ceil(left.reset_s))
    values = (str(left.limit), str(left.remaining))
    openai, anthropic = "x-ratelimit", f"anthropic-ratelimit-{left.kind}"
    return {
        f"{openai}-limit-{left.kind}": values[0],
        f"{openai}-remaining-{left.kind}": values[1],
        f"{openai}-reset-{left.kind}": f"{minutes}m{seconds}s" if minutes else f"{seconds}s",
        f"{anthropic}-limit": values[0],
        f"{anthropic}-remaining": values[1],
        f"{anthropic}-reset": again.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def install_error_handlers(app: FastAPI) -> None:
    """Install handlers that answer every expected error in the vendors' formats.

    `AccessLog` answers unexpected exceptions.
    """
    app.add_exception_handler(ClientDisconnect, _client_disconnected)

    @app.exception_handler(errors.SemanticError)
    async def _semantic(_: Request, error: errors.SemanticError) -> Response:
        row = _row(error)
        openai = JSONResponse(openai_body(error), row.status, _retry_headers(error))
        return _VendorResponse(openai, row.anthropic_status, anthropic_body(error))

    @app.exception_handler(RequestValidationError)
    async def _validation(_: Request, error: RequestValidationError) -> Response:
        problem = most_telling(error.errors())
        param = field_path(problem["loc"][1:])
        if problem["type"] == "json_invalid":
            return _not_json(problem["ctx"]["error"])
        if isinstance(error.body, bytes):  # FastAPI did not parse it as JSON
            message = "send content-type: application/json."
        else:
            message = f"{param or 'the body'}: {plain_reason(problem)}"
        return error_response(400, message, "invalid_request", param=param)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        if error.status_code == 400:
            # FastAPI raises 400 if it fails to parse: bad UTF-8, deep nesting, huge numbers.
            return _not_json()
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is no endpoint {request.method} {request.url.path}."
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"{request.url.path} takes {allowed}, not {request.method}."
        return error_response(error.status_code, message, "http_error", headers=error.headers)


def _retry_headers(error: errors.SemanticError) -> dict[str, str]:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, errors.RateLimitedError) and error.allowance is not None:
        kind, limit, reset_s = error.allowance
        headers |= allowance_headers(Allowance(kind, limit, 0, reset_s))
    if isinstance(error, errors.QuotaExceededError):
        headers["x-should-retry"] = "false"  # otherwise clients retry for minutes
    return headers


async def _client_disconnected(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


def _not_json(detail: str = "") -> Response:
    message = f"the body is not valid JSON: {detail}".rstrip(": ")
    return error_response(400, message, "invalid_request")
