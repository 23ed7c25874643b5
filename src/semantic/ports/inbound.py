"""What protocol adapters ask of the core."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from semantic.domain.agents import Agent, Principal, Reuse, Tier, Turn
from semantic.domain.blocks import BlockName
from semantic.domain.chat import ChatRequest, Message, OutputFormat, Thinking, ToolChoice
from semantic.domain.events import Event, Usage
from semantic.domain.sampling import FinishReason, SamplingParams, StopRules
from semantic.domain.spec import Compute
from semantic.ports.backend import DeviceMemory


@dataclass(frozen=True, slots=True)
class PastTurn:
    """A turn that is over.

    Attributes:
        turn_id: For `AgentHint.previous_turn`.
        messages: The whole conversation after it, without instructions for one request.
        reply: What the model said in it.
        model: Which model that was; empty if it is not known.
        reason: Why the reply ended; None if it is not known.
        is_whole: Whether `messages` are all; not if the text of a turn before it was removed.
    """

    turn_id: str
    messages: tuple[Message, ...]
    reply: Message
    usage: Usage
    created_at: float
    model: str
    reason: FinishReason | None
    is_whole: bool = True


class Reply(Protocol):
    """A reply in the making: an async iterator of events, on the event loop's thread.

    The first event is `Started`; the last is `Finished` or `Failed`, exactly one of them.
    """

    def __aiter__(self) -> AsyncIterator[Event]:
        """Iterate once; a second iteration sees nothing new."""

    def cancel(self) -> None:
        """Stop computing, if it has not ended; idempotent, returns at once."""


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts to be made vectors of.

    Attributes:
        inputs: Each a text, or its token ids.
        dimensions: How many numbers of a vector are kept; None keeps all.
    """

    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    dimensions: int | None = None


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A vector of length 1 for each text, in their order.

    Attributes:
        num_tokens: Of all texts.
    """

    model: str
    vectors: tuple[tuple[float, ...], ...]
    num_tokens: int


class InferencePort(Protocol):
    """Turns a conversation into a reply. Called on the event loop's thread."""

    async def start(self, request: ChatRequest, principal: Principal) -> Reply:
        """Render, tokenise, check and queue a request.

        All refusals that can be known early are raised here, before a client sees a header.

        Raises:
            InvalidRequestError: a field is wrong or unsupported.
            ContextLengthError: it does not fit the model's context.
            QuotaExceededError: its agent has had all it may have.
            ModelNotFoundError: the request names a model that is not served.
            ModelSwapError: the model is still loading, or failed to load.
            OverloadedError: the queue is full.
            DrainingError: the server is shutting down.
        """

    async def count_tokens(self, request: ChatRequest, principal: Principal) -> int:
        """Count the tokens of the prompt that `start` would compute; queues nothing.

        Raises:
            InvalidRequestError: a part cannot be shown to the model.
            ModelNotFoundError: the request names a model that is not served.
            ModelSwapError: the model is still loading, or failed to load.
        """

    async def embed(self, request: EmbeddingRequest, principal: Principal) -> Embeddings:
        """Make vectors of texts; if it is cancelled, no more of them is computed.

        Raises:
            InvalidRequestError: a text is empty or too long or has an unknown token, or there are
                not so many dimensions.
            ModelNotFoundError: the request names a model that is not served.
            ModelSwapError: the model is still loading, or failed to load.
            RateLimitedError: too much was asked.
            GenerationTimeoutError: it took too long.
        """

    async def decode(self, tokens: Sequence[int]) -> str:
        """Write tokens out as text, special ones left out.

        Raises:
            ModelSwapError: the model is still loading, or failed to load.
        """


