"""Request bodies: unpacked if they come packed, and never larger than permitted."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semantic.adapters.inbound.http.errors import error_response

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


class BodyLimit:
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
        self._app = app
        self._usual = _Limit(max_bytes, "max_body_mb")
        self._larger = {p: _Limit(num, "disk_budget_mb") for p, num in (larger or {}).items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, counting its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
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


def _unknown(encoding: str) -> Response:
    message = f"content-encoding {encoding!r} is not supported; send gzip, deflate or plain text."
    headers = {"accept-encoding": "gzip, deflate", **_CLOSE}
    return error_response(415, message, "unsupported_encoding", headers=headers)


def _damaged(error: zlib.error) -> Response:
    message = f"the body cannot be unpacked: {error}."
    return error_response(400, message, "invalid_request", headers=_CLOSE)
