"""Requests that are put differently and mean what is served: other paths, other methods."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# What stands behind `/v1/`. Some clients leave the prefix out, others put it into their base URL.
_VERSIONED = frozenset(
    {
        *("chat", "completions", "responses", "messages", "models"),
        *("embeddings", "moderations", "audio", "images"),  # answered: not served here
        *("agents", "cache", "events"),
    }
)


class ShortPaths:
    """Adds `/v1` to paths that lack it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, to its full path."""
        if scope["type"] == "http" and f"{scope['path']}/".split("/")[1] in _VERSIONED:
            raw = scope.get("raw_path") or scope["path"].encode()
            scope = {**scope, "path": f"/v1{scope['path']}", "raw_path": b"/v1" + raw}
        await self._app(scope, receive, send)


class HeadAsGet:
    """Answers HEAD as GET, without the body: a stream ends before its first piece."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def headers_only(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})

        await self._app({**scope, "method": "GET"}, receive, headers_only)
