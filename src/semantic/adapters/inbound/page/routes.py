"""Serves `/` (the page for browsers, a text for programs), the page's files, and `/docs`.

All files are read once at startup, so no request can make the server open a file. `/docs` shows
every endpoint as plain HTML.
"""

import hashlib
import json
import mimetypes
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import groupby
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, Response

from semantic.adapters.inbound.http.errors import error_response

# Scripts, styles and data come from this server alone, pictures also from the page itself; no site
# may frame the page.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # the browser revalidates each time
}
_INDEX: Final = "index.html"
_TYPES: Final = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
# Clients of Ollama's API recognise a server by this text.
OLLAMA_GREETING: Final = "Ollama is running"


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str

    def answer(self, http: Request) -> Response:
        headers = {**_HEADERS, "etag": self.etag}
        if http.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def page_router() -> APIRouter:
    """Serve the page."""
    router = APIRouter(include_in_schema=False)
    static = dict(_read(files(__package__) / "static"))

    @router.get("/", response_model=None)
    def greet(http: Request) -> Response:
        if "text/html" in http.headers.get("accept", ""):
            return static[_INDEX].answer(http)
        return PlainTextResponse(OLLAMA_GREETING)

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


# -- the page at `/docs` --------------------------------------------------------------------------

# FastAPI's own pages load a viewer from a CDN: they need the internet, and disclose the visit.
# This page loads nothing from other hosts.
_DOCS_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
pre { background: #8881; padding: .6rem; overflow-x: auto }
code, pre, h3 { font-family: ui-monospace, monospace; font-size: 14px }
h3 { margin: 1.6rem 0 .2rem } p { margin: .2rem 0 } :root { color-scheme: light dark }
"""
_HEAD = """<!doctype html>
<html lang=en><meta charset=utf-8><title>{title}</title><style>{style}</style>
<h1>{title} {version}</h1>
<p>{description}
<p>The same for programs: <a href=openapi.json>openapi.json</a>
"""
_EXAMPLE_FILE = "coder.agent"


def docs_router(document: Callable[[], dict[str, Any]]) -> APIRouter:
    """Serve the API reference at `/docs`; `document` returns the OpenAPI document."""
    router = APIRouter()

    @router.get("/docs", include_in_schema=False)
    def docs(http: Request) -> HTMLResponse:
        return HTMLResponse(_docs_page(document(), str(http.base_url)), headers=_DOCS_HEADERS)

    return router


def _docs_page(document: dict[str, Any], url: str) -> str:
    info = {name: escape(value) for name, value in document["info"].items()}
    operations = [
        (operation["tags"][0], method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    operations.sort(key=lambda found: found[0])
    parts = [_HEAD.format(style=_STYLE, **info)]
    for tag, group in groupby(operations, key=lambda found: found[0]):
        parts.append(f"<h2>{escape(tag)}</h2>")
        for _, method, path, operation in group:
            body = _body_of(operation, document)
            parts += _operation(method, path, operation, body)
            command = _command(method, url.rstrip("/") + path, body) + _file_of(operation)
            parts.append(f"<pre>{escape(command)}</pre>")
    return "\n".join(parts)


def _operation(
    method: str, path: str, operation: dict[str, Any], body: dict[str, Any]
) -> Iterator[str]:
    yield f"<h3>{method} {escape(path)}</h3>"
    for paragraph in operation.get("description", "").split("\n\n"):
        yield f"<p>{escape(paragraph)}"
    kinds = {"path": "path", "query": "query", "header": "headers"}
    for kind, title in kinds.items():
        names = [p["name"] for p in operation.get("parameters", ()) if p["in"] == kind]
        if names:
            yield f"<p>{title}: <code>{escape(', '.join(names))}</code>"
    if names := list(body.get("properties", ())):
        yield f"<p>body: <code>{escape(', '.join(names))}</code>"


def _body_of(operation: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    content = operation.get("requestBody", {}).get("content", {})
    schema: dict[str, Any] = content.get("application/json", {}).get("schema", {})
    schema = schema.get("anyOf", [schema])[0]  # an optional body
    name = schema.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = document["components"]["schemas"].get(name, {})
    return found


def _command(method: str, url: str, body: dict[str, Any]) -> str:
    place = shlex.quote(url)
    command = f"curl {place}" if method == "GET" else f"curl -X {method} {place}"
    for example in body.get("examples", ())[:1]:
        body_json = shlex.quote(json.dumps(example))
        command += f" -H 'content-type: application/json' \\\n  -d {body_json}"
    return command


def _file_of(operation: dict[str, Any]) -> str:
    """The curl option that uploads or saves a file; empty if the operation has none."""
    if _is_file(operation.get("requestBody", {})):
        return f" --data-binary @{_EXAMPLE_FILE}"
    return f" -o {_EXAMPLE_FILE}" if _is_file(operation["responses"].get("200", {})) else ""


def _is_file(described: dict[str, Any]) -> bool:
    media = described.get("content", {}).values()
    return any(kind.get("schema", {}).get("format") == "binary" for kind in media)
