"""What every request passes before it is parsed: its host, its page, its id and line in the log."""

import re
import secrets
import time
import zlib
from collections.abc import Collection, Mapping
from contextvars import Token
from dataclasses import dataclass

import structlog
from opentelemetry import context as otel_context
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semantic.adapters.inbound.http.errors import error_response

_log = structlog.get_logger("semantic.access")

_LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
LOCAL_ORIGINS = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_FOREIGN_SITES = frozenset({"cross-site", "same-site"})
_HOST_PATTERN = re.compile(r"(\[[^]]*\]|[^:]*)(:\d*)?")


class Middleware:
    """Stands before an application; what is no request passes it by."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        handle = self.handle if scope["type"] == "http" else self._app
        await handle(scope, receive, send)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        raise NotImplementedError


class RequestCheck(Middleware):
    """Answers requests with a refusal, or passes them on."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass a request on."""
        await (self.refusal(scope) or self._app)(scope, receive, send)

    def refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that may not pass."""
        raise NotImplementedError


class HostCheck(RequestCheck):
    """Refuses requests that do not call this machine by a local name.

    A web page can give its own name our address, and would then read our replies; the browser
    still sends the page's name in `Host`.
    """

    def refusal(self, scope: Scope) -> Response | None:
        """The answer where the host is not local."""
        host = Headers(scope=scope).get("host", "")
        match = _HOST_PATTERN.fullmatch(host)
        if match is not None and match[1].lower() in _LOCAL_NAMES:
            return None
        message = f"the host {host!r} is not local; start with --allow-remote to permit it."
        return error_response(400, message, "host_not_allowed")


class OriginCheck(RequestCheck):
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
        super().__init__(app)
        self._origins = frozenset(origins)

    def refusal(self, scope: Scope) -> Response | None:
        """The answer to what a foreign page would change."""
        headers = Headers(scope=scope)
        if scope["method"] in _READING or not self._is_foreign(headers):
            return None
        page = headers.get("origin", "elsewhere")
        message = f"web pages from {page} may not do this; cors_origins can permit them."
        return error_response(403, message, "origin_not_allowed")

    def _is_foreign(self, headers: Headers) -> bool:
        if "*" in self._origins:
            return False
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site") in _FOREIGN_SITES
        is_own = origin.partition("://")[2] == headers.get("host")
        is_local = re.fullmatch(LOCAL_ORIGINS, origin) is not None
        return not (is_own or is_local or origin in self._origins)


_PROPAGATOR = TraceContextTextMapPropagator()
_MAX_LOGGED = 2**16


class AccessLog(Middleware):
    """Gives each request an id, and one log line when it is answered; answers our defects.

    What is done for it belongs to its client's trace, if it names one.
    """

    def __init__(self, app: ASGIApp, *, is_body_logged: bool = False) -> None:
        super().__init__(app)
        self._is_body_logged = is_body_logged

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
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
        trace = _join_trace(Headers(scope=scope))
        body = bytearray()
        try:
            heard = _overheard(receive, body) if self._is_body_logged else receive
            await self._app(scope, heard, tagged)
        except Exception as error:  # noqa: BLE001 - whatever it was, the client gets an answer
            defect = error
            if not status:
                failure = "the server failed; its log says why."
                await error_response(500, failure, "internal_error")(scope, receive, tagged)
        finally:
            if body:
                _log.info("body", body=body.decode("utf-8", "replace"))
            _write_line(scope, status, time.perf_counter() - started, defect)
            structlog.contextvars.unbind_contextvars("request_id", "trace_id", "agent")
            otel_context.detach(trace)


def _join_trace(headers: Headers) -> Token[otel_context.Context]:
    """Go on in the trace that a client names, if it names one."""
    context = _PROPAGATOR.extract(headers)
    remote = get_current_span(context).get_span_context()
    if remote.is_valid:
        structlog.contextvars.bind_contextvars(trace_id=f"{remote.trace_id:032x}")
    return otel_context.attach(context)


def _overheard(receive: Receive, body: bytearray) -> Receive:
    """Keep what is received, up to a limit."""

    async def received() -> Message:
        message = await receive()
        body.extend(message.get("body", b"")[: _MAX_LOGGED - len(body)])
        return message

    return received


def _write_line(scope: Scope, status: int, elapsed_s: float, defect: Exception | None) -> None:
    method, path, ms = scope["method"], scope["path"], round(elapsed_s * 1000, 1)
    log = _log.debug if path.startswith(("/health", "/metrics")) else _log.info
    named = {"method": method, "path": path, "status": status, "ms": ms}
    if tenant := scope["state"].get("tenant"):
        named["tenant"] = tenant
    if defect is None:
        log("request", **named)
    else:
        _log.error("request failed", **named, exc_info=defect)


# What stands behind `/v1/`. Some clients leave the prefix out, others put it into their base URL.
_VERSIONED = frozenset(
    {
        *("chat", "completions", "responses", "messages", "models", "embeddings"),
        *("moderations", "audio", "images"),  # answered: not served here
        *("agents", "cache", "events"),
    }
)


class ShortPaths(Middleware):
    """Adds `/v1` to paths that lack it."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, to its full path."""
        if f"{scope['path']}/".split("/")[1] in _VERSIONED:
            raw = scope.get("raw_path") or scope["path"].encode()
            scope = {**scope, "path": f"/v1{scope['path']}", "raw_path": b"/v1" + raw}
        await self._app(scope, receive, send)


