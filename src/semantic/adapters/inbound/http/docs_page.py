"""The page at `/docs`: every endpoint, as plain HTML.

FastAPI's own pages load a viewer from a CDN: they need the internet, and tell it that somebody
looks. A browser asks nobody else for anything here.
"""

import json
import shlex
from collections.abc import Callable, Iterator
from html import escape
from itertools import groupby
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
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
_FILE = "coder.agent"


def docs_router(document: Callable[[], dict[str, Any]]) -> APIRouter:
    """Serve it.

    Args:
        document: Makes the OpenAPI document.
    """
    router = APIRouter()

    @router.get("/docs", include_in_schema=False)
    def docs(http: Request) -> HTMLResponse:
        return HTMLResponse(_page(document(), str(http.base_url)), headers=_HEADERS)

    return router


def _page(document: dict[str, Any], url: str) -> str:
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
            parts += _entry(method, path, operation, body)
            command = _command(method, url.rstrip("/") + path, body) + _file_of(operation)
            parts.append(f"<pre>{escape(command)}</pre>")
    return "\n".join(parts)


def _entry(
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
    """The schema of an operation's JSON; empty without."""
    content = operation.get("requestBody", {}).get("content", {})
    schema: dict[str, Any] = content.get("application/json", {}).get("schema", {})
    schema = schema.get("anyOf", [schema])[0]  # one that may be absent
    name = schema.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = document["components"]["schemas"].get(name, {})
    return found


def _command(method: str, url: str, body: dict[str, Any]) -> str:
    """A call to copy, with the first example there is."""
    place = shlex.quote(url)
    command = f"curl {place}" if method == "GET" else f"curl -X {method} {place}"
    for example in body.get("examples", ())[:1]:
        body_json = shlex.quote(json.dumps(example))
        command += f" -H 'content-type: application/json' \\\n  -d {body_json}"
    return command


def _file_of(operation: dict[str, Any]) -> str:
    """Where a call takes a file from, or where it puts one; empty without."""
    if _is_file(operation.get("requestBody", {})):
        return f" --data-binary @{_FILE}"
    return f" -o {_FILE}" if _is_file(operation["responses"].get("200", {})) else ""


def _is_file(described: dict[str, Any]) -> bool:
    media = described.get("content", {}).values()
    return any(kind.get("schema", {}).get("format") == "binary" for kind in media)
