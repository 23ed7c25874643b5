"""Interface of a model on a device: sequences, steps, and their KV cache as payloads."""

import enum
import sys
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NewType, Protocol, TypeAlias

from semantic.domain.images.spans import ImageSpan
from semantic.domain.sampling import SamplingParams, TokenLogprob
from semantic.domain.spec import Compute, LayerKind, ModelCacheSpec

SequenceId = NewType("SequenceId", int)


class LastSampled(enum.Enum):
    """Placeholder for the token that the device sampled last for a sequence.

    It lets the engine launch the next step before the host knows the token.
    """

    LAST_SAMPLED = enum.auto()


LAST_SAMPLED: Final = LastSampled.LAST_SAMPLED


class PendingTokens(Sequence[int]):
    """Tokens that a device may still sample. Their number is known; reading one waits for all.

    A slice from the first token on is pending as well.
    """

    @property
    @abstractmethod
    def seconds(self) -> float:
        """How long the device sampled all of them; waits."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Request to sample a token after a chunk.

    Attributes:
        params: Sampling parameters; `params.seed` is already set.
        num_prompt: Number of prompt tokens; penalties on generated tokens count from this position.
        allowed: Bit mask with one bit per token id, least significant bit first within a byte;
            None allows every token.
        num_before: Tokens of the text before the sequence's first one. Random numbers depend on the
            position in the text.
    """

    params: SamplingParams
    num_prompt: int
    allowed: bytes | None = None
    num_before: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one sequence: its positions ``[start, start + len(tokens))``.

    Attributes:
        start: Must equal the number of tokens the backend holds for the sequence.
        draw: How to sample after the last token; None in the middle of a prompt.
        draft: Draft tokens, at most `Traits.max_draft`; perhaps `PendingTokens`. Requires a `draw`,
            and `tokens` other than `LAST_SAMPLED`. The sequence keeps the accepted ones after the
            step; the first rejected one and all after it are dropped.
        masks: `Draw.allowed` after each draft token; an empty tuple allows every token.
        targets: Tokens to score, not together with a draft: the one at an index follows the
            chunk's token at that index. Logits take memory, so callers keep such chunks short.
        num_top: How many of the most likely tokens to report with each target.
        images: The images that overlap the chunk. A sequence learns from them, in addition to those
            that it was opened with: one that was forked or truncated goes on with other images.
    """

    seq: SequenceId
    start: int
    tokens: tuple[int, ...] | Literal[LastSampled.LAST_SAMPLED]
    draw: Draw | None = None
    draft: Sequence[int] = ()
    masks: tuple[bytes | None, ...] = ()
    targets: tuple[int, ...] = ()
    num_top: int = 0
    images: tuple[ImageSpan, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens the chunk adds, not counting draft tokens."""
        return 1 if self.tokens is LAST_SAMPLED else len(self.tokens)

    @property
    def draws(self) -> tuple[Draw, ...]:
        """The draws after the last token and after each draft token."""
        if self.draw is None:
            return ()
        masks = self.masks or (None,) * len(self.draft)
        return (self.draw, *(replace(self.draw, allowed=mask) for mask in masks))


@dataclass(frozen=True, slots=True)
class Step:
    """One batch for the device: chunks of different sequences, in any mix of lengths."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all chunks."""
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Computed:
    """Result of a chunk without a draw: its KV cache is computed.

    Attributes:
        scores: The chunk's targets with their log-probabilities.
    """

    seq: SequenceId
    scores: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """Result of a chunk with a draw: the sampled token.

    Attributes:
        accepted: The accepted draft tokens before it, in order.
        scores: As in `Computed`.
    """

    seq: SequenceId
    token: int
    logprob: TokenLogprob | None = None
    accepted: tuple["Sampled", ...] = ()
    scores: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class RowFailed:
    """Result of a chunk the backend rejected; its sequence is as it was before the step."""

    seq: SequenceId
    reason: str


Row: TypeAlias = Computed | Sampled | RowFailed


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One row per chunk, in the order of the step's chunks."""

    rows: tuple[Row, ...]


class Ticket(Protocol):
    """Handle of launched work; each backend has its own type."""


