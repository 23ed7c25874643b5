"""Fixed replies for tests of how protocols encode them."""

from collections.abc import AsyncIterator, Sequence

from semantic.domain.agents import Principal
from semantic.domain.chat import ChatRequest, Message
from semantic.domain.events import (
    Event,
    Finished,
    ScoredToken,
    Started,
    TextDelta,
    ThinkingDelta,
    ThinkingEnded,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from semantic.domain.sampling import FinishReason
from semantic.ports.inbound import EmbeddingRequest, Embeddings

USAGE = Usage(20, completion_tokens=12, cache_read_tokens=15, cache_creation_tokens=5)
# Thinking, text and two tool calls: all features that a reply can have.
EVERYTHING: tuple[Event, ...] = (
    Started("abc", "m", Usage(20), num_marked=18),
    ThinkingDelta("Let me "),
    ThinkingDelta("look."),
    ThinkingEnded("sig"),
    TextDelta("I", (ScoredToken(b"I", -0.5, ((b"I", -0.5), (b"You", float("-inf")))),)),
    TextDelta(" look."),
    ToolCallStarted(0, "1", "read"),
    ToolCallDelta(0, '{"path": '),
    ToolCallDelta(0, '"ä.txt"}'),
    ToolCallEnded(0),
    ToolCallStarted(1, "2", "list"),
    ToolCallDelta(1, "{}"),
    ToolCallEnded(1),
    Finished(FinishReason.TOOL_USE, USAGE),
)
# A tool call cut off by `max_tokens`.
CUT_CALL: tuple[Event, ...] = (
    Started("abc", "m", Usage(20), num_marked=18),
    TextDelta("I look."),
    ToolCallStarted(0, "1", "read"),
    ToolCallDelta(0, '{"path": "ä'),
    Finished(FinishReason.MAX_TOKENS, USAGE),
)


async def no_images(messages: Sequence[Message]) -> tuple[Message, ...]:
    """For routes whose requests have no images."""
    return tuple(messages)


class CannedReply:
    """A `Reply` that yields fixed events."""

    def __init__(self, events: Sequence[Event] = EVERYTHING) -> None:
        self._events = events
        self.is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[Event]:
        for event in self._events:
            yield event

    def cancel(self) -> None:
        self.is_cancelled = True


class CannedInference:
    """An `InferencePort` that gives the same reply to all requests, and records them."""

    def __init__(self, events: Sequence[Event] = EVERYTHING) -> None:
        self._events = events
        self.requests: list[ChatRequest] = []

    async def start(self, request: ChatRequest, principal: Principal) -> CannedReply:  # noqa: ARG002
        self.requests.append(request)
        return CannedReply(self._events)

    async def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode()

    async def embed(self, request: EmbeddingRequest, principal: Principal) -> Embeddings:  # noqa: ARG002
        return Embeddings("m", ((1.0,),) * len(request.inputs), len(request.inputs))

    async def count_tokens(self, request: ChatRequest, principal: Principal) -> int:  # noqa: ARG002
        return len(request.messages)
