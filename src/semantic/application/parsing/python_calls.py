"""Calls written as in Python: ``[f(a=1), g(b="x")]``. Read as syntax, never executed."""

import ast
import math
import re
from collections.abc import Mapping

from semantic.domain.chat import JsonObject, JsonValue, ToolSpec

_MAX_LENGTH = 200_000
_NAMES: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}
_NOTABLE = re.compile(r"""[\[\](){}"'\\]""")


class BracketEnd:
    """Finds where the bracket that begins a text closes; looks at each character once."""

    def __init__(self) -> None:
        self._at = -1
        self._depth = 0
        self._quote = ""

    def __call__(self, text: str, start: int) -> int:
        """The end of the bracket that opens at or after `start` of the first call; -1 if open."""
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
        """Take a bracket or quote into account; True if everything is closed by it."""
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


def python_calls(text: str, tools: Mapping[str, ToolSpec]) -> list[tuple[str, JsonObject]] | None:
    """Read a list of calls, or calls one a line; None if that is not what it is."""
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
        raise ValueError("not an expression")  # noqa: TRY004 - all that is wrong is one error here
    value = statement.value
    if isinstance(value, ast.List | ast.Tuple):
        return value.elts
    # Gemma likes to print what a call returns.
    if isinstance(value, ast.Call) and _name(value) == "print" and len(value.args) == 1:
        return value.args
    return [value]


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ast.unparse(call.func)


def _read_call(node: ast.expr, tools: Mapping[str, ToolSpec]) -> tuple[str, JsonObject]:
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
