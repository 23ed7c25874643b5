"""Errors as Anthropic's clients parse them, and which requests come from such a client."""

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from semantic.domain import errors

# The first class that fits decides, so subclasses come before their base.
_STATUS: tuple[tuple[type[errors.SemanticError], int, str], ...] = (
    (errors.InvalidRequestError, 400, "invalid_request_error"),
    (errors.AuthenticationError, 401, "authentication_error"),
    (errors.AgentNotFoundError, 404, "not_found_error"),
    (errors.ModelNotFoundError, 404, "not_found_error"),
    (errors.RateLimitedError, 429, "rate_limit_error"),
    (errors.QuotaExceededError, 429, "rate_limit_error"),
    (errors.PoolExhaustedError, 429, "rate_limit_error"),
    (errors.OverloadedError, 529, "overloaded_error"),
    (errors.ModelSwapError, 503, "api_error"),
    (errors.DrainingError, 503, "api_error"),
    (errors.GenerationTimeoutError, 504, "timeout_error"),
    (errors.SemanticError, 500, "api_error"),
)
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# Our names of fields whose names differ from Anthropic's.
_SPELLINGS = {"stop": "stop_sequences", "response_format": "output_config.format"}


def is_anthropic(scope: Scope) -> bool:
    """Whether a request expects Anthropic's shapes: by its path, or by its version header."""
    path: str = scope["path"]
    own = ("/v1/messages", "/api/hello", "/api/event_logging")
    return path.startswith(own) or "anthropic-version" in Headers(scope=scope)


def anthropic_status(error: errors.SemanticError) -> int:
    """The HTTP status of an error."""
    return next(status for kind, status, _ in _STATUS if isinstance(error, kind))


def anthropic_body(error: errors.SemanticError) -> dict[str, object]:
    """An error as Anthropic's clients parse it, in a response or in a stream."""
    kind = next(name for cls, _, name in _STATUS if isinstance(error, cls))
    return _body(kind, _message(error))


def _body(kind: str, message: str) -> dict[str, object]:
    return {"type": "error", "error": {"type": kind, "message": message}}


def _message(error: errors.SemanticError) -> str:
    match error:
        case errors.ContextLengthError(num_prompt=prompt, limit=limit):
            # Clients read the numbers off this sentence, and shorten what they send.
            return f"prompt is too long: {prompt} tokens > {limit - 1} maximum"
        case errors.InvalidRequestError(param=str(param)):
            return f"{_spelled(param)}: {error.message}"
        case _:
            return error.message


def _spelled(param: str) -> str:
    """A field as Anthropic writes it.

    Example:
        >>> _spelled("tools[0].parameters"), _spelled("stop")
        ('tools[0].input_schema', 'stop_sequences')
    """
    if param.endswith("].parameters"):
        return f"{param.removesuffix('parameters')}input_schema"
    return _SPELLINGS.get(param, param)


class VendorResponse(Response):
    """An error in the shape of the caller's vendor, which is known once it is sent.

    Args:
        openai: The answer to everyone else.
        status: Of the answer to Anthropic's clients.
        anthropic: Its body.
    """

    def __init__(self, openai: JSONResponse, status: int, anthropic: dict[str, object]) -> None:
        super().__init__(status_code=openai.status_code)
        self._openai = openai
        self._status = status
        self._anthropic = anthropic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        response = self._openai
        if is_anthropic(scope):
            request_id = scope.get("state", {}).get("request_id")
            body = {**self._anthropic, "request_id": request_id}
            kept = {k: v for k, v in self._openai.headers.items() if not k.startswith("content-")}
            response = JSONResponse(body, self._status, kept)
        await response(scope, receive, send)


def in_callers_shape(
    openai: JSONResponse, message: str, error: errors.SemanticError | None = None
) -> VendorResponse:
    """Answer with an error in the shape the caller expects.

    Args:
        openai: The answer in OpenAI's shape.
        message: What is wrong, where it is no error of ours.
        error: The error of ours.
    """
    if error is not None:
        return VendorResponse(openai, anthropic_status(error), anthropic_body(error))
    status = openai.status_code
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return VendorResponse(openai, status, _body(kind, message))
