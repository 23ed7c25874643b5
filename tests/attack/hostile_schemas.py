"""JSON schemas and patterns that cost their reader much more than their writer."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]


def _products(dice: random.Random) -> Schema:
    """Numbers that are multiples of several large ones: the automaton has their product."""
    primes = [99999989, 99999971, 1000003, 7919, 104729, 1299709]
    first, *rest = primes[:3] if dice.random() < 0.5 else dice.sample(primes, dice.randint(2, 4))
    return {"allOf": [{"type": "integer", "multipleOf": first}, *({"multipleOf": n} for n in rest)]}


def _mutual_refs(dice: random.Random) -> Schema:
    """Definitions that all refer to each other: paths through them are factorially many."""
    number = dice.randint(6, 14)
    names = [f"d{i}" for i in range(number)]
    definitions = {
        name: {
            "type": "object",
            "properties": {other: {"$ref": f"#/$defs/{other}"} for other in names if other != name},
            "required": [other for other in names if other != name] if dice.random() < 0.3 else [],
        }
        for name in names
    }
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def _any_of_refs(dice: random.Random) -> Schema:
    number = dice.randint(8, 40)
    names = [f"d{i}" for i in range(number)]
    definitions = {
        name: {"anyOf": [{"$ref": f"#/$defs/{other}"} for other in names] + [{"type": "null"}]}
        for name in names
    }
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def _self_required(_: random.Random) -> Schema:
    """Five required keys that each need the whole again: no finite document fits."""
    names = ["a", "b", "c", "d", "e"]
    return {
        "type": "object",
        "properties": {name: {"$ref": "#"} for name in names},
        "required": names,
    }


def _doubling_refs(dice: random.Random) -> Schema:
    """Each definition holds the next one twice."""
    depth = dice.randint(15, 40)
    definitions: Schema = {
        f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2}
        for i in range(depth)
    }
    definitions[f"d{depth}"] = {"type": "boolean"}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def _counted_pattern(dice: random.Random) -> Schema:
    inner, outer = dice.randint(50, 1000), dice.randint(50, 1000)
    pattern = dice.choice(
        (
            f"^((a{{1,{inner}}}b?){{1,{outer}}}c){{1,{outer}}}$",
            f"^(.{{0,{inner}}}x){{{outer}}}$",
            f"^([a-z]+)*{{{inner}}}$",
            f"^(a?){{{inner}}}a{{{inner}}}$",
            "^" + "(a|b|ab)" * 200 + "{1,500}$",
        )
    )
    return {"type": "string", "pattern": pattern}


def _huge_enum(dice: random.Random) -> Schema:
    if dice.random() < 0.5:
        return {"enum": ["x" * 10**6, "y" * 10**6]}
    return {"enum": [f"value-{i}-{dice.random()}" for i in range(dice.choice((1000, 50_000)))]}


def _many_properties(dice: random.Random) -> Schema:
    names = [f"p{i}" for i in range(dice.choice((500, 5000)))]
    properties = {name: {"type": "integer", "minimum": i} for i, name in enumerate(names)}
    return {
        "type": "object",
        "properties": properties,
        "required": names if dice.random() < 0.5 else [],
        "additionalProperties": False,
    }


def _far_bounds(dice: random.Random) -> Schema:
    return dice.choice(
        (
            {"type": "integer", "minimum": -(10**300)},
            {"type": "integer", "minimum": 10**300, "maximum": 10**301},
            {"type": "number", "minimum": 1e-300, "maximum": 1e-299},
            {"type": "number", "multipleOf": 1e-300},
            {"type": "string", "minLength": 10**6, "maxLength": 10**7},
            {"type": "array", "items": {"type": "integer"}, "minItems": 10**5},
            {"type": "object", "minProperties": 10**5, "maxProperties": 10**6},
        )
    )


def _deep(dice: random.Random) -> Schema:
    key = dice.choice(("allOf", "anyOf", "oneOf"))
    schema: Schema = {"type": "integer"}
    for _ in range(dice.choice((20, 90, 400))):
        schema = {key: [schema, {"minimum": 0}]}
    return schema


def _deep_items(dice: random.Random) -> Schema:
    schema: Schema = {"type": "null"}
    for _ in range(dice.choice((50, 400))):
        schema = {"type": "array", "items": schema, "minItems": 1}
    return schema


def _crossed_options(dice: random.Random) -> Schema:
    """All combinations of several alternatives at once."""
    number = dice.randint(4, 12)
    sides = [
        {
            "anyOf": [
                {"properties": {f"k{i}": {"const": value}}, "required": [f"k{i}"]}
                for value in range(dice.randint(2, 6))
            ]
        }
        for i in range(number)
    ]
    return {"type": "object", "allOf": sides}


def _crossed_patterns(dice: random.Random) -> Schema:
    """A string that fits many patterns at once: the product of their automata."""
    sizes = dice.sample((7, 11, 13, 17, 19, 23, 29, 31), dice.randint(3, 8))
    return {"allOf": [{"type": "string"}, *({"pattern": f"^(a{{{size}}})*$"} for size in sizes)]}


def _nonsense(dice: random.Random) -> Schema:
    return dice.choice(
        (
            {"$ref": "#"},
            {"$ref": "http://example.com/schema.json"},
            {"$ref": "file:///etc/passwd"},
            {"$ref": "#/$defs/none"},
            {"type": "unknown"},
            {"type": ["string"] * 1000},
            {"properties": []},
            {"pattern": "(" * 500, "type": "string"},
            {"not": {}},
            {"enum": []},
            {"patternProperties": {"^(a+)+$": {"type": "string"}}, "type": "object"},
            {"$dynamicRef": "#x", "$recursiveRef": "#"},
            {"if": {"type": "string"}, "then": False, "else": {"$ref": "#"}},
        )
    )


MAKERS: tuple[Callable[[random.Random], Schema], ...] = (
    _products,
    _mutual_refs,
    _self_required,
    _counted_pattern,
    _huge_enum,
    _many_properties,
    _far_bounds,
    _deep,
    _any_of_refs,
    _doubling_refs,
    _crossed_options,
    _crossed_patterns,
    _deep_items,
    _nonsense,
)
