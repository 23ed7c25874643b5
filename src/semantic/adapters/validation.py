"""What pydantic finds wrong with a value, as people read it: in a request, a setting or a key file.

Inbound adapters and `config` share it; it knows neither.
"""

import re
from collections.abc import Sequence

from pydantic_core import ErrorDetails

_REASONS = {
    "extra_forbidden": "there is no such field",
    "model_attributes_type": "it must be a JSON object",
}


def plain_reason(problem: ErrorDetails) -> str:
    """What is wrong with a value, in plain words."""
    reason = _REASONS.get(problem["type"], problem["msg"]).removeprefix("Value error, ")
    reason = re.sub(", unable to (parse string|interpret input).*", "", reason)
    return re.sub("^(Input|String|List|Dictionary) should", "it must", reason)


def most_telling(problems: Sequence[ErrorDetails]) -> ErrorDetails:
    """Of the first wrong field's problems the deepest: its union member is the one meant."""
    field = problems[0]["loc"][:2]
    return max((p for p in problems if p["loc"][:2] == field), key=lambda p: len(p["loc"]))


def field_path(location: tuple[int | str, ...]) -> str | None:
    """Write a place in a body as a client would.

    Example:
        >>> field_path(("messages", 0, "role"))
        'messages[0].role'
    """
    if location[-1:] == ("[key]",):
        location = location[:-2]  # a wrong key is its object's fault
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part and part[0].islower() and part.isidentifier() and not _is_variant(part):
            path += f".{part}" if path else part
    return path or None


def _is_variant(part: str) -> bool:
    """Whether a part names a member of a union rather than a field."""
    return part in {"str", "int", "float", "bool", "list", "dict"} or part.startswith("function-")
