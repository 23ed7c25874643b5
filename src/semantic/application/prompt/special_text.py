"""Keeps special tokens the template's own: what a client writes never becomes one.

Text from outside is guarded before the template sees it: an invisible mark breaks each special
token spelled in it, and stands at an end that could complete one together with its surroundings.
What is still a special token in the rendered text was written by the template. The marks are
taken out again before a run of text is encoded.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from semantic.domain.chat import JsonObject, JsonValue
from semantic.ports.text import SpecialToken

# Noncharacters: no text has a use for them, and one that holds them all the same is escaped.
_MARK = "\ufdd0"
_BREAK = _MARK + "\ufdd1"
_LITERAL = _MARK + "\ufdd2"

_ByCharacter: TypeAlias = dict[str, tuple[str, ...]]


class Span(NamedTuple):
    """Characters ``[start, end)`` of a text: a special token, or a run of text between them."""

    start: int
    end: int
    token: int | None


class SpecialText:
    """The special tokens of one tokenizer, as text. Immutable."""

    def __init__(self, tokens: Sequence[SpecialToken]) -> None:
        # Longest first: of two that start alike, the tokenizer takes the longer one too.
        ordered = sorted((t for t in tokens if len(t.text) > 1), key=lambda t: -len(t.text))
        self._ids = {token.text: token.id for token in ordered}
        self._spelled = _alternatives([re.escape(token.text) for token in ordered])
        self._splitter = _alternatives([_with_stripping(token) for token in ordered])
        self._endings, self._beginnings = _partial(self._ids)
        self._all = "\n".join(self._ids)
        self._longest = max(map(len, self._ids), default=0)

    def guard(self, text: str) -> str:
        """Return `text` so that no special token can come of it."""
        if _MARK in text:
            text = text.replace(_MARK, _LITERAL)
        # Breaking one may leave another that overlapped it.
        while self._spelled.search(text):
            text = self._spelled.sub(lambda match: match[0][0] + _BREAK + match[0][1:], text)
        core = text.strip()
        if not core:
            return text
        if core.startswith(self._endings.get(core[0], ())) or self._is_inside_one(core):
            text = text.replace(core, _BREAK + core, 1)
        if core.endswith(self._beginnings.get(core[-1], ())):
            head, _, space = text.rpartition(core)
            text = head + core + _BREAK + space
        return text

    def guard_json(self, value: JsonValue) -> JsonValue:
        """Guard every string in a JSON value."""
        match value:
            case str():
                return self.guard(value)
            case list():
                return [self.guard_json(item) for item in value]
            case dict():
                return self.guard_object(value)
            case _:
                return value

    def guard_object(self, value: JsonObject) -> JsonObject:
        """Guard every string in a JSON object, keys included."""
        return {self.guard(key): self.guard_json(item) for key, item in value.items()}

    def split(self, text: str) -> list[Span]:
        """Cut guarded text at its special tokens; the spans cover all of it."""
        spans: list[Span] = []
        end = 0
        for match in self._splitter.finditer(text):
            if match.start() > end:
                spans.append(Span(end, match.start(), None))
            end = match.end()
            token = self._ids.get(match[0])
            spans.append(
                Span(match.start(), end, self._ids[match[0].strip()] if token is None else token)
            )
        if end < len(text):
            spans.append(Span(end, len(text), None))
        return spans

    @staticmethod
    def reveal(text: str) -> str:
        """Return guarded text as it was."""
        if _MARK not in text:
            return text
        return text.replace(_BREAK, "").replace(_LITERAL, _MARK)

    def _is_inside_one(self, core: str) -> bool:
        return len(core) < self._longest and core in self._all


def _alternatives(patterns: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(patterns) if patterns else r"(?!)")


def _with_stripping(token: SpecialToken) -> str:
    left, right = r"\s*" * token.strips_left, r"\s*" * token.strips_right
    return left + re.escape(token.text) + right


def _partial(texts: Iterable[str]) -> tuple[_ByCharacter, _ByCharacter]:
    """Proper endings by first character, and proper beginnings by last."""
    endings: dict[str, set[str]] = defaultdict(set)
    beginnings: dict[str, set[str]] = defaultdict(set)
    for text in texts:
        for cut in range(1, len(text)):
            endings[text[cut]].add(text[cut:])
            beginnings[text[cut - 1]].add(text[:cut])
    return (
        {key: tuple(values) for key, values in endings.items()},
        {key: tuple(values) for key, values in beginnings.items()},
    )
