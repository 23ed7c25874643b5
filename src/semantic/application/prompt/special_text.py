"""Prevents text from clients from becoming special tokens, and encodes rendered text.

Text from clients is guarded before the template gets it. A mark breaks each special token that is
spelled in the text, and is added at an end that could form a special token together with the
surrounding text. So every special token in the rendered text was written by the template. The marks
are removed before text is encoded.

Text between two special tokens, a run, is encoded as a unit. A run's tokens depend on the run
alone, so they are cached: when a message is added to a conversation, only that message is encoded.
"""

import copy
import itertools
import re
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple, TypeAlias

from semantic.application.prompt.replay import LruCache
from semantic.domain.chat import JsonObject, JsonValue
from semantic.domain.images.spans import ImageSpan, PreparedImage
from semantic.ports.text import SpecialToken, TokenizerPort

# Unicode noncharacters, which ordinary text does not contain; text that does is escaped.
_MARK = "\ufdd0"
_BREAK = _MARK + "\ufdd1"
_LITERAL = _MARK + "\ufdd2"
# Stands for an image in guarded text: guarding escapes the mark in text from clients.
IMAGE = _MARK + "\ufdd4"

_ENTRY_BYTES = 300  # memory overhead of a cached run, without its text and tokens

_ByCharacter: TypeAlias = dict[str, tuple[str, ...]]


class TextSpan(NamedTuple):
    """Characters ``[start, end)`` of a text: a special token, or a run of text between them."""

    start: int
    end: int
    token: int | None


class SpecialText:
    """The special tokens of one tokenizer, as text. Immutable."""

    def __init__(self, tokens: Sequence[SpecialToken]) -> None:
        # Longest first: if one is a prefix of another, the tokenizer also takes the longer one.
        ordered = sorted((t for t in tokens if len(t.text) > 1), key=lambda t: -len(t.text))
        self._ids = {token.text: token.id for token in ordered}
        self._spelled = _alternatives([re.escape(token.text) for token in ordered])
        self._splitter = _alternatives([_with_stripping(token) for token in ordered])
        self._endings, self._beginnings = _partial(self._ids)
        self._all = "\n".join(self._ids)
        self._longest = max(map(len, self._ids), default=0)

    def guard(self, text: str) -> str:
        """Return `text` with marks, so that it cannot become or complete a special token."""
        if _MARK in text:
            text = text.replace(_MARK, _LITERAL)
        # Repeated, since breaking one token may leave another that overlapped it.
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

    def split(self, text: str) -> list[TextSpan]:
        """Split guarded text at its special tokens; the spans cover the whole text."""
        spans: list[TextSpan] = []
        end = 0
        for match in self._splitter.finditer(text):
            if match.start() > end:
                spans.append(TextSpan(end, match.start(), None))
            end = match.end()
            token = self._ids.get(match[0])
            if token is None:
                token = self._ids[match[0].strip()]
            spans.append(TextSpan(match.start(), end, token))
        if end < len(text):
            spans.append(TextSpan(end, len(text), None))
        return spans

    @staticmethod
    def reveal(text: str) -> str:
        """Return guarded text without its marks: the inverse of `guard`."""
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
    """Return proper suffixes by first character, and proper prefixes by last character."""
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


# -- from text to tokens ---------------------------------------------------------------------------


class RunEncoder:
    """Encodes runs of guarded text, with a cache. Thread-safe."""

    def __init__(self, tokenizer: TokenizerPort, *, max_bytes: int = 24 * 2**20) -> None:
        """Start with an empty cache; `max_bytes` bounds its text and tokens together."""
        self._tokenizer = tokenizer
        self._root = b""
        self._runs: LruCache[tuple[bytes, str, bool], array[int]] = LruCache(
            max_bytes, lambda key, ids: _ENTRY_BYTES + sys.getsizeof(key[1]) + 4 * len(ids)
        )

    def of_tenant(self, root: bytes) -> "RunEncoder":
        """Return a view for one tenant, so that timing reveals no other tenant's text."""
        made = copy.copy(self)
        made._root = root
        return made

    def encode(self, run: str, *, is_start: bool) -> "array[int]":
        """Return a run's tokens; the caller must not modify the array."""
        key = (self._root, run, is_start)
        ids = self._runs.get(key)
        if ids is None:
            text = SpecialText.reveal(run)
            ids = array("I", self._tokenizer.encode_plain(text, is_start=is_start))
            self._runs.put(key, ids)
        return ids


class TokenWalk:
    """Encodes guarded text from front to back. Mutable; one per rendering.

    Attributes:
        tokens: Tokens of the text before `position`.
        position: Index of the next character to encode; never inside a special token.
        images: The images in `tokens`.
    """

    def __init__(
        self,
        text: str,
        spans: Sequence[TextSpan],
        runs: RunEncoder,
        images: Mapping[TextSpan, PreparedImage] | None = None,
    ) -> None:
        """`images` has those spans that stand for an image."""
        self._text = text
        self._spans = spans
        self._runs = runs
        self._prepared = images or {}
        self._next = 0
        self.position = 0
        self.tokens = array("I")  # packed: a long prompt is hashed and copied without objects
        self.images: list[ImageSpan] = []

    def advance(self, end: int) -> None:
        """Encode up to `end`, or up to the start of the run that contains `end`."""
        while self._next < len(self._spans) and self._spans[self._next].end <= end:
            span = self._spans[self._next]
            if span.token is None:
                self.tokens.extend(self.ahead(span.end))
            elif (image := self._prepared.get(span)) is not None:
                self.images.append(ImageSpan.placed(image, len(self.tokens)))
                self.tokens.extend(image.tokens)
            else:
                self.tokens.append(span.token)
            self.position = span.end
            self._next += 1

    def ahead(self, end: int) -> Sequence[int]:
        """Return the tokens from `position` to `end`, which lies in the next run; no advance."""
        if end <= self.position:
            return ()
        run = self._text[self.position : end]
        return self._runs.encode(run, is_start=self.position == 0)

    def find_special(self, tokens: Set[int], start: int, end: int) -> TextSpan | None:
        for span in itertools.islice(self._spans, self._next, None):
            if span.start >= end:
                return None
            if span.start >= start and span.token in tokens:
                return span
        return None

    def starts_with(self, text: str, position: int) -> bool:
        return self._text.startswith(text, position)

    def replace(self, end: int, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        self.position = end
        while self._next < len(self._spans) and self._spans[self._next].end <= end:
            self._next += 1
