"""Finds the agent of a request: by name, by a client's hint, or by the content of the prompt.

Identity decides which agent's log receives the turn. It does not affect reuse of KV cache: cached
blocks are found by the prompt's tokens alone.
"""

import hashlib
import logging
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from semantic.application.agents.ledger import AgentLedger, as_anonymous
from semantic.domain.agents import Agent, Turn, check_agent_id
from semantic.domain.blocks import TOKEN_BYTES, pack_tokens, unpack_tokens
from semantic.domain.chat import AgentHint
from semantic.domain.errors import AgentNotFoundError, CachePersistenceError, InvalidRequestError
from semantic.ports.sharing import AgentLeasesPort, Lease

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_PATIENCE_S = 0.3  # a request that just ended on another server may not have released its agent yet
_MAX_ENDINGS = 20_000  # 18 MB; a conversation that ended before them becomes a new agent
_TAIL_TOKENS = 8  # last tokens of a conversation, compared before a prefix is hashed
_MAX_UNKNOWN = 256  # latest lengths kept of conversations whose last tokens are unknown
_MAX_ALIKE = 256  # agents remembered for one identical conversation
_MAX_FILLED = 10_000  # most recent agents whose latest turn is read on the first lookup
_MAX_FAILED = 16  # failed reads, with none successful, after which the ledger counts as unreadable
_MAX_SEARCHED = 64  # agents tried as fork sources for a turn whose own agent is gone


@dataclass(frozen=True, slots=True)
class Identity:
    """The agent that a turn belongs to.

    Attributes:
        agent_id: An existing agent, or one that is created when the turn is logged.
        is_anonymous: No client named the agent; it expires after a day without use.
        fork: The agent to create, as a fork of another; None creates one without history.
    """

    agent_id: str
    is_anonymous: bool
    fork: Agent | None = None


class BusyAgents:
    """Counts the requests that run, or are about to run, for each agent. Thread-safe.

    Attributes:
        leases: Leases on agents that other servers use too; None on a single server.
    """

    def __init__(self, leases: AgentLeasesPort | None = None) -> None:
        self.lock = threading.Lock()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.leases = leases

    def claim(self, tenant: str) -> "Claim":
        return Claim(tenant, self)


class Claim:
    """One request's claim on its agent, from identification to the end. Thread-safe."""

    def __init__(self, tenant: str, busy: BusyAgents) -> None:
        self._tenant = tenant
        self._busy = busy
        self._counted: tuple[str, str] | None = None
        self._lease: Lease | None = None
        self._is_released = False

    @property
    def epoch(self) -> int | None:
        return self._lease.epoch if self._lease else None

    def acquire(self, agent_id: str, *, patience_s: float = 0.0) -> bool:
        """Claim an agent unless another request, on this server or another, has claimed it.

        Waits up to `patience_s` for a lease that another server holds. False also after `release`.
        """
        with self._busy.lock:
            if self._busy.counts[self._tenant, agent_id]:
                return False
            self._count(agent_id)
            if self._busy.leases is None:
                return not self._is_released
        return self._acquire_lease(self._busy.leases, agent_id, patience_s)

    def _acquire_lease(self, leases: AgentLeasesPort, agent_id: str, patience_s: float) -> bool:
        lease = leases.acquire(self._tenant, agent_id, patience_s=patience_s)
        with self._busy.lock:
            if lease is not None and not self._is_released:
                self._lease = lease
                return True
            self._uncount()
        if lease is not None:
            leases.release(lease)
        return False

    def share(self, agent_id: str) -> None:
        """Claim an agent without a lease, even if other requests have claimed it."""
        with self._busy.lock:
            self._count(agent_id)

    def release(self) -> None:
        """Release the agent and its lease; later calls of `acquire` and `share` claim nothing.

        Preparation may still be running in its thread after its request has failed.
        """
        with self._busy.lock:
            self._is_released = True
            self._uncount()
            lease, self._lease = self._lease, None
        if lease is not None and self._busy.leases is not None:
            self._busy.leases.release(lease)

    def _uncount(self) -> None:
        if self._counted is not None:
            self._busy.counts -= Counter([self._counted])
            self._counted = None

    def _count(self, agent_id: str) -> None:
        if not self._is_released:
            self._counted = (self._tenant, agent_id)
            self._busy.counts[self._counted] += 1