class PendingBytes(Protocol):
    """Bytes that a device is still copying to host memory. Thread-safe."""

    @property
    def nbytes(self) -> int:
        """Number of bytes that the copy will have."""

    def wait(self) -> memoryview:
        """Wait for the copy and return its bytes.

        Raises:
            CacheCorruptionError: the copy failed.
        """


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """Named bytes in host memory, with the shape and dtype set by the backend.

    Attributes:
        source: The bytes, or the pending copy; use `data` to read them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    source: bytes | bytearray | memoryview | PendingBytes

    @property
    def data(self) -> bytes | bytearray | memoryview:
        """The bytes; waits for a pending copy.

        Raises:
            CacheCorruptionError: the copy failed.
        """
        source = self.source
        return source if isinstance(source, bytes | bytearray | memoryview) else source.wait()

    @property
    def nbytes(self) -> int:
        """Number of bytes, also of a pending copy."""
        source = self.source
        return len(source) if isinstance(source, bytes | bytearray) else source.nbytes


@dataclass(frozen=True, slots=True)
class KVPayload:
    """KV cache of all layers of one kind at positions ``[start, end)``. Thread-safe.

    Attributes:
        abi: The `Traits.kv_abi` of the backend that created it; a backend with another ABI
            rejects it.
        kind: FULL and WINDOW hold the keys and values of every position; STATE holds the recurrent
            state at `end`.
    """

    abi: str
    kind: LayerKind
    start: int
    end: int
    buffers: tuple[HostBuffer, ...]

    @property
    def nbytes(self) -> int:
        """Total size of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a backend that the engine depends on.

    Attributes:
        pipeline_depth: 1 if a step may be launched before the previous one is collected.
        kv_abi: Identifies the payload layout; changes whenever older payloads become unreadable.
        state_bits: Bits per number in the KV cache on the device.
        compute: How the model is computed; None for a backend that computes nothing.
        max_draft: Maximum number of draft tokens per chunk; 0 if rejected ones cannot be
            dropped from the model's layers.
        draft_end: Draft tokens must lie before this position, since window layers cannot be
            truncated beyond it.
        accepts_images: Whether sequences may have images.
        needs_whole_images: Whether the positions of an image attend to each other in both
            directions, so that a chunk must contain all of them or none.
        kv_room: Bytes of the device's memory for open sequences; None if only the memory budget
            limits them.
        max_step_tokens: Prompt tokens of a step that the device's memory for activations holds.
    """

    pipeline_depth: Literal[0, 1]
    kv_abi: str
    state_bits: int = 16
    compute: Compute | None = None
    max_draft: int = 0
    draft_end: int = sys.maxsize
    accepts_images: bool = False
    needs_whole_images: bool = False
    kv_room: int | None = None
    max_step_tokens: int = sys.maxsize


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Dedicated memory of a device in bytes.

    Attributes:
        used: By all processes, if the device reports that; otherwise by this process.
        weights: Of the model; 0 if not known, like the following.
        sequences: KV cache of open sequences.
        cached: Buffers that the backend's library keeps for reuse.
    """

    used: int
    total: int
    weights: int = 0
    sequences: int = 0
    cached: int = 0

    @property
    def scratch(self) -> int:
        """The rest: activations, compiled kernels, other programs."""
        return max(self.used - self.weights - self.sequences - self.cached, 0)


class DraftHead(Protocol):
    """A model's own head for draft tokens (multi-token prediction). Used on the engine's thread."""

    def draft(self, rows: Sequence[Chunk], count: int) -> list[tuple[int, ...]]:
        """Draft tokens that may follow the next chunks of sequences, in place of computing them.

        Args:
            rows: A sequence's last token, which is not computed yet, and how to sample after it.

        Returns:
            Up to `count` tokens for each row; none if the head did not see the row's last tokens.

        Raises:
            BackendError: the device failed.
        """


class TokenLoop(Protocol):
    """Samples several tokens in a row without the host. Used on the engine's thread."""

    def sample(self, rows: Sequence[Chunk], count: int) -> Sequence[PendingTokens]:
        """Compute the next chunks of sequences, and sample `count` tokens after each.

        Each sequence is extended by its chunk and by all sampled tokens but the last. They are
        those of `count` steps with this chunk and `LAST_SAMPLED`, except where rounding decides.

        Returns:
            The tokens of each chunk, without waiting for them; a token is negative if the device
            failed. Empty if the loop cannot sample these chunks, and nothing is computed then.

        Raises:
            BackendError: the device failed.
        """

    def sample_ahead(
        self, rows: Sequence[Chunk], verifying: Ticket, count: int
    ) -> Sequence[PendingTokens]:
        """Sample `count` tokens after each draft, as far as a running step will accept it.

        The device compares the draft with the tokens that the step samples. The sequences stay as
        they are until `adopt`.

        Args:
            rows: The last token before each draft, of this loop's sequences. They hold it and the
                draft, except perhaps the draft's last token.
            verifying: The step of another backend that verifies the drafts, in the same order.

        Returns:
            As `sample`; empty if the loop cannot read that step.

        Raises:
            BackendError: the device failed.
        """

    def adopt(self, rows: Sequence[Chunk], ahead: Sequence[PendingTokens]) -> None:
        """Extend sequences as if `sample` had been called now and had returned `ahead`.

        The caller must have compared the drafts with the step's tokens: `rows` end with the token
        that the step sampled after those that it accepted.
        """


