"""What every backend checks of a step: a row that cannot run fails alone and changes nothing."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from semantic.domain.errors import BackendError, InvalidRequestError
from semantic.ports.backend import LAST_SAMPLED, Chunk, RowFailed, SequenceId, Step

RowT = TypeVar("RowT")


class HasLength(Protocol):
    """A sequence of any backend."""

    @property
    def length(self) -> int:
        """Tokens whose state is held."""
        ...


SequenceT = TypeVar("SequenceT", bound=HasLength)


def make_rows(step: Step, make: Callable[[Chunk], RowT]) -> list[RowT | RowFailed]:
    """Make a row of each chunk, or say why it failed: what `make` raised, or it is there twice."""
    rows: list[RowT | RowFailed] = []
    seen: set[SequenceId] = set()
    for chunk in step.chunks:
        try:
            if chunk.seq in seen:
                raise InvalidRequestError("the sequence is in the step already")
            seen.add(chunk.seq)
            rows.append(make(chunk))
        except (InvalidRequestError, BackendError) as error:
            rows.append(RowFailed(chunk.seq, error.message))
    return rows


def sequence_of(
    chunk: Chunk, sequences: Mapping[SequenceId, SequenceT], is_whole: Callable[[SequenceT], bool]
) -> SequenceT:
    """Find the sequence that a chunk continues.

    Raises:
        InvalidRequestError: it is not open, ends elsewhere, or lacks parts of its state.
    """
    sequence = sequences.get(chunk.seq)
    if sequence is None:
        raise InvalidRequestError(f"sequence {chunk.seq} is not open")
    if chunk.start != sequence.length:
        raise InvalidRequestError(f"the chunk is at {chunk.start}, not {sequence.length}")
    if not is_whole(sequence):
        raise InvalidRequestError("its window or state parts are not loaded")
    return sequence


def check_tokens(chunk: Chunk, vocab_size: int, *, has_sampled: bool) -> None:
    """Check what a chunk brings, where `has_sampled` says if its sequence has a token to go on.

    Raises:
        InvalidRequestError: nothing, or ids that are none.
    """
    if chunk.tokens is LAST_SAMPLED:
        if not has_sampled:
            raise InvalidRequestError("nothing was sampled here")
    elif not chunk.tokens:
        raise InvalidRequestError("the chunk is empty")
    else:
        check_ids(chunk.tokens, vocab_size)


def tokens_of(chunk: Chunk, last_sampled: int | None, vocab_size: int) -> tuple[int, ...]:
    """The ids of a chunk, where the one that was sampled last is on the host.

    Raises:
        InvalidRequestError: see `check_tokens`.
    """
    check_tokens(chunk, vocab_size, has_sampled=last_sampled is not None)
    if chunk.tokens is LAST_SAMPLED:
        return () if last_sampled is None else (last_sampled,)
    return chunk.tokens


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Check that ids are in the vocabulary.

    Raises:
        InvalidRequestError: one is not.
    """
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        raise InvalidRequestError(f"a token id is not in [0, {vocab_size})", param="tokens")
