"""Parses calls that must be complete to be read: JSON whose keys are in any order."""

import json
from collections.abc import Mapping
from typing import TypeAlias

from semantic.domain.chat import JsonObject, JsonValue, ToolSpec

Tools: TypeAlias = Mapping[str, ToolSpec]


def json_or_text(text: str) -> JsonValue:
    """Parse a value; text that is not JSON is a string."""
    try:
        value: JsonValue = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    return value


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters")


def json_call(text: str, tools: Tools) -> tuple[str, JsonObject] | None:
    """Parse a call; its arguments may be an object, its text, or null.

    Returns None if the text is malformed or calls an unknown tool.
    """
    try:
        call = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict):
        return None
    name = next((call[key] for key in NAME_KEYS if key in call), None)
    if not isinstance(name, str) or name not in tools:
        return None
    given = next((call[key] for key in ARGUMENT_KEYS if key in call), None)
    arguments = _as_object(given)
    return None if arguments is None else (name, arguments)


def _as_object(value: JsonValue) -> JsonObject | None:
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value, strict=False)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None
