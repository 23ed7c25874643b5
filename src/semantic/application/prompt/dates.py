"""The day each agent believes it is: the one on which it first spoke.

Some templates print the date at the head of the prompt; were it today's, every agent's state
would be worthless at midnight. Like the replies a client sends again, a prompt's date is repeated
as it was, so it is kept where they are.
"""

import hashlib
from collections.abc import Callable
from datetime import date
from itertools import takewhile

from semantic.application.prompt.replay import ReplayKey, ReplayStore, canonical_json
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

        Changes nothing: a day is kept once its conversation is logged.

        Args:
            root: The root of the names of a tenant's blocks, under which the day is kept.
            request: Names its agent, or is known by how the conversation begins.
        """
        # A new conversation that begins like an older one is another conversation.
        key = None if _is_new(request) else _key_of(root, request)
        kept = self._store.lookup(key, is_used=False) if key else None
        return date.fromordinal(kept[0]) if kept else self._today()

    def keep(self, root: bytes, request: ChatRequest, day: date) -> None:
        """Let a request's agent, or the conversation it begins, go on with the day it was shown."""
        key = _key_of(root, request)
        if _is_new(request) or self._store.lookup(key) is None:
            self._store.remember(key, (day.toordinal(),))


def _name(request: ChatRequest) -> str | None:
    hint = request.agent
    return hint.agent_id or hint.session or hint.client_key


def _is_new(request: ChatRequest) -> bool:
    """Whether nobody named the conversation and it has no reply yet."""
    return not _name(request) and len(_beginning(request)) == len(request.messages)


def _key_of(root: bytes, request: ChatRequest) -> ReplayKey:
    if name := _name(request):
        return _key(_AGENT_TAG, root, name)
    return _key(_BEGINNING_TAG, root, [message.text for message in _beginning(request)])


def _beginning(request: ChatRequest) -> list[Message]:
    """What was said before the first reply."""
    return list(takewhile(lambda m: m.role is not Role.ASSISTANT, request.messages))


def _key(tag: bytes, root: bytes, what: JsonValue) -> ReplayKey:
    said = hashlib.sha256(tag + canonical_json(what).encode()).digest()
    return ReplayKey(hashlib.sha256(tag + root).digest(), said)
