"""Converts arguments written as tags to a JSON object while they stream.

``<parameter=city>Zürich</parameter><parameter=days>2</parameter>`` becomes ``{"city": "Zürich",
"days": 2}``. A string streams piece by piece; any other value is emitted when it is complete.
"""

import json
from collections.abc import Mapping

from semantic.application.parsing.call_blocks import json_or_text
from semantic.application.parsing.cursor import Cursor, NeedMore, NoCall
from semantic.domain.chat import JsonValue, ToolSpec
from semantic.domain.reply_format import CDATA, SLOT, CallNotation
from semantic.domain.sampling import num_undecided

_LITERALS: Mapping[str, bool | None] = {"True": True, "False": False, "None": None}


class TagArguments:
    """The `ArgumentParser` of arguments that are written as tags.

    A value may contain its own closing tag: the tag ends the value only if another argument or the
    end of the call follows.
    """

    def __init__(self, notation: CallNotation, tool: ToolSpec) -> None:
        self.is_done = False
        self.is_broken = False
        self._notation = notation
        self._types = _types(tool)
        self._ends = f"{notation.after_arguments} {notation.end}".split()
        self._at = 0
        self._out: list[str] = []
        self._opening = "{"  # emitted before the next key or the end
        self._key: str | None = None  # of the value that is being read
        self._is_string = False
        self._value_end = ""  # empty until the beginning of a value was read

    def feed(self, text: str, *, is_final: bool = False) -> tuple[int, str]:
        self._at = 0
        try:
            while not self.is_done:
                if self._key is None:
                    self._between(text)
                else:
                    self._value(text, is_final=is_final)
        except NeedMore:
            self.is_broken = is_final
        except NoCall:
            self.is_broken = True
        out, self._out = "".join(self._out), []
        return self._at, out

    def close(self) -> str:
        self.is_done = True
        is_in_string = self._key is not None and self._is_string
        return ('"' if is_in_string else self._opening.rstrip(", ")) + "}"

    # -- between arguments ----------------------------------------------------------------------

    def _between(self, text: str) -> None:
        cursor = Cursor(text, self._at)
        if self._is_argument(cursor):
            self._begin(cursor)
        else:
            self._out.append(self._opening.rstrip(", ") + "}")
            self.is_done = True
        self._at = cursor.at

    def _is_argument(self, cursor: Cursor) -> bool:
        """Pass over what begins an argument; False, with the cursor there, at the call's end."""
        cursor.space()
        try:
            cursor.require(self._ends)
        except NoCall:
            cursor.phrase(self._notation.before_key)
            return True
        return False

    def _begin(self, cursor: Cursor) -> None:
        notation = self._notation
        key = cursor.until(notation.before_value.lstrip()[0]).strip()
        cursor.at -= 1
        start = cursor.at
        is_string = self._types.get(key) == "string"
        try:
            cursor.phrase(notation.before_value)
            is_string |= notation.before_value != notation.before_other
        except NoCall:
            cursor.at = start
            cursor.phrase(notation.before_other)
            is_string = False
        self._key, self._is_string, self._value_end = key, is_string, ""
        if is_string:
            self._emit_key('"')

    def _emit_key(self, value: str) -> None:
        self._out.append(f"{self._opening}{json.dumps(self._key, ensure_ascii=False)}: {value}")
        self._opening = ", "

    # -- values ---------------------------------------------------------------------------------

    def _value(self, text: str, *, is_final: bool) -> None:
        end = self._value_end = self._value_end or self._read_beginning(text)
        found = text.find(end, self._at)
        while found >= 0:
            try:
                is_end = self._ends_value(Cursor(text, found + len(end)))
            except NeedMore:
                is_end = is_final
                if not is_final:
                    self._string_until(text, found)
                    raise
            if is_end:
                self._finish(text, found)
                self._at = found + len(end)
                return
            found = text.find(end, found + 1)
        self._string_until(text, len(text) - num_undecided(text[self._at :], (end,)))
        raise NeedMore

    def _read_beginning(self, text: str) -> str:
        """Pass over what precedes a value; returns what ends it."""
        cursor, end = Cursor(text, self._at), self._notation.after_value.strip()
        end = end.replace(SLOT, self._key or "")
        if cursor.peek() == "\n" and self._notation.before_value.endswith("\n"):
            self._at += 1
        elif self._notation.has_cdata and cursor.starts(CDATA.start):
            self._at += len(CDATA.start)
            end = CDATA.end + end
        return end

    def _ends_value(self, cursor: Cursor) -> bool:
        try:
            self._is_argument(cursor)
        except NoCall:
            return False
        return True

    def _without_line_break(self, text: str, end: int) -> int:
        """Exclude the line break before the closing tag, where the notation has one."""
        has_break = (
            self._notation.after_value.startswith("\n") and text[self._at : end][-1:] == "\n"
        )
        return end - has_break

    def _string_until(self, text: str, end: int) -> None:
        if self._is_string:
            end = self._without_line_break(text, end)
            self._out.append(json.dumps(text[self._at : end], ensure_ascii=False)[1:-1])
            self._at = end

    def _finish(self, text: str, end: int) -> None:
        if self._is_string:
            self._string_until(text, end)
            self._out.append('"')
        else:
            written = text[self._at : self._without_line_break(text, end)]
            value = _LITERALS.get(written, json_or_text(written))
            self._emit_key(json.dumps(value, ensure_ascii=False))
        self._key = None


def _types(tool: ToolSpec) -> Mapping[str, JsonValue]:
    properties = tool.parameters.get("properties")
    known = properties if isinstance(properties, dict) else {}
    return {name: s.get("type") for name, s in known.items() if isinstance(s, dict)}
