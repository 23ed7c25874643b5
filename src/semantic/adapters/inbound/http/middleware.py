"""Middleware before parsing: host and origin checks, request ids, access log, body limits."""

import asyncio
import re
import secrets
import time
import zlib
from collections.abc import Callable, Collection, Mapping
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
    """Base of ASGI middleware for HTTP requests; other scopes pass unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = self.handle if scope["type"] == "http" else self._app
        await handle(scope, receive, send)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        raise NotImplementedError


class RequestCheck(Middleware):
    """Base of middleware that refuses some requests and passes on all others."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.refusal(scope) or self._app)(scope, receive, send)

    def refusal(self, scope: Scope) -> Response | None:
        """Return the error response to a refused request; None lets it pass."""
        raise NotImplementedError


class HostCheck(RequestCheck):
    """Refuses requests whose `Host` is neither a local name nor an allowed one.

    With DNS rebinding, a web page's domain resolves to this server's address, so the page could
    read the replies. The browser still sends the page's domain in `Host`.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] = ()) -> None:
        """Wrap an application; `hosts` are allowed besides the local names, without port."""
        super().__init__(app)
        self._hosts = _LOCAL_NAMES | {host.lower() for host in hosts}

    def refusal(self, scope: Scope) -> Response | None:
        host = Headers(scope=scope).get("host", "")
        match = _HOST_PATTERN.fullmatch(host)
        if match is not None and match[1].lower() in self._hosts:
            return None
        message = (
            f"the host {host!r} is not allowed: use localhost, or add its name to the setting "
            "allowed_hosts (SEMANTIC_ALLOWED_HOSTS)."
        )
        return error_response(400, message, "host_not_allowed")


class OriginCheck(RequestCheck):
    """Refuses requests that change something and come from a web page of another origin.

    A browser sends such requests for any page, and only withholds the response from it. It
    identifies the page in `Origin` and `Sec-Fetch-Site`; other programs send neither header.
    """

    def __init__(
        self,
        app: ASGIApp,
        origins: Collection[str] = (),
        permits: Callable[[Scope], bool] | None = None,
    ) -> None:
        """Wrap an application.

        Args:
            origins: Permitted besides this machine's; `*` permits all.
            permits: Whether a request is permitted from an origin that is not.
        """
        super().__init__(app)
        self._origins = frozenset(origins)
        self._permits = permits

    def refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] in _READING or not self._is_foreign(headers):
            return None
        if self._permits is not None and self._permits(scope):
            return None
        page = headers.get("origin", "elsewhere")
        message = (
            f"web pages from {page} may not send this request; to permit it, add the origin to the "
            "setting cors_origins."
        )
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
    """Gives each request an id and one log line; answers 500 to unexpected exceptions.

    A request joins the client's trace if it has a `traceparent` header.
    """

    def __init__(self, app: ASGIApp, *, is_body_logged: bool = False) -> None:
        super().__init__(app)
        self._is_body_logged = is_body_logged

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = f"req_{secrets.token_hex(8)}"
        scope.setdefault("state", {})["request_id"] = request_id
        started = time.perf_counter()
        status = 0
        defect: Exception | None = None

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                names = (b"x-request-id", b"request-id")  # for OpenAI's and Anthropic's clients
                extra = [(name, request_id.encode()) for name in names]
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        structlog.contextvars.bind_contextvars(request_id=request_id)
        trace = _join_trace(Headers(scope=scope))
        body = bytearray()
        try:
            received = _copy_received(receive, body) if self._is_body_logged else receive
            await self._app(scope, received, tagged)
        except Exception as error:  # noqa: BLE001 - the client gets an answer in any case
            defect = error
            if not status:
                failure = "internal server error; see the server's log."
                await error_response(500, failure, "internal_error")(scope, receive, tagged)
        finally:
            if body:
                _log.info("body", body=body.decode("utf-8", "replace"))
            _write_line(scope, status, time.perf_counter() - started, defect)
            structlog.contextvars.unbind_contextvars("request_id", "trace_id", "agent")
            otel_context.detach(trace)


def _join_trace(headers: Headers) -> Token[otel_context.Context]:
    context = _PROPAGATOR.extract(headers)
    remote = get_current_span(context).get_span_context()
    if remote.is_valid:
        structlog.contextvars.bind_contextvars(trace_id=f"{remote.trace_id:032x}")
    return otel_context.attach(context)


def _copy_received(receive: Receive, body: bytearray) -> Receive:
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


# First segments after `/v1/`. Some clients omit the prefix; others have it in their base URL.
_VERSIONED = frozenset(
    {
        "chat",
        "completions",
        "responses",
        "messages",
        "models",
        "embeddings",
        # Not supported: answered with 404.
        "moderations",
        "audio",
        "images",
        # Our own.
        "agents",
        "cache",
        "events",
    }
)


class ShortPaths(Middleware):
    """Adds `/v1` to paths that lack it."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if f"{scope['path']}/".split("/")[1] in _VERSIONED:
            raw = scope.get("raw_path") or scope["path"].encode()
            scope = {**scope, "path": f"/v1{scope['path']}", "raw_path": b"/v1" + raw}
        await self._app(scope, receive, send)


