"""Counts the tokens of thinking, and ends thinking when a budget is spent.

If the model is still thinking when the budget is spent, only the tokens of the end marker are
allowed. Then the model continues with the answer as if it had stopped thinking by itself.
"""

import copy
import enum
from collections.abc import Callable, Sequence

from semantic.domain.reply_format import Markers
from semantic.ports.text import TokenConstraint


class _Place(enum.Enum):
    BEFORE = enum.auto()  # all text so far may be the beginning of a start marker
    INSIDE = enum.auto()
    AFTER = enum.auto()


class ThinkingSpan:
    """Tracks whether a reply is before, inside or after its thinking; `feed` mutates it.

    Attributes:
        num_tokens: Tokens of thinking so far, including the markers.
    """

    def __init__(
        self, markers: Markers, piece: Callable[[int], bytes], *, is_open: bool = False
    ) -> None:
        """Start before the first token.

        Args:
            markers: The markers that enclose thinking.
            piece: Returns a token's text, including that of markers that are special tokens.
            is_open: The prompt ends inside thinking.
        """
        self._start = markers.start.encode()
        self._end = markers.end.encode()
        self._piece = piece
        self._place = _Place.INSIDE if is_open else _Place.BEFORE
        self._text = b""
        self.num_tokens = 0

    @property
    def is_inside(self) -> bool:
        """Whether the next token is part of the thinking."""
        return self._place is _Place.INSIDE

    def feed(self, token: int) -> None:
        """Process the reply's next token."""
        if self._place is _Place.AFTER:
            return
        self.num_tokens += 1
        self._text += self._piece(token)
        if self._place is _Place.BEFORE:
            begun = self._text.lstrip()
            if begun.startswith(self._start):
                self._place, self._text = _Place.INSIDE, begun[len(self._start) :]
            elif not self._start.startswith(begun):
                self._place, self.num_tokens = _Place.AFTER, 0
        if self._place is _Place.INSIDE:
            if self._end in self._text:
                self._place = _Place.AFTER
            self._text = self._text[-len(self._end) :]


class ThinkingBudget:
    """`TokenConstraint` that limits thinking to a budget. One per reply; not thread-safe."""

    def __init__(
        self,
        budget: int,
        span: ThinkingSpan,
        way_out: Sequence[int],
        vocab_size: int,
        inner: TokenConstraint | None = None,
    ) -> None:
        """Start before the first token.

        Args:
            budget: Maximum tokens of thinking before the end marker is forced.
            span: Tracks the reply's thinking.
            way_out: The tokens of the end marker.
            vocab_size: Size of the vocabulary.
            inner: Another constraint on the reply; it takes precedence in a conflict.
        """
        self._budget = budget
        self._span = span
        self._way_out = tuple(way_out)
        self._num_bytes = (vocab_size + 7) // 8
        self._inner = inner
        self._num_forced = 0

    def allowed(self) -> bytes | None:
        """Return a mask with the next token of the end marker, once the budget is spent."""
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
        """Advance by one token."""
        self._num_forced = self._num_forced + 1 if token == self._forced() else 0
        self._span.feed(token)
        if self._inner is not None:
            self._inner.accept(token)

    def copy(self) -> "ThinkingBudget":
        """Return an independent copy at the same position in the reply."""
        other = copy.copy(self)
        other._span = copy.copy(self._span)
        other._inner = self._inner.copy() if self._inner else None
        return other

    def _forced(self) -> int | None:
        is_spent = self._span.is_inside and self._span.num_tokens - self._num_forced >= self._budget
        return self._way_out[self._num_forced % len(self._way_out)] if is_spent else None
