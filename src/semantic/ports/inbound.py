"""The interface that protocol adapters call: inference, and views of models and agents."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from semantic.domain.agents import Agent, Principal, Reuse, Tier, Turn
from semantic.domain.blocks import BlockName
from semantic.domain.chat import (
    CacheComparison,
    ChatRequest,
    Message,
    OutputFormat,
    Thinking,
    ToolChoice,
)
from semantic.domain.events import Event, Usage
from semantic.domain.sampling import FinishReason, SamplingParams, StopRules
from semantic.domain.spec import Compute
from semantic.ports.backend import DeviceMemory
from semantic.ports.vision import VisionPort


@dataclass(frozen=True, slots=True)
class PastTurn:
    """A finished turn.

    Attributes:
        turn_id: Id of the turn, for `AgentHint.previous_turn`.
        messages: The whole conversation up to and including the turn, without instructions that
            applied to one request only.
        reply: The model's message in this turn.
        created_at: In seconds since the epoch.
        model: Id of the model that replied; empty if unknown.
        reason: Why the reply ended; None if unknown.
        is_whole: False if `messages` is incomplete because the text of an earlier turn was removed.
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
    """A running reply: an async iterator of events, for the event loop's thread.

    The first event is `Started`; the last one is `Finished` or `Failed`, exactly one of them. A
    reply that waits for its model begins with `ModelProgress` events instead, and has no `Started`
    if it ends while waiting.
    """

    def __aiter__(self) -> AsyncIterator[Event]:
        """Iterate over the events; only the first iteration yields them."""

    def cancel(self) -> None:
        """Stop the generation if it has not ended; idempotent, returns at once."""


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A request for embeddings of texts.

    Attributes:
        inputs: Texts, each as a string or as token ids.
        dimensions: Number of leading dimensions to keep in each vector; None keeps all.
        is_cut: Whether texts that are too long are cut at their end; otherwise they are refused.
        is_normalised: Whether vectors are scaled to length 1, after they are cut to `dimensions`.
    """

    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    dimensions: int | None = None
    is_cut: bool = False
    is_normalised: bool = True


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Embeddings: one vector per text, in the order of the texts.

    Attributes:
        num_tokens: Number of tokens in all texts.
    """

    model: str
    vectors: tuple[tuple[float, ...], ...]
    num_tokens: int


