"""Lets desktop apps and browser extensions use the inference routes of Ollama's port.

Ollama's own server permits them, so they expect it there. On the server's own port, and for all
other routes, web content needs the setting `cors_origins`.
"""

import re
from collections.abc import Callable
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

# Obsidian, Tauri and Electron apps, VS Code's web views, browser extensions: no web page.
APP_ORIGINS: Final = (
    r"(app|file|tauri|vscode-webview|vscode-file|chrome-extension|moz-extension"
    r"|safari-web-extension)://.*"
)
_IS_APP = re.compile(APP_ORIGINS)
_ROUTES: Final = frozenset(
    {f"/api/{name}" for name in ("version", "tags", "show", "ps", "chat", "generate", "embed")}
    | {f"/v1/{name}" for name in ("models", "chat/completions", "completions", "embeddings")}
    | {"/", "/api/embeddings", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"}
)


def from_app(port: int) -> Callable[[Scope], bool]:
    """Return a function that recognises an app's inference request on this port."""

    def is_from_app(scope: Scope) -> bool:
        origin = Headers(scope=scope).get("origin", "")
        is_here = (scope.get("server") or ("", None))[1] == port
        return is_here and scope["path"] in _ROUTES and _IS_APP.fullmatch(origin) is not None

    return is_from_app


class AppCors:
    """CORS headers: those of `CORSMiddleware`, and others for requests of apps."""

    def __init__(
        self, app: ASGIApp, /, *, is_from_app: Callable[[Scope], bool], **cors: Any
    ) -> None:
        """Wrap an application; `cors` are the arguments of `CORSMiddleware`."""
        self._is_from_app = is_from_app
        self._usual = CORSMiddleware(app, **cors)
        self._for_apps = CORSMiddleware(app, **{**cors, "allow_origin_regex": APP_ORIGINS})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_from_app = scope["type"] == "http" and self._is_from_app(scope)
        await (self._for_apps if is_from_app else self._usual)(scope, receive, send)