@dataclass(frozen=True, slots=True)
class _Ending:
    """End of a conversation: its length, last tokens, and latest turn by agent id."""

    num_tokens: int
    tail: bytes
    turns: dict[str, str] = field(default_factory=dict)


_Key: TypeAlias = tuple[str, str]  # tenant, digest of the conversation


class _Tails:
    """Index of known conversations by their lengths and last tokens.

    A lookup takes time linear in the prompt or in the number of different lengths, whichever is
    less. The owner's lock guards changes; `places` needs no lock.
    """

    def __init__(self) -> None:
        self._known: Counter[tuple[bytes, int]] = Counter()  # tail and length of conversations
        self._ends: Counter[int] = Counter()  # their lengths
        self._last: Counter[int] = Counter()  # the last token of each tail
        self._sizes: Counter[int] = Counter()  # sizes of tails in bytes
        self._unknown: dict[int, None] = {}  # lengths of conversations whose tokens are not stored

    def add(self, ending: _Ending) -> None:
        tail = ending.tail
        if not tail:
            self._unknown[ending.num_tokens] = None
            if len(self._unknown) > _MAX_UNKNOWN:
                del self._unknown[next(iter(self._unknown))]
            return
        self._known[tail, ending.num_tokens] += 1
        self._ends[ending.num_tokens] += 1
        self._last[_last_token(tail)] += 1
        self._sizes[len(tail)] += 1

    def remove(self, ending: _Ending) -> None:
        tail = ending.tail
        if not tail:
            self._unknown.pop(ending.num_tokens, None)
            return
        _decrease(self._known, (tail, ending.num_tokens))
        _decrease(self._ends, ending.num_tokens)
        _decrease(self._last, _last_token(tail))
        _decrease(self._sizes, len(tail))

    def places(self, tokens: Sequence[int], packed: bytes, num_head: int) -> list[int]:
        """Return, in ascending order, the lengths above `num_head` where a conversation may end."""
        places = {length for length in tuple(self._unknown) if num_head < length <= len(tokens)}
        ends, last, sizes = self._ends, self._last, tuple(self._sizes)
        above = range(num_head + 1, len(tokens) + 1)
        some = tuple(ends) if len(ends) < len(above) else above
        for at in [at for at in some if at in above and at in ends and tokens[at - 1] in last]:
            end = at * TOKEN_BYTES
            tails = (packed[max(0, end - size) : end] for size in sizes)
            if any((tail, at) in self._known for tail in tails):
                places.add(at)
        return sorted(places)


def _last_token(tail: bytes) -> int:
    return unpack_tokens(tail[-TOKEN_BYTES:])[0]


def _decrease(counts: Counter[_T], key: _T) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


