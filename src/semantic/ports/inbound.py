"""What protocol adapters ask of the core."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from semantic.domain.agents import Principal
from semantic.domain.chat import ChatRequest, Event, Message, Usage


@dataclass(frozen=True, slots=True)
class PastTurn:
    """A turn that is over.

    Attributes:
        turn_id: For `AgentHint.previous_turn`.
        messages: The whole conversation after it, without instructions for one request.
        reply: What the model said in it.
    """

    turn_id: str
    messages: tuple[Message, ...]
    reply: Message
    usage: Usage
    created_at: float


class Reply(Protocol):
    """A reply in the making: an async iterator of events, on the event loop's thread.

    The first event is `Started`; the last is `Finished` or `Failed`, exactly one of them.
    """

    def __aiter__(self) -> AsyncIterator[Event]:
        """Iterate once; a second iteration sees nothing new."""
        ...

    def cancel(self) -> None:
        """Stop computing, if it has not ended; idempotent, returns at once."""
        ...


class InferencePort(Protocol):
    """Turns a conversation into a reply. Called on the event loop's thread."""

    async def start(self, request: ChatRequest, principal: Principal) -> Reply:
        """Render, tokenise, check and queue a request.

        All refusals that can be known early are raised here, before a client sees a header.

        Raises:
            InvalidRequestError: a field is wrong or unsupported.
            ContextLengthError: it does not fit the model's context.
            ModelNotFoundError: the request names a model that is not served.
            ModelSwapError: the model is still loading, or failed to load.
            OverloadedError: the queue is full.
            DrainingError: the server is shutting down.
        """
        ...

    async def count_tokens(self, request: ChatRequest, principal: Principal) -> int:
        """Count the tokens of the prompt that `start` would compute; queues nothing.

        Raises:
            InvalidRequestError: a part cannot be shown to the model.
            ModelNotFoundError: the request names a model that is not served.
            ModelSwapError: the model is still loading, or failed to load.
        """
        ...

    async def decode(self, tokens: Sequence[int]) -> str:
        """Write tokens out as text, special ones left out.

        Raises:
            ModelSwapError: the model is still loading, or failed to load.
        """
        ...


class PastTurnsPort(Protocol):
    """What was said in turns that are over. May read a disk: not for the event loop's thread."""

    def find(self, request_id: str, principal: Principal) -> PastTurn | None:
        """Find the turn that a request made; None if it is unknown, or its text is not kept."""
        ...

    def forget(self, request_id: str, principal: Principal) -> bool:
        """Remove what was said in a turn; False if there is nothing to remove."""
        ...


class ModelState(Enum):
    """Where a model is on its way to answering."""

    LOADING = "loading"
    READY = "ready"
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
    """

    id: str
    backend: str
    state: ModelState
    detail: str
    max_context: int
    created_at: float


class ModelManagementPort(Protocol):
    """What models there are and how they are. Safe on any thread; never waits."""

    def models(self) -> tuple[ModelStatus, ...]:
        """All models this server serves or is loading, the current one first."""
        ...
