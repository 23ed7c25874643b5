"""Shared parts of the backends: open sequences, and the rules for lengths, windows and states.

A sequence continues where its KV cache ends. Layers with full attention can be truncated at any
token, window layers only as far back as they hold a complete window, and recurrent layers only at
0, at the end, and inside the last draft (see `drafting`). A row that cannot run fails alone and
changes nothing. This module uses positions and layer kinds only; each backend handles its own
arrays, shapes and bytes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from semantic.domain.errors import BackendError, CacheCorruptionError, InvalidRequestError
from semantic.domain.images.spans import ImageSpan, cut_before_image
from semantic.domain.sampling import TokenLogprob
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.backend import (
    LAST_SAMPLED,
    Chunk,
    DeviceMemory,
    DraftHead,
    Draw,
    KVPayload,
    RowFailed,
    Sampled,
    SequenceId,
    Step,
    StepOutput,
    Ticket,
    TokenLoop,
    Traits,
)

RowT = TypeVar("RowT")


class BackendSequence(Protocol):
    """A sequence of any backend."""

    known: list[int]

    @property
    def length(self) -> int:
        """Number of known tokens, from the first, whose KV cache is held."""

    @property
    def window_start(self) -> int:
        """Window layers hold nothing before this position, because it was not restored."""

    @property
    def has_state(self) -> bool:
        """Whether recurrent layers hold the state at `length`."""


SequenceT = TypeVar("SequenceT", bound=BackendSequence)


class SequenceBackend(ABC, Generic[SequenceT]):
    """The part of `ModelBackendPort` that does not depend on how a backend stores KV cache."""

    def __init__(
        self,
        spec: ModelCacheSpec,
        traits: Traits,
        new_sequence: Callable[[list[int]], SequenceT],
    ) -> None:
        self._spec = spec
        self._window = spec.window
        self._has_state = spec.num_state > 0
        self._traits = traits
        self._new_sequence = new_sequence
        self._sequences: dict[SequenceId, SequenceT] = {}
        self._images: dict[SequenceId, tuple[ImageSpan, ...]] = {}  # of sequences with images

    @property
    def spec(self) -> ModelCacheSpec:
        return self._spec

    @property
    def traits(self) -> Traits:
        return self._traits

    @property
    def head(self) -> DraftHead | None:
        return None

    @property
    def loop(self) -> TokenLoop | None:
        return None

    def open_sequence(
        self, seq: SequenceId, tokens: Sequence[int], images: Sequence[ImageSpan] = ()
    ) -> None:
        self._check_ids(tokens, images)
        self._add(seq, self._new_sequence(list(tokens)))
        self._keep_images(seq, images)

    def fork(self, src: SequenceId, dst: SequenceId, num_tokens: int) -> bool:
        source, images = self._sequences[src], self.images_of(src)
        if not 0 <= num_tokens <= source.length or not self._can_cut(source, num_tokens):
            return False
        if cut_before_image(num_tokens, images) != num_tokens:
            return False
        target = self._new_sequence(source.known[:num_tokens])
        if num_tokens:
            self._copy(source, target, num_tokens)
        self._add(dst, target)
        self._keep_images(dst, [span for span in images if span.end <= num_tokens])
        return True

    def truncate(self, seq: SequenceId, num_tokens: int) -> int:
        """Truncate a sequence; to 0 tokens if windows or states do not reach back that far."""
        sequence = self._sequences[seq]
        if num_tokens < 0:
            raise ValueError(f"cannot truncate a sequence to {num_tokens} tokens")
        images = self.images_of(seq)
        num_tokens = cut_before_image(num_tokens, images)
        if num_tokens < sequence.length:
            self._keep_images(seq, [span for span in images if span.end <= num_tokens])
            self._cut(sequence, num_tokens if self._can_cut(sequence, num_tokens) else 0)
            # The tokens up to the cut stay known: KV cache may be loaded for them again.
            del sequence.known[num_tokens:]
        return sequence.length

    def close_sequence(self, seq: SequenceId) -> None:
        self._sequences.pop(seq, None)
        self._images.pop(seq, None)

    def flush(self) -> None:
        """Do nothing: this backend defers no work."""

    # -- for backends ---------------------------------------------------------------------------

    def images_of(self, seq: SequenceId) -> tuple[ImageSpan, ...]:
        """Return a sequence's images in ascending order, as far as it knows them."""
        return self._images.get(seq, ())

    def _keep_images(self, seq: SequenceId, images: Sequence[ImageSpan]) -> None:
        self._images.pop(seq, None)
        if images:
            self._images[seq] = tuple(images)

    def _learn_images(self, chunk: Chunk) -> None:
        """Keep the images of a chunk in place of those that its sequence expected there."""
        end = chunk.start + chunk.num_tokens
        others = [s for s in self.images_of(chunk.seq) if s.end <= chunk.start or s.start >= end]
        found = sorted((*others, *chunk.images), key=lambda span: span.start)
        self._keep_images(chunk.seq, found)

    def _check_ids(
        self, tokens: Sequence[int], images: Sequence[ImageSpan] = (), start: int = 0
    ) -> None:
        """Check the token ids of positions from `start` on, in and between their images.

        Raises:
            InvalidRequestError: an id is outside the vocabulary and not that of an image, or the
                model does not accept images.
        """
        if images and not self._traits.accepts_images:
            raise InvalidRequestError("this model does not accept images.", param="messages")
        done, end = start, start + len(tokens)
        for span in images:
            first, last = max(span.start, start), min(span.end, end)
            expected = span.tokens[first - span.start : last - span.start]
            if tuple(tokens[first - start : last - start]) != expected:
                raise InvalidRequestError("the token ids are not those of the image.")
            _check_range(tokens[done - start : first - start], self._spec.vocab_size)
            done = last
        _check_range(tokens[done - start :], self._spec.vocab_size)

    def _check_draft_ids(self, draft: Sequence[int]) -> None:
        self._check_ids(draft)

    @abstractmethod
    def _copy(self, source: SequenceT, target: SequenceT, num_tokens: int) -> None:
        """Copy the KV cache of a sequence's first tokens; `_can_cut` holds for `num_tokens`."""

    @abstractmethod
    def _cut(self, sequence: SequenceT, num_tokens: int) -> None:
        """Drop the KV cache after some tokens; `_can_cut` holds for `num_tokens`."""

    def _first_kept(self, sequence: SequenceT) -> int:
        """Return the first position whose keys and values window layers still hold."""
        return max(sequence.window_start, sequence.length - self._window)

    def _has_window(self, sequence: SequenceT, num_tokens: int) -> bool:
        if not self._window:
            return True
        return self._first_kept(sequence) <= max(0, num_tokens - self._window)

    def _can_cut(self, sequence: SequenceT, num_tokens: int) -> bool:
        is_end = num_tokens in (0, sequence.length)
        return is_end or (not self._has_state and self._has_window(sequence, num_tokens))

    def _sort_parts(self, seq: SequenceId, parts: Sequence[KVPayload], end: int) -> "SortedParts":
        sequence = self._sequences[seq]
        by_kind = sort_parts(parts, sequence.length, end, self._spec, self._traits.kv_abi)
        if end > len(sequence.known):
            raise CacheCorruptionError(
                f"cannot load {end} tokens: only {len(sequence.known)} token ids are known"
            )
        return by_kind

    def _snapshot_start(self, sequence: SequenceT, start: int, end: int, kind: LayerKind) -> int:
        """Return where a snapshot of ``[start, end)`` begins; at the last window for WINDOW layers.

        Raises:
            ValueError: the range is not (or no longer) held, or the model has no such layers.
        """
        is_held = kind in self._spec.kinds and 0 <= start < end <= sequence.length
        if kind is LayerKind.WINDOW:
            start = max(start, end - self._window)
            is_held = is_held and start >= self._first_kept(sequence)
        if kind is LayerKind.STATE:
            is_held = is_held and end == sequence.length and sequence.has_state
        if not is_held:
            raise ValueError(f"the {kind.value} layers do not hold positions [{start}, {end})")
        return start

    def _sequence_of(self, chunk: Chunk) -> SequenceT:
        """Return the sequence that a chunk continues.

        Raises:
            InvalidRequestError: it is not open, has another length, or lacks parts of its KV cache.
        """
        sequence = self._sequences.get(chunk.seq)
        if sequence is None:
            raise InvalidRequestError(f"sequence {chunk.seq} is not open")
        if chunk.start != sequence.length:
            raise InvalidRequestError(
                f"the chunk starts at {chunk.start}; the sequence ends at {sequence.length}"
            )
        is_whole = self._has_window(sequence, sequence.length)
        if not is_whole or (self._has_state and not sequence.has_state):
            raise InvalidRequestError("the sequence's window or state parts are not loaded")
        return sequence

    def _check_tokens(self, chunk: Chunk, *, has_sampled: bool) -> None:
        """Check a chunk's tokens; `has_sampled`: whether its sequence has a last sampled token.

        Raises:
            InvalidRequestError: there are no tokens, too many targets, or ids outside the
                vocabulary, or the chunk splits an image that must be whole.
        """
        if chunk.tokens is LAST_SAMPLED:
            if not has_sampled:
                raise InvalidRequestError("the sequence has no last sampled token")
        elif not chunk.tokens:
            raise InvalidRequestError("the chunk has no tokens")
        else:
            self._check_ids(chunk.tokens, chunk.images, chunk.start)
        if self._traits.needs_whole_images:
            _require_whole_images(chunk)
        if chunk.draft:
            _check_draft(chunk, self._traits.max_draft)
            self._check_draft_ids(chunk.draft)
        if len(chunk.targets) > chunk.num_tokens or (chunk.targets and chunk.draft):
            raise InvalidRequestError(f"cannot score {len(chunk.targets)} tokens in this chunk")
        self._check_ids(chunk.targets)
        if chunk.images:
            self._learn_images(chunk)

    def _add(self, seq: SequenceId, sequence: SequenceT) -> None:
        if seq in self._sequences:
            raise ValueError(f"sequence {seq} is already open")
        self._sequences[seq] = sequence


