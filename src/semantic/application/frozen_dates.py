"""The day each agent believes it is: the one on which it first spoke.

Some templates print the date at the head of the prompt; were it today's, every agent's state
would be worthless at midnight. Like the replies a client sends again, a prompt's date is repeated
as it was, so it is kept where they are.
"""

import hashlib
from collections.abc import Callable
from datetime import date
from itertools import takewhile

from semantic.application.normalising import canonical_json
from semantic.application.replay import ReplayKey, ReplayStore
from semantic.domain.chat import ChatRequest, JsonValue, Message, Role

_AGENT_TAG = b"semantic.date.agent.v1"
_BEGINNING_TAG = b"semantic.date.beginning.v1"


class FrozenDates:
    """Days of agents, and of conversations that nobody named. Safe on any thread."""

    def __init__(self, store: ReplayStore, today: Callable[[], date] = date.today) -> None:
        self._store = store
        self._today = today

    def of(self, root: bytes, request: ChatRequest) -> date:
        """Return the day a prompt shall show: today's for who speaks for the first time.

        Args:
            root: The root of the names of a tenant's blocks, under which the day is kept.
            request: Names its agent, or is known by how the conversation begins.
        """
        hint = request.agent
        agent = hint.agent_id or hint.session or hint.client_key
        if agent:
            key = _key(_AGENT_TAG, root, agent)
            return self._kept(key) or self._keep_today(key)
        beginning = _beginning(request)
        key = _key(_BEGINNING_TAG, root, [message.text for message in beginning])
        # Who begins anew as somebody did on another day is somebody else.
        if len(beginning) == len(request.messages):
            return self._keep_today(key)
        return self._kept(key) or self._today()

    def _kept(self, key: ReplayKey) -> date | None:
        kept = self._store.lookup(key)
        return date.fromordinal(kept[0]) if kept else None

    def _keep_today(self, key: ReplayKey) -> date:
        day = self._today()
        self._store.remember(key, (day.toordinal(),))
        return day


def _beginning(request: ChatRequest) -> list[Message]:
    """What was said before the first reply."""
    return list(takewhile(lambda m: m.role is not Role.ASSISTANT, request.messages))


def _key(tag: bytes, root: bytes, what: JsonValue) -> ReplayKey:
    said = hashlib.sha256(tag + canonical_json(what).encode()).digest()
    return ReplayKey(hashlib.sha256(tag + root).digest(), said)
