"""What HTTP clients see of errors, in OpenAI's shape; `anthropic_errors` has the other."""

import math
from collections.abc import Mapping, Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from semantic.adapters.inbound.anthropic.errors import in_callers_shape
from semantic.adapters.inbound.http.disconnects import CLIENT_LEFT
from semantic.domain import errors

# The first class that fits decides, so subclasses come before their base.
_STATUS: tuple[tuple[type[errors.SemanticError], int, str, str], ...] = (
    (errors.ContextLengthError, 400, "invalid_request_error", "context_length_exceeded"),
    (errors.ConflictError, 409, "invalid_request_error", "conflict"),
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


def error_response(
    status: int,
    message: str,
    code: str,
    *,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Answer what is no error of ours, such as an unknown path, in the same shape."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    openai = JSONResponse(_body(message, kind, code, param), status, headers)
    return in_callers_shape(openai, message)


def install_error_handlers(app: FastAPI) -> None:
    """Answer every refusal, ours or not, in one shape; defects are the access log's."""
    app.add_exception_handler(ClientDisconnect, _left)

    @app.exception_handler(errors.SemanticError)
    async def _semantic(_: Request, error: errors.SemanticError) -> Response:
        headers = {}
        if error.retry_after_s is not None:
            headers["retry-after"] = str(math.ceil(error.retry_after_s))
        if isinstance(error, errors.QuotaExceededError):
            headers["x-should-retry"] = "false"  # clients would try for minutes
        openai = JSONResponse(openai_body(error), status_of(error), headers)
        return in_callers_shape(openai, error.message, error)

    @app.exception_handler(RequestValidationError)
    async def _validation(_: Request, error: RequestValidationError) -> Response:
        problem = _most_telling(error.errors())
        param = field_path(problem["loc"][1:])
        if problem["type"] == "json_invalid":
            return _not_json(problem["ctx"]["error"])
        if isinstance(error.body, bytes):  # it was not read as JSON
            message = "send content-type: application/json."
        else:
            reason = problem["msg"].removeprefix("Value error, ")
            message = f"{param or 'the body'}: {reason}"
        return error_response(400, message, "invalid_request", param=param)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        if error.status_code == 400:
            # FastAPI raises it for what it did not expect: bad UTF-8, deep nesting, huge numbers.
            return _not_json()
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is nothing at {request.method} {request.url.path}."
        return error_response(error.status_code, message, "http_error", headers=error.headers)


async def _left(_: Request, __: Exception) -> Response:
    """Answer a client that left in the middle of its body."""
    return Response(status_code=CLIENT_LEFT)


def _not_json(detail: str = "") -> Response:
    message = f"the body is not valid JSON: {detail}".rstrip(": ")
    return error_response(400, message, "invalid_request")


def _most_telling(problems: Sequence[ErrorDetails]) -> ErrorDetails:
    """Of the first wrong field's problems the deepest: its union member is the one meant."""
    field = problems[0]["loc"][:2]
    return max((p for p in problems if p["loc"][:2] == field), key=lambda p: len(p["loc"]))


def field_path(location: tuple[int | str, ...]) -> str | None:
    """Write a place in a body as a client would.

    Example:
        >>> field_path(("messages", 0, "role"))
        'messages[0].role'
    """
    if location[-1:] == ("[key]",):
        location = location[:-2]  # a wrong key is its object's fault
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
