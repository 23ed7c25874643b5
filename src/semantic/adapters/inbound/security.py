"""What every request passes before it is parsed: its host, size and id, and a line in the log."""

import re
import secrets
import time
from collections.abc import Mapping

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semantic.adapters.inbound.http_errors import error_response

_log = structlog.get_logger("semantic.access")

_LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
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


class BodyLimit:
    """Answers 413 to bodies over a limit, whether declared or streamed."""

    def __init__(
        self, app: ASGIApp, max_bytes: int, larger: Mapping[str, int] | None = None
    ) -> None:
        """Wrap an application.

        Args:
            app: What is behind the limit.
            max_bytes: The limit.
            larger: Paths with a limit of their own.
        """
        self._app = app
        self._max_bytes = max_bytes
        self._larger = larger or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, counting its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        max_bytes = self._larger.get(scope["path"], self._max_bytes)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > max_bytes:
            await self._refuse(scope, receive, send)
            return
        num_read = 0
        is_refused = False

        async def counted() -> Message:
            nonlocal num_read, is_refused
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read <= max_bytes:
                return message
            if not is_refused:
                is_refused = True
                await self._refuse(scope, receive, send)
            return {"type": "http.disconnect"}

        async def unless_refused(message: Message) -> None:
            # The app answers its half-read request too, and nobody may hear that.
            if not is_refused:
                await send(message)

        await self._app(scope, counted, unless_refused)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_usual = scope["path"] not in self._larger
        setting = "max_body_mb" if is_usual else "disk_budget_mb"
        max_bytes = self._larger.get(scope["path"], self._max_bytes)
        message = f"the body is larger than {max_bytes} bytes ({setting})."
        headers = {"connection": "close"}
        refusal = error_response(413, message, "request_too_large", headers=headers)
        await refusal(scope, receive, send)


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
