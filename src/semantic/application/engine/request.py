"""What the engine receives and what it returns: jobs, drafts and events."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Final, TypeAlias
from uuid import uuid4

from semantic.domain.agents import Reuse
from semantic.domain.blocks import BlockName
from semantic.domain.chat import ServiceClass
from semantic.domain.errors import BackendError, DeviceLostError, SemanticError
from semantic.domain.events import DraftOrigin, Event
from semantic.domain.images.spans import ImageSpan
from semantic.domain.sampling import SamplingParams, StopRules
from semantic.ports.backend import SequenceId
from semantic.ports.telemetry import RequestTrace
from semantic.ports.text import TokenConstraint

Clock = Callable[[], float]
monotonic: Clock = time.monotonic
NO_SEQUENCE: Final = SequenceId(-1)


@dataclass(frozen=True, slots=True)
class Job:
    """A reply to generate.

    Attributes:
        id: Identifies the request in events and in `cancel`.
        agent: The agent that takes the turn; the scheduler shares the device between agents.
        root: Root of the tenant's block names; only sequences with the same root share state.
        boundaries: Prompt positions where blocks end, so that later requests can resume there.
        sampling: Sampling parameters, with the seed set.
        max_tokens: The most tokens to generate; prompt and reply together fit the context. 0 only
            computes the prompt.
        deadline: Time on the engine's clock after which the request fails; None for no deadline.
        constraint: Restricts the tokens of the reply; the engine advances it.
        visible: Special tokens that count as text; see `ReplyFormat.visible_ids`.
        max_kept: The most tokens of the conversation to seal; None for no limit.
        prediction: Token ids that the client expects as the reply; a source of draft tokens.
        past: The tenant's conversations from before the model was loaded; a source of draft tokens.
        spelled: Text of special tokens in log-probabilities, which then also list the end token;
            None leaves special tokens without text.
        is_prompt_scored: Whether to score the prompt's tokens, with `sampling.top_logprobs`
            alternatives each.
        is_ephemeral: Whether the engine keeps nothing of the request: no block, no idle copy and
            no source of draft tokens.
        images: The images of the prompt in ascending order; `boundaries` has their starts and ends.
    """

    id: str
    agent: str
    root: BlockName
    tokens: tuple[int, ...]
    sampling: SamplingParams
    stop: StopRules
    max_tokens: int
    boundaries: tuple[int, ...] = ()
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    weight: float = 1.0
    deadline: float | None = None
    constraint: TokenConstraint | None = None
    visible: Mapping[int, bytes] = field(default_factory=dict)
    max_kept: int | None = None
    prediction: tuple[int, ...] = ()
    past: tuple[tuple[int, ...], ...] = ()
    spelled: Mapping[int, bytes] | None = None
    is_prompt_scored: bool = False
    is_ephemeral: bool = False
    images: tuple[ImageSpan, ...] = ()
    trace: RequestTrace = field(default_factory=RequestTrace, compare=False)


@dataclass(slots=True, eq=False)
class EmbeddingJob:
    """A text to embed.

    Attributes:
        result: Resolves to the sum; cancelling it stops the computation.
        seq: The text's sequence while it is open.
    """

    tokens: tuple[int, ...]
    id: str = field(default_factory=lambda: uuid4().hex)
    result: "Future[tuple[float, ...]]" = field(default_factory=Future)
    num_done: int = 0
    sums: tuple[float, ...] = ()
    seq: SequenceId = NO_SEQUENCE

    def finish(self) -> None:
        """Resolve the result, unless it is already resolved or cancelled. Thread-safe."""
        with contextlib.suppress(InvalidStateError):
            self.result.set_result(self.sums)

    def fail(self, error: SemanticError) -> None:
        """Resolve the result with an error, unless it is resolved or cancelled. Thread-safe."""
        with contextlib.suppress(InvalidStateError):
            self.result.set_exception(error)


@dataclass(frozen=True, slots=True, eq=False)
class GuestSequence:
    """A sequence that belongs to no request, e.g. to compute stored blocks again."""

    seq: SequenceId


@dataclass(frozen=True, slots=True)
class AheadJob:
    """The beginning of an agent's next prompt, to prepare while no request runs.

    Attributes:
        agent: As in `Job`; the agent's next request replaces this job.
        tokens: The whole conversation as far as it is known or predicted.
        images: The images in `tokens`, in ascending order.
        is_stored: Whether to restore the tokens from sealed blocks, and compute nothing.
    """

    agent: str
    root: BlockName
    tokens: tuple[int, ...]
    images: tuple[ImageSpan, ...] = ()
    is_stored: bool = False


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens: a prediction of a reply's next tokens, which the model verifies.

    Attributes:
        masks: The tokens that the constraint allows after each draft token; empty without one.
        states: The constraint's state after each draft token; empty without a constraint.
    """

    tokens: Sequence[int] = ()
    masks: tuple[bytes | None, ...] = ()
    states: tuple[TokenConstraint, ...] = ()
    origin: DraftOrigin = DraftOrigin.MEMORY

    def cut(self, size: int) -> "Draft":
        return Draft(self.tokens[:size], self.masks[:size], self.states[:size], self.origin)


NO_DRAFT: Final = Draft()


@dataclass(frozen=True, slots=True)
class ReplyState:
    """A reply's tokens and sealed state; emitted right before `Finished`, for the ledger.

    Attributes:
        block: The last sealed block; None if nothing was sealed.
        num_sealed: Tokens of prompt and reply whose state was sealed.
        num_stored: Leading tokens of the prompt whose blocks were stored when it began.
        is_damaged: Whether stored blocks of the prompt could not be loaded.
    """

    tokens: tuple[int, ...]
    block: BlockName | None
    num_sealed: int
    reuse: Reuse
    num_stored: int = 0
    is_damaged: bool = False


EngineEvent: TypeAlias = Event | ReplyState
EventBatch: TypeAlias = list[tuple[str, EngineEvent]]
EventSink: TypeAlias = Callable[[EventBatch], None]


def as_backend_error(error: Exception) -> SemanticError:
    """Convert an exception into the error that the request fails with.

    Raises:
        DeviceLostError: raised again, since it ends all requests; the device thread handles it.
    """
    if isinstance(error, DeviceLostError):
        raise error
    if isinstance(error, SemanticError):
        return error
    return BackendError(f"the device failed this request: {type(error).__name__}: {error}")