class InferencePort(Protocol):
    """Generates replies to conversations that the client sends whole, and embeddings.

    Called on the event loop's thread.
    """

    async def start(self, request: ChatRequest, principal: Principal) -> Reply:
        """Render, tokenise, check and queue a request.

        Errors that can be detected early are raised here, before the response headers are sent.

        Raises:
            InvalidRequestError: a field is invalid or unsupported.
            ContextLengthError: the prompt does not fit the model's context.
            QuotaExceededError: the agent's quota is used up.
            ModelNotFoundError: the request names a model that is not served.
            ModelSwapError: the model is still loading, or failed to load.
            OverloadedError: the queue is full.
            DrainingError: the server is shutting down.
        """

    async def count_tokens(self, request: ChatRequest, principal: Principal) -> int:
        """Count the prompt tokens that `start` would use for the request; queues nothing.

        Raises:
            InvalidRequestError: the model does not support a part of the conversation.
            ModelNotFoundError: the request names a model that is not served.
            ModelSwapError: the model is still loading, or failed to load.
        """

    async def embed(self, request: EmbeddingRequest, principal: Principal) -> Embeddings:
        """Compute embeddings of texts; cancelling the call stops the computation.

        Raises:
            InvalidRequestError: a text is empty, too long or has an unknown token, or `dimensions`
                exceeds the model's dimensions.
            ModelNotFoundError: the request names a model that is not served.
            ModelSwapError: the model is still loading, or failed to load.
            RateLimitedError: a rate limit is exceeded.
            GenerationTimeoutError: the computation took too long.
        """

    async def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text, omitting special tokens.

        Raises:
            ModelSwapError: the model is still loading, or failed to load.
        """


@dataclass(frozen=True, slots=True)
class NewTurn:
    """New messages in an agent's conversation, and the parameters of the reply.

    Attributes:
        is_ephemeral: See `AgentHint`; such a turn does not wait for others of the agent.
        comparison: See `AgentHint`.
    """

    messages: tuple[Message, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopRules = field(default_factory=StopRules)
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    output_format: OutputFormat | None = None
    thinking: Thinking | None = None
    is_ephemeral: bool = False
    comparison: CacheComparison | None = None


@dataclass(frozen=True, slots=True)
class Compaction:
    """How to compact an agent; None means the server's settings.

    Attributes:
        new_id: Id of the branch; None for a random id.
        instructions: The message that asks for the summary.
        keep_turns: Latest turns that stay as they are.
        max_tokens: Longest summary.
        labels: Labels of the branch, besides those of the agent.
    """

    new_id: str | None = None
    instructions: str | None = None
    keep_turns: int | None = None
    max_tokens: int | None = None
    sampling: SamplingParams | None = None
    labels: tuple[tuple[str, str], ...] = ()


class StatefulInferencePort(Protocol):
    """Generates replies in conversations that the server stores."""

    async def generate(self, principal: Principal, agent_id: str, ask: NewTurn) -> Reply:
        """Reply to new messages in an agent's conversation; turns of one agent run in sequence.

        Call it on the event loop's thread.

        Raises:
            AgentNotFoundError: there is no such agent.
            QuotaExceededError: the agent's quota is used up.
            OverloadedError: too many turns of all agents are waiting.
            ContextLengthError: the conversation exceeds the context, and its oldest part must not
                be dropped.
            GenerationTimeoutError: the agent's earlier turns took too long.
            InvalidRequestError, ModelNotFoundError, ModelSwapError, DrainingError: see
                `InferencePort`.
        """


class ModelState(Enum):
    """Lifecycle state of a model.

    SWAPPING: its last requests end, and another model replaces it. UNLOADED: the next request loads
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


class ImageSupport(Enum):
    """What a model gets of the images in a request.

    VISION: the model sees them. OCR: it gets the text recognised in them. NONE: they are refused.
    """

    VISION = "vision"
    OCR = "ocr"
    NONE = "none"

    @classmethod
    def of(cls, vision: VisionPort | None, *, has_ocr: bool) -> "ImageSupport":
        """Return the support of a model; `has_ocr` says whether text can be recognised."""
        if vision is not None:
            return cls.VISION
        return cls.OCR if has_ocr else cls.NONE


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model as shown to clients and health checks.

    Attributes:
        id: The name requests use.
        backend: Name of the backend that runs it.
        detail: Human-readable loading step, or reason of a failure.
        max_context: Tokens that a prompt and its reply may have: the model's context length, or the
            part of it that fits this server's memory; 0 until the model is loaded.
        created_at: Start of the server, in seconds since the epoch.
        compute: How the model is computed; None until it is loaded.
        family: Its model type; empty if unknown.
        num_bytes: Size of its weights on disk; 0 if unknown.
        fits: Whether its weights fit this machine's memory; None if unknown.
        draft_model: The model that drafts tokens for it; mtp for its own head; empty if none does.
        draft_note: Why it does not draft with its own head; empty if it does, or was not to.
        images: What it gets of images; None until it is loaded.
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
    draft_model: str = ""
    draft_note: str = ""
    images: ImageSupport | None = None


