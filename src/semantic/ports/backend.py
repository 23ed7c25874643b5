"""Interface of a model on a device: sequences, steps, and their KV cache as payloads.

Also the interface of model sources, which find and fetch models.
"""

import enum
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NewType, Protocol, TypeAlias

from semantic.domain.model_names import Suggestion
from semantic.domain.sampling import SamplingParams, TokenLogprob
from semantic.domain.spec import Compute, LayerKind, ModelCacheSpec

SequenceId = NewType("SequenceId", int)


class LastSampled(enum.Enum):
    """Placeholder for the token that the device sampled last for a sequence.

    It lets the engine launch the next step before the host knows the token.
    """

    LAST_SAMPLED = enum.auto()


LAST_SAMPLED: Final = LastSampled.LAST_SAMPLED


@dataclass(frozen=True, slots=True)
class Draw:
    """Request to sample a token after a chunk.

    Attributes:
        params: Sampling parameters; `params.seed` is already set.
        num_prompt: Number of prompt tokens; penalties on generated tokens count from this position.
        allowed: Bit mask with one bit per token id, least significant bit first within a byte;
            None allows every token.
    """

    params: SamplingParams
    num_prompt: int
    allowed: bytes | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one sequence: its positions ``[start, start + len(tokens))``.

    Attributes:
        start: Must equal the number of tokens the backend holds for the sequence.
        draw: How to sample after the last token; None in the middle of a prompt.
        draft: Draft tokens, at most `Traits.max_draft`. Requires a `draw`, and `tokens` other than
            `LAST_SAMPLED`. The sequence keeps the accepted ones after the step; the first
            rejected one and all after it are dropped.
        masks: `Draw.allowed` after each draft token; an empty tuple allows every token.
        targets: Tokens to score, not together with a draft: the one at an index follows the
            chunk's token at that index. Logits take memory, so callers keep such chunks short.
        num_top: How many of the most likely tokens to report with each target.
    """

    seq: SequenceId
    start: int
    tokens: tuple[int, ...] | Literal[LastSampled.LAST_SAMPLED]
    draw: Draw | None = None
    draft: tuple[int, ...] = ()
    masks: tuple[bytes | None, ...] = ()
    targets: tuple[int, ...] = ()
    num_top: int = 0

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
        max_draft: Maximum number of draft tokens per chunk; 0 if the model's layers cannot be
            truncated.
        draft_end: Draft tokens must lie before this position, since window layers cannot be
            truncated beyond it.
    """

    pipeline_depth: Literal[0, 1]
    kv_abi: str
    state_bits: int = 16
    compute: Compute | None = None
    max_draft: int = 0
    draft_end: int = sys.maxsize


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Dedicated memory of a device in bytes.

    Attributes:
        used: By all processes, if the device reports that; otherwise by this process.
    """

    used: int
    total: int


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

    def open_sequence(self, seq: SequenceId, tokens: Sequence[int]) -> None:
        """Open a sequence with an empty KV cache.

        Args:
            seq: A new id.
            tokens: The token ids known so far. `load` brings KV cache without token ids, and
                sampling penalties need the ids.

        Raises:
            InvalidRequestError: a token id is outside the model's vocabulary.
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

        Returns:
            False if this model's KV cache cannot be truncated there; `dst` is not opened then.
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
            The new length; less than `num_tokens` if the layers cannot be truncated there.
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


# -- model sources --------------------------------------------------------------------------------

# Receives a human-readable description of the current step.
OnProgress: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that can be loaded.

    Attributes:
        id: The name requests use.
        source: Where its files are: a name, a path, or a Hugging Face id.
        family: The model type in its config; empty if unknown.
        num_bytes: Size of its weights on disk; 0 if unknown.
        fits: Whether its weights fit this machine's memory; None if unknown.
    """

    id: str
    source: str
    family: str = ""
    num_bytes: int = 0
    fits: bool | None = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's files say about it; 0 or empty where they do not say.

    Attributes:
        file_format: `gguf`, also after its import, or `safetensors`.
        precision: Number format of the weights, such as `BF16` or `Q4`.
        template: Source of its chat template.
        special_tokens: Texts of its special tokens.
        modified_at: In seconds since the epoch.
        digest: 64 hexadecimal digits that change with the files.
    """

    architecture: str = ""
    file_format: str = ""
    precision: str = ""
    num_parameters: int = 0
    max_context: int = 0
    hidden_size: int = 0
    num_layers: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    vocab_size: int = 0
    template: str = ""
    special_tokens: tuple[str, ...] = ()
    modified_at: float = 0.0
    digest: str = "0" * 64


class ModelSourcePort(Protocol):
    """Finds and fetches models. Thread-safe; reads the disk, and `fetch` may use the network."""

    def entries(self) -> Sequence[ModelEntry]:
        """Return the models on this machine; the result may be cached for a short time."""

    def find_model(self, source: str) -> ModelEntry:
        """Return a model that is on this machine or can be fetched.

        Raises:
            ModelNotFoundError: no such model exists.
        """

    def fetch(self, entry: ModelEntry, on_progress: OnProgress) -> ModelEntry:
        """Download a model's files if needed and check that they appear complete.

        Returns:
            The entry, completed with what the files tell: family, size, and whether it fits.

        Raises:
            ModelNotFoundError: the model cannot be found or downloaded.
            InvalidRequestError: the model's files cannot be used.
        """

    def suggestions(self) -> Sequence[Suggestion]:
        """Judge the known published models for this machine; the first call measures it."""

    def remove(self, entry: ModelEntry) -> int:
        """Delete a model's files and return how many bytes this freed.

        Raises:
            ModelNotFoundError: the model is not on this machine.
            ConflictError: a server on this machine uses the model.
            InvalidRequestError: the files belong to another program, or the model has none.
        """

    def facts(self, entry: ModelEntry) -> ModelFacts:
        """Read what the files of a model on this machine say about it."""
