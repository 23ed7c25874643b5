"""What every request passes before it is parsed: its host, its page, its id and line in the log."""

import re
import secrets
import time
from collections.abc import Collection

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semantic.adapters.inbound.http.errors import error_response

_log = structlog.get_logger("semantic.access")

_LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
LOCAL_ORIGINS = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_FOREIGN_SITES = frozenset({"cross-site", "same-site"})
_HOST_PATTERN = re.compile(r"(\[[^]]*\]|[^:]*)(:\d*)?")


class LocalHosts:
    """Refuses requests that do not call this machine by a local name.

    A web page can give its own name our address, and would then read our replies; the browser
    still sends the page's name in `Host`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if its host is local."""
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            match = _HOST_PATTERN.fullmatch(host)
            if match is None or match[1].lower() not in _LOCAL_NAMES:
                message = f"the host {host!r} is not local; start with --allow-remote to permit it."
                refusal = error_response(400, message, "host_not_allowed")
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


class ForeignPages:
    """Refuses to change anything on behalf of a web page from elsewhere.

    A browser sends such requests for any page; it keeps only the answer from it, and says in
    `Origin` and `Sec-Fetch-Site` whose they are. Programs send neither.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str] = ()) -> None:
        """Wrap an application.

        Args:
            app: What is behind it.
            origins: Whose pages are permitted, beside those of this machine; `*` permits all.
        """
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, unless it is a foreign page's."""
        if scope["type"] == "http" and scope["method"] not in _READING:
            headers = Headers(scope=scope)
            if self._is_foreign(headers):
                page = headers.get("origin", "elsewhere")
                message = f"web pages from {page} may not do this; cors_origins can permit them."
                refusal = error_response(403, message, "origin_not_allowed")
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_foreign(self, headers: Headers) -> bool:
        if "*" in self._origins:
            return False
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site") in _FOREIGN_SITES
        is_own = origin.partition("://")[2] == headers.get("host")
        is_local = re.fullmatch(LOCAL_ORIGINS, origin) is not None
        return not (is_own or is_local or origin in self._origins)


class AccessLog:
    """Gives each request an id, and one log line when it is answered; answers our defects."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(8)}"
        scope.setdefault("state", {})["request_id"] = request_id
        started = time.perf_counter()
        status = 0
        defect: Exception | None = None

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                names = (b"x-request-id", b"request-id")  # OpenAI's clients', Anthropic's
                told = [(name, request_id.encode()) for name in names]
                message["headers"] = [*message["headers"], *told]
            await send(message)

        structlog.contextvars.bind_contextvars(request_id=request_id)
        try:
            await self._app(scope, receive, tagged)
        except Exception as error:  # noqa: BLE001 - whatever it was, the client gets an answer
            defect = error
            if not status:
                failure = "the server failed; its log says why."
                await error_response(500, failure, "internal_error")(scope, receive, tagged)
        finally:
            _write_line(scope, status, time.perf_counter() - started, defect)
            structlog.contextvars.unbind_contextvars("request_id")


def _write_line(scope: Scope, status: int, elapsed_s: float, defect: Exception | None) -> None:
    method, path, ms = scope["method"], scope["path"], round(elapsed_s * 1000, 1)
    log = _log.debug if path.startswith("/health") else _log.info
    if defect is None:
        log("request", method=method, path=path, status=status, ms=ms)
    else:
        _log.error(
            "request failed", method=method, path=path, status=status, ms=ms, exc_info=defect
        )
