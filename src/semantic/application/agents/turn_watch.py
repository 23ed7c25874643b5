"""Counts what replies reused, and tells the feed when an agent's turn begins and ends."""

import threading
from collections.abc import Callable
from dataclasses import replace

from semantic.application.agents.feed import EventFeed
from semantic.application.agents.turn_log import turn_id
from semantic.domain.agents import Reuse
from semantic.domain.chat import Failed, Finished, Started
from semantic.domain.feed import TurnEnded, TurnStarted


class TurnWatch:
    """Looks at every reply. Readings are safe on any thread."""

    def __init__(self, feed: EventFeed) -> None:
        self._feed = feed
        self._lock = threading.Lock()
        self._reuse = Reuse()
        self._num_turns = 0

    @property
    def totals(self) -> tuple[int, Reuse]:
        """How many replies were finished since the start, and where their prompts came from."""
        with self._lock:
            return self._num_turns, self._reuse

    def begin(
        self, started: Started, tenant: str, agent_id: str
    ) -> Callable[[Finished | Failed, Reuse], None]:
        """Tell that a turn began; returns what is to be called with its end."""
        begun = TurnStarted(
            tenant, agent_id, turn_id(started.request_id), started.usage.prompt_tokens
        )
        self._feed.publish(begun)
        return lambda event, reuse: self._end(started, begun, event, reuse)

    def _end(
        self, started: Started, begun: TurnStarted, event: Finished | Failed, reuse: Reuse
    ) -> None:
        reason, usage = "failed", started.usage
        if isinstance(event, Finished):
            reason, usage = event.reason.value, event.usage
            self._count(reuse)
        names = begun.tenant, begun.agent_id, begun.turn_id
        self._feed.publish(TurnEnded(*names, reason, usage, reuse))

    def _count(self, more: Reuse) -> None:
        with self._lock:
            self._num_turns += 1
            self._reuse = replace(
                self._reuse,
                hot=self._reuse.hot + more.hot,
                pool=self._reuse.pool + more.pool,
                disk=self._reuse.disk + more.disk,
                computed=self._reuse.computed + more.computed,
            )
