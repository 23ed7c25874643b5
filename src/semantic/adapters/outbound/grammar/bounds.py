"""How far one more token can move a reply away from being complete.

Upper bounds in bytes, read off a schema or a pattern. A bound that is too high only makes the end
of a budget be watched earlier; one that is too low could let a reply run out of it.
"""

import json
from collections.abc import Iterator

from semantic.domain.chat import JsonObject, JsonValue

_MAX_DEPTH = 8
_NUMBER_BYTES = 24
_FORMAT_BYTES = 48
_COUNTED_MAX = 10_000


def schema_growth(schema: JsonObject) -> int:
    """The most bytes that one more optional part of the schema can commit a reply to.

    What the schema requires anyway is part of every completion, so beginning it adds nothing.
    """
    return max(_growths(schema, schema, frozenset()))


def _growths(schema: JsonValue, root: JsonObject, seen: frozenset[str]) -> Iterator[int]:
    """Bounds for everything that may be begun in a value that is itself required."""
    if not isinstance(schema, dict):
        yield _NUMBER_BYTES
        return
    yield max(_string_bytes(schema), _chosen_bytes(schema), _NUMBER_BYTES)
    for name, part, is_needed in _parts(schema):
        if not is_needed:
            yield len(json.dumps(name)) + 6 + _value_bytes(part, root, 0)
        yield from _growths(part, root, seen)
    pointer = schema.get("$ref")
    if isinstance(pointer, str) and pointer not in seen:
        yield from _growths(_resolve(pointer, root), root, seen | {pointer})


def _parts(schema: JsonObject) -> Iterator[tuple[str, JsonValue, bool]]:
    """The schemas within a schema: a key, the schema, and whether its value must be there."""
    required = _items(schema.get("required"))
    for key in ("properties", "patternProperties"):
        known = schema.get(key)
        for name, part in (known if isinstance(known, dict) else {}).items():
            yield name, part, key == "properties" and name in required
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for part in _items(schema.get(key)):
            yield "", part, key == "allOf"
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield "", schema[key], False


def has_patterns(schema: JsonObject) -> bool:
    """Whether a string of the schema may be restricted in more than its length."""
    keys = ("pattern", "format", "patternProperties", "propertyNames")
    return any(key in part for part in subschemas(schema) for key in keys)


def subschemas(schema: JsonObject) -> Iterator[JsonObject]:
    """The schema and every object within it, outermost first."""
    yield schema
    for value in schema.values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield from subschemas(item)


def pattern_growth(pattern: str) -> int:
    """The bytes of the longest way through a pattern that repeats nothing needlessly."""
    return max(4, _Pattern(pattern).alternatives())


def _value_bytes(schema: JsonValue, root: JsonObject, depth: int) -> int:
    """At most this many bytes make a shortest value of the schema."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return 4
    if "const" in schema or "enum" in schema:
        return _chosen_bytes(schema)
    size = _referenced_bytes(schema, root, depth)
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        sizes = [_value_bytes(b, root, depth + 1) for b in _items(branches)]
        size += sum(sizes) if key == "allOf" else max(sizes, default=0)
    return size + max(
        _object_bytes(schema, root, depth),
        _array_bytes(schema, root, depth),
        _string_bytes(schema),
        _NUMBER_BYTES,
    )


def _chosen_bytes(schema: JsonObject) -> int:
    choices = [schema["const"]] if "const" in schema else _items(schema.get("enum"))
    return max((len(json.dumps(choice)) for choice in choices), default=4)


def _items(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []


def _count(value: JsonValue) -> int:
    return min(int(value), _COUNTED_MAX) if isinstance(value, int | float) and value > 0 else 0


def _referenced_bytes(schema: JsonObject, root: JsonObject, depth: int) -> int:
    pointer = schema.get("$ref")
    if not isinstance(pointer, str):
        return 0
    return _value_bytes(_resolve(pointer, root), root, depth + 1)


def _resolve(pointer: str, root: JsonObject) -> JsonValue:
    target: JsonValue = root
    for step in pointer.removeprefix("#").strip("/").split("/"):
        if step and isinstance(target, dict):
            target = target.get(step.replace("~1", "/").replace("~0", "~"))
    return target


def _object_bytes(schema: JsonObject, root: JsonObject, depth: int) -> int:
    known = schema.get("properties")
    properties = known if isinstance(known, dict) else {}
    size = 2
    for key in _items(schema.get("required")):
        size += len(json.dumps(key)) + 4 + _value_bytes(properties.get(str(key)), root, depth + 1)
    return size + 12 * _count(schema.get("minProperties"))


def _array_bytes(schema: JsonObject, root: JsonObject, depth: int) -> int:
    item = _value_bytes(schema.get("items"), root, depth + 1)
    fixed = sum(_value_bytes(i, root, depth + 1) + 2 for i in _items(schema.get("prefixItems")))
    return 2 + fixed + _count(schema.get("minItems")) * (item + 2)


def _string_bytes(schema: JsonObject) -> int:
    pattern = schema.get("pattern")
    size = 2 + _count(schema.get("minLength"))
    size += pattern_growth(pattern) if isinstance(pattern, str) else 0
    return size + (_FORMAT_BYTES if "format" in schema else 0)


class _Pattern:
    """Adds up the atoms of a regular expression, counted repetitions multiplied."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def alternatives(self) -> int:
        total = 0
        while self._at < len(self._text) and self._text[self._at] != ")":
            total += self._atom() * self._repetitions()
        return total

    def _atom(self) -> int:
        char = self._text[self._at]
        self._at += 1
        if char == "(":
            size = self.alternatives()
            self._at += 1
            return size
        if char == "[":
            self._skip_class()
            return 1
        if char == "\\":
            self._at += 1
            return 2
        return len(char.encode("utf-8", "replace"))

    def _skip_class(self) -> None:
        # A bracket right after the opening (or its negation) is a member of the class.
        self._at += self._text[self._at : self._at + 1] == "^"
        self._at += self._text[self._at : self._at + 1] == "]"
        while self._at < len(self._text) and self._text[self._at] != "]":
            self._at += 2 if self._text[self._at] == "\\" else 1
        self._at += 1

    def _repetitions(self) -> int:
        if self._text[self._at : self._at + 1] != "{":
            return 1
        end = self._text.find("}", self._at)
        least = self._text[self._at + 1 : end].split(",")[0] if end > 0 else ""
        if not least.isdecimal():
            return 1
        self._at = end + 1
        return max(1, min(int(least), _COUNTED_MAX))
