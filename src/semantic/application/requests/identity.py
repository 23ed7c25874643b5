"""Which agent is this? Named by the request, hinted at by the client, or known by what it says.

Identity decides whose turn it is, never whether state is found: that depends on the tokens alone.
"""

import hashlib
import logging
import secrets
import threading
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from semantic.application.agents.ledger import AgentLedger, as_anonymous
from semantic.application.agents.sharing import PATIENCE_S, AgentLeases, Lease
from semantic.domain.agents import Agent, Turn, check_agent_id
from semantic.domain.blocks import TOKEN_BYTES, pack_tokens
from semantic.domain.chat import AgentHint
from semantic.domain.errors import AgentNotFoundError, CachePersistenceError, InvalidRequestError

_log = logging.getLogger(__name__)
_MAX_ENDINGS = 100_000
_MAX_ALIKE = 256  # agents known by one conversation that all of them had
_MAX_FILLED = 10_000  # agents, the latest ones, whose ends are read at the start
_MAX_SEARCHED = 64  # agents whose log is read for a turn whose own agent is gone


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose turn it is.

    Attributes:
        agent_id: An agent that is there, or one to be made when the turn is logged.
        is_anonymous: Nobody named it; it expires when it is not used for a day.
        fork: What it is to be made as; None makes it with no past.
    """

    agent_id: str
    is_anonymous: bool
    fork: Agent | None = None


class BusyAgents:
    """Which agents have a request running, or about to run. Thread-safe."""

    def __init__(self, leases: AgentLeases | None = None) -> None:
        self.lock = threading.Lock()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.leases = leases or AgentLeases()

    def claim(self, tenant: str) -> "Claim":
        """Begin a request that will have one of a tenant's agents."""
        return Claim(tenant, self)


class Claim:
    """The agent that one request has: from when it is identified until it ends. Thread-safe."""

    def __init__(self, tenant: str, busy: BusyAgents) -> None:
        self._tenant = tenant
        self._busy = busy
        self._held: tuple[str, str] | None = None
        self._lease: Lease | None = None
        self._is_released = False

    @property
    def epoch(self) -> int | None:
        """Of the lease of the agent; None where it needs none."""
        return self._lease.epoch if self._lease else None

    def take(self, agent_id: str, *, patience_s: float = 0.0) -> bool:
        """Have an agent if no other request has it, here or elsewhere; returns whether it is so.

        One that is elsewhere is waited for, if there is patience.
        """
        with self._busy.lock:
            if self._busy.counts[self._tenant, agent_id]:
                return False
            self._hold(agent_id)
        lease = self._busy.leases.acquire(self._tenant, agent_id, patience_s=patience_s)
        with self._busy.lock:
            if lease is not None and not self._is_released:
                self._lease = lease
                return True
            self._let_go()
        if lease is not None:
            self._busy.leases.release(lease)
        return False

    def share(self, agent_id: str) -> None:
        """Claim an agent although others may have it too."""
        with self._busy.lock:
            self._hold(agent_id)

    def release(self) -> None:
        """Let the agent go, and take none from now on: nobody waits for the request any more."""
        with self._busy.lock:
            self._is_released = True
            self._let_go()
            lease, self._lease = self._lease, None
        if lease is not None:
            self._busy.leases.release(lease)

    def _let_go(self) -> None:
        if self._held is not None:
            self._busy.counts -= Counter([self._held])
            self._held = None

    def _hold(self, agent_id: str) -> None:
        if not self._is_released:
            self._held = (self._tenant, agent_id)
            self._busy.counts[self._held] += 1


@dataclass(frozen=True, slots=True)
class _Ending:
    """How a conversation ended: its length, and the turn of each agent that had it."""

    num_tokens: int
    turns: dict[str, str] = field(default_factory=dict)


_Key: TypeAlias = tuple[str, str]  # tenant, digest of the conversation


