"""Parses and repairs a call's JSON arguments while they stream.

`close` can complete the emitted text to a valid object at any time, so a syntax error never leaves
a client with an incomplete object. For this, a key is held back until its value begins, and a
number or literal until it is complete.
"""

import enum
import json
import re
from collections.abc import Mapping
from typing import Protocol

_SPACE = " \t\r\n"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?\Z")
LITERALS = {
    "true": "true", "false": "false", "null": "null",
    "True": "true", "False": "false", "None": "null",
}  # fmt: skip
_ESCAPES = '"\\/bfnrt'
_HEX = frozenset("0123456789abcdefABCDEF")
_MAX_DEPTH = 128
MAX_WORD = 400


class _Want(enum.Enum):
    """What the JSON grammar expects next."""

    START = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    NEXT = enum.auto()
    STRING = enum.auto()


class ArgumentParser(Protocol):
    """An incremental parser for the arguments of one call, which it converts to a JSON object.

    Attributes:
        is_done: The arguments are complete; text after them was not read.
        is_broken: A syntax error was found; text from there on was not read.
    """

    is_done: bool
    is_broken: bool

    def feed(self, text: str, *, is_final: bool = False) -> tuple[int, str]:
        """Read more text.

        Args:
            text: The characters that the last call did not read, followed by new ones.

        Returns:
            How many characters were read, and the text they add to the JSON object.
        """

    def close(self) -> str:
        """Return the text that completes the emitted object; do not call `feed` afterwards."""


