"""Where in a schema the trouble is; llguidance says only what it is."""

from llguidance import LLMatcher, LLTokenizer

from semantic.domain.chat import JsonObject, JsonValue

_DEFINITIONS = ("$defs", "definitions")


def schema_fault(
    tokenizer: LLTokenizer, schema: JsonObject, *, is_lenient: bool = False
) -> str | None:
    """Say where and why a schema cannot be enforced; None if it can."""
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}

    def error(part: JsonObject) -> str:
        grammar = LLMatcher.grammar_from_json_schema(
            {**shared, **part}, overrides={"lenient": is_lenient}
        )
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        return matcher.get_error() if matcher.is_error() else ""

    reason, path, part = error(schema), "", schema
    if not reason:
        return None
    while True:
        # The innermost part that fails by itself is where the fault is.
        faulty = next(((p, s, e) for p, s in _parts(part) if (e := error(s))), None)
        if faulty is None:
            where = f"at {path}" if path else "at its root"
            return f"cannot be enforced {where}: {reason.strip().splitlines()[-1]}."
        path, part, reason = path + faulty[0], faulty[1], faulty[2]


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
    return [(path, part) for path, part in parts if isinstance(part, dict)]
