"""A grammar in llguidance's dialect of Lark, while it is written."""

import json
from collections.abc import Mapping

from semantic.domain.chat import JsonObject

# As templates write JSON; no other whitespace, so that a reply cannot dawdle in it.
_JSON_STYLE: JsonObject = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_LENIENT: JsonObject = {**_JSON_STYLE, "lenient": True}


class Lark:
    """A grammar while it is written."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        self._rules: dict[str, str] = {"TEXT": "/(.|\\n)*/"}

    def text(self) -> str:
        """The grammar."""
        return "%llguidance {}\n" + "\n".join(f"{n}: {b}" for n, b in self._rules.items())

    def rule(self, name: str, body: str) -> str:
        """Add a rule; returns its name."""
        self._rules[name] = body
        return name.removesuffix("[lazy]")

    def json(self, schema: JsonObject, *, is_lenient: bool = False) -> str:
        """Add a rule for JSON of a schema; returns its name."""
        styled = {**schema, "x-guidance": _LENIENT if is_lenient else _JSON_STYLE}
        return self.rule(f"json_{len(self._rules)}", f"%json {json.dumps(styled)}")

    def quoted(self, text: str) -> str:
        """A literal."""
        return json.dumps(text, ensure_ascii=False)

    def marker(self, text: str) -> str:
        """A literal, or the special token that it is in this vocabulary."""
        token = self._special_tokens.get(text)
        return self.quoted(text) if token is None else f"<[{token}]>"

    def markers(self, *texts: str) -> str:
        """Literals and special tokens in a row."""
        return " ".join(self.marker(text) for text in texts)

    def text_until(self, name: str, end: str) -> str:
        """Free text up to and including its end."""
        if end in self._special_tokens:
            return f"TEXT {self.marker(end)}"
        return self.rule(f"{name}[lazy]", f"TEXT {self.quoted(end)}")
