"""What every request passes before it is parsed: its size and its id, and a line in the log."""

import json
import secrets
import time

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = structlog.get_logger("semantic.access")


class BodyLimit:
    """Answers 413 to bodies over a limit, whether declared or streamed."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, counting its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await self._refuse(send)
            return
        await self._app(scope, self._counted(receive, send), send)

    def _counted(self, receive: Receive, send: Send) -> Receive:
        num_read = 0

        async def counted() -> Message:
            nonlocal num_read
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > self._max_bytes:
                await self._refuse(send)
                return {"type": "http.disconnect"}
            return message

        return counted

    async def _refuse(self, send: Send) -> None:
        error = {
            "message": f"the body is larger than {self._max_bytes} bytes (max_body_mb).",
            "type": "invalid_request_error",
            "param": None,
            "code": "request_too_large",
        }
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})


class AccessLog:
    """Gives each request an id, and a log line when it is answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(8)}"
        started = time.perf_counter()
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        structlog.contextvars.bind_contextvars(request_id=request_id)
        try:
            await self._app(scope, receive, tagged)
        finally:
            elapsed_ms = round((time.perf_counter() - started) * 1000, 1)
            log = _log.debug if scope["path"].startswith("/health") else _log.info
            log("request", method=scope["method"], path=scope["path"], status=status, ms=elapsed_ms)
            structlog.contextvars.unbind_contextvars("request_id")