class Identities:
    """Finds agents. Thread-safe."""

    def __init__(self, agents: AgentLedger) -> None:
        self._agents = agents
        self._lock = threading.Lock()
        self._endings: OrderedDict[_Key, _Ending] = OrderedDict()
        self._lengths: dict[str, list[int]] = {}  # of each ending, in order
        self._fill_lock = threading.Lock()
        self._filled: set[str] = set()

    @property
    def num_known(self) -> int:
        """How many agents' turns are remembered."""
        with self._lock:
            return sum(len(ending.turns) for ending in self._endings.values())

    def identify(
        self, tenant: str, hint: AgentHint, tokens: Sequence[int], num_head: int, claim: Claim
    ) -> Identity:
        """Say whose turn a prompt is, and claim that agent; nothing is written.

        Args:
            tenant: Whose agents count.
            hint: What the request says.
            tokens: The prompt.
            num_head: How many of them are tools and system prompt, which many agents share.
            claim: The request's: where an agent has another request, a new one takes its place.
        """
        if hint.previous_turn and not (hint.agent_id or hint.session):
            found = self._following(tenant, hint.previous_turn, claim)
        elif (named := self._named(hint, tokens[:num_head])) is not None:
            found = _claimed(named, hint, claim)
        else:
            found = self._known(tenant, tokens, num_head, claim)
        if found is None:
            found = Identity(_new_id(), is_anonymous=True)
            claim.share(found.agent_id)
        return found

    def note(self, tenant: str, agent_id: str, turn: Turn) -> None:
        """Remember how a conversation ended, so that who goes on with it is known."""
        key = (tenant, turn.digest)
        with self._lock:
            ending = self._endings.get(key)
            if ending is None:
                ending = self._endings[key] = _Ending(turn.num_tokens)
                insort(self._lengths.setdefault(tenant, []), turn.num_tokens)
            self._endings.move_to_end(key)
            ending.turns.pop(agent_id, None)
            ending.turns[agent_id] = turn.id
            if len(ending.turns) > _MAX_ALIKE:
                del ending.turns[next(iter(ending.turns))]
            if len(self._endings) > _MAX_ENDINGS:
                self._drop(next(iter(self._endings)))

    def note_remote_turn(self, tenant: str, agent_id: str, turn_id: str) -> None:
        """Remember how a conversation ended in another process; an empty tenant means all of them.

        Reads the turn.
        """
        if not tenant:
            with self._fill_lock:
                self._filled.clear()  # learn anew what was missed
        elif turn_id and (turn := self._agents.turn(tenant, turn_id)) is not None:
            self.note(tenant, agent_id, turn)

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

    def _following(self, tenant: str, turn_id: str, claim: Claim) -> Identity | None:
        """An idle agent whose latest turn it is, else a fork of one that came by."""
        agents = self._agents.agents(tenant)
        for agent in agents:
            if agent.head == turn_id and claim.take(agent.id):
                return Identity(agent.id, agent.is_anonymous)
        turn = self._agents.turn(tenant, turn_id)
        owner = self._agents.find(tenant, turn.agent_id) if turn else None
        for agent in (*((owner,) if owner else ()), *agents[:_MAX_SEARCHED]):
            if (fork := self._fork(agent, turn_id, claim)) is not None:
                return fork
        return None

    def _known(
        self, tenant: str, tokens: Sequence[int], num_head: int, claim: Claim
    ) -> Identity | None:
        """Who had a beginning of the prompt as its conversation, the longest first."""
        for key, turns in self._matches(tenant, tokens, num_head):
            found = self._choose(key, turns, claim)
            if found is not None:
                return found
        return None

    def _matches(
        self, tenant: str, tokens: Sequence[int], num_head: int
    ) -> list[tuple[_Key, dict[str, str]]]:
        """What is known of the prompt's beginnings, the longest first."""
        self._fill(tenant)
        packed = pack_tokens(tokens)
        found: list[tuple[_Key, dict[str, str]]] = []
        with self._lock:
            lengths = self._lengths.get(tenant, [])
            first, last = bisect_right(lengths, num_head), bisect_right(lengths, len(tokens))
            running, position = hashlib.sha256(), 0
            for length in dict.fromkeys(lengths[first:last]):
                running.update(packed[position * TOKEN_BYTES : length * TOKEN_BYTES])
                position = length
                key = (tenant, running.hexdigest())
                ending = self._endings.get(key)
                if ending is not None:
                    found.append((key, dict(ending.turns)))
        return found[::-1]

    def _choose(self, key: _Key, turns: dict[str, str], claim: Claim) -> Identity | None:
        """Of agents that came by a turn: one that is still there, else one to take back or fork.

        An agent that somebody named is nobody else's to move: it is forked.
        """
        tenant, _ = key
        found = {agent_id: self._agents.find(tenant, agent_id) for agent_id in turns}
        self._forget(key, [agent_id for agent_id, agent in found.items() if agent is None])
        present = sorted(
            (agent for agent in found.values() if agent is not None),
            key=lambda agent: (agent.head == turns[agent.id], agent.last_used),
            reverse=True,
        )
        for agent in present:
            # If it has gone on since, the turn that is logged takes it back there.
            if agent.is_anonymous and claim.take(agent.id):
                return Identity(agent.id, is_anonymous=True)
        latest = max(present, key=lambda agent: agent.last_used, default=None)
        return self._fork(latest, turns[latest.id], claim) if latest else None

    def _fork(self, agent: Agent, turn_id: str, claim: Claim) -> Identity | None:
        """A fork that is made when its turn is logged: a request that is refused leaves none."""
        try:
            fork = self._agents.preview_fork(agent, _new_id(), turn_id)
        except AgentNotFoundError:
            return None  # it went back before that turn meanwhile
        claim.share(fork.id)
        return Identity(fork.id, is_anonymous=True, fork=as_anonymous(fork))

    def _forget(self, key: _Key, agent_ids: Sequence[str]) -> None:
        """Forget agents that are gone."""
        with self._lock:
            ending = self._endings.get(key)
            if ending is None:
                return
            for agent_id in agent_ids:
                ending.turns.pop(agent_id, None)
            if not ending.turns:
                self._drop(key)

    def _drop(self, key: _Key) -> None:
        lengths = self._lengths[key[0]]
        del lengths[bisect_left(lengths, self._endings.pop(key).num_tokens)]

    def _fill(self, tenant: str) -> None:
        """Learn once how the conversations of all known agents ended; others wait for that."""
        with self._fill_lock:
            if tenant in self._filled:
                return
            try:
                for agent in reversed(self._agents.agents(tenant)[:_MAX_FILLED]):
                    turn = self._agents.turn(tenant, agent.head) if agent.head else None
                    if turn is not None:
                        self.note(tenant, agent.id, turn)
            except CachePersistenceError as error:
                _log.warning("agents cannot be identified by content: %s", error.message)
                return  # the next request tries again
            self._filled.add(tenant)


def _claimed(agent_id: str, hint: AgentHint, claim: Claim) -> Identity | None:
    """The agent that a request names, unless it is busy."""
    if hint.continuation is not None:
        claim.share(agent_id)  # it waited for its turn, and is never another
    elif not claim.take(agent_id, patience_s=PATIENCE_S):
        return None
    # A client's own key is a hint, not a name: nobody will ask for that agent again.
    return Identity(agent_id, is_anonymous=not (hint.agent_id or hint.session))


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
