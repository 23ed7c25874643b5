"""What a reply is made of: its events, from `Started` to `Finished` or `Failed`, and its usage."""

from dataclasses import dataclass, field
from typing import TypeAlias

from semantic.domain.errors import SemanticError
from semantic.domain.sampling import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one turn.

    Attributes:
        prompt_tokens: All tokens of the prompt, reused ones included.
        completion_tokens: Tokens generated, the end token included.
        cache_read_tokens: Prompt tokens whose KV cache was reused.
        cache_creation_tokens: Prompt tokens computed now and kept for later.
        thinking_tokens: Generated tokens that were thinking.
        accepted_prediction_tokens: Generated tokens that were guessed before they were computed.
        rejected_prediction_tokens: Guesses that were wrong, and are no part of the reply.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cache_read_tokens: int = 0
    cache_creation_tokens: int = 0
    thinking_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and reply."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is rendered and queued; always the first event.

    Attributes:
        sampling: How tokens will be chosen, the model's own defaults included.
        fingerprint: Tells apart what may answer the same seed differently.
    """

    request_id: str
    model: str
    usage: Usage
    sampling: SamplingParams = field(default_factory=SamplingParams)
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """How much of the prompt is computed; comes while the client waits.

    The first comes before the first token of every reply: what was found is known by then.

    Attributes:
        done: Prompt tokens whose state is there.
        total: All tokens of the prompt.
        reused: Of those done, the ones that were found and not computed.
    """

    done: int
    total: int
    reused: int = 0


@dataclass(frozen=True, slots=True)
class ModelProgress:
    """The model is not there yet: what is being done, for people. Comes before `Started`."""

    detail: str


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token's bytes and log-probability, and those of the likeliest in its place."""

    text: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the answer, with the tokens it completes where asked for."""

    text: str
    logprobs: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    """More thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class ThinkingEnded:
    """Thinking is complete; `signature` is its handle."""

    signature: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """A tool call begins; calls are numbered from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a call's arguments, as JSON text."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """The call's arguments are complete."""

    index: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The reply is complete; a final event.

    Attributes:
        is_durable: Whether the turn and its KV cache are safe on disk; None where that was
            not promised. False, too, where the turn could not be logged.
    """

    reason: FinishReason
    usage: Usage
    stop_sequence: str | None = None
    is_durable: bool | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The reply ended early because of an error; a final event."""

    error: SemanticError


Event: TypeAlias = (
    Started
    | PrefillProgress
    | ModelProgress
    | TextDelta
    | ThinkingDelta
    | ThinkingEnded
    | ToolCallStarted
    | ToolCallDelta
    | ToolCallEnded
    | Finished
    | Failed
)