class JsonArguments:
    """The `ArgumentParser` of arguments that are written as JSON.

    Attributes:
        opening: The bracket that begins the arguments, and the one that ends them.
        brackets: By a bracket that begins an object or array: the one that ends it, and what both
            are in JSON.
        word: Matches a number or literal.
    """

    opening = "{}"
    brackets: Mapping[str, tuple[str, str]] = {"{": ("}", "{}"), "[": ("]", "[]")}
    word = re.compile(r"[A-Za-z0-9+.\-]+")

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self._want = _Want.START
        self._closers: list[str] = []  # what ends the open objects and arrays
        self._stack: list[str] = []  # the same in JSON
        self._held = ""  # comma and key, held back until their value begins
        self._quote = ""  # ends the string that is being read
        self._is_key = False
        self._surrogate = ""  # a high surrogate, held back until the low one follows
        self._out: list[str] = []

    def feed(self, text: str, *, is_final: bool = False) -> tuple[int, str]:
        at = 0
        while at < len(text) and not self._is_over():
            used = self._string(text, at) if self._want is _Want.STRING else self._token(text, at)
            if used == 0 and not self._is_over():
                self.is_broken = is_final  # undecided, and no more text follows
                break
            at += used
        return at, self._take()

    def close(self) -> str:
        text, self._out = "".join(self._out), []
        if self._want is _Want.START:
            text = "{"
            self._stack.append("}")
        elif self._want is _Want.STRING and not self._is_key:
            text += self._lone_surrogate() + '"'
        text += "".join(reversed(self._stack))
        self._stack.clear()
        self.is_done = True
        return text

    def _take(self) -> str:
        """Return the text that is decided, and forget it."""
        out, self._out = "".join(self._out), []
        return out

    def _is_over(self) -> bool:
        return self.is_done or self.is_broken

    # -- outside strings ------------------------------------------------------------------------

    def _token(self, text: str, at: int) -> int:
        char = text[at]
        if char in _SPACE:
            return 1
        match self._want:
            case _Want.START if char == self.opening[0]:
                return self._open(self.opening[1], "{}")
            case _Want.KEY:
                return self._key(text, at)
            case _Want.COLON if char == self._colon:
                self._held += ": "
                self._want = _Want.VALUE
                return 1
            case _Want.VALUE:
                return self._value(text, at)
            case _Want.NEXT:
                return self._next(char)
            case _:
                return self._break()

    @property
    def _colon(self) -> str:
        """What separates a key from its value."""
        return ":"

    def _quote_at(self, text: str, at: int) -> str | None:
        """Return the quote that begins a string here; empty if none does, None if undecided."""
        return '"' if text[at] == '"' else ""

    def _key(self, text: str, at: int) -> int:
        quote = self._quote_at(text, at)
        if quote is None:
            return 0
        if quote:
            self._held += '"'
            return self._begin(quote, is_key=True)
        return self._shut(text[at]) if text[at] == self._closers[-1] else self._bare_key(text, at)

    def _bare_key(self, text: str, at: int) -> int:  # noqa: ARG002 - JSON has none
        return self._break()

    def _hold_key(self, key: str) -> None:
        self._held += json.dumps(key, ensure_ascii=False)
        self._want = _Want.COLON

    def _value(self, text: str, at: int) -> int:
        char, quote = text[at], self._quote_at(text, at)
        if quote is None:
            return 0
        if quote:
            self._emit('"')
            return self._begin(quote, is_key=False)
        if char in self.brackets:
            return self._open(*self.brackets[char])
        if char == self._closers[-1] and self._stack[-1] == "]":
            return self._shut(char)
        return self._word(text, at)

    def _begin(self, quote: str, *, is_key: bool) -> int:
        self._quote, self._is_key, self._want = quote, is_key, _Want.STRING
        return len(quote)

    def _word(self, text: str, at: int) -> int:
        """Read a number or literal; the character after it decides that it is complete."""
        match = self.word.match(text, at)
        if match is None or len(match[0]) > MAX_WORD:
            return self._break()
        if match.end() == len(text):
            return 0
        value = self._scalar(match[0])
        if not value:
            return self._break()
        self._emit(value)
        self._want = _Want.NEXT
        return len(match[0])

    def _scalar(self, word: str) -> str:
        """Return a number or literal as JSON; empty if it is neither."""
        return LITERALS.get(word) or (word if _NUMBER.match(word) else "")

    def _next(self, char: str) -> int:
        if char == ",":
            self._held = ", "
            self._want = _Want.KEY if self._stack[-1] == "}" else _Want.VALUE
            return 1
        return self._shut(char)

    def _open(self, closer: str, brackets: str) -> int:
        if len(self._stack) >= _MAX_DEPTH:
            return self._break()
        self._emit(brackets[0])
        self._closers.append(closer)
        self._stack.append(brackets[1])
        self._want = _Want.KEY if brackets == "{}" else _Want.VALUE
        return 1

    def _shut(self, char: str) -> int:
        if char != self._closers[-1]:
            return self._break()
        self._held = ""  # drops a trailing comma
        self._closers.pop()
        self._out.append(self._stack.pop())
        self._want = _Want.NEXT
        self.is_done = not self._stack
        return 1

    def _emit(self, text: str) -> None:
        self._out.append(self._held + text)
        self._held = ""

    def _break(self) -> int:
        self.is_broken = True
        return 0

    # -- inside strings -------------------------------------------------------------------------

    def _string(self, text: str, at: int) -> int:
        char = text[at]
        if char == "\\":
            return self._escape(text, at)
        if char == self._quote:
            return self._end_string()
        plain = _PLAIN.match(text, at)
        if plain is None:  # a control character that should have been escaped
            self._content(self._lone_surrogate() + f"\\u{ord(char):04x}")
            return 1
        self._content(self._lone_surrogate() + plain[0])
        return len(plain[0])

    def _end_string(self) -> int:
        self._content(self._lone_surrogate() + '"')
        self._want = _Want.COLON if self._is_key else _Want.NEXT
        return len(self._quote)

    def _escape(self, text: str, at: int) -> int:
        if at + 1 == len(text):
            return 0
        char = text[at + 1]
        if char == "u":
            return self._unicode_escape(text, at)
        # A backslash before any other character is taken literally.
        escaped = f"\\{char}" if char in _ESCAPES else "\\\\"
        self._content(self._lone_surrogate() + escaped)
        return 2 if char in _ESCAPES else 1

    def _unicode_escape(self, text: str, at: int) -> int:
        digits = text[at + 2 : at + 6]
        if not all(digit in _HEX for digit in digits):
            self._content(self._lone_surrogate() + "\\\\")
            return 1
        if len(digits) < 4:
            return 0
        code = int(digits, 16)
        escaped = f"\\u{digits}"
        if 0xD800 <= code < 0xDC00:
            self._content(self._lone_surrogate())
            self._surrogate = escaped
        elif 0xDC00 <= code < 0xE000:
            high, self._surrogate = self._surrogate, ""
            self._content(high + escaped if high else "\\ufffd")
        else:
            self._content(self._lone_surrogate() + escaped)
        return 6

    def _lone_surrogate(self) -> str:
        lone, self._surrogate = self._surrogate, ""
        return "\\ufffd" if lone else ""

    def _content(self, text: str) -> None:
        if self._is_key:
            self._held += text
        else:
            self._out.append(text)