class HeadAsGet(Middleware):
    """Answers HEAD as GET without the body; a stream ends before its first chunk."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def headers_only(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})

        await self._app({**scope, "method": "GET"}, receive, headers_only)


# zlib's `wbits`: 31 expects a gzip header, 15 a zlib header.
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_PLAIN = "identity"
_CLOSE = {"connection": "close"}
# Limit on expansion: text and KV cache compress to a tenth, decompression bombs to a thousandth.
_MAX_RATIO = 50
_ALWAYS_ALLOWED = 2**20
# Bytes to read of a refused body: a client that is still sending would miss the response.
_MAX_READ_OFF = 2**25
_MAX_MEMBERS = 1000  # concatenated compressed streams in one body


@dataclass(frozen=True, slots=True)
class _Limit:
    max_bytes: int
    setting: str

    def refusal(self) -> Response:
        message = f"the body is larger than {self.max_bytes} bytes ({self.setting})."
        return error_response(413, message, "request_too_large", headers=_CLOSE)


class BodyLimit(Middleware):
    """Decompresses bodies, and answers 413 to those over a limit.

    The limit applies to the declared length, to what arrives, and to the decompressed size.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, larger: Mapping[str, int] | None = None
    ) -> None:
        """Wrap an application; `larger` has the paths with a limit of their own."""
        super().__init__(app)
        self._usual = _Limit(max_bytes, "max_body_mb")
        self._larger = {p: _Limit(num, "disk_budget_mb") for p, num in (larger or {}).items()}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        limit = self._larger.get(scope["path"], self._usual)
        declared = headers.get("content-length", "0")
        encoding = headers.get("content-encoding", _PLAIN).strip().lower()
        if declared.isdecimal() and int(declared) > limit.max_bytes:
            await limit.refusal()(scope, receive, send)
        elif encoding == _PLAIN:
            body = _LimitedBody(scope, receive, send, limit)
            await self._app(scope, body.receive, body.send)
        elif encoding in _WINDOW_BITS:
            body = _LimitedBody(scope, receive, send, limit, _Unpacker(_WINDOW_BITS[encoding]))
            await self._app(_plain(scope), body.receive, body.send)
        else:
            await read_off(receive, limit.max_bytes)
            await _unknown(encoding)(scope, receive, send)


class _LimitedBody:
    """The body that the application reads, and its response unless the body is refused."""

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
        self._is_answered = False

    async def receive(self) -> Message:
        """Read the next message; after a refusal, the application receives a disconnect."""
        message = await self._receive()
        refusal: Response | None = None
        if self._unpacker is not None and message["type"] == "http.request":
            max_bytes = self._limit.max_bytes - self._num_read
            try:
                message = await asyncio.to_thread(self._unpacker.unpack, message, max_bytes)
            except zlib.error as error:
                refusal = _damaged(error)
            except _TooDenseError as error:
                refusal = error_response(413, str(error), "request_too_large", headers=_CLOSE)
        self._num_read += len(message.get("body", b""))
        if self._num_read > self._limit.max_bytes:
            refusal = self._limit.refusal()
        if refusal is None:
            return message
        if self._is_answered:  # by an endpoint that takes no body: discard the rest
            return {**message, "body": b""}
        if not self._is_refused:
            self._is_refused = True
            if message.get("more_body", False):
                await read_off(self._receive, _MAX_READ_OFF)
            await refusal(self._scope, self._receive, self._send)
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send unless the request was refused: the application answers half-read requests too."""
        if not self._is_refused:
            self._is_answered = True
            await self._send(message)


class _TooDenseError(Exception):
    """A compressed body expands too much, or has too many members."""


class _Unpacker:
    """Decompresses a body chunk by chunk, and limits its expansion."""

    def __init__(self, window_bits: int) -> None:
        self._window_bits = window_bits
        self._stream = zlib.decompressobj(window_bits)
        self._num_members = 1
        self._num_packed = 0
        self._num_made = 0

    def unpack(self, message: Message, max_bytes: int) -> Message:
        """Decompress to at most `max_bytes` + 1 bytes; raises `zlib.error` or `_TooDenseError`."""
        packed: bytes = message.get("body", b"")
        self._num_packed += len(packed)
        allowed = max(_ALWAYS_ALLOWED, _MAX_RATIO * self._num_packed) - self._num_made
        made = self._made_of(packed, min(max_bytes, allowed))
        self._num_made += len(made)
        if len(made) > allowed and allowed < max_bytes:
            raise _TooDenseError(
                f"the body expands to more than {_MAX_RATIO} times its packed size; "
                "send it uncompressed."
            )
        is_last = not message.get("more_body", False)
        if is_last and self._num_packed and len(made) <= max_bytes and not self._stream.eof:
            raise zlib.error("unexpected end of data")
        return {**message, "body": made}

    def _made_of(self, packed: bytes, max_bytes: int) -> bytes:
        made = bytearray()
        while packed and len(made) <= max_bytes:
            if self._stream.eof:  # concatenated members form one body
                self._num_members += 1
                if self._num_members > _MAX_MEMBERS:
                    raise _TooDenseError(
                        f"the body consists of more than {_MAX_MEMBERS} compressed members; "
                        "compress it as one."
                    )
                self._stream = zlib.decompressobj(self._window_bits)
            made += self._stream.decompress(packed, max_bytes + 1 - len(made))
            packed = self._stream.unused_data
        return bytes(made)


def _plain(scope: Scope) -> Scope:
    """Remove the headers that describe the compressed body."""
    inner = {**scope, "headers": list(scope["headers"])}
    headers = MutableHeaders(scope=inner)
    del headers["content-encoding"]
    del headers["content-length"]
    return inner


async def read_off(receive: Receive, max_bytes: int) -> None:
    """Read and discard a body: closing the connection during an upload loses the response."""
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