@dataclass(frozen=True, slots=True)
class StateView:
    """Location of an agent's KV cache, in tokens and bytes.

    Attributes:
        tier: The tier that its next turn starts from.
        num_tokens: Tokens whose KV cache was stored when its latest turn ended.
        block: The last block that the next turn can reuse; None if there is none.
        reusable_tokens: Tokens that the engine would not need to compute if the next turn came now.
        note: Human-readable reason why the next turn cannot use the stored KV cache; empty if it
            can.
    """

    tier: Tier = Tier.COLD
    num_tokens: int = 0
    memory_tokens: int = 0
    disk_tokens: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    block: BlockName | None = None
    reusable_tokens: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class AgentView:
    """An agent as shown to clients.

    Attributes:
        num_tokens: Number of tokens in its conversation.
        is_busy: Whether a turn of the agent is running or waiting.
        history: Ids of its latest turns, latest first, as many as requested.
    """

    agent: Agent
    num_tokens: int
    state: StateView
    is_busy: bool
    history: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BranchComparison:
    """What two agents have in common, and the turns of each after that, oldest first.

    Attributes:
        fork: The last turn of both; None if they have none in common.
        num_common: Number of turns up to `fork`.
        num_turns: Number of turns of each after `fork`, of which some may be left out.
    """

    fork: Turn | None
    num_common: int
    first: tuple[Turn, ...]
    second: tuple[Turn, ...]
    num_turns: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Compacted:
    """A branch that continues an agent from a summary.

    Attributes:
        view: The branch.
        num_before: Tokens of the agent's conversation.
        num_summarised: Messages that the summary replaces.
        num_kept: Messages that stay as they are.
        summary_usage: Tokens of the request that wrote the summary.
        summary_reuse: Where the prompt of that request came from.
        reuse: Where the branch's tokens came from.
    """

    view: AgentView
    parent_id: str
    summary: str
    num_before: int
    num_summarised: int
    num_kept: int
    summary_usage: Usage
    summary_reuse: Reuse
    reuse: Reuse

    @property
    def num_after(self) -> int:
        """Tokens of the branch's conversation."""
        return self.view.num_tokens


@dataclass(frozen=True, slots=True)
class AgentQuery:
    """Filter, order and page of a list of agents.

    Attributes:
        sort: A field of `Agent`: last_used, created_at, num_turns or id.
        limit: Maximum number of agents on the page.
        after: The cursor of the previous page; None for the first page.
        labels: Labels that an agent must all have.
        id_prefix: Prefix that an agent's id must have.
        is_pinned: Restricts the list to pinned or unpinned agents; None lists both.
        num_history: Number of turn ids to return in each agent's `history`.
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
    """One page of matching agents.

    Attributes:
        num_matching: Number of matching agents on all pages.
        cursor: Cursor for the next page; None on the last page.
    """

    agents: tuple[AgentView, ...]
    num_matching: int
    cursor: str | None


@dataclass(frozen=True, slots=True)
class DivergenceView:
    """Where a prompt diverged from the agent's conversation, and the text around that position.

    If the model of a text is not loaded, a note replaces the text, since only that model's
    tokenizer can decode it.

    Attributes:
        turn_id: The turn whose conversation the prompt diverged from.
        index: Number of tokens that both have in common.
        before: The end of the common text.
        expected: How the conversation continues.
        actual: How the prompt continues.
    """

    turn_id: str
    index: int
    before: str
    expected: str
    actual: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a turn of an agent reused and why, and what the next turn starts from.

    Attributes:
        turn: The turn; None if the agent has none.
        divergence: Where its prompt diverged from the conversation; None if it did not.
        state: The KV cache that the agent's next turn can reuse.
        note: Why the turn could not use the KV cache of the turn before it; empty if it could.
    """

    turn: Turn | None
    divergence: DivergenceView | None
    state: StateView
    note: str = ""


@dataclass(frozen=True, slots=True)
class ImportedAgent:
    """An agent imported from a file.

    Attributes:
        has_state: Whether its KV cache was imported; if not, the next turn computes it.
        reason: Human-readable reason for `has_state`.
    """

    agent: Agent
    has_state: bool
    reason: str


@dataclass(frozen=True, slots=True)
class CacheOverview:
    """Statistics of the KV cache, for dashboards; sizes are in bytes.

    Attributes:
        memory_working: Used by open sequences and by parts that are being read.
        disk_other: Share of the budget used by the ledger and its backup.
        tiers: Number of agents whose next turn starts from each tier.
        logical_bytes: Size of all agents' KV cache if they shared no blocks.
        unique_bytes: Actual size, with shared blocks counted once.
        num_replies: Finished replies since the start of the server.
        reuse: Where the prompt tokens of these replies came from.
        num_live: Number of waiting and running requests.
        problem: Human-readable reason why nothing can be written; empty if there is no problem.
        device: Memory of the device; None if unknown.
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
    """Progress of a check of all block files."""

    num_checked: int
    num_total: int
    num_bad: int
