"""What backends that run models share about draft tokens: the head, and recurrent state.

Keys and values of rejected draft tokens are dropped with the sequence's length. Recurrent state
cannot be cut back. A sequence returns to its state before the draft, and computes the accepted
tokens again.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from semantic.adapters.outbound.backends.common import BackendSequence, SequenceBackend
from semantic.adapters.outbound.backends.mtp.head import DraftingHead
from semantic.adapters.outbound.backends.mtp.state import HeadState
from semantic.domain.errors import SemanticError
from semantic.ports.backend import Chunk, DraftHead, Row, Sampled

DEVICE_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, MemoryError)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The recurrent arrays of a sequence before its last draft.

    Attributes:
        arrays: In the form of the backend. They must not change.
    """

    length: int
    arrays: Any


class DraftedSequence(BackendSequence, Protocol):
    """A sequence whose draft tokens are verified.

    Attributes:
        ahead: What the model's head for draft tokens keeps.
        checkpoint: From here, recurrent state can be computed up to any later token; None if the
            model has none, or if the last tokens were no draft.
    """

    length: int
    ahead: HeadState
    checkpoint: Checkpoint | None


DraftedT = TypeVar("DraftedT", bound=DraftedSequence)


class DraftingBackend(SequenceBackend[DraftedT]):
    """Drafts with the model's head, and drops rejected draft tokens from recurrent layers."""

    _head: DraftingHead | None = None

    @property
    def head(self) -> DraftHead | None:
        return self if self._head is not None else None

    def draft(self, rows: Sequence[Chunk], count: int) -> list[tuple[int, ...]]:
        if self._head is None:
            return [() for _ in rows]
        try:
            return self._head.draft(rows, self._sequences, count)
        except DEVICE_ERRORS as error:
            raise self._step_error(error) from error

    @abstractmethod
    def _step_error(self, error: Exception) -> SemanticError:
        """Build the error of a step that the device failed to compute."""

    @abstractmethod
    def _rewind(self, sequence: DraftedT, end: int) -> None:
        """Return to a sequence's checkpoint, and compute its tokens up to `end` again.

        Raises:
            ValueError: it has no checkpoint.
        """

    def _drop_rejected(self, sequence: DraftedT, row: Row, num_drafted: int) -> None:
        """Remove rejected draft tokens from recurrent state; `length` is without them."""
        is_partly_wrong = isinstance(row, Sampled) and len(row.accepted) < num_drafted
        if is_partly_wrong and sequence.checkpoint is not None:
            self._rewind(sequence, sequence.length)

    def _can_cut(self, sequence: DraftedT, num_tokens: int) -> bool:
        point = sequence.checkpoint
        is_in_draft = point is not None and point.length <= num_tokens <= sequence.length
        return is_in_draft or super()._can_cut(sequence, num_tokens)

    def _copy_state(self, source: DraftedT, target: DraftedT, num_tokens: int) -> None:
        """Cut a copy with the state at the end of `source` back to its own length."""
        if self._has_state and num_tokens < source.length:
            target.checkpoint = source.checkpoint
            self._rewind(target, num_tokens)

    def _cut_state(self, sequence: DraftedT, num_tokens: int) -> None:
        """Cut recurrent state, and forget what the head keeps."""
        if num_tokens == 0:
            sequence.checkpoint = None
        elif self._has_state and num_tokens < sequence.length:
            self._rewind(sequence, num_tokens)
        sequence.ahead.clear()
