"""Qwen's XML-like calls: ``<function=f><parameter=a>1</parameter></function>``."""

import json
import re
from collections.abc import Mapping

from semantic.domain.chat import JsonObject, JsonValue, ToolSpec

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*(.*)</function>\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>")
_END = "</function>"
_VALUE_END = "</parameter>"


def function_end(text: str, start: int) -> int:
    """Where the function ends; a value may hold the closing tag, so one must close before it."""
    at = text.find(_END, max(0, start))
    while at >= 0:
        before = text[:at].rstrip()
        if before.endswith(_VALUE_END) or _opens_function(before):
            return at + len(_END)
        at = text.find(_END, at + 1)
    return -1


def _opens_function(text: str) -> bool:
    tag = text.rpartition("<")[2]
    return tag.startswith("function=") and tag.endswith(">")


def xml_calls(text: str, tools: Mapping[str, ToolSpec]) -> list[tuple[str, JsonObject]] | None:
    """Read one function; None if it is malformed or unknown."""
    match = _FUNCTION.match(text)
    if match is None or match[1].strip() not in tools:
        return None
    name, rest = match[1].strip(), match[2]
    types = _types(tools[name])
    arguments: JsonObject = {}
    while rest.strip():
        opening = _PARAMETER.match(rest.lstrip())
        if opening is None:
            return None
        rest = rest.lstrip()[opening.end() :]
        end = _value_end(rest)
        if end < 0:
            return None
        arguments[opening[1].strip()] = _value(rest[:end], types.get(opening[1].strip()))
        rest = rest[end + len(_VALUE_END) :]
    return [(name, arguments)]


def _value_end(text: str) -> int:
    """The closing tag that is followed by another parameter or by nothing."""
    at = text.find(_VALUE_END)
    while at >= 0:
        after = text[at + len(_VALUE_END) :].lstrip()
        if not after or after.startswith("<parameter="):
            return at
        at = text.find(_VALUE_END, at + 1)
    return -1


def _types(tool: ToolSpec) -> Mapping[str, JsonValue]:
    properties = tool.parameters.get("properties")
    known = properties if isinstance(properties, dict) else {}
    return {name: s.get("type") for name, s in known.items() if isinstance(s, dict)}


def _value(text: str, kind: JsonValue) -> JsonValue:
    """A value is text by its schema, else JSON if it can be read as such."""
    text = text.removeprefix("\n").removesuffix("\n")
    if kind == "string":
        return text
    try:
        value: JsonValue = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    return value


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