class Identities:
    """Finds the agent of each request. Thread-safe."""

    def __init__(
        self, agents: AgentLedger, new_hash: Callable[[], "hashlib._Hash"] = hashlib.sha256
    ) -> None:
        """Start empty; `new_hash` must create the hash that `conversation_digest` uses."""
        self._agents = agents
        self._new_hash = new_hash
        self._lock = threading.Lock()  # held for a few lookups in memory, never to hash a prompt
        self._endings: OrderedDict[_Key, _Ending] = OrderedDict()
        self._tails: dict[str, _Tails] = {}  # by tenant
        self._fill_lock = threading.Lock()
        self._filled: set[str] = set()

    @property
    def num_known(self) -> int:
        with self._lock:
            return sum(len(ending.turns) for ending in self._endings.values())

    def identify(
        self, tenant: str, hint: AgentHint, tokens: Sequence[int], num_head: int, claim: Claim
    ) -> Identity:
        """Find the agent that a prompt belongs to, and claim it; writes nothing.

        Returns a new anonymous agent if none matches, if the named agent is busy, or if the
        request is ephemeral.

        Args:
            num_head: Number of leading tokens for tools and system prompt, which agents share.
        """
        found: Identity | None = None
        if hint.is_ephemeral:
            pass  # its agent is never created
        elif hint.previous_turn and not (hint.agent_id or hint.session):
            found = self._following(tenant, hint.previous_turn, claim)
        elif (named := self._named(hint, tokens[:num_head])) is not None:
            found = _claimed(named, hint, claim)
        else:
            found = self._known(tenant, tokens, num_head, claim)
        if found is None:
            found = Identity(_new_id(), is_anonymous=True)
            claim.share(found.agent_id)
        return found

    def note(self, tenant: str, agent_id: str, turn: Turn, last_tokens: Sequence[int] = ()) -> None:
        """Remember the end of a conversation; `last_tokens` if the turn's tokens are not stored."""
        key = (tenant, turn.digest)
        with self._lock:
            ending = self._endings.get(key)
            if ending is None:
                tail = pack_tokens((turn.tokens or last_tokens)[-_TAIL_TOKENS:])
                ending = self._endings[key] = _Ending(turn.num_tokens, tail)
                self._tails.setdefault(tenant, _Tails()).add(ending)
            self._endings.move_to_end(key)
            ending.turns.pop(agent_id, None)
            ending.turns[agent_id] = turn.id
            if len(ending.turns) > _MAX_ALIKE:
                del ending.turns[next(iter(ending.turns))]
            if len(self._endings) > _MAX_ENDINGS:
                self._drop(next(iter(self._endings)))

    def note_remote_turn(self, tenant: str, agent_id: str, turn_id: str) -> None:
        """Remember a turn that another process logged; reads the turn from the ledger.

        An empty tenant means that notices may be lost: the next request of each tenant reads the
        latest turns of all its agents again.
        """
        if not tenant:
            with self._fill_lock:
                self._filled.clear()
        elif turn_id and (turn := self._agents.turn(tenant, turn_id)) is not None:
            self.note(tenant, agent_id, turn)

    # -- inside ---------------------------------------------------------------------------------

    def _named(self, hint: AgentHint, head: Sequence[int]) -> str | None:
        if hint.agent_id:
            return hint.agent_id
        if hint.session:
            return _as_id("session", hint.session)
        if hint.client_key:
            # Sub-agents of a client share its key, but differ in tools and system prompt.
            return _as_id("client", f"{hint.client_key}\n{_digest(pack_tokens(head))}")
        return None

    def _following(self, tenant: str, turn_id: str, claim: Claim) -> Identity | None:
        """Return an idle agent with this turn as its head, else a fork of one that had it."""
        turn = self._agents.turn(tenant, turn_id)
        owner = self._agents.find_agent(tenant, turn.agent_id) if turn else None
        owners = (owner,) if owner else ()
        if owner and owner.head == turn_id and claim.acquire(owner.id):
            return Identity(owner.id, owner.is_anonymous)  # the common case needs no search
        agents = self._agents.agents(tenant)
        for agent in agents:
            if agent.head == turn_id and claim.acquire(agent.id):
                return Identity(agent.id, agent.is_anonymous)
        for agent in (*owners, *agents[:_MAX_SEARCHED]):
            if (fork := self._fork(agent, turn_id, claim)) is not None:
                return fork
        return None

    def _known(
        self, tenant: str, tokens: Sequence[int], num_head: int, claim: Claim
    ) -> Identity | None:
        for key, turns in self._matches(tenant, tokens, num_head):
            found = self._choose(key, turns, claim)
            if found is not None:
                return found
        return None

    def _matches(
        self, tenant: str, tokens: Sequence[int], num_head: int
    ) -> list[tuple[_Key, dict[str, str]]]:
        self._fill(tenant)
        tails = self._tails.get(tenant)
        packed = pack_tokens(tokens)
        found: list[tuple[_Key, dict[str, str]]] = []
        running, position = self._new_hash(), 0
        for length in tails.places(tokens, packed, num_head) if tails else ():
            running.update(packed[position * TOKEN_BYTES : length * TOKEN_BYTES])
            position = length
            key = (tenant, running.hexdigest())
            with self._lock:
                ending = self._endings.get(key)
                if ending is not None:
                    found.append((key, dict(ending.turns)))
        return found[::-1]

    def _choose(self, key: _Key, turns: dict[str, str], claim: Claim) -> Identity | None:
        """Choose among agents that had the same conversation.

        An idle anonymous agent is preferred: first one that is still at this turn, else one that is
        rewound to it. An agent that a client named is forked, because only requests that name it
        may change it.
        """
        tenant, _ = key
        found = {agent_id: self._agents.find_agent(tenant, agent_id) for agent_id in turns}
        self._forget(key, [agent_id for agent_id, agent in found.items() if agent is None])
        present = sorted(
            (agent for agent in found.values() if agent is not None),
            key=lambda agent: (agent.head == turns[agent.id], agent.last_used),
            reverse=True,
        )
        for agent in present:
            # If the agent has advanced since, logging the new turn rewinds it.
            if agent.is_anonymous and claim.acquire(agent.id):
                return Identity(agent.id, is_anonymous=True)
        latest = max(present, key=lambda agent: agent.last_used, default=None)
        return self._fork(latest, turns[latest.id], claim) if latest else None

    def _fork(self, agent: Agent, turn_id: str, claim: Claim) -> Identity | None:
        """Describe a fork; it is created with its turn, so a refused request leaves none behind."""
        try:
            fork = self._agents.preview_fork(agent, _new_id(), turn_id)
        except AgentNotFoundError:
            return None  # the agent was rewound past that turn
        claim.share(fork.id)
        return Identity(fork.id, is_anonymous=True, fork=as_anonymous(fork))

    def _forget(self, key: _Key, agent_ids: Sequence[str]) -> None:
        with self._lock:
            ending = self._endings.get(key)
            if ending is None:
                return
            for agent_id in agent_ids:
                ending.turns.pop(agent_id, None)
            if not ending.turns:
                self._drop(key)

    def _drop(self, key: _Key) -> None:
        self._tails[key[0]].remove(self._endings.pop(key))

    def _fill(self, tenant: str) -> None:
        """Read the latest turn of the tenant's agents, once; concurrent callers wait."""
        with self._fill_lock:
            if tenant in self._filled:
                return
            num_read, num_failed = 0, 0
            for agent in reversed(self._agents.agents(tenant)[:_MAX_FILLED]):
                if not num_read and num_failed == _MAX_FAILED:
                    break
                try:
                    turn = self._agents.turn(tenant, agent.head) if agent.head else None
                except CachePersistenceError as error:
                    num_failed += 1
                    problem = (
                        "cannot read the latest turn of agent %s; not matching requests to it: %s"
                    )
                    _log.warning(problem, agent.id, error.message)
                    continue
                num_read += 1
                if turn is not None:
                    self.note(tenant, agent.id, turn)
            if num_failed and not num_read:
                return  # the next request tries again
            self._filled.add(tenant)


def _claimed(agent_id: str, hint: AgentHint, claim: Claim) -> Identity | None:
    if hint.continuation is not None:
        claim.share(agent_id)  # `StatefulChat` has queued the turn and holds the lease
    elif not claim.acquire(agent_id, patience_s=_PATIENCE_S):
        return None
    # A client key is a hint and not a name, so its agent may expire.
    return Identity(agent_id, is_anonymous=not (hint.agent_id or hint.session))


def _new_id() -> str:
    return f"anon-{secrets.token_hex(8)}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _as_id(kind: str, key: str) -> str:
    try:
        check_agent_id(key, kind)
    except InvalidRequestError:
        return f"{kind}-{_digest(key.encode('utf-8', 'surrogatepass'))[:32]}"
    return key
