"""Converts arguments in the notations of Python and Gemma to a JSON object while they stream.

``(city="Zürich", days=2)`` and ``{city:<escape>Zürich<escape>,days:2}`` become ``{"city": "Zürich",
"days": 2}``. Nothing is executed.
"""

import json
import math
import re
from collections.abc import Mapping

from semantic.application.parsing.call_blocks import json_or_text
from semantic.application.parsing.json_arguments import LITERALS, MAX_WORD, JsonArguments
from semantic.domain.sampling import num_undecided

_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_PLAIN = re.compile(r"[^\"'\\\x00-\x1f]+")
_NO_SPACE = re.compile(r"\S")
_ESCAPES: Mapping[str, str] = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
_NUM_HEX = {"x": 2, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]*")
_OCTAL = re.compile(r"[0-7]{1,3}")
_MAX_CODE = 0x10FFFF


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def python_scalar(word: str) -> str:
    """Return a number or literal of Python as JSON; empty if it is neither."""
    if word in LITERALS:
        return LITERALS[word]
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        return ""
    return json.dumps(number) if math.isfinite(number) else ""


class PythonArguments(JsonArguments):
    """The `ArgumentParser` of keyword arguments with literals as values.

    What follows a parenthesis is held back until a comma shows that it begins a tuple.
    """

    opening = "()"
    brackets: Mapping[str, tuple[str, str]] = {**JsonArguments.brackets, "(": (")", "[]")}
    word = re.compile(r"[\w+.\-]+")

    def __init__(self) -> None:
        super().__init__()
        self._is_raw = False
        # By depth, where the "[" of a parenthesis is in `_out` that may not begin a tuple.
        self._undecided: dict[int, int] = {}

    @property
    def _colon(self) -> str:
        return "=" if len(self._stack) == 1 else ":"

    # -- parentheses ----------------------------------------------------------------------------

    def _take(self) -> str:
        end = min(self._undecided.values(), default=len(self._out))
        taken = "".join(self._out[:end])
        del self._out[:end]
        self._undecided = {depth: place - end for depth, place in self._undecided.items()}
        return taken

    def _open(self, closer: str, brackets: str) -> int:
        used = super()._open(closer, brackets)
        if used and closer == ")" and len(self._stack) > 1:
            self._undecided[len(self._stack)] = len(self._out) - 1
        return used

    def _next(self, char: str) -> int:
        if char == ",":
            self._undecided.pop(len(self._stack), None)
        return super()._next(char)

    def _shut(self, char: str) -> int:
        place = self._undecided.get(len(self._stack)) if char == self._closers[-1] else None
        if place is not None:
            del self._undecided[len(self._stack)]
            if place < len(self._out) - 1:  # one value, and no comma
                self._out[place] = self._out[place][:-1]
                self._stack[-1] = ""
        return super()._shut(char)

    # -- keys and scalars -----------------------------------------------------------------------

    def _bare_key(self, text: str, at: int) -> int:
        is_keyword = len(self._stack) == 1
        match = (_IDENTIFIER if is_keyword else self.word).match(text, at)
        if match is None or len(match[0]) > MAX_WORD:
            return self._break()
        if match.end() == len(text):
            return 0
        key = match[0] if is_keyword else python_scalar(match[0])  # as json.dumps writes {1: 2}
        if not key:
            return self._break()
        self._hold_key(key)
        return len(match[0])

    def _scalar(self, word: str) -> str:
        return python_scalar(word)

    # -- strings --------------------------------------------------------------------------------

    def _quote_at(self, text: str, at: int) -> str | None:
        prefix = text[at] if text[at] in "rRuU" else ""
        begin = at + len(prefix)
        quote = text[begin : begin + 1]
        if not quote or quote not in "\"'":
            return "" if quote else None
        following = text[begin : begin + 3]
        if following == quote * 3:
            return prefix + following
        return None if following == quote * len(following) else prefix + quote

    def _begin(self, quote: str, *, is_key: bool) -> int:
        self._is_raw = quote[0] in "rR"
        super()._begin(quote.lstrip("rRuU"), is_key=is_key)
        return len(quote)

    def _string(self, text: str, at: int) -> int:
        char = text[at]
        if char == "\\":
            return self._escape(text, at)
        if text.startswith(self._quote, at):
            return self._end_or_join(text, at)
        if self._quote.startswith(text[at : at + len(self._quote)]):
            return 0  # the beginning of a triple quote
        plain = _PLAIN.match(text, at)
        return self._read(plain[0] if plain else char, len(plain[0]) if plain else 1)

    def _end_or_join(self, text: str, at: int) -> int:
        """End the string, or continue it with the next one: ``'a' "b"`` is ``'ab'``."""
        following = _NO_SPACE.search(text, at + len(self._quote))
        quote = self._quote_at(text, following.start()) if following else None
        if following is None or quote is None:
            return 0
        if not quote:
            return self._end_string()
        return following.start() - at + self._begin(quote, is_key=self._is_key)

    def _read(self, content: str, size: int) -> int:
        self._content(self._lone_surrogate() + _in_json(content))
        return size

    def _escape(self, text: str, at: int) -> int:
        if at + 1 == len(text):
            return 0
        char = text[at + 1]
        if self._is_raw:
            return self._read("\\" + char, 2)
        if char in _ESCAPES:
            return self._read(_ESCAPES[char], 2)
        if char == "u":
            return self._unicode_escape(text, at)
        return self._code_escape(text, at)

    def _code_escape(self, text: str, at: int) -> int:
        r"""Read ``\x41``, ``\U0001F600`` or ``\101``; any other backslash is taken literally."""
        char, begin = text[at + 1], at + 2
        if octal := _OCTAL.match(text, at + 1):
            is_open = octal.end() == len(text) and len(octal[0]) < 3
            return 0 if is_open else self._read(chr(int(octal[0], 8)), 1 + len(octal[0]))
        num_digits = _NUM_HEX.get(char, 0)
        digits = _HEX.match(text[begin : begin + num_digits])
        found = digits[0] if digits and num_digits else ""
        if num_digits and begin + len(found) == len(text) and len(found) < num_digits:
            return 0
        if len(found) < max(1, num_digits) or (code := int(found, 16)) > _MAX_CODE:
            return self._read("\\", 1)
        is_surrogate = 0xD800 <= code < 0xE000
        return self._read("\ufffd" if is_surrogate else chr(code), 2 + num_digits)


class GemmaArguments(JsonArguments):
    """The `ArgumentParser` of objects without quotes around keys, and a marker around strings."""

    word = re.compile(r"[^,}\]\s]+")
    bare_key = re.compile(r"[^:,{}\[\]]+")

    def __init__(self, quote: str) -> None:
        super().__init__()
        self._marker = quote

    def _quote_at(self, text: str, at: int) -> str | None:
        rest = text[at : at + len(self._marker)]
        if rest == self._marker:
            return rest
        return None if self._marker.startswith(rest) else ""

    def _bare_key(self, text: str, at: int) -> int:
        match = self.bare_key.match(text, at)
        if match is None or len(match[0]) > MAX_WORD:
            return self._break()
        if match.end() == len(text):
            return 0
        self._hold_key(match[0].strip())
        return len(match[0])

    def _scalar(self, word: str) -> str:
        return json.dumps(json_or_text(word), ensure_ascii=False)

    def _string(self, text: str, at: int) -> int:
        end = text.find(self._marker, at)
        if end == at:
            return self._end_string()
        if end < 0:
            end = len(text) - num_undecided(text[at:], (self._marker,))
        self._content(_in_json(text[at:end]))
        return end - at
