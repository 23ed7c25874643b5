"""What a model's head for draft tokens keeps of a sequence. It is never stored.

A sequence that was restored, forked or truncated begins with nothing: the head then sees only the
tokens computed since.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

MAX_ENTRIES: Final = 2048  # the head attends to so many tokens
MAX_HIDDEN: Final = 1024  # hidden states kept for a head that is not asked

Array: TypeAlias = Any  # of the backend's library


class Arrays(Protocol):
    """Operations on the arrays of a backend's library."""

    def from_host(self, values: NDArray[np.int64]) -> Array: ...

    def zeros(self, shape: Sequence[int], like: Array) -> Array: ...

    def concatenate(self, arrays: Sequence[Array], axis: int) -> Array: ...

    def copied(self, array: Array) -> Array:
        """Return the array in memory of its own: a view would keep all of the viewed one."""

    def start(self, arrays: Sequence[Array]) -> None:
        """Start to compute arrays, in a library that would wait until they are read."""


@dataclass(slots=True)
class HeadState:
    """Keys and values of the head's entries, and hidden states that it did not see yet.

    Attributes:
        end: The position after the last hidden state.
        pair: Keys and values, ``[heads, entries, dim]``; None if there are none.
    """

    arrays: Arrays
    end: int = 0
    pair: tuple[Array, Array] | None = None
    _hidden: list[Array] = field(default_factory=list)
    num_hidden: int = 0

    @property
    def num_entries(self) -> int:
        return 0 if self.pair is None else self.pair[0].shape[1]

    @property
    def hidden(self) -> Array:
        return self.arrays.concatenate(self._hidden, 0)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*(self.pair or ()), *self._hidden))

    def clear(self) -> None:
        self.pair, self.end, self.num_hidden = None, 0, 0
        self._hidden.clear()

    def add(self, start: int, hidden: Array) -> Array:
        """Add the hidden states of new tokens, and return those kept; a gap begins anew."""
        if start != self.end:
            self.clear()
        self.end = start + len(hidden)
        kept = self.arrays.copied(hidden[-MAX_HIDDEN:])
        self._hidden.append(kept)
        self.num_hidden += len(kept)
        while self.num_hidden - len(self._hidden[0]) >= MAX_HIDDEN:
            self.num_hidden -= len(self._hidden.pop(0))
        return kept

    def keep(self, keys: Array, values: Array) -> None:
        """Add the entries of all hidden states, which are not needed any more."""
        if self.pair is not None:
            keys, values = (
                self.arrays.concatenate(both, 1)
                for both in zip(self.pair, (keys, values), strict=True)
            )
        copied = self.arrays.copied
        self.pair = (copied(keys[:, -MAX_ENTRIES:]), copied(values[:, -MAX_ENTRIES:]))
        self._hidden.clear()
        self.num_hidden = 0


def head_bytes(length: int, entry_bytes: int, hidden_bytes: int) -> int:
    """Return the most bytes that a head keeps of a sequence.

    Args:
        entry_bytes: Of the keys and values of one token.
        hidden_bytes: Of one hidden state.
    """
    return entry_bytes * min(length, MAX_ENTRIES) + hidden_bytes * min(length, 2 * MAX_HIDDEN)