class ModelState(Enum):
    """Where a model is on its way to answering.

    SWAPPING: its last requests end, and another takes its place. UNLOADED: the next request loads
    it again.
    """

    LOADING = "loading"
    READY = "ready"
    SWAPPING = "swapping"
    UNLOADED = "unloaded"
    ON_DISK = "on_disk"
    FAILED = "failed"
    HUNG = "hung"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model as clients and health checks see it.

    Attributes:
        id: The name requests use.
        detail: Loading step or reason of failure, for people.
        max_context: The model's context length; 0 until it is loaded.
        created_at: When it was asked for, in seconds since the epoch.
        compute: How it is computed; None until it is loaded.
        family: Its model type; empty if that is not known yet.
        num_bytes: Of its weights on disk; 0 if that is not known yet.
        fits: Whether its weights fit this machine's memory; None if that is not known.
    """

    id: str
    backend: str
    state: ModelState
    detail: str
    max_context: int
    created_at: float
    compute: Compute | None = None
    family: str = ""
    num_bytes: int = 0
    fits: bool | None = None


@dataclass(frozen=True, slots=True)
class StateView:
    """Where an agent's KV cache is, in tokens and bytes.

    Attributes:
        tier: Where its next turn starts from.
        num_tokens: Tokens whose state was kept when its latest turn ended.
        block: The last block of it that is known.
    """

    tier: Tier = Tier.COLD
    num_tokens: int = 0
    memory_tokens: int = 0
    disk_tokens: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    block: BlockName | None = None


@dataclass(frozen=True, slots=True)
class AgentView:
    """An agent as clients see it.

    Attributes:
        num_tokens: Tokens of its conversation.
        is_busy: A turn of its own is running or waiting.
        history: Its latest turns, the last first, as many as were asked for.
    """

    agent: Agent
    num_tokens: int
    state: StateView
    is_busy: bool
    history: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentQuery:
    """Which agents are wanted, and in which order.

    Attributes:
        sort: A field of `Agent`: last_used, created_at, num_turns or id.
        after: The cursor that the page before gave.
        labels: All of them must be there.
        id_prefix: What ids begin with.
        num_history: So many of each agent's latest turns are named.
    """

    sort: str = "last_used"
    is_descending: bool = True
    limit: int = 20
    after: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    id_prefix: str = ""
    is_pinned: bool | None = None
    num_history: int = 0


@dataclass(frozen=True, slots=True)
class AgentPage:
    """Some of the agents that match.

    Attributes:
        num_matching: All that match, on this page or not.
        cursor: Asks for the next page; None on the last one.
    """

    agents: tuple[AgentView, ...]
    num_matching: int
    cursor: str | None


@dataclass(frozen=True, slots=True)
class NewTurn:
    """What a client adds to the conversation of an agent, and how the reply is to be made."""

    messages: tuple[Message, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopRules = field(default_factory=StopRules)
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    output_format: OutputFormat | None = None
    thinking: Thinking | None = None


@dataclass(frozen=True, slots=True)
class DivergenceView:
    """Where a prompt left the conversation that was there, and the text on both sides.

    Instead of text whose model is not loaded, it is said that it is not.

    Attributes:
        before: The last text they share.
        expected: What the conversation went on with.
        actual: What the prompt went on with.
    """

    turn_id: str
    index: int
    before: str
    expected: str
    actual: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What an agent's latest turn cost and why, and what the next one starts from."""

    turn: Turn | None
    divergence: DivergenceView | None
    state: StateView


@dataclass(frozen=True, slots=True)
class ImportedAgent:
    """An agent that came in as a file.

    Attributes:
        has_state: Its KV cache came with it; if not, the next turn computes it.
        reason: Why that is so, for people.
    """

    agent: Agent
    has_state: bool
    reason: str


@dataclass(frozen=True, slots=True)
class CacheOverview:
    """The cache as dashboards see it; sizes are in bytes.

    Attributes:
        memory_working: Taken by sequences that are open, and by what is being read.
        disk_other: Of the budget, what the ledger and its backup take.
        tiers: How many agents start from which tier.
        logical_bytes: What agents would take if they shared nothing.
        unique_bytes: What they do take.
        num_replies: Replies since the start, whose prompts came from where `reuse` says.
        num_live: Requests that wait or run.
        problem: Why nothing can be written, for people; empty while all is well.
        device: Memory of the device's own, if it says.
    """

    memory_budget: int
    memory_used: int
    memory_working: int
    pressure: str
    num_blocks: int
    disk_budget: int
    disk_used: int
    disk_other: int
    num_files: int
    queue_budget: int
    queue_used: int
    tiers: tuple[tuple[Tier, int], ...]
    logical_bytes: int
    unique_bytes: int
    num_replies: int
    reuse: Reuse
    counters: dict[str, int]
    num_live: int
    problem: str
    device: DeviceMemory | None


@dataclass(frozen=True, slots=True)
class CheckProgress:
    """How far a check of all files has come."""

    num_checked: int
    num_total: int
    num_bad: int