# -- backends that compute a step the moment it is launched ----------------------------------------


@dataclass(frozen=True, slots=True)
class StepTicket:
    """A computed step."""

    output: StepOutput


@dataclass(frozen=True, slots=True)
class PayloadTicket:
    """A completed snapshot."""

    payload: KVPayload


class DoneTickets:
    """Returns what a ticket holds: all work was complete when the ticket was created."""

    def collect(self, ticket: Ticket) -> StepOutput:
        if not isinstance(ticket, StepTicket):
            raise TypeError("not a step ticket of this backend")
        return ticket.output

    def payload(self, ticket: Ticket) -> KVPayload:
        if not isinstance(ticket, PayloadTicket):
            raise TypeError("not a snapshot ticket of this backend")
        return ticket.payload


class EagerBackend(DoneTickets, SequenceBackend[SequenceT]):
    """Computes synchronously; the last sampled token is on the host."""

    def _tokens_of(self, chunk: Chunk, last_sampled: int | None) -> tuple[int, ...]:
        self._check_tokens(chunk, has_sampled=last_sampled is not None)
        if chunk.tokens is LAST_SAMPLED:
            return () if last_sampled is None else (last_sampled,)
        return chunk.tokens

    def device_memory(self) -> DeviceMemory | None:
        return None


