"""Counts the tokens of thinking, and ends thinking when a budget is spent.

If the model is still thinking when the budget is spent, only the tokens of the end marker are
allowed. Then the model continues with the answer as if it had stopped thinking by itself.
"""

import copy
from collections.abc import Callable, Sequence

from semantic.application.parsing.splitter import ThinkingSplitter
from semantic.domain.events import TextDelta
from semantic.domain.reply_format import Markers
from semantic.ports.text import TokenConstraint


class ThinkingCounter:
    """Counts the tokens of thinking, as the reply's parser separates it; `feed` mutates it.

    Attributes:
        num_tokens: Tokens of thinking so far, including the markers.
    """

    def __init__(
        self, markers: Markers, piece: Callable[[int], bytes], *, is_open: bool = False
    ) -> None:
        """Start before the first token; `piece` also returns the text of special tokens."""
        # A token may end inside a character, so bytes stand for characters.
        as_bytes = Markers(_latin(markers.start.encode()), _latin(markers.end.encode()))
        self._splitter = ThinkingSplitter(as_bytes, is_open=is_open, sign=str)
        self._piece = piece
        self._num_undecided = 0  # latest tokens that may belong to a start marker
        self.num_tokens = 0

    @property
    def is_inside(self) -> bool:
        return self._splitter.is_inside

    def feed(self, token: int) -> None:
        if self._splitter.is_over:
            return
        was_inside = self.is_inside
        self._num_undecided += 1
        self._splitter.feed(TextDelta(_latin(self._piece(token))))
        if was_inside or self.is_inside:
            self.num_tokens += self._num_undecided
            self._num_undecided = 0

    def copy(self) -> "ThinkingCounter":
        other = copy.copy(self)
        other._splitter = self._splitter.copy()
        return other


def _latin(piece: bytes) -> str:
    return piece.decode("latin-1")


class ThinkingBudget:
    """`TokenConstraint` that limits thinking to a budget. One per reply; not thread-safe."""

    def __init__(
        self,
        budget: int,
        thinking: ThinkingCounter,
        way_out: Sequence[int],
        vocab_size: int,
        inner: TokenConstraint | None = None,
    ) -> None:
        """Start before the first token; `way_out` is the end marker, `inner` takes precedence."""
        self._budget = budget
        self._thinking = thinking
        self._way_out = tuple(way_out)
        self._num_bytes = (vocab_size + 7) // 8
        self._inner = inner
        self._num_forced = 0

    def allowed(self) -> bytes | None:
        allowed = self._inner.allowed() if self._inner else None
        token = self._forced()
        if token is None:
            return allowed
        if allowed is not None and not allowed[token >> 3] >> (token & 7) & 1:
            return allowed
        mask = bytearray(self._num_bytes)
        mask[token >> 3] = 1 << (token & 7)
        return bytes(mask)

    def accept(self, token: int) -> None:
        self._num_forced = self._num_forced + 1 if token == self._forced() else 0
        self._thinking.feed(token)
        if self._inner is not None:
            self._inner.accept(token)

    def copy(self) -> "ThinkingBudget":
        other = copy.copy(self)
        other._thinking = self._thinking.copy()
        other._inner = self._inner.copy() if self._inner else None
        return other

    def _forced(self) -> int | None:
        num_thought = self._thinking.num_tokens - self._num_forced
        is_spent = self._thinking.is_inside and num_thought >= self._budget
        return self._way_out[self._num_forced % len(self._way_out)] if is_spent else None
