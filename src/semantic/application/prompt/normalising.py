"""What makes two ways to write the same thing the same text.

Clients re-serialise what they send again: these functions take out what carries no meaning, so
that the next prompt begins with the last one.
"""

import json

from semantic.domain.chat import JsonObject, JsonValue

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_BILLING_PREFIX = "x-anthropic-billing-header:"
_LARGEST_EXACT = 2**53  # beyond it, JavaScript rounds integers
_SCHEMA_ORDER = ("type", "description", "enum", "properties", "items", "required")


def without_billing_line(text: str) -> str:
    r"""Leave out a first line that only counts for a vendor's billing.

    Example:
        >>> without_billing_line("x-anthropic-billing-header: cc_version=2; cch=1f;\nBe terse.")
        'Be terse.'
    """
    if not text.lstrip().lower().startswith(_BILLING_PREFIX):
        return text
    return text.lstrip().partition("\n")[2].lstrip("\n")


def canonical_json(value: JsonValue) -> str:
    r"""Write JSON so that equal values are equal text.

    Example:
        >>> canonical_json({"b": 1000.0, "a": "\u00e9"}) == canonical_json({"a": "é", "b": 1e3})
        True
    """
    return _ENCODER.encode(_by_value(value))


def in_schema_order(value: JsonValue) -> JsonValue:
    """Put a schema's keys in one order, whatever order they came in: the customary ones first.

    Example:
        >>> list(in_schema_order({"required": [], "b": 1, "a": 2, "type": "object"}))
        ['type', 'required', 'a', 'b']
    """
    match value:
        case dict():
            return {key: in_schema_order(value[key]) for key in sorted(value, key=_schema_rank)}
        case list():
            return [in_schema_order(item) for item in value]
        case _:
            return value


def _schema_rank(key: str) -> tuple[int, str]:
    return (_SCHEMA_ORDER.index(key) if key in _SCHEMA_ORDER else len(_SCHEMA_ORDER), key)


def _by_value(value: JsonValue) -> JsonValue:
    match value:
        case dict():
            members: JsonObject = {key: _by_value(item) for key, item in value.items()}
            return members
        case list():
            return [_by_value(item) for item in value]
        case bool():
            return value
        case int() if abs(value) > _LARGEST_EXACT:
            return _rounded(value)
        case float() if value.is_integer() and abs(value) <= _LARGEST_EXACT:
            return int(value)
        case _:
            return value


def _rounded(value: int) -> JsonValue:
    try:
        return float(value)
    except OverflowError:
        return str(value)