class ModelBackendPort(Protocol):
    """One loaded model on one device.

    Created, called and shut down only on the engine's thread, except where noted. A method that
    raises leaves every sequence as it was, except where noted.
    """

    @property
    def spec(self) -> ModelCacheSpec:
        """Geometry of the model's KV cache."""

    @property
    def traits(self) -> Traits:
        """Properties that the engine depends on."""

    @property
    def head(self) -> DraftHead | None:
        """The model's own head for draft tokens; None if it has none or none was asked for."""

    @property
    def loop(self) -> TokenLoop | None:
        """Samples tokens for drafts; None if the model or the device does not support it.

        Prepared at the first access, which may take seconds.
        """

    def open_sequence(
        self, seq: SequenceId, tokens: Sequence[int], images: Sequence[ImageSpan] = ()
    ) -> None:
        """Open a sequence with an empty KV cache.

        Args:
            seq: A new id.
            tokens: The token ids known so far. `load` brings KV cache without token ids, and
                sampling penalties need the ids. Penalties ignore key ids of images.
            images: The images in `tokens`, in ascending order. The positions of later tokens may
                depend on them, also where the KV cache of an image is loaded and not computed.

        Raises:
            InvalidRequestError: a token id is outside the model's vocabulary and no key id of
                `images`, or the model does not accept images.
            ValueError: the sequence id is already open.
        """

    def load(self, seq: SequenceId, parts: Sequence[KVPayload], end: int) -> None:
        """Extend a sequence to `end` with KV cache from payloads.

        FULL parts continue the sequence without a gap; the last one may extend past `end`. WINDOW
        parts cover the `spec.window` positions before `end`, and the STATE part holds the state at
        `end`. WINDOW and STATE parts may follow in a later call with the same `end`: the engine
        splits a long restore into several calls with FULL parts. The sequence can continue only
        when all of its layer kinds are loaded.

        Raises:
            CacheCorruptionError: another ABI or geometry, a gap, or a kind that does not reach
                `end`; nothing is loaded.
            BackendError: the device failed to copy; nothing is loaded.
            KeyError: the sequence is not open.
        """

    def fork(self, src: SequenceId, dst: SequenceId, num_tokens: int) -> bool:
        """Open `dst` with the KV cache of the first `num_tokens` tokens of `src`.

        `dst` has the images before that position.

        Returns:
            False if this model's KV cache cannot be truncated there, which is never possible inside
            an image; `dst` is not opened then.
        """

    def launch(self, step: Step) -> Ticket:
        """Enqueue a step without waiting for it; extends the sequences it names.

        A chunk with invalid tokens fails its row, not the step. The step itself verifies draft
        tokens: one is accepted if it equals the token sampled at its position, so that drafts never
        change the tokens of a sequence. A backend may verify fewer draft tokens than it is given.

        Raises:
            BackendError: the whole step failed; its sequences must be reopened.
        """

    def collect(self, ticket: Ticket) -> StepOutput:
        """Wait for a step and return its results; steps must be collected in launch order.

        Raises:
            BackendError: the whole step failed; its sequences must be reopened.
        """

    def embed(self, seq: SequenceId, start: int, tokens: Sequence[int]) -> tuple[float, ...]:
        """Append tokens at `start`, the sequence's end; returns the sum of their hidden states.

        The hidden states are those of the last layer. Blocks until computed, so callers split a
        long text into several calls.

        Raises:
            InvalidRequestError: the tokens are invalid, or the model exposes no hidden states.
            BackendError: the device failed.
        """

    def snapshot(self, seq: SequenceId, start: int, end: int, kind: LayerKind) -> Ticket:
        """Start copying the KV cache of one layer kind at ``[start, end)`` to the host.

        For WINDOW layers at most the last `spec.window` positions are copied; STATE is the state
        at `end`.

        Raises:
            ValueError: the sequence does not hold the range (any more), or the model has no such
                layers.
        """

    def payload(self, ticket: Ticket) -> KVPayload:
        """Return the payload of a snapshot.

        The payload is thread-safe; reading its bytes may still wait for the copy.
        """

    def flush(self) -> None:
        """Start deferred work, such as copies of snapshots; the engine calls this after each step.

        Other threads may wait for the bytes of a payload only after this call.
        """

    def truncate(self, seq: SequenceId, num_tokens: int) -> int:
        """Truncate a sequence to at most `num_tokens`.

        Returns:
            The new length; less than `num_tokens` if the layers cannot be truncated there, or if it
            is inside an image.
        """

    def close_sequence(self, seq: SequenceId) -> None:
        """Close a sequence and free its KV cache; does nothing for an unknown sequence."""

    def bytes_for(self, lengths: Sequence[int]) -> int:
        """Return the bytes that sequences of these lengths would need together."""

    def memory(self) -> int:
        """Return the bytes that the open sequences use on the device."""

    def device_memory(self) -> DeviceMemory | None:
        """Return the usage of the device's memory; None if unknown. Thread-safe."""

    def shutdown(self) -> None:
        """Free all sequences and the model; no call may follow."""
