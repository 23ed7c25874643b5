"""The greeting at `/`: a page for browsers, a few lines for programs; and the files of the page.

All files are read once, at the start: nothing that a request names is ever opened.
"""

import hashlib
import mimetypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from semantic import __version__
from semantic.adapters.inbound.http.errors import error_response
from semantic.ports.inbound import ModelStatus

# Scripts, styles and answers come from this server alone; nobody may frame the page.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # asked for each time, and sent when it changed
}
_INDEX: Final = "index.html"
_TYPES: Final = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_LINKS: Final = {
    "docs": "/docs",
    "openapi": "/openapi.json",
    "health": "/health",
    "models": "/v1/models",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str

    def answer(self, http: Request) -> Response:
        """The file, or that the browser has it."""
        headers = {**_HEADERS, "etag": self.etag}
        if http.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def page_router(current_model: Callable[[], ModelStatus]) -> APIRouter:
    """Serve the page.

    Args:
        current_model: What is served.
    """
    router = APIRouter(include_in_schema=False)
    static = dict(_read(files(__package__) / "static"))

    @router.get("/", response_model=None)
    def greet(http: Request) -> Response:
        if "text/html" in http.headers.get("accept", ""):
            return static[_INDEX].answer(http)
        model = current_model().id
        return JSONResponse(
            {"name": "Semantic", "version": __version__, "model": model, "links": _LINKS}
        )

    @router.get("/page/{name:path}", response_model=None)
    def file(name: str, http: Request) -> Response:
        if name not in static:
            return error_response(404, f"the page has no file {name!r}.", "not_found")
        return static[name].answer(http)

    return router


def _read(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, _File]]:
    for entry in folder.iterdir():
        name = f"{prefix}{entry.name}"
        if entry.is_dir():
            yield from _read(entry, f"{name}/")
            continue
        content = entry.read_bytes()
        ending = name.rpartition(".")[2]
        media_type = _TYPES.get(ending) or mimetypes.guess_type(name)[0] or "text/plain"
        etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        yield name, _File(content, media_type, etag)
