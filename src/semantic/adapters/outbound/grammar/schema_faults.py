"""Where in a schema the trouble is; llguidance says only what it is."""

import re
from collections.abc import Callable

from semantic.adapters.outbound.grammar.lark import Lark
from semantic.adapters.outbound.grammar.trial import EXCEEDED
from semantic.domain.chat import JsonObject, JsonValue

_DEFINITIONS = ("$defs", "definitions")
_MAX_TRIALS = 100


def schema_fault(
    fault_of: Callable[[str], str], schema: JsonObject, *, is_lenient: bool = False
) -> str | None:
    """Say where and why a schema cannot be enforced; None if it can.

    Args:
        fault_of: Tries a grammar and says what is wrong with it.
        schema: To look at; its parts are tried by themselves, some of them if it has many.
        is_lenient: Keywords that cannot be enforced do not count.
    """
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    num_trials = 0

    def fault(part: JsonObject) -> str:
        nonlocal num_trials
        num_trials += 1
        lark = Lark({})
        lark.rule("start", lark.json({**shared, **part}, is_lenient=is_lenient))
        return fault_of(lark.text()) if num_trials <= _MAX_TRIALS else ""

    reason, path, part = fault(schema), "", schema
    if not reason:
        return None
    while True:
        # The innermost part that fails by itself is where the fault is.
        parts = _parts(part) if reason != EXCEEDED else []
        faulty = next(((p, s, e) for p, s in parts if (e := fault(s))), None)
        if faulty is None:
            where = f"at {path}" if path else "at its root"
            return f"cannot be enforced {where}: {fault_line(reason)}."
        path, part, reason = path + faulty[0], faulty[1], faulty[2]


def fault_line(reason: str) -> str:
    """What llguidance's message says, without its listing of the grammar."""
    _, is_pattern, detail = reason.partition("\nerror: ")  # of a pattern, after a drawing
    if is_pattern:
        return detail.split("\n", 1)[0]
    if reason.startswith("NoExtension"):
        return "no reply can satisfy it"
    return re.sub(
        r"^(at )?\d+\(\d+\): |failed to compile JSON schema: ", "", reason.split("\n", 1)[0]
    )


def _parts(schema: JsonObject) -> list[tuple[str, JsonObject]]:
    """The schemas directly inside a schema, with their paths from it."""
    parts: list[tuple[str, JsonValue]] = []
    for key, value in schema.items():
        if key in ("properties", "patternProperties", *_DEFINITIONS) and isinstance(value, dict):
            parts += [(f"/{key}/{name}", inner) for name, inner in value.items()]
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            parts += [(f"/{key}/{index}", inner) for index, inner in enumerate(value)]
        elif key in ("items", "additionalProperties", "not"):
            parts.append((f"/{key}", value))
    return [(path, part) for path, part in parts if isinstance(part, dict) and _is_whole(part)]


def _is_whole(part: JsonObject) -> bool:
    """Whether a part means the same by itself: it points at nothing but definitions."""
    return str(part.get("$ref", "#/$defs/")).startswith(tuple(f"#/{key}/" for key in _DEFINITIONS))
