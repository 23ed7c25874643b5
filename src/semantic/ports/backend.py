"""What the core asks of a model on a device: sequences, steps, and their state as payloads.

And where models come from.
"""

import enum
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NewType, Protocol, TypeAlias

from semantic.domain.sampling import SamplingParams, TokenLogprob
from semantic.domain.spec import Compute, LayerKind, ModelCacheSpec

SequenceId = NewType("SequenceId", int)


class LastSampled(enum.Enum):
    """Stands for the token the device sampled last for a sequence."""

    LAST_SAMPLED = enum.auto()


LAST_SAMPLED: Final = LastSampled.LAST_SAMPLED


@dataclass(frozen=True, slots=True)
class Draw:
    """Ask for a token after a chunk.

    Attributes:
        params: How to choose; `params.seed` is set by now.
        num_prompt: Tokens before this position are the prompt; penalties on generated tokens
            count from here.
        allowed: One bit a token id, little-endian within a byte; None allows every token.
    """

    params: SamplingParams
    num_prompt: int
    allowed: bytes | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one sequence: its positions ``[start, start + len(tokens))``.

    Attributes:
        start: Must equal the number of tokens the backend holds for the sequence.
        draw: Sample after the last token, or None in the middle of a prompt.
        draft: Guesses of what is drawn, at most `Traits.max_draft`; only with known tokens and a
            draw. Those that prove right are held after the step, the first wrong one and what
            follows it are not.
        masks: As `Draw.allowed`, after each guess; none allow every token.
    """

    seq: SequenceId
    start: int
    tokens: tuple[int, ...] | Literal[LastSampled.LAST_SAMPLED]
    draw: Draw | None = None
    draft: tuple[int, ...] = ()
    masks: tuple[bytes | None, ...] = ()

    @property
    def num_tokens(self) -> int:
        """How many tokens the chunk adds for certain."""
        return 1 if self.tokens is LAST_SAMPLED else len(self.tokens)

    @property
    def draws(self) -> tuple[Draw, ...]:
        """What is asked for after the last token, and after each guess."""
        if self.draw is None:
            return ()
        masks = self.masks or (None,) * len(self.draft)
        return (self.draw, *(replace(self.draw, allowed=mask) for mask in masks))


@dataclass(frozen=True, slots=True)
class Step:
    """What the device does at once: chunks of different sequences, in any mix of lengths."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens in all chunks."""
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Computed:
    """A row that asked for no token and got its state computed."""

    seq: SequenceId


@dataclass(frozen=True, slots=True)
class Sampled:
    """A row's token.

    Attributes:
        accepted: The guesses before it that were drawn, too, in order.
    """

    seq: SequenceId
    token: int
    logprob: TokenLogprob | None = None
    accepted: tuple["Sampled", ...] = ()


@dataclass(frozen=True, slots=True)
class RowFailed:
    """A row the backend refused; its sequence is as it was before the step."""

    seq: SequenceId
    reason: str


Row: TypeAlias = Computed | Sampled | RowFailed


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One row for each chunk, in the step's order."""

    rows: tuple[Row, ...]


class Ticket(Protocol):
    """Handle of work that was launched; each backend has its own kind."""


class PendingBytes(Protocol):
    """Bytes that a device is still copying to host memory. Any thread may wait for them."""

    @property
    def nbytes(self) -> int:
        """How many there will be."""

    def wait(self) -> memoryview:
        """Wait for them.

        Raises:
            CacheCorruptionError: the copy failed, and they never come.
        """


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """Named bytes in host memory, with the shape and dtype the backend gave them.

    Attributes:
        source: The bytes, or who waits for them; read them by `data`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    source: bytes | bytearray | memoryview | PendingBytes

    @property
    def data(self) -> bytes | bytearray | memoryview:
        """The bytes, as soon as they are there.

        Raises:
            CacheCorruptionError: they never come.
        """
        source = self.source
        return source if isinstance(source, bytes | bytearray | memoryview) else source.wait()

    @property
    def nbytes(self) -> int:
        """How many bytes there are, or will be."""
        source = self.source
        return len(source) if isinstance(source, bytes | bytearray) else source.nbytes


@dataclass(frozen=True, slots=True)
class KVPayload:
    """One kind of layers' KV cache of positions ``[start, end)``, safe on any thread.

    Attributes:
        abi: The `Traits.kv_abi` of the backend that made it; others refuse it.
        kind: FULL and WINDOW hold every position's keys and values; STATE is what was at `end`.
    """

    abi: str
    kind: LayerKind
    start: int
    end: int
    buffers: tuple[HostBuffer, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)


@dataclass(frozen=True, slots=True)
class Traits:
    """What the engine must know of a backend.

    Attributes:
        pipeline_depth: 1 if a step may be launched before the one before it is collected.
        kv_abi: Changes whenever payloads of this backend become unreadable to it.
        state_bits: Of a number in the KV cache, as it is computed.
        compute: None where nothing is computed.
        max_draft: The most guesses of a chunk; 0 where layers cannot be cut back.
        draft_end: Guesses must lie before this position: windows cannot be cut back further on.
    """

    pipeline_depth: Literal[0, 1]
    kv_abi: str
    state_bits: int = 16
    compute: Compute | None = None
    max_draft: int = 0
    draft_end: int = sys.maxsize


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device's own, in bytes, whoever uses it."""

    used: int
    total: int