# -- steps and payloads ----------------------------------------------------------------------------


def make_rows(step: Step, make: Callable[[Chunk], RowT]) -> list[RowT | RowFailed]:
    """Make a row of each chunk; a row fails if `make` raises or its sequence occurs twice."""
    rows: list[RowT | RowFailed] = []
    seen: set[SequenceId] = set()
    for chunk in step.chunks:
        try:
            if chunk.seq in seen:
                raise InvalidRequestError("the sequence occurs twice in the step")
            seen.add(chunk.seq)
            rows.append(make(chunk))
        except (InvalidRequestError, BackendError) as error:
            rows.append(RowFailed(chunk.seq, error.message))
    return rows


@dataclass(frozen=True, slots=True)
class SortedParts:
    """Payloads by kind, in order of position."""

    full: tuple[KVPayload, ...] = ()
    window: tuple[KVPayload, ...] = ()
    state: KVPayload | None = None


def sort_parts(
    parts: Sequence[KVPayload], length: int, end: int, spec: ModelCacheSpec, abi: str
) -> SortedParts:
    """Sort the payloads that extend a sequence of `length` tokens to `end`.

    Raises:
        CacheCorruptionError: a part does not belong to this model, or positions are missing; see
            `ModelBackendPort.load`.
    """
    for part in parts:
        if part.abi != abi:
            raise CacheCorruptionError(
                f"cannot load a payload with ABI {part.abi}; this backend uses {abi}"
            )
        if part.kind not in spec.kinds or not 0 <= part.start < part.end:
            raise CacheCorruptionError(
                f"cannot load a {part.kind.value} payload at [{part.start}, {part.end})"
            )
    full = tuple(part for part in parts if part.kind is LayerKind.FULL)
    window = tuple(part for part in parts if part.kind is LayerKind.WINDOW)
    state = next((part for part in parts if part.kind is LayerKind.STATE), None)
    if full and full[0].start != length:
        raise CacheCorruptionError(
            f"the first payload starts at {full[0].start}; expected {length}"
        )
    if full or LayerKind.FULL in spec.kinds:
        _check_run(full, length, end)
    if window or (end > length and LayerKind.FULL not in spec.kinds and spec.window):
        _check_run(window, max(0, end - spec.window), end)
    if state is not None and state.end != end:
        raise CacheCorruptionError(f"the state payload ends at {state.end}; expected {end}")
    return SortedParts(full, window, state)


