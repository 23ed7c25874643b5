"""Which agent is this? Named by the request, hinted at by the client, or known by what it says.

Identity decides whose turn it is, never whether state is found: that depends on the tokens alone.
"""

import hashlib
import secrets
import threading
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from semantic.application.agent_ledger import AgentLedger, as_anonymous
from semantic.domain.agents import Agent, Turn, check_agent_id
from semantic.domain.blocks import TOKEN_BYTES, pack_tokens
from semantic.domain.chat import AgentHint
from semantic.domain.errors import AgentNotFoundError, InvalidRequestError

_MAX_TURNS = 100_000
_MAX_SEARCHED = 64  # agents whose log is read for a turn whose own agent is gone


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose turn it is.

    Attributes:
        agent_id: An agent that is there, or one to be made when the turn is logged.
        is_anonymous: Nobody named it; it expires when it is not used for a day.
    """

    agent_id: str
    is_anonymous: bool


@dataclass(frozen=True, slots=True)
class _Sighting:
    """A turn that ended with a known conversation."""

    agent_id: str
    turn_id: str


class Identities:
    """Finds agents. Thread-safe."""

    def __init__(self, agents: AgentLedger) -> None:
        self._agents = agents
        self._lock = threading.Lock()
        self._sightings: OrderedDict[tuple[str, str], list[_Sighting]] = OrderedDict()
        self._lengths: dict[str, list[int]] = {}
        self._filled: set[str] = set()

    def identify(
        self,
        tenant: str,
        hint: AgentHint,
        tokens: Sequence[int],
        num_head: int,
        is_busy: Callable[[str], bool],
    ) -> Identity:
        """Say whose turn a prompt is.

        Args:
            tenant: Whose agents count.
            hint: What the request says.
            tokens: The prompt.
            num_head: How many of them are tools and system prompt, which many agents share.
            is_busy: Whether an agent has a request running: then another takes its place.
        """
        if hint.previous_turn and not (hint.agent_id or hint.session):
            return self._following(tenant, hint.previous_turn, is_busy)
        named = self._named(hint, tokens[:num_head])
        if named is not None:
            # Who lets the server keep the conversation waits for its turn, and is never another.
            if hint.continuation is not None or not is_busy(named):
                # A client's own key is a hint, not a name: nobody will ask for that agent again.
                return Identity(named, is_anonymous=not (hint.agent_id or hint.session))
            return Identity(_new_id(), is_anonymous=True)
        for sightings in self._matches(tenant, tokens, num_head):
            agent_id = self._choose(tenant, sightings, is_busy)
            if agent_id is not None:
                return Identity(agent_id, is_anonymous=True)
        return Identity(_new_id(), is_anonymous=True)

    def note(self, tenant: str, agent_id: str, turn: Turn) -> None:
        """Remember how a conversation ended, so that who goes on with it is known."""
        with self._lock:
            key = (tenant, turn.digest)
            lengths = self._lengths.setdefault(tenant, [])
            place = bisect_right(lengths, turn.num_tokens)
            if not place or lengths[place - 1] != turn.num_tokens:
                insort(lengths, turn.num_tokens)
            self._sightings.setdefault(key, []).append(_Sighting(agent_id, turn.id))
            self._sightings.move_to_end(key)
            while len(self._sightings) > _MAX_TURNS:
                self._sightings.popitem(last=False)

    # -- inside ---------------------------------------------------------------------------------

    def _named(self, hint: AgentHint, head: Sequence[int]) -> str | None:
        if hint.agent_id:
            return hint.agent_id
        if hint.session:
            return _as_id("session", hint.session)
        if hint.client_key:
            # A client's sub-agents share its session; their tools and system prompts differ.
            return _as_id("client", f"{hint.client_key}\n{_digest(pack_tokens(head))}")
        return None

    def _following(self, tenant: str, turn_id: str, is_busy: Callable[[str], bool]) -> Identity:
        """An idle agent whose latest turn it is, else a fork of one that came by."""
        agents = self._agents.agents(tenant)
        for agent in agents:
            if agent.head == turn_id and not is_busy(agent.id):
                return Identity(agent.id, agent.is_anonymous)
        turn = self._agents.turn(tenant, turn_id)
        owner = self._find(tenant, turn.agent_id) if turn else None
        for agent in (*((owner,) if owner else ()), *agents[:_MAX_SEARCHED]):
            forked = self._forked(agent, turn_id)
            if forked is not None:
                return Identity(forked, is_anonymous=True)
        return Identity(_new_id(), is_anonymous=True)

    def _matches(self, tenant: str, tokens: Sequence[int], num_head: int) -> list[list[_Sighting]]:
        """What is known of the prompt's beginnings, the longest first."""
        self._fill(tenant)
        packed = pack_tokens(tokens)
        found: list[list[_Sighting]] = []
        with self._lock:
            lengths = self._lengths.get(tenant, [])
            first, last = bisect_right(lengths, num_head), bisect_right(lengths, len(tokens))
            running, position = hashlib.sha256(), 0
            for length in lengths[first:last]:
                running.update(packed[position * TOKEN_BYTES : length * TOKEN_BYTES])
                position = length
                known = self._sightings.get((tenant, running.hexdigest()))
                if known:
                    found.append(list(reversed(known)))
        return found[::-1]

    def _choose(
        self, tenant: str, sightings: Sequence[_Sighting], is_busy: Callable[[str], bool]
    ) -> str | None:
        """Of agents that came by a turn: one that is still there, else one to take back or fork.

        An agent that somebody named is nobody else's to move: it is forked.
        """
        present = [
            (agent, seen)
            for seen in sightings
            if (agent := self._find(tenant, seen.agent_id)) is not None
        ]
        present.sort(key=lambda pair: pair[0].last_used, reverse=True)
        idle = [
            (agent, seen) for agent, seen in present if agent.is_anonymous and not is_busy(agent.id)
        ]
        for agent, seen in idle:
            if agent.head == seen.turn_id:
                return agent.id
        if idle:
            return idle[0][0].id  # the turn that is logged takes it back there
        for agent, seen in present:
            return self._forked(agent, seen.turn_id)
        return None

    def _forked(self, agent: Agent, turn_id: str) -> str | None:
        try:
            (fork,) = self._agents.fork(agent.tenant, agent.id, [_new_id()], turn_id)
            self._agents.update(fork.tenant, fork.id, as_anonymous)
            return fork.id
        except AgentNotFoundError:
            return None  # it went back before that turn meanwhile

    def _find(self, tenant: str, agent_id: str) -> Agent | None:
        try:
            return self._agents.get(tenant, agent_id)
        except AgentNotFoundError:
            return None

    def _fill(self, tenant: str) -> None:
        """Learn once how the conversations of all known agents ended."""
        if tenant in self._filled:
            return
        self._filled.add(tenant)
        for agent in reversed(self._agents.agents(tenant)):
            turn = self._agents.turn(tenant, agent.head) if agent.head else None
            if turn is not None:
                self.note(tenant, agent.id, turn)


def _new_id() -> str:
    return f"anon-{secrets.token_hex(8)}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _as_id(kind: str, key: str) -> str:
    """A key as an agent's id; one that cannot be is hashed."""
    try:
        check_agent_id(key, kind)
    except InvalidRequestError:
        return f"{kind}-{_digest(key.encode('utf-8', 'surrogatepass'))[:32]}"
    return key
