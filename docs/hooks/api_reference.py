"""Makes the page `api-reference.md` from the server's own OpenAPI document while docs are built."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from semantic.adapters.config.sources import load_settings
from semantic.entrypoints.bootstrap import bootstrap
from semantic.entrypoints.server import create_app

Json = dict[str, Any]
_HEAD = """# API reference

Every endpoint, made from the server's own description of itself. On a running server
`/openapi.json` has it for machines, and `/docs` with commands to try. [Protocols](protocols.md)
says in words what each field does, [Agents](agents.md) what the agent API is for.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    text = "\n".join([_HEAD, *_sections(_openapi())])
    files.append(File.generated(config, "api-reference.md", content=text))
    return files


def _openapi() -> Json:
    with tempfile.TemporaryDirectory() as home:
        given = {"home": home, "backend": "fake", "durability": "none"}
        server = bootstrap(load_settings(given, config_dir=Path(home)))
        try:
            return create_app(server).openapi()
        finally:
            server.memory.close(1)


def _sections(api: Json) -> Iterator[str]:
    by_tag: dict[str, list[tuple[str, str, Json]]] = {}
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            tag = (operation.get("tags") or ["other"])[0]
            by_tag.setdefault(tag, []).append((method.upper(), path, operation))
    for tag, operations in by_tag.items():
        yield f"\n## {tag}\n"
        for method, path, operation in operations:
            yield f"\n### {method} {path}\n"
            yield (operation.get("description") or operation.get("summary") or "").strip() + "\n"
            yield from _parameters(operation)
            yield from _body(operation, api)


def _parameters(operation: Json) -> Iterator[str]:
    listed = operation.get("parameters") or []
    if listed:
        yield "| parameter | in | type | |\n|---|---|---|---|"
        for one in listed:
            text = _cell(one.get("description") or "")
            yield f"| `{one['name']}` | {one['in']} | {_type(one.get('schema', {}))} | {text} |"
        yield ""


def _body(operation: Json, api: Json) -> Iterator[str]:
    content = (operation.get("requestBody") or {}).get("content") or {}
    schema = _resolve((content.get("application/json") or {}).get("schema") or {}, api)
    fields = schema.get("properties") or {}
    if fields:
        required = set(schema.get("required") or ())
        yield "| field | type | |\n|---|---|---|"
        for name, entry in fields.items():
            text = _cell(entry.get("description") or "")
            mark = " (required)" if name in required else ""
            yield f"| `{name}`{mark} | {_type(entry)} | {text} |"
        yield ""


def _resolve(schema: Json, api: Json) -> Json:
    while "$ref" in schema:
        schema = api["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def _type(schema: Json) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(_type(one) for one in schema[key]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items') or {})}"
    return str(schema.get("type") or "any")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