class ModelBackendPort(Protocol):
    """One loaded model on one device.

    Made, called and shut down on the engine's thread only. Methods that raise leave every
    sequence as it was.
    """

    @property
    def spec(self) -> ModelCacheSpec:
        """Geometry of the model's KV cache."""

    @property
    def traits(self) -> Traits:
        """What the engine must know."""

    def open(self, seq: SequenceId, tokens: Sequence[int]) -> None:
        """Begin a sequence with no state yet.

        Args:
            seq: A new id.
            tokens: The ids known so far; penalties need those of state that is loaded.

        Raises:
            InvalidRequestError: a token id is out of the model's range.
            ValueError: the id is open.
        """

    def load(self, seq: SequenceId, parts: Sequence[KVPayload], end: int) -> None:
        """Bring a sequence to `end` with state from payloads; mutates it.

        FULL parts continue what is held, without a gap; the last one may reach past `end`. WINDOW
        parts cover the `spec.window` positions before `end`, and the STATE part was taken there.
        These two may come in a later call with the same `end`: a long restore is cut into calls
        of FULL parts, and the sequence can go on once its other kinds have come too.

        Raises:
            CacheCorruptionError: another abi or geometry, a gap, or a kind that does not reach
                `end`; nothing is loaded.
            KeyError: the sequence is not open.
        """

    def fork(self, src: SequenceId, dst: SequenceId, num_tokens: int) -> bool:
        """Open `dst` with the first `num_tokens` of `src`.

        Returns:
            False, and nothing is opened, if this model's state cannot be cut there.
        """

    def launch(self, step: Step) -> Ticket:
        """Enqueue a step and do not wait; mutates the sequences it names.

        A chunk with bad tokens fails its row, not the step. Guesses are checked in the step itself:
        one is right where the token drawn there is the guess, so that the tokens of a sequence are
        the same with any draft. A backend may check fewer of them than it is given.

        Raises:
            BackendError: the whole step failed; its sequences must be reopened.
        """

    def collect(self, ticket: Ticket) -> StepOutput:
        """Wait for a step; tickets are collected in the order they were launched.

        Raises:
            BackendError: the whole step failed; its sequences must be reopened.
        """

    def embed(self, seq: SequenceId, start: int, tokens: Sequence[int]) -> tuple[float, ...]:
        """Add tokens at `start`, the sequence's end, and sum their last hidden states; mutates it.

        Computes at once: a long text comes in pieces.

        Raises:
            InvalidRequestError: as a chunk's row would fail, or the model has no such states.
            BackendError: the device failed.
        """

    def snapshot(self, seq: SequenceId, start: int, end: int, kind: LayerKind) -> Ticket:
        """Begin copying one kind of layers' state of ``[start, end)`` to the host.

        Of WINDOW layers at most the last `spec.window` positions are copied; STATE is taken at
        `end`.

        Raises:
            ValueError: the range is not held (any more), or the model has no such layers.
        """

    def payload(self, ticket: Ticket) -> KVPayload:
        """Finish a snapshot; the result may go to any thread, which may yet wait for its bytes."""

    def flush(self) -> None:
        """Begin what was asked for and put off: the engine calls this after every step.

        Payloads may be waited for on other threads only after it.
        """

    def truncate(self, seq: SequenceId, num_tokens: int) -> int:
        """Cut a sequence's state back; mutates it.

        Returns:
            The length reached, at most `num_tokens`: less where layers cannot be cut there.
        """

    def close(self, seq: SequenceId) -> None:
        """Drop a sequence; closing an unknown one does nothing."""

    def bytes_for(self, lengths: Sequence[int]) -> int:
        """Bytes of working state that sequences of these lengths take together."""

    def memory(self) -> int:
        """Bytes that the open sequences take on the device."""

    def device_memory(self) -> DeviceMemory | None:
        """Read how full the device's own memory is; None if it cannot say. Any thread."""

    def shutdown(self) -> None:
        """Drop every sequence and the model; the last call."""


# -- where models come from -----------------------------------------------------------------------

# Is told, for people, what is being done.
OnProgress: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that can be loaded.

    Attributes:
        id: The name requests use.
        source: What finds its files: a name, a path, or a Hugging Face id.
        family: The model type of its config; empty if it is not known yet.
        num_bytes: Of its weights on disk; 0 if that is not known yet.
        fits: Whether its weights fit this machine's memory; None if that is not known.
    """

    id: str
    source: str
    family: str = ""
    num_bytes: int = 0
    fits: bool | None = None


class ModelSourcePort(Protocol):
    """Finds models. Safe on any thread; may read a disk, and `fetch` a network."""

    def entries(self) -> Sequence[ModelEntry]:
        """The models on this machine; read anew now and then."""

    def find(self, source: str) -> ModelEntry:
        """A model on this machine, or one that can be fetched.

        Raises:
            ModelNotFoundError: there is none.
        """

    def fetch(self, entry: ModelEntry, on_progress: OnProgress) -> ModelEntry:
        """See that a model's files are here, whole as far as can be seen, and say what they are.

        Raises:
            ModelNotFoundError: it cannot be had.
            InvalidRequestError: it is there but cannot be used.
        """
