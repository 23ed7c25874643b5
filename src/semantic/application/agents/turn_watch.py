"""Counts what replies reused, and tells the feed when an agent's turn begins and ends."""

import threading
from dataclasses import replace

from semantic.application.agents.feed import EventFeed
from semantic.application.agents.turn_log import turn_id
from semantic.application.requests.reply import LiveReply
from semantic.domain.agents import Reuse
from semantic.domain.chat import Event, Failed, Finished, Started
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

    def watch(self, reply: LiveReply, started: Started, tenant: str, agent_id: str) -> None:
        """Follow a reply to its end."""
        turn, num_prompt = turn_id(started.request_id), started.usage.prompt_tokens
        begun = TurnStarted(tenant, agent_id, turn, num_prompt)
        self._feed.publish(begun)
        reply.on_end = lambda event: self._end(reply, started, begun, event)

    def _end(self, reply: LiveReply, started: Started, begun: TurnStarted, event: Event) -> None:
        reuse = reply.put_away.reuse if reply.put_away else Reuse()
        reason, usage = "failed", started.usage
        if isinstance(event, Finished):
            reason, usage = event.reason.value, event.usage
            self._count(reuse)
        if isinstance(event, Finished | Failed):
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
