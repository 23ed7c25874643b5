"""One table from errors to what HTTP clients see, in OpenAI's shape."""

import math

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from semantic.domain import errors

_log = structlog.get_logger(__name__)

# The first class that fits decides, so subclasses come before their base.
_STATUS: tuple[tuple[type[errors.SemanticError], int, str, str], ...] = (
    (errors.ContextLengthError, 400, "invalid_request_error", "context_length_exceeded"),
    (errors.InvalidRequestError, 400, "invalid_request_error", "invalid_request"),
    (errors.AuthenticationError, 401, "authentication_error", "invalid_api_key"),
    (errors.AgentNotFoundError, 404, "invalid_request_error", "agent_not_found"),
    (errors.ModelNotFoundError, 404, "invalid_request_error", "model_not_found"),
    (errors.RateLimitedError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (errors.QuotaExceededError, 429, "rate_limit_error", "quota_exceeded"),
    (errors.PoolExhaustedError, 429, "rate_limit_error", "memory_exhausted"),
    (errors.OverloadedError, 503, "server_error", "overloaded"),
    (errors.ModelSwapError, 503, "server_error", "model_not_ready"),
    (errors.DrainingError, 503, "server_error", "shutting_down"),
    (errors.GenerationTimeoutError, 504, "server_error", "timeout"),
    (errors.SemanticError, 500, "server_error", "internal_error"),
)


def status_of(error: errors.SemanticError) -> int:
    """The HTTP status of an error."""
    return next(status for kind, status, _, _ in _STATUS if isinstance(error, kind))


def openai_body(error: errors.SemanticError) -> dict[str, object]:
    """An error as OpenAI's clients parse it, in a response or in a stream."""
    kind, code = next((k, c) for cls, _, k, c in _STATUS if isinstance(error, cls))
    return _body(error.message, kind, code, _param_of(error))


def _param_of(error: errors.SemanticError) -> str | None:
    if isinstance(error, errors.ModelNotFoundError):
        return "model"
    return error.param if isinstance(error, errors.InvalidRequestError) else None


def _body(message: str, kind: str, code: str, param: str | None) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error, ours or not, in one shape."""

    @app.exception_handler(errors.SemanticError)
    async def _semantic(_: Request, error: errors.SemanticError) -> JSONResponse:
        headers = {}
        if error.retry_after_s is not None:
            headers["retry-after"] = str(math.ceil(error.retry_after_s))
        return JSONResponse(openai_body(error), status_of(error), headers)

    @app.exception_handler(RequestValidationError)
    async def _validation(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        param = field_path(first["loc"][1:])
        if first["type"] == "json_invalid":
            detail = first.get("ctx", {}).get("error", "")
            message, param = f"the body is not valid JSON: {detail}".rstrip(": "), None
        else:
            reason = first["msg"].removeprefix("Value error, ")
            message = f"{param or 'the body'}: {reason}"
        body = _body(message, "invalid_request_error", "invalid_request", param)
        return JSONResponse(body, 400)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is nothing at {request.method} {request.url.path}."
        body = _body(message, "invalid_request_error", "http_error", None)
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def _defect(request: Request, error: Exception) -> JSONResponse:
        _log.error("request failed", path=request.url.path, exc_info=error)
        body = _body("the server failed; its log says why.", "server_error", "internal_error", None)
        return JSONResponse(body, 500)


def field_path(location: tuple[int | str, ...]) -> str | None:
    """Write a place in a body as a client would.

    Example:
        >>> field_path(("messages", 0, "role"))
        'messages[0].role'
    """
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part and part[0].islower() and part.isidentifier() and not _is_variant(part):
            path += f".{part}" if path else part
    return path or None


def _is_variant(part: str) -> bool:
    """Whether a part names a member of a union rather than a field."""
    return part in {"str", "int", "float", "bool", "list", "dict"} or part.startswith("function-")
