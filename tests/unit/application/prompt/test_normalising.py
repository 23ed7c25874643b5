"""Two ways to write the same thing."""

import json

import pytest

from semantic.application.prompt.normalising import (
    canonical_json,
    in_schema_order,
    without_billing_line,
)
from semantic.domain.chat import JsonObject

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "one,other",
    [
        ('{"a": 1000.0, "b": "\\u00e9"}', '{"b": "é", "a": 1e3}'),
        ("[0, -0.0, 1.5]", "[0.0, 0, 15e-1]"),
        ("12345678901234567890", "12345678901234567000"),  # as JavaScript writes it
        ('{"a": {"c": 1, "d": [true, null]}}', '{"a":{"d":[true,null],"c":1.0}}'),
    ],
)
def test_equal_values_are_equal_text(one: str, other: str) -> None:
    assert canonical_json(json.loads(one)) == canonical_json(json.loads(other))


@pytest.mark.parametrize(
    "one,other", [("1", "true"), ("1", '"1"'), ("[1, 2]", "[2, 1]"), ("1", "1.5"), ("0", "null")]
)
def test_different_values_are_not(one: str, other: str) -> None:
    assert canonical_json(json.loads(one)) != canonical_json(json.loads(other))


def test_numbers_too_large_for_a_float_are_told_apart() -> None:
    assert canonical_json(10**400) != canonical_json(10**401)


def test_the_order_of_a_schemas_keys_does_not_matter() -> None:
    inner: JsonObject = {"enum": ["y", "x"], "type": "string"}
    turned: JsonObject = dict(reversed(inner.items()))
    one: JsonObject = {"type": "object", "properties": {"b": inner, "a": {}}}
    other: JsonObject = {"properties": {"a": {}, "b": turned}, "type": "object"}
    assert json.dumps(in_schema_order(one)) == json.dumps(in_schema_order(other))
    assert json.dumps(in_schema_order({"enum": ["y", "x"]})) == '{"enum": ["y", "x"]}'


@pytest.mark.parametrize(
    "text,left",
    [
        ("x-anthropic-billing-header: cc_version=2.1; cch=00000;", ""),
        ("x-anthropic-billing-header: a=1\n\nYou are terse.", "You are terse."),
        ("Terse.\nx-anthropic-billing-header: a", "Terse.\nx-anthropic-billing-header: a"),
        ("", ""),
    ],
)
def test_the_billing_line_is_left_out(text: str, left: str) -> None:
    assert without_billing_line(text) == left
