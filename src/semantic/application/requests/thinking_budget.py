"""How long a model thinks, counted token by token, and an end to it when a budget is spent.

A model that is still thinking when its budget is spent may only write what ends its thinking; then
it goes on with the answer as if it had stopped by itself.
"""

import copy
import enum
from collections.abc import Callable, Sequence

from semantic.domain.reply_format import Markers
from semantic.ports.text import TokenConstraint


class _Place(enum.Enum):
    BEFORE = enum.auto()  # nothing but what may begin a thought was written
    INSIDE = enum.auto()
    AFTER = enum.auto()


class ThinkingSpan:
    """Follows a reply's tokens from before its thinking to behind it; mutated by `feed`.

    Attributes:
        num_tokens: Tokens of thinking so far, the markers' own included.
    """

    def __init__(
        self, markers: Markers, piece: Callable[[int], bytes], *, is_open: bool = False
    ) -> None:
        """Begin before the first token.

        Args:
            markers: What stands around thinking.
            piece: A token's text, markers that are special tokens included.
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
        """Whether the next token is thinking."""
        return self._place is _Place.INSIDE

    def feed(self, token: int) -> None:
        """Take the reply's next token."""
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
    """`TokenConstraint` that ends thinking in time. One reply, one thread."""

    def __init__(
        self,
        budget: int,
        span: ThinkingSpan,
        way_out: Sequence[int],
        vocab_size: int,
        inner: TokenConstraint | None = None,
    ) -> None:
        """Begin before the first token.

        Args:
            budget: Tokens of thinking before it must end.
            span: Follows the reply.
            way_out: The tokens that end thinking.
            vocab_size: Ids are below this.
            inner: What else the reply must be like; where both cannot be had, it decides.
        """
        self._budget = budget
        self._span = span
        self._way_out = tuple(way_out)
        self._num_bytes = (vocab_size + 7) // 8
        self._inner = inner
        self._num_forced = 0

    def allowed(self) -> bytes | None:
        """The one token that leads out, once the budget is spent."""
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
        """Advance by a token."""
        self._num_forced = self._num_forced + 1 if token == self._forced() else 0
        self._span.feed(token)
        if self._inner is not None:
            self._inner.accept(token)

    def copy(self) -> "ThinkingBudget":
        """The same place in the reply."""
        other = copy.copy(self)
        other._span = copy.copy(self._span)
        other._inner = self._inner.copy() if self._inner else None
        return other

    def _forced(self) -> int | None:
        is_spent = self._span.is_inside and self._span.num_tokens - self._num_forced >= self._budget
        return self._way_out[self._num_forced % len(self._way_out)] if is_spent else None
