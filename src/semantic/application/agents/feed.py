"""A feed of what happens to agents; a reader that is too slow loses events and learns how many."""

import asyncio
import enum
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

from semantic.domain.agents import Reuse
from semantic.domain.errors import OverloadedError
from semantic.domain.events import Usage

_CAPACITY = 256
_MAX_READERS = 64


class AgentAction(enum.Enum):
    """What was done to an agent."""

    CREATED = "created"
    UPDATED = "updated"
    FORKED = "forked"
    REWOUND = "rewound"
    IMPORTED = "imported"
    EVICTED = "evicted"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class AgentChanged:
    """Something was done to an agent."""

    tenant: str
    agent_id: str
    action: AgentAction


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """An agent's request was queued."""

    tenant: str
    agent_id: str
    turn_id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """An agent's request has its last event.

    Attributes:
        reason: Why the reply ended, or `failed`.
    """

    tenant: str
    agent_id: str
    turn_id: str
    reason: str
    usage: Usage
    reuse: Reuse = field(default_factory=Reuse)


@dataclass(frozen=True, slots=True)
class ModelChanged:
    """A model is on its way, is there, or could not be loaded; every tenant hears of it.

    Attributes:
        state: fetching, swapping, loading, ready, unloaded, or failed.
        detail: For people: what is being done, or why it failed.
    """

    model: str
    state: str
    detail: str


FeedEvent: TypeAlias = AgentChanged | TurnStarted | TurnEnded | ModelChanged


@dataclass(frozen=True, slots=True)
class MissedEvents:
    """A reader was too slow: so many events before the next one are lost to it."""

    num_events: int


class Subscription:
    """One reader's part of the feed. Read on the event loop's thread that made it."""

    def __init__(self, tenant: str, feed: "EventFeed", capacity: int) -> None:
        self.tenant = tenant
        self._feed = feed
        self._loop = asyncio.get_running_loop()
        self._lock = threading.RLock()  # a signal's handler may run inside it
        self._events: deque[FeedEvent] = deque()
        self._capacity = capacity
        self._num_missed = 0
        self._is_closed = False
        self._has_news = asyncio.Event()

    def put(self, event: FeedEvent) -> None:
        """Add an event, dropping the oldest if there is no room; any thread."""
        with self._lock:
            self._events.append(event)
            if len(self._events) > self._capacity:
                self._events.popleft()
                self._num_missed += 1
        self._wake()

    async def next(self, timeout_s: float) -> FeedEvent | MissedEvents | None:
        """Wait for the next event; None if nothing happened for `timeout_s`.

        Raises:
            StopAsyncIteration: the feed has ended.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (event := self._take()) is None:
                    await self._has_news.wait()
        except TimeoutError:
            return None
        return event

    def _take(self) -> FeedEvent | MissedEvents | None:
        """Take what is next; None if the reader has to wait."""
        # Cleared before looking, so that a later event sets it again.
        self._has_news.clear()
        with self._lock:
            if self._num_missed:
                missed, self._num_missed = MissedEvents(self._num_missed), 0
                return missed
            if self._events:
                return self._events.popleft()
            if self._is_closed:
                raise StopAsyncIteration
        return None

    def close(self) -> None:
        """Stop listening; idempotent."""
        self._feed.drop(self)

    def end(self) -> None:
        """Let the reader come to its end; any thread."""
        with self._lock:
            self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._has_news.set)


class EventFeed:
    """Everyone who watches. Safe on any thread; publishing never waits."""

    def __init__(self, capacity: int = _CAPACITY, max_readers: int = _MAX_READERS) -> None:
        """Start with nobody.

        Args:
            capacity: Events kept for a reader that does not read.
            max_readers: Further ones are refused.
        """
        self._capacity = capacity
        self._max_readers = max_readers
        self._lock = threading.RLock()  # a signal's handler may run inside it
        self._readers: list[Subscription] = []

    def publish(self, event: FeedEvent) -> None:
        """Tell the readers of the event's tenant; all of them what concerns the model."""
        tenant = None if isinstance(event, ModelChanged) else event.tenant
        with self._lock:
            readers = [reader for reader in self._readers if tenant in (None, reader.tenant)]
        for reader in readers:
            reader.put(event)

    def subscribe(self, tenant: str) -> Subscription:
        """Listen to what happens to a tenant's agents from now on.

        Raises:
            OverloadedError: too many are listening.
        """
        subscription = Subscription(tenant, self, self._capacity)
        with self._lock:
            if len(self._readers) >= self._max_readers:
                raise OverloadedError(
                    "too many clients are watching already; try again later.", retry_after_s=30
                )
            self._readers.append(subscription)
        return subscription

    def drop(self, subscription: Subscription) -> None:
        """Forget a reader."""
        with self._lock:
            if subscription in self._readers:
                self._readers.remove(subscription)

    def close(self) -> None:
        """End all readers, at the end of the server."""
        with self._lock:
            readers, self._readers = self._readers, []
        for reader in readers:
            reader.end()