def _check_run(parts: Sequence[KVPayload], start: int, end: int) -> None:
    position = min(start, parts[0].start) if parts else start
    for part in parts:
        if part.start != position or position >= end:
            raise CacheCorruptionError(f"a payload starts at {part.start}; expected {position}")
        position = part.end
    if position < end:
        raise CacheCorruptionError(f"payloads end at {position}; expected {end}")


def _require_whole_images(chunk: Chunk) -> None:
    end = chunk.start + chunk.num_tokens
    if any(span.start < chunk.start or span.end > end for span in chunk.images):
        raise InvalidRequestError("the chunk splits an image, which this model needs whole")


def _check_range(tokens: Sequence[int], vocab_size: int) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        raise InvalidRequestError(f"token ids must be in [0, {vocab_size})", param="tokens")


def _check_draft(chunk: Chunk, max_draft: int) -> None:
    if len(chunk.draft) > max_draft or chunk.draw is None or chunk.tokens is LAST_SAMPLED:
        raise InvalidRequestError(f"cannot verify {len(chunk.draft)} draft tokens in this chunk")
    if len(chunk.masks) not in (0, len(chunk.draft)):
        raise InvalidRequestError("either every draft token has a mask, or none")


def verify(
    chunk: Chunk, draw_at: Callable[[int, Draw], tuple[int, TokenLogprob | None]]
) -> Sampled:
    """Sample a chunk's token, and one more after each draft token that matches.

    Args:
        draw_at: Samples the token after the last known one (0), the first draft token (1), ...
    """
    first, *later = chunk.draws
    accepted: list[Sampled] = []
    drawn = Sampled(chunk.seq, *draw_at(0, first))
    for index, (draft_token, draw) in enumerate(zip(chunk.draft, later, strict=True), 1):
        if drawn.token != draft_token:
            break
        accepted.append(drawn)
        drawn = Sampled(chunk.seq, *draw_at(index, draw))
    return replace(drawn, accepted=tuple(accepted))
