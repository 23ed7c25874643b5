"""Agents, tenants and turns, and the operations that change them.

Agents are in a table; turns are read from the ledger on demand. Changes take effect in memory at
once and are written in order in the background. If several servers share the agents, a change takes
effect when the ledger has stored it.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from semantic.application.agents.comparison import begins_alike, says_same
from semantic.application.agents.storage_quota import StorageQuota, StoredRow
from semantic.application.agents.turn_log import MAX_WALK, FinishedTurn, TurnLog
from semantic.domain.agents import (
    LOCAL_TENANT,
    Agent,
    Principal,
    Turn,
    pack_id,
)
from semantic.domain.chat import Continuation, Message, Role
from semantic.domain.errors import (
    AgentNotFoundError,
    CachePersistenceError,
    ConflictError,
    QuotaExceededError,
)
from semantic.ports.sharing import AgentLeasesPort, AgentTablePort
from semantic.ports.storage import (
    DropAgent,
    LedgerChange,
    LedgerPort,
    LedgerState,
    PutAgent,
    PutImage,
    PutTenant,
    PutTurn,
    Tenant,
    TurnPlace,
    WriteChanges,
)

ANONYMOUS_TTL_S = 24 * 3600.0
_SALT_BYTES = 16
_IMAGE_S = 60.0  # the longest wait for an image to be written
_MAX_SEARCHED = 16  # agents whose latest replies are compared with those of a new agent


class AgentsInMemory:
    """`AgentTablePort` for agents that only this process uses."""

    is_shared = False

    def __init__(self, agents: Iterable[Agent]) -> None:
        # Never held across I/O: the event loop acquires it and must not wait for the disk.
        self._lock = threading.Lock()
        self._agents = {(agent.tenant, agent.id): agent for agent in agents}

    def find_agent(self, tenant: str, agent_id: str) -> Agent | None:
        with self._lock:
            return self._agents.get((tenant, agent_id))

    def of_tenant(self, tenant: str) -> list[Agent]:
        with self._lock:
            return [agent for (owner, _), agent in self._agents.items() if owner == tenant]

    def known(self) -> list[Agent]:
        with self._lock:
            return list(self._agents.values())

    def put(self, agent: Agent, before: Agent | None, epoch: int | None) -> LedgerChange:  # noqa: ARG002
        """Store an agent; the change is unconditional, since no other process moves the agent."""
        with self._lock:
            self._agents[agent.tenant, agent.id] = agent
        return PutAgent(agent)

    def drop(self, agent: Agent) -> None:
        with self._lock:
            del self._agents[agent.tenant, agent.id]


class AgentLedger:
    """All agents of one data directory, or of one ledger shared by several servers. Thread-safe.

    Methods raise AgentNotFoundError if the agent or turn that they name does not exist, unless they
    return None then. Methods that create or change agents raise QuotaExceededError if the result
    exceeds the tenant's disk quota.

    Attributes:
        leases: Leases on agents, needed to move their heads; None on a single server.
        storage: Disk quotas of tenants; None if there are none.
    """

    def __init__(
        self,
        ledger: LedgerPort,
        state: LedgerState,
        write: WriteChanges,
        now: Callable[[], float] = time.time,
        *,
        table: AgentTablePort | None = None,
        leases: AgentLeasesPort | None = None,
        settle_s: float | None = None,
    ) -> None:
        """Start from the content of a ledger.

        Args:
            write: Writes changes in order; its future resolves when they are written.
            now: Clock, in seconds since the epoch.
            table: Table of agents; None keeps the agents of `state` in memory, owned by this
                process.
            settle_s: Longest wait for a change to be written before the response; None does not
                wait.
        """
        self._ledger = ledger
        self._write = write
        self._now = now
        # Serialises changes; held while they read and write the ledger.
        self._changes = threading.RLock()
        self._new_tenants = threading.Lock()  # held across I/O, so that a tenant gets one salt
        self._lock = threading.Lock()  # guards the tenants in memory; never held across I/O
        self._agents: AgentTablePort = table or AgentsInMemory(state.agents)
        self.is_shared = self._agents.is_shared
        self.leases = leases
        self.storage: StorageQuota | None = None
        self._tenants = {tenant.id: tenant for tenant in state.tenants}
        self.log = TurnLog(ledger, write, settle_s)

    # -- tenants --------------------------------------------------------------------------------

    def principal(self, tenant: str = LOCAL_TENANT) -> Principal:
        """Return a tenant, creating it with a random salt if it does not exist."""
        known = self._tenant(tenant)
        if known is None:
            with self._new_tenants:
                known = self._tenant(tenant) or self._new_tenant(tenant)
        return Principal(known.id, known.salt)

    def principals(self) -> list[Principal]:
        with self._lock:
            return [Principal(tenant.id, tenant.salt) for tenant in self._tenants.values()]

    # -- agents ---------------------------------------------------------------------------------

    def agents(self, tenant: str) -> list[Agent]:
        """Return a tenant's agents, most recently used first."""
        found = self._agents.of_tenant(tenant)
        return sorted(found, key=lambda agent: agent.last_used, reverse=True)

    def recent(self, limit: int | None = None) -> list[Agent]:
        """Return the agents of all tenants that this process knows, most recently used first."""
        return sorted(self._agents.known(), key=lambda agent: agent.last_used, reverse=True)[:limit]

    def get(self, tenant: str, agent_id: str) -> Agent:
        agent = self._agents.find_agent(tenant, agent_id)
        if agent is None or agent.pack:
            raise AgentNotFoundError(f"there is no agent {agent_id!r}.")
        return agent

    def find_agent(self, tenant: str, agent_id: str) -> Agent | None:
        return self._agents.find_agent(tenant, agent_id)

    def create(self, agent: Agent, turns: Sequence[Turn] = ()) -> Agent:
        """Add an agent, and the turns that lead to its head if the ledger lacks them.

        Raises:
            ConflictError: the tenant already has an agent with this id.
        """
        with self._changes:
            if self.find_agent(agent.tenant, agent.id) is not None:
                raise ConflictError(f"agent {agent.id!r} already exists.", param="id")
            logged = [PutTurn(agent.tenant, turn) for turn in turns]
            self.check_storage(agent.tenant, PutAgent(agent), *logged)
            for change in logged:
                self.log.put(agent.tenant, change.turn)
                self._count_stored(agent.tenant, change)
            return self._put(agent, None)

    def update(self, tenant: str, agent_id: str, edit: Callable[[Agent], Agent]) -> Agent:
        """Change an agent's settings; its id, tenant, head and number of turns stay."""
        with self._changes:
            known = self.get(tenant, agent_id)
            edited = replace(edit(known), head=known.head, num_turns=known.num_turns)
            self.check_storage(tenant, PutAgent(edited), old=PutAgent(known))
            return self._put(edited, known)

    def fork(
        self, tenant: str, agent_id: str, new_ids: Sequence[str], turn_id: str | None = None
    ) -> list[Agent]:
        """Create agents with the same history, up to `turn_id` if given; all or none.

        Raises:
            ConflictError: a new id is taken, or occurs twice.
        """
        with self._changes:
            source = self.get(tenant, agent_id)
            if turn_id is not None:
                source = self._rewound(source, turn_id)
            for new_id in new_ids:
                if self.find_agent(tenant, new_id) is not None or new_ids.count(new_id) > 1:
                    raise ConflictError(f"agent {new_id!r} already exists.", param="ids")
            now = self._now()
            made = [source.fork(new_id, at=now) for new_id in new_ids]
            self.check_storage(tenant, *map(PutAgent, made))
            self._write(*(self._agents.put(agent, None, None) for agent in made))
            for agent in made:
                self._count_stored(tenant, PutAgent(agent))
            return made

    def preview_fork(self, agent: Agent, new_id: str, turn_id: str) -> Agent:
        """Return the agent that a fork at a turn would create, without creating it."""
        return self._rewound(agent, turn_id).fork(new_id, at=self._now())

    def rewind(self, tenant: str, agent_id: str, turn_id: str | None) -> Agent:
        """Move an agent's head to an earlier turn; None moves it before the first.

        A turn that descends from the current head is accepted too, so that a rewind can be undone.
        """
        with self._changes:
            agent = self.get(tenant, agent_id)
            try:
                moved = self._rewound(agent, turn_id)
            except AgentNotFoundError:
                ahead = self._ahead(agent, turn_id)
                if ahead is None:
                    raise
                moved = ahead
            return self._put(moved, agent)

    def delete(self, tenant: str, agent_id: str) -> Agent:
        """Delete an agent; the next garbage collection deletes its turns and blocks."""
        with self._changes:
            return self._drop(self.get(tenant, agent_id))

    def get_pack(self, tenant: str, name: str) -> Agent:
        """Return the agent that keeps a pack's blocks; `AgentNotFoundError` if there is none."""
        agent = self.find_agent(tenant, pack_id(name))
        if agent is None:
            raise AgentNotFoundError(f"tenant {tenant!r} has no pack {name!r}.")
        return agent

    def delete_pack(self, pack: Agent) -> None:
        """Delete the agent that keeps a pack's blocks."""
        with self._changes:
            self._drop(self.get_pack(pack.tenant, pack.pack))

    def expire(self) -> list[Agent]:
        """Delete expired agents and return them.

        Does nothing in a shared ledger, where another process may have used an agent meanwhile.
        """
        if self.is_shared:
            return []  # the garbage collection deletes them, by the ledger's clock
        now = self._now()
        with self._changes:
            late = [agent for agent in self.recent() if agent.is_expired(now)]
            return [self.delete(agent.tenant, agent.id) for agent in late]

    # -- turns ----------------------------------------------------------------------------------

    def turn(self, tenant: str, turn_id: str) -> Turn | None:
        return self.log.turn(tenant, turn_id)

    def place(self, agent: Agent) -> TurnPlace:
        place = self.log.place(agent.tenant, agent.head) if agent.head else None
        return place or TurnPlace(0, None)

    def places(self, agents: Sequence[Agent]) -> list[TurnPlace]:
        """Return the place of each agent as it is written, read together."""
        heads: dict[str, list[str]] = {}
        for agent in agents:
            heads.setdefault(agent.tenant, []).extend([agent.head] if agent.head else [])
        read = {tenant: self._ledger.places(tenant, ids) for tenant, ids in heads.items()}
        return [read[agent.tenant].get(agent.head or "") or self.place(agent) for agent in agents]

    def turns(self, agent: Agent, limit: int = MAX_WALK) -> list[Turn]:
        return self.log.turns(agent.tenant, agent.head, limit)

    def before(self, agent: Agent, turn_id: str) -> Agent:
        """Return a copy of the agent whose head is the parent of one of its turns."""
        back = self._rewound(agent, turn_id)
        turn = self.log.turn(agent.tenant, turn_id)
        parent = turn.parent if turn else None
        return back.rewind(parent, back.num_turns - 1, at=agent.last_used)

    def likely_previous(self, tenant: str, messages: Sequence[Message]) -> Turn | None:
        """Return the latest turn of the conversation that a new agent's messages seem to continue.

        A client that changes its tools or system prompt gets a new agent. The turn is searched
        among the most recently used agents: its reply is the last one in the messages, and both
        conversations begin with the same message after the system prompt.
        """
        replies = [message for message in messages if message.role is Role.ASSISTANT]
        for agent in self.agents(tenant)[:_MAX_SEARCHED] if replies else ():
            turn = self.turn(tenant, agent.head) if agent.head else None
            if turn is None or not turn.messages or not says_same(turn.messages[-1], replies[-1]):
                continue
            if begins_alike(self.conversation(agent), messages):
                return turn
        return None

    def conversation(self, agent: Agent) -> list[Message]:
        return self.log.messages(agent.tenant, agent.head)

    def tokens(self, agent: Agent) -> list[int]:
        """Return all tokens of an agent's conversation; reads every turn that is not in memory."""
        return self.log.tokens(agent.tenant, agent.head)

    def image_file(self, tenant: str, digest: str) -> bytes | None:
        """Return the file of an image that the tenant's turns refer to; None if not stored."""
        return self.log.image_file(tenant, digest)

    def store_image(self, tenant: str, digest: str, data: bytes) -> None:
        """Store an image file for turns to come, and wait until it is written.

        Garbage collection deletes it if no turn refers to it.

        Raises:
            QuotaExceededError: the image exceeds the tenant's disk quota.
            CachePersistenceError: it cannot be written now.
        """
        change = PutImage(tenant, digest, data, self._now())
        self.check_storage(tenant, change)
        try:
            self._write(change).result(_IMAGE_S)
        except TimeoutError:
            why = f"writing an image takes more than {_IMAGE_S:g} s; try again."
            raise CachePersistenceError(why, retry_after_s=5) from None
        self._count_stored(tenant, change)

    def check_quota(self, agent: Agent) -> None:
        """Raise QuotaExceededError if the agent has reached its `max_turns`."""
        limit = agent.quota.max_turns
        if limit is not None and agent.num_turns >= limit:
            raise QuotaExceededError(f"agent {agent.id} has reached its limit of {limit} turns.")

    def check_storage(self, tenant: str, *new: StoredRow, old: StoredRow | None = None) -> None:
        """Raise QuotaExceededError if `new` in place of `old` exceeds the tenant's disk quota."""
        if self.storage is not None:
            self.storage.check(tenant, *new, old=old)

    def commit(
        self,
        tenant: str,
        agent_id: str,
        finished: FinishedTurn,
        *,
        is_anonymous: bool = False,
        fork: Agent | None = None,
    ) -> tuple[Turn, Future[None]]:
        """Log a turn and move its agent's head there; the future resolves when it is written.

        If the client keeps the conversation, the new turn continues the agent's latest turn whose
        conversation is a prefix of the prompt; so the agent rewinds when the client does. If
        another process moved the agent meanwhile, the turn goes to a new anonymous fork.

        Args:
            is_anonymous: Whether the request named no agent, so that a new agent expires.
            fork: The agent to create if `agent_id` does not exist; None creates an empty one.

        Raises:
            AgentNotFoundError: the server keeps the conversation, and the agent was deleted.
            ConflictError: the server keeps the conversation, and the agent's head moved meanwhile.
        """
        with self._changes:
            if finished.continuation is not None:
                agent = self.get(tenant, agent_id)
                parent = self._named(agent, finished.continuation)
                return self._append(agent, agent, finished, (parent, agent.num_turns))
            before = self.find_agent(tenant, agent_id)
            agent = before or fork or self._new(tenant, agent_id, is_anonymous=is_anonymous)
            continued = self.log.continued(agent, finished.prompt)
            try:
                return self._append(agent, before, finished, continued)
            except ConflictError:
                own = as_anonymous(agent.fork(f"anon-{secrets.token_hex(8)}", at=self._now()))
                return self._append(own, None, replace(finished, epoch=None), continued)

    # -- inside ---------------------------------------------------------------------------------

    def _count_stored(self, tenant: str, new: StoredRow, old: StoredRow | None = None) -> None:
        if self.storage is not None:
            self.storage.add(tenant, new, old)

    def _tenant(self, tenant: str) -> Tenant | None:
        with self._lock:
            return self._tenants.get(tenant)

    def _new_tenant(self, tenant: str) -> Tenant:
        made = Tenant(tenant, secrets.token_bytes(_SALT_BYTES))
        self._write(PutTenant(made))
        known = self._ledger.tenant(tenant) or made  # another process may have created it first
        with self._lock:
            self._tenants[tenant] = known
        return known

    def _new(self, tenant: str, agent_id: str, *, is_anonymous: bool) -> Agent:
        now = self._now()
        made = Agent(agent_id, now, tenant=tenant, last_used=now)
        return as_anonymous(made) if is_anonymous else made

    def _append(
        self,
        agent: Agent,
        before: Agent | None,
        finished: FinishedTurn,
        continued: tuple[Turn | None, int],
    ) -> tuple[Turn, Future[None]]:
        parent, depth = continued
        turn = self.log.next_turn(agent, parent, finished, self._now())
        back = agent.rewind(turn.parent, depth, at=agent.last_used)
        moved = back.advance(turn.id, at=turn.created_at)
        change = self._agents.put(moved, before, finished.epoch)
        logged = self.log.put(agent.tenant, turn, change)
        self._count_stored(agent.tenant, PutTurn(agent.tenant, turn))
        if before is None:
            self._count_stored(agent.tenant, PutAgent(moved))
        return logged

    def _put(self, agent: Agent, before: Agent | None) -> Agent:
        self._write(self._agents.put(agent, before, None))
        self._count_stored(agent.tenant, PutAgent(agent), PutAgent(before) if before else None)
        return agent

    def _drop(self, agent: Agent) -> Agent:
        self._agents.drop(agent)
        self._write(DropAgent(agent.tenant, agent.id))
        if self.storage is not None:
            self.storage.remove(agent.tenant, PutAgent(agent))
        return agent

    def _rewound(self, agent: Agent, turn_id: str | None) -> Agent:
        if turn_id is None:
            return agent.rewind(None, 0, at=self._now())
        ancestry = self.log.ancestry(agent.tenant, agent.head, until=turn_id)
        for index, known_id in enumerate(ancestry):
            if known_id == turn_id:
                return agent.rewind(turn_id, agent.num_turns - index, at=self._now())
        raise AgentNotFoundError(f"agent {agent.id!r} has no turn {turn_id!r}.")

    def _ahead(self, agent: Agent, turn_id: str | None) -> Agent | None:
        turn = self.turn(agent.tenant, turn_id) if turn_id else None
        if turn is None:
            return None
        ids = list(self.log.ancestry(agent.tenant, turn.id, until=agent.head or ""))
        if agent.head is None and turn.agent_id == agent.id:
            return agent.rewind(turn.id, len(ids), at=self._now())
        if ids[-1] != agent.head:
            return None  # the turn does not descend from the agent's head
        return agent.rewind(turn.id, agent.num_turns + len(ids) - 1, at=self._now())

    def _named(self, agent: Agent, continuation: Continuation) -> Turn | None:
        if agent.head != continuation.turn_id:
            raise ConflictError(f"another request moved agent {agent.id!r} to another turn.")
        return self.turn(agent.tenant, agent.head) if agent.head else None


def as_anonymous(agent: Agent) -> Agent:
    """Return a copy of the agent that is anonymous and expires after `ANONYMOUS_TTL_S`."""
    return replace(agent, is_anonymous=True, ttl_s=ANONYMOUS_TTL_S)


def write_at_once(ledger: LedgerPort) -> WriteChanges:
    """Return a `WriteChanges` that writes in the calling thread, for use without a disk tier."""

    def write(*changes: LedgerChange) -> Future[None]:
        ledger.apply(changes, is_synced=False)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    return write
