"""Events of a reply, from `Started` to `Finished` or `Failed`; token usage and cache misses."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from semantic.domain.errors import SemanticError
from semantic.domain.sampling import FinishReason, SamplingParams


class DraftOrigin(enum.StrEnum):
    """Where draft tokens come from."""

    MEMORY = "memory"
    MODEL = "draft_model"
    HEAD = "mtp"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one turn.

    Attributes:
        prompt_tokens: All tokens of the prompt, reused ones included.
        completion_tokens: Tokens generated, the end token included.
        cache_creation_tokens: Prompt tokens computed in this turn and kept for later.
        accepted_prediction_tokens: Draft tokens that were accepted into the reply.
        accepted_by_source: The same by `DraftOrigin`; sources without any are left out.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cache_read_tokens: int = 0
    cache_creation_tokens: int = 0
    thinking_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    accepted_by_source: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class ReplyTiming:
    """How long a reply took.

    Attributes:
        first_token_s: Seconds from the request to the first token.
        decode_s: Seconds from the first token to the last one.
    """

    first_token_s: float
    decode_s: float


class MissReason(enum.Enum):
    """Why a prompt did not reuse the KV cache of an earlier turn."""

    # The request differs from that of the earlier turn.
    MODEL_CHANGED = "model_changed"
    TOOLS_CHANGED = "tools_changed"
    SYSTEM_CHANGED = "system_changed"
    MESSAGES_CHANGED = "messages_changed"
    PARAMETERS_CHANGED = "parameters_changed"
    RENDERED_DIFFERENTLY = "rendered_differently"
    # The prompt continues the earlier turn, but its KV cache is missing or unusable.
    NOT_STORED = "not_stored"
    EVICTED = "evicted"
    DAMAGED = "damaged"
    FORMAT_CHANGED = "format_changed"
    NOT_LOADED = "not_loaded"
    # The earlier turn cannot be compared.
    NOT_FOUND = "previous_not_found"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """The reason why tokens of an earlier turn are computed again.

    Attributes:
        num_tokens: Tokens computed again that would have been reused otherwise; an estimate until
            the prompt is computed.
        detail: What changed, in words.
        names: Names of the tools that changed; of many, the first ones.

    Example:
        >>> detail = "tool list changed: 1 tool added at position 2"
        >>> CacheMiss(MissReason.TOOLS_CHANGED, 1204, detail).text
        'tool list changed: 1 tool added at position 2, 1,204 tokens recomputed'
    """

    reason: MissReason
    num_tokens: int
    detail: str
    names: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        if not self.num_tokens:
            return self.detail
        return f"{self.detail}, {self.num_tokens:,} tokens recomputed"


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What a prompt reused, compared with an earlier turn; made for requests that ask for it.

    Attributes:
        turn_id: The earlier turn; None if there is none to compare with.
        miss: Why tokens of that turn were computed again; None if they were not.
        hot: Tokens from an open sequence; `pool` and `disk` are from blocks in memory and on disk.
    """

    turn_id: str | None
    miss: CacheMiss | None
    hot: int
    pool: int
    disk: int
    computed: int

    @property
    def reused(self) -> int:
        return self.hot + self.pool + self.disk

    @property
    def text(self) -> str:
        if self.miss is not None:
            return self.miss.text
        counts = f"{self.reused:,} tokens reused, {self.computed:,} computed"
        return counts if self.turn_id else f"no earlier turn to compare with, {counts}"


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is rendered and queued; the first event, except for `ModelProgress`.

    Attributes:
        sampling: The sampling parameters in effect, including the model's defaults.
        fingerprint: Changes when the server may answer the same seed differently.
        num_marked: Tokens of the prompt up to the last mark of `ChatRequest.num_marked`.
        change: How the request differs from that of an earlier turn; None if it does not, or if the
            request asks for no `CacheComparison`.
    """

    request_id: str
    model: str
    usage: Usage
    sampling: SamplingParams = field(default_factory=SamplingParams)
    fingerprint: str | None = None
    num_marked: int = 0
    change: CacheMiss | None = None


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """How much of the prompt is computed; sent during prefill.

    The first of these events precedes the first token of every reply and reports the reused
    tokens.

    Attributes:
        done: Prompt tokens whose KV cache is available.
        reused: Those of the done tokens that were restored instead of computed.
    """

    done: int
    total: int
    reused: int = 0


@dataclass(frozen=True, slots=True)
class ModelProgress:
    """The model is not ready yet; `detail` describes the progress. Precedes `Started`."""

    detail: str


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token's bytes and log-probability, and those of the most likely tokens at its position."""

    text: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScored:
    """The prompt's tokens, if their log-probabilities were requested; precedes the text.

    Attributes:
        first: Text of the first token, which has no log-probability.
        rest: The other tokens.
    """

    first: bytes
    rest: tuple[ScoredToken, ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the answer, with the tokens it completes if log-probabilities were requested."""

    text: str
    logprobs: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    """More thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class ThinkingEnded:
    """The thinking is complete; `signature` is its handle."""

    signature: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """A tool call begins; calls are numbered from 0. For `is_custom` see `ToolSpec`."""

    index: int
    id: str
    name: str
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a call's arguments, as JSON text."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """The call's arguments are complete; a call that was cut off has no such event."""

    index: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The reply is complete; a final event.

    Attributes:
        is_durable: Whether the turn and its KV cache are on disk; None if the server did not
            promise that. Also False if the turn could not be logged.
        cache: What the prompt reused; None unless the request asks for a `CacheComparison`.
    """

    reason: FinishReason
    usage: Usage
    stop_sequence: str | None = None
    is_durable: bool | None = None
    cache: CacheReport | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The reply ended early because of an error; a final event."""

    error: SemanticError


Event: TypeAlias = (
    Started
    | PrefillProgress
    | ModelProgress
    | PromptScored
    | TextDelta
    | ThinkingDelta
    | ThinkingEnded
    | ToolCallStarted
    | ToolCallDelta
    | ToolCallEnded
    | Finished
    | Failed
)
