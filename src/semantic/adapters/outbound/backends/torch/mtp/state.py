"""What a model's head for draft tokens keeps of a sequence. It is never stored.

A sequence that was restored, forked or truncated begins with nothing: the head then sees only the
tokens computed since.
"""

from dataclasses import dataclass, field
from typing import Final

import torch

MAX_ENTRIES: Final = 2048  # the head attends to so many tokens
MAX_HIDDEN: Final = 1024  # hidden states kept for a head that is not asked


@dataclass(slots=True)
class HeadState:
    """Keys and values of the head's entries, and hidden states that it did not see yet.

    Attributes:
        end: The position after the last hidden state.
        pair: Keys and values, ``[heads, entries, dim]``; None if there are none.
    """

    end: int = 0
    pair: tuple[torch.Tensor, torch.Tensor] | None = None
    _hidden: list[torch.Tensor] = field(default_factory=list)
    num_hidden: int = 0

    @property
    def num_entries(self) -> int:
        return 0 if self.pair is None else self.pair[0].shape[1]

    @property
    def hidden(self) -> torch.Tensor:
        return torch.cat(self._hidden)

    @property
    def nbytes(self) -> int:
        tensors = (*(self.pair or ()), *self._hidden)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def add(self, start: int, hidden: torch.Tensor) -> None:
        """Add the hidden states of new tokens; other ones than the next begin anew."""
        if start != self.end:
            self.pair, self.num_hidden = None, 0
            self._hidden.clear()
        self.end = start + len(hidden)
        # A copy, because a view would keep the whole step's.
        self._hidden.append(hidden[-MAX_HIDDEN:].clone())
        self.num_hidden += len(self._hidden[-1])
        while self.num_hidden - len(self._hidden[0]) >= MAX_HIDDEN:
            self.num_hidden -= len(self._hidden.pop(0))

    def keep(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add the entries of all hidden states, which are not needed any more."""
        if self.pair is not None:
            keys, values = (
                torch.cat(both, dim=1) for both in zip(self.pair, (keys, values), strict=True)
            )
        self.pair = (keys[:, -MAX_ENTRIES:].clone(), values[:, -MAX_ENTRIES:].clone())
        self._hidden.clear()
        self.num_hidden = 0
