"""Refuses requests on surplus connections, and what a request's API key does not permit.

Health probes and the page's files need no key. If keys are configured, all other paths need one,
and paths that concern all tenants need an admin key. Endpoints call `current_principal` to learn
on whose behalf they run.
"""

from collections.abc import Iterator
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semantic.adapters.inbound.http.connections import CONNECTION, IS_BEYOND_LIMIT, Connection
from semantic.adapters.inbound.http.errors import allowance_headers, error_response
from semantic.adapters.inbound.http.middleware import Middleware, RequestCheck, read_off
from semantic.application.requests.access import Access
from semantic.domain.agents import Principal
from semantic.domain.errors import AuthenticationError

# The page prompts for a key itself. So is `/`, which has the page and no tenant's data.
_OPEN = ("/health", "/page")
_ADMIN = ("/admin", "/v1/cache", "/metrics")
# Bytes to read of a refused body: a client that is still sending would miss the response.
_MAX_REFUSED_BYTES = 2**20

_current: ContextVar[Principal] = ContextVar("principal")


def current_principal() -> Principal:
    """Return the principal on whose behalf the current request runs."""
    return _current.get()


class CapacityCheck(RequestCheck):
    """Answers 503 on connections beyond the limit, except to health checks and cancels."""

    def refusal(self, scope: Scope) -> Response | None:
        path = scope["path"]
        is_urgent = path.startswith("/health") or path.endswith("/cancel")
        if is_urgent or not scope.get("state", {}).get(IS_BEYOND_LIMIT):
            return None
        message = "all connections are in use (max_connections); try again later."
        headers = {"connection": "close", "retry-after": "1"}
        return error_response(503, message, "overloaded", headers=headers)


class Guard(Middleware):
    """Authenticates each request, and refuses what its key does not permit."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        super().__init__(app)
        self._access = access

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._admit(scope)
        if refusal is None:
            await self._app(scope, receive, self._with_allowances(send, current_principal()))
        else:
            await read_off(receive, _MAX_REFUSED_BYTES)
            await refusal(scope, receive, send)

    def _admit(self, scope: Scope) -> Response | None:
        path: str = scope["path"]
        try:
            principal = self._access.authenticate(_secrets(Headers(scope=scope)))
        except AuthenticationError as error:
            if _is_under(path, _OPEN) or path == "/":
                _current.set(Principal())
                return None
            headers = {"www-authenticate": "Bearer"}
            return error_response(401, error.message, "invalid_api_key", headers=headers)
        if _is_under(path, _ADMIN) and not principal.is_admin:
            message = f"{path} needs an admin key: make one with `semantic keys add --admin`."
            return error_response(403, message, "admin_key_required")
        state = scope.setdefault("state", {})
        connection: Connection | None = state.get(CONNECTION)
        limit = self._access.ring.policy(principal.tenant).max_connections
        if connection is not None and not connection.claim(principal.tenant, limit):
            message = f"limit of {limit} connections exceeded for this tenant; close some."
            headers = {"connection": "close", "retry-after": "1"}
            return error_response(429, message, "rate_limit_exceeded", headers=headers)
        _current.set(principal)
        state["tenant"] = principal.tenant
        return None

    def _with_allowances(self, send: Send, principal: Principal) -> Send:
        async def send_with_allowances(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                limits = self._access.limits()
                for left in limits.allowances(principal) if limits else ():
                    for name, value in allowance_headers(left).items():
                        headers.setdefault(name, value)
            await send(message)

        return send_with_allowances


def _is_under(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)


def _secrets(headers: Headers) -> Iterator[str]:
    """Yield all keys of a request: some clients send two, of which only one is valid."""
    yield from headers.getlist("x-api-key")
    for value in headers.getlist("authorization"):
        scheme, _, secret = value.partition(" ")
        if scheme.lower() == "bearer":
            yield secret.strip()