class HeadAsGet(Middleware):
    """Answers HEAD as GET, without the body: a stream ends before its first piece."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def headers_only(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})

        await self._app({**scope, "method": "GET"}, receive, headers_only)


# What zlib is told to expect: gzip's header, or its own.
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_PLAIN = "identity"
_CLOSE = {"connection": "close"}


@dataclass(frozen=True, slots=True)
class _Limit:
    max_bytes: int
    setting: str

    def refusal(self) -> Response:
        message = f"the body is larger than {self.max_bytes} bytes ({self.setting})."
        return error_response(413, message, "request_too_large", headers=_CLOSE)


class BodyLimit(Middleware):
    """Unpacks bodies, and answers 413 to those over a limit: declared, streamed or packed."""

    def __init__(
        self, app: ASGIApp, max_bytes: int, larger: Mapping[str, int] | None = None
    ) -> None:
        """Wrap an application.

        Args:
            app: What is behind the limit.
            max_bytes: The limit.
            larger: Paths with a limit of their own.
        """
        super().__init__(app)
        self._usual = _Limit(max_bytes, "max_body_mb")
        self._larger = {p: _Limit(num, "disk_budget_mb") for p, num in (larger or {}).items()}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, counting its body."""
        headers = Headers(scope=scope)
        limit = self._larger.get(scope["path"], self._usual)
        declared = headers.get("content-length", "0")
        encoding = headers.get("content-encoding", _PLAIN).strip().lower()
        if declared.isdecimal() and int(declared) > limit.max_bytes:
            await limit.refusal()(scope, receive, send)
        elif encoding == _PLAIN:
            body = _Body(scope, receive, send, limit)
            await self._app(scope, body.receive, body.send)
        elif encoding in _WINDOW_BITS:
            body = _Body(scope, receive, send, limit, _Unpacker(_WINDOW_BITS[encoding]))
            await self._app(_plain(scope), body.receive, body.send)
        else:
            await read_off(receive, limit.max_bytes)
            await _unknown(encoding)(scope, receive, send)


class _Body:
    """A body as the application reads it, and the application's answer, unless it is refused."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        limit: _Limit,
        unpacker: "_Unpacker | None" = None,
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._limit = limit
        self._unpacker = unpacker
        self._num_read = 0
        self._is_refused = False

    async def receive(self) -> Message:
        """Read on; a client that is refused has left, as far as the application knows."""
        message = await self._receive()
        refusal: Response | None = None
        if self._unpacker is not None and message["type"] == "http.request":
            try:
                message = self._unpacker.unpack(message, self._limit.max_bytes - self._num_read)
            except zlib.error as error:
                refusal = _damaged(error)
        self._num_read += len(message.get("body", b""))
        if self._num_read > self._limit.max_bytes:
            refusal = self._limit.refusal()
        if refusal is None:
            return message
        if not self._is_refused:
            self._is_refused = True
            await refusal(self._scope, self._receive, self._send)
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Answer; the application answers a half-read request too, and nobody may hear that."""
        if not self._is_refused:
            await self._send(message)


class _Unpacker:
    """Unpacks a body piece by piece."""

    def __init__(self, window_bits: int) -> None:
        self._window_bits = window_bits
        self._stream = zlib.decompressobj(window_bits)
        self._is_begun = False

    def unpack(self, message: Message, max_bytes: int) -> Message:
        """Unpack a piece, of which no more is made than `max_bytes` and one.

        Raises:
            zlib.error: the body is damaged, or ends too early.
        """
        packed: bytes = message.get("body", b"")
        self._is_begun = self._is_begun or bool(packed)
        made = bytearray()
        while packed and len(made) <= max_bytes:
            if self._stream.eof:  # several streams in a row are one body
                self._stream = zlib.decompressobj(self._window_bits)
            made += self._stream.decompress(packed, max_bytes + 1 - len(made))
            packed = self._stream.unused_data
        is_last = not message.get("more_body", False)
        if is_last and self._is_begun and len(made) <= max_bytes and not self._stream.eof:
            raise zlib.error("it ends too early")
        return {**message, "body": bytes(made)}


def _plain(scope: Scope) -> Scope:
    """The scope of the same request with its body unpacked, whose length is not known."""
    inner = {**scope, "headers": list(scope["headers"])}
    headers = MutableHeaders(scope=inner)
    del headers["content-encoding"]
    del headers["content-length"]
    return inner


async def read_off(receive: Receive, max_bytes: int) -> None:
    """Read a body for nothing: closed while it still comes, a connection loses the answer."""
    num_read, is_more = 0, True
    while is_more and num_read <= max_bytes:
        message = await receive()
        num_read += len(message.get("body", b""))
        is_more = message.get("more_body", False)


def _unknown(encoding: str) -> Response:
    message = f"content-encoding {encoding!r} is not supported; send gzip, deflate or plain text."
    headers = {"accept-encoding": "gzip, deflate", **_CLOSE}
    return error_response(415, message, "unsupported_encoding", headers=headers)


def _damaged(error: zlib.error) -> Response:
    message = f"the body cannot be unpacked: {error}."
    return error_response(400, message, "invalid_request", headers=_CLOSE)
