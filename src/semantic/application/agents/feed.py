"""Event feed about agents and models, with bounded buffers.

A subscriber that reads too slowly loses the oldest events and receives their number.
"""

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
    """Kinds of change to an agent."""

    CREATED = "created"
    UPDATED = "updated"
    FORKED = "forked"
    REWOUND = "rewound"
    IMPORTED = "imported"
    EVICTED = "evicted"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class AgentChanged:
    """An agent was created, changed or deleted."""

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
    """An agent's request ended.

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
    """The state of a model changed. All tenants receive this event.

    Attributes:
        state: fetching, swapping, loading, ready, unloaded, or failed.
        detail: Human-readable description of the current step, or the reason of the failure.
    """

    model: str
    state: str
    detail: str


FeedEvent: TypeAlias = AgentChanged | TurnStarted | TurnEnded | ModelChanged


@dataclass(frozen=True, slots=True)
class MissedEvents:
    """A subscriber read too slowly: `num_events` events before the next one were dropped."""

    num_events: int


class Subscription:
    """Buffered events of one subscriber. Read it on the event loop that created it."""

    def __init__(self, tenant: str, feed: "EventFeed", capacity: int) -> None:
        self.tenant = tenant
        self._feed = feed
        self._loop = asyncio.get_running_loop()
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt the holder
        self._events: deque[FeedEvent] = deque()
        self._capacity = capacity
        self._num_missed = 0
        self._is_closed = False
        self._has_news = asyncio.Event()

    def put(self, event: FeedEvent) -> None:
        """Add an event, dropping the oldest if the buffer is full. Thread-safe."""
        with self._lock:
            self._events.append(event)
            if len(self._events) > self._capacity:
                self._events.popleft()
                self._num_missed += 1
        self._wake()

    async def next(self, timeout_s: float) -> FeedEvent | MissedEvents | None:
        """Wait for the next event; returns None after `timeout_s` without one.

        Raises:
            StopAsyncIteration: the feed is closed and all events were read.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (event := self._take()) is None:
                    await self._has_news.wait()
        except TimeoutError:
            return None
        return event

    def _take(self) -> FeedEvent | MissedEvents | None:
        # Clear before reading the buffer, so that an event added afterwards sets it again.
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
        self._feed.drop(self)

    def end(self) -> None:
        """Make `next` raise StopAsyncIteration once the buffer is empty. Thread-safe."""
        with self._lock:
            self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._has_news.set)


class EventFeed:
    """Distributes events to subscribers. Thread-safe; publishing never blocks on a subscriber."""

    def __init__(self, capacity: int = _CAPACITY, max_readers: int = _MAX_READERS) -> None:
        """Create a feed; `capacity` is the maximum number of unread events per subscriber."""
        self._capacity = capacity
        self._max_readers = max_readers
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt the holder
        self._readers: list[Subscription] = []

    def publish(self, event: FeedEvent) -> None:
        """Send an event to the subscribers of its tenant; a ModelChanged goes to all."""
        tenant = None if isinstance(event, ModelChanged) else event.tenant
        with self._lock:
            readers = [reader for reader in self._readers if tenant in (None, reader.tenant)]
        for reader in readers:
            reader.put(event)

    def subscribe(self, tenant: str) -> Subscription:
        """Subscribe to the events of a tenant's agents; raises OverloadedError at `max_readers`."""
        subscription = Subscription(tenant, self, self._capacity)
        with self._lock:
            if len(self._readers) >= self._max_readers:
                raise OverloadedError(
                    "too many clients are subscribed to events; try again later.", retry_after_s=30
                )
            self._readers.append(subscription)
        return subscription

    def drop(self, subscription: Subscription) -> None:
        with self._lock:
            if subscription in self._readers:
                self._readers.remove(subscription)

    def close(self) -> None:
        with self._lock:
            readers, self._readers = self._readers, []
        for reader in readers:
            reader.end()
