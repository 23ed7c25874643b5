"""What the core asks of models, tokenizers and places where models come from."""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Final, Literal, NewType, Protocol, TypeAlias

from semantic.domain.chat import JsonObject
from semantic.domain.reply_format import ReplyShape
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
    """

    seq: SequenceId
    start: int
    tokens: tuple[int, ...] | Literal[LastSampled.LAST_SAMPLED]
    draw: Draw | None = None

    @property
    def num_tokens(self) -> int:
        """How many tokens the chunk adds."""
        return 1 if self.tokens is LAST_SAMPLED else len(self.tokens)


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
    """A row's token."""

    seq: SequenceId
    token: int
    logprob: TokenLogprob | None = None


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


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """Named bytes in host memory, with the shape and dtype the backend gave them."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class KVPayload:
    """One kind of layers' attention state of positions ``[start, end)``, safe on any thread.

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
        return sum(memoryview(buffer.data).nbytes for buffer in self.buffers)


@dataclass(frozen=True, slots=True)
class Traits:
    """What the engine must know of a backend.

    Attributes:
        pipeline_depth: 1 if a step may be launched before the one before it is collected.
        is_unified_memory: Whether working state and payloads share one memory.
        kv_abi: Changes whenever payloads of this backend become unreadable to it.
        state_bits: Of a number of attention state, as it is computed.
        compute: None where nothing is computed.
    """

    pipeline_depth: Literal[0, 1]
    is_unified_memory: bool
    kv_abi: str
    state_bits: int = 16
    compute: Compute | None = None


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on the device.

    Attributes:
        total: All it has; 0 where the backend cannot tell.
        used: What the open sequences take.
    """

    total: int
    used: int


class ModelBackendPort(Protocol):
    """One loaded model on one device.

    Made, called and shut down on the engine's thread only. Methods that raise leave every
    sequence as it was.
    """

    @property
    def spec(self) -> ModelCacheSpec:
        """Geometry of the model's attention state."""
        ...

    @property
    def traits(self) -> Traits:
        """What the engine must know."""
        ...

    def open(self, seq: SequenceId, tokens: Sequence[int]) -> None:
        """Begin a sequence with no state yet.

        Args:
            seq: A new id.
            tokens: The ids known so far; penalties need those of state that is loaded.

        Raises:
            InvalidRequestError: a token id is out of the model's range.
            ValueError: the id is open.
        """
        ...

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
        ...

    def fork(self, src: SequenceId, dst: SequenceId, num_tokens: int) -> bool:
        """Open `dst` with the first `num_tokens` of `src`.

        Returns:
            False, and nothing is opened, if this model's state cannot be cut there.
        """
        ...

    def launch(self, step: Step) -> Ticket:
        """Enqueue a step and do not wait; mutates the sequences it names.

        A chunk with bad tokens fails its row, not the step.

        Raises:
            BackendError: the whole step failed; its sequences must be reopened.
        """
        ...

    def collect(self, ticket: Ticket) -> StepOutput:
        """Wait for a step; tickets are collected in the order they were launched.

        Raises:
            BackendError: the whole step failed; its sequences must be reopened.
        """
        ...

    def snapshot(self, seq: SequenceId, start: int, end: int, kind: LayerKind) -> Ticket:
        """Begin copying one kind of layers' state of ``[start, end)`` to the host.

        Of WINDOW layers at most the last `spec.window` positions are copied; STATE is taken at
        `end`.

        Raises:
            ValueError: the range is not held (any more), or the model has no such layers.
        """
        ...

    def payload(self, ticket: Ticket) -> KVPayload:
        """Finish a snapshot; the result may go to any thread."""
        ...

    def truncate(self, seq: SequenceId, num_tokens: int) -> int:
        """Cut a sequence's state back; mutates it.

        Returns:
            The length reached, at most `num_tokens`: less where layers cannot be cut there.
        """
        ...

    def close(self, seq: SequenceId) -> None:
        """Drop a sequence; closing an unknown one does nothing."""
        ...

    def bytes_for(self, lengths: Sequence[int]) -> int:
        """Bytes of working state that sequences of these lengths take together."""
        ...

    def memory(self) -> DeviceMemory:
        """Read the device's memory."""
        ...

    def shutdown(self) -> None:
        """Drop every sequence and the model; the last call."""
        ...


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that steers the model; only the chat template may write it.

    Attributes:
        strips_left: White space before it is part of it.
        strips_right: White space after it is part of it.
    """

    id: int
    text: str
    strips_left: bool = False
    strips_right: bool = False


class TokenizerPort(Protocol):
    """Text to token ids and back. Immutable, safe on any thread."""

    @property
    def vocab_size(self) -> int:
        """Ids are in ``[0, vocab_size)``."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a reply."""
        ...

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Texts that are single ids and no part of a reply's text, e.g. ``<|im_end|>``."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The template's source; None if the model has none."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokenise; special tokens written in the text become their ids, none is added."""
        ...

    @property
    def special_tokens(self) -> tuple[SpecialToken, ...]:
        """The tokens that `encode` finds in a text and `encode_plain` never makes."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Tokenise a whole prompt as `encode` does, begun as the model's texts begin."""
        ...

    def encode_plain(self, text: str, *, is_start: bool = False) -> list[int]:
        """Tokenise text as it is: no id of the result is special, whatever the text spells.

        Args:
            text: What stands between two special tokens.
            is_start: Nothing comes before it; some vocabularies write a first word differently.
        """
        ...

    def token_bytes(self, token: int) -> bytes:
        """What a token contributes to the text; empty for special and unknown tokens."""
        ...

    def render_chat(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] = (),
        *,
        add_generation_prompt: bool = True,
        today: date | None = None,
        is_thinking: bool | None = None,
    ) -> str:
        """Apply the model's chat template.

        Args:
            messages: In the shape templates expect: role, content, tool_calls, and so on.
            tools: Function definitions, for templates that show them.
            add_generation_prompt: End where a reply begins.
            today: The date shown by templates that show one; None is the real one.
            is_thinking: For templates that know the switch; None leaves it to them.

        Raises:
            InvalidRequestError: the template refuses the conversation, or there is none.
        """
        ...


class TokenConstraint(Protocol):
    """Which tokens one reply may go on with: a grammar's state. Used on the engine's thread."""

    def allowed(self) -> bytes | None:
        """One bit a token id, as in `Draw.allowed`; None allows every token."""
        ...

    def accept(self, token: int) -> None:
        """Advance by the token that was chosen; mutates."""
        ...


class GrammarPort(Protocol):
    """Turns what a reply must look like into a constraint. Immutable, safe on any thread."""

    def constrain(self, shape: ReplyShape, max_tokens: int) -> TokenConstraint | None:
        """Compile a shape for one reply of at most `max_tokens`; None if nothing is enforced.

        Near the end of the budget only tokens are allowed that lead to the reply's end, where a
        short way there is known; else the budget cuts the reply.

        Raises:
            InvalidRequestError: a schema or pattern cannot be enforced, or takes too much to
                compile (it says where), or no such tool is offered.
            OverloadedError: too much is being compiled.
        """
        ...


class ModelSourcePort(Protocol):
    """Where models come from. May take long; called off the event loop."""

    def resolve(self, model: str, on_progress: Callable[[str], None]) -> Path:
        """Find a model's directory, making it if need be; `on_progress` gets steps for people.

        Raises:
            ModelNotFoundError: no such model.
            InvalidRequestError: the model is there but cannot be used.
        """
        ...
