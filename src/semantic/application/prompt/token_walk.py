"""From rendered text to tokens, a run between special tokens at a time.

A run's tokens depend on the run alone, so those of earlier turns are remembered and a
conversation that grew by a message costs the encoding of that message.
"""

import itertools
from array import array
from collections.abc import Sequence, Set

from semantic.application.prompt.lru_cache import LruCache
from semantic.application.prompt.special_text import Span, SpecialText
from semantic.ports.text import TokenizerPort


class RunEncoder:
    """Encodes runs of guarded text, and remembers them. Safe on any thread."""

    def __init__(self, tokenizer: TokenizerPort, *, max_characters: int = 8_000_000) -> None:
        """Start with nothing remembered.

        Args:
            tokenizer: Encodes what is not remembered.
            max_characters: Text of this length in all is remembered, the latest used.
        """
        self._tokenizer = tokenizer
        self._runs: LruCache[tuple[str, bool], array[int]] = LruCache(
            max_characters, lambda key, _: len(key[0])
        )

    def encode(self, run: str, *, is_start: bool) -> "array[int]":
        """Return a run's tokens; not to be changed by the caller."""
        key = (run, is_start)
        ids = self._runs.get(key)
        if ids is None:
            text = SpecialText.reveal(run)
            ids = array("I", self._tokenizer.encode_plain(text, is_start=is_start))
            self._runs.put(key, ids)
        return ids


class TokenWalk:
    """A walk along guarded text that turns it into tokens. Mutable; one per rendering.

    Attributes:
        tokens: Of the text before `position`.
        position: Where the walk stands; never inside a special token.
    """

    def __init__(self, text: str, spans: Sequence[Span], runs: RunEncoder) -> None:
        self._text = text
        self._spans = spans
        self._runs = runs
        self._next = 0
        self.position = 0
        self.tokens: list[int] = []

    def advance(self, end: int) -> None:
        """Go on to `end`, or to the start of the run that `end` would cut in two."""
        while self._next < len(self._spans) and self._spans[self._next].end <= end:
            span = self._spans[self._next]
            if span.token is None:
                self.tokens.extend(self.ahead(span.end))
            else:
                self.tokens.append(span.token)
            self.position = span.end
            self._next += 1

    def ahead(self, end: int) -> Sequence[int]:
        """Return the tokens of the rest up to `end`, which lies in the run that comes next."""
        if end <= self.position:
            return ()
        run = self._text[self.position : end]
        return self._runs.encode(run, is_start=self.position == 0)

    def find(self, tokens: Set[int], start: int, end: int) -> Span | None:
        """Return the first of these special tokens within ``[start, end)``."""
        for span in itertools.islice(self._spans, self._next, None):
            if span.start >= end:
                return None
            if span.start >= start and span.token in tokens:
                return span
        return None

    def starts_with(self, text: str, position: int) -> bool:
        """Whether guarded text stands at a position."""
        return self._text.startswith(text, position)

    def replace(self, end: int, tokens: Sequence[int]) -> None:
        """Take these tokens instead of the text up to `end`."""
        self.tokens.extend(tokens)
        self.position = end
        while self._next < len(self._spans) and self._spans[self._next].end <= end:
            self._next += 1
