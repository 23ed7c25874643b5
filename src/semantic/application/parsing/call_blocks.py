"""Parsers for calls that must be complete to be read: in Python, and JSON with its name last.

Each parser returns None if the text is malformed or calls an unknown tool.
"""

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from semantic.domain.chat import JsonObject, JsonValue, ToolSpec

Tools: TypeAlias = Mapping[str, ToolSpec]
Calls: TypeAlias = list[tuple[str, JsonObject]]


def json_or_text(text: str) -> JsonValue:
    """Parse a value; text that is not JSON is a string."""
    try:
        value: JsonValue = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    return value


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


# -- JSON, with keys in any order -----------------------------------------------------------

NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters")


def json_call(text: str, tools: Tools) -> Calls | None:
    """Parse one call; its arguments may be an object, its text, or null."""
    try:
        call = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict):
        return None
    name = next((call[key] for key in NAME_KEYS if key in call), None)
    if name not in tools:
        return None
    given = next((call[key] for key in ARGUMENT_KEYS if key in call), None)
    arguments = _as_object(given)
    return None if arguments is None else [(str(name), arguments)]


def _as_object(value: JsonValue) -> JsonObject | None:
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value, strict=False)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


# -- Python: [f(a=1), g(b="x")], parsed and never executed ------------------------------------

_MAX_LENGTH = 200_000
_NAMES: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}
_NOTABLE = re.compile(r"""[\[\](){}"'\\]""")


class BracketEnd:
    """Finds the closing bracket of a text that streams; scans each character once."""

    def __init__(self) -> None:
        self._at = -1
        self._depth = 0
        self._quote = ""

    def __call__(self, text: str, start: int) -> int:
        """Return the index after the closing bracket; -1 if it is not there yet.

        Scans from the `start` of the first call, and later from where it stopped.
        """
        self._at = max(self._at, start)
        while match := _NOTABLE.search(text, self._at):
            char, at = match[0], match.start()
            if char == "\\":
                if at + 1 >= len(text):
                    self._at = at
                    return -1
                self._at = at + 2
                continue
            self._at = at + 1
            if self._count(char):
                return self._at
        self._at = max(self._at, len(text))
        return -1

    def _count(self, char: str) -> bool:
        """Count a bracket or quote; True if it closes the outermost bracket."""
        if self._quote:
            self._quote = "" if char == self._quote else self._quote
        elif char in "\"'":
            self._quote = char
        elif char in "[({":
            self._depth += 1
        else:
            self._depth -= 1
            return self._depth <= 0
        return False


def python_calls(text: str, tools: Tools) -> Calls | None:
    """Parse a list of calls, or one call per line; None if it is malformed or unknown."""
    if len(text) > _MAX_LENGTH:
        return None
    try:
        body = ast.parse(text.strip()).body
        nodes = [node for statement in body for node in _call_nodes(statement)]
        calls = [_read_call(node, tools) for node in nodes]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return calls or None


def _call_nodes(statement: ast.stmt) -> list[ast.expr]:
    if not isinstance(statement, ast.Expr):
        raise ValueError("not an expression")  # noqa: TRY004 - all errors are ValueError here
    value = statement.value
    if isinstance(value, ast.List | ast.Tuple):
        return value.elts
    # Gemma often wraps a call in print().
    if isinstance(value, ast.Call) and _name(value) == "print" and len(value.args) == 1:
        return value.args
    return [value]


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ast.unparse(call.func)


def _read_call(node: ast.expr, tools: Tools) -> tuple[str, JsonObject]:
    if not isinstance(node, ast.Call) or _name(node) not in tools or node.args:
        raise ValueError("not a call of a known tool by keywords")
    arguments: JsonObject = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("arguments must be named")
        arguments[keyword.arg] = _literal(keyword.value)
    return _name(node), arguments


def _literal(node: ast.expr) -> JsonValue:
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=bool() | str() as value):
            return value
        case ast.Constant(value=int() | float() as number) if math.isfinite(number):
            return number
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)) if (
            math.isfinite(number)
        ):
            return -number
        case _:
            raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("keys must be strings")


# -- Gemma: call:f{a:<escape>x<escape>,b:[1,2]}, with a marker for quotes ---------------------

_CALL = re.compile(r"\s*([^{\s]+)\s*\{")
_WORD = re.compile(r"[^,}\]\s]+")
_MAX_DEPTH = 64


def gemma_call(text: str, quote: str, tools: Tools) -> Calls | None:
    """Parse one call in Gemma's notation; None if it is malformed or unknown."""
    match = _CALL.match(text)
    if match is None or match[1] not in tools:
        return None
    reader = _Reader(text, match.end() - 1, quote)
    try:
        arguments = reader.object(0)
    except (ValueError, IndexError, RecursionError):
        return None
    return None if text[reader.at :].strip() else [(match[1], arguments)]


class _Reader:
    """Recursive descent parser; raises ValueError or IndexError if the text is malformed."""

    def __init__(self, text: str, at: int, quote: str) -> None:
        self._text, self.at, self._quote = text, at, quote

    def object(self, depth: int) -> JsonObject:
        values: JsonObject = {}
        for _ in self._items("{", "}"):
            key = self._key()
            self._pass(":")
            values[key] = self._value(depth)
        return values

    def _items(self, start: str, end: str) -> Iterator[None]:
        """Yield before each item between brackets; the caller reads the item."""
        self._pass(start)
        while self._peek() != end:
            yield
            if self._peek() != end:
                self._pass(",")
        self._pass(end)

    def _value(self, depth: int) -> JsonValue:
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        char = self._peek()
        if self._text.startswith(self._quote, self.at):
            return self._quoted()
        if char == "{":
            return self.object(depth + 1)
        if char == "[":
            return [self._value(depth + 1) for _ in self._items("[", "]")]
        return self._word()

    def _quoted(self) -> str:
        start = self.at + len(self._quote)
        end = self._text.index(self._quote, start)
        self.at = end + len(self._quote)
        return self._text[start:end]

    def _word(self) -> JsonValue:
        match = _WORD.match(self._text, self.at)
        if match is None:
            raise ValueError("a value is missing")
        self.at = match.end()
        return json_or_text(match[0])

    def _key(self) -> str:
        if self._text.startswith(self._quote, self.at):
            return self._quoted()
        end = self._text.index(":", self.at)
        key = self._text[self.at : end].strip()
        self.at = end
        return key

    def _peek(self) -> str:
        while self._text[self.at].isspace():
            self.at += 1
        return self._text[self.at]

    def _pass(self, char: str) -> None:
        if self._peek() != char:
            raise ValueError(f"{char} is missing")
        self.at += 1
