"""Pydantic in requests, settings and key files: readable messages, and fields of dataclasses.

Inbound adapters and `config` share this module; it depends on neither.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic_core import ErrorDetails

_REASONS = {
    "extra_forbidden": "unknown field",
    "model_attributes_type": "it must be a JSON object",
}


def plain_reason(problem: ErrorDetails) -> str:
    """Reword a validation error as a short phrase, such as `it must be greater than 0`."""
    reason = _REASONS.get(problem["type"], problem["msg"]).removeprefix("Value error, ")
    reason = re.sub(", unable to (parse string|interpret input).*", "", reason)
    return re.sub("^(Input|String|List|Dictionary) should", "it must", reason)


def most_telling(problems: Sequence[ErrorDetails]) -> ErrorDetails:
    """Return the deepest problem of the first invalid field.

    A union reports problems of every member; the deepest belongs to the member that fits best.
    """
    field = problems[0]["loc"][:2]
    return max((p for p in problems if p["loc"][:2] == field), key=lambda p: len(p["loc"]))


def field_path(location: tuple[int | str, ...]) -> str | None:
    """Format a location in a request body as a path.

    Example:
        >>> field_path(("messages", 0, "role"))
        'messages[0].role'
    """
    if location[-1:] == ("[key]",):
        location = location[:-2]  # for an invalid key, name the object that contains it
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part and part[0].islower() and part.isidentifier() and not _is_variant(part):
            path += f".{part}" if path else part
    return path or None


def _is_variant(part: str) -> bool:
    return part in {"str", "int", "float", "bool", "list", "dict"} or part.startswith("function-")


def pydantic_fields(entries: Iterable["dataclasses.Field[Any]"]) -> dict[str, Any]:
    """Fields of a dataclass as `create_model` takes them.

    Pydantic reads bounds and descriptions from the fields' metadata.
    """
    return {entry.name: (entry.type, entry) for entry in entries}
