"""Agents and their turns: who exists, what they said, and where their KV cache ends.

`sharing` says who exists; turns are read when they are asked for. Where one process has the agents
to itself, changes are made in memory at once and written behind, in order; where several share
them, a change is made when the ledger has it.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from semantic.application.agents.sharing import AgentLeases, AgentTable, OwnAgents
from semantic.application.agents.turns import TurnLog
from semantic.domain.agents import (
    LOCAL_TENANT,
    Agent,
    Divergence,
    Pointer,
    Principal,
    Reuse,
    Turn,
    conversation_digest,
)
from semantic.domain.blocks import common_prefix
from semantic.domain.chat import Continuation, Message
from semantic.domain.errors import AgentNotFoundError, ConflictError, QuotaExceededError
from semantic.domain.events import Usage
from semantic.domain.sampling import FinishReason
from semantic.ports.storage import (
    DropAgent,
    LedgerChange,
    LedgerPort,
    LedgerState,
    PutTenant,
    Tenant,
    TurnPlace,
    WriteChanges,
)

ANONYMOUS_TTL_S = 24 * 3600.0
_SALT_BYTES = 16
_MAX_WALK = 64  # turns looked at to find the one a prompt continues


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a finished request adds to an agent.

    Attributes:
        prompt: All tokens of the prompt.
        reply: The tokens of the reply.
        messages: The whole conversation, the reply included.
        turn_id: What the turn is to be called; empty lets the ledger name it.
        is_stored: Whether what was said is logged; if not, the turn holds no text and no ids.
        continuation: Which turn it goes on from, where the server kept the conversation.
        model: Which model replied.
        reason: Why the reply ended.
        epoch: Of the lease of the agent; None where it needs none.
    """

    prompt: Sequence[int]
    reply: Sequence[int]
    messages: Sequence[Message]
    pointer: Pointer | None
    usage: Usage
    reuse: Reuse
    turn_id: str = ""
    is_stored: bool = True
    continuation: Continuation | None = None
    model: str = ""
    reason: FinishReason | None = None
    epoch: int | None = None


class AgentLedger:
    """All agents of one directory, or of one ledger that several share. Thread-safe.

    Attributes:
        log: Their turns.
        is_shared: Whether other processes have these agents too.
        leases: Who may move them.
    """

    def __init__(
        self,
        ledger: LedgerPort,
        state: LedgerState,
        write: WriteChanges,
        now: Callable[[], float] = time.time,
        *,
        table: AgentTable | None = None,
        leases: AgentLeases | None = None,
    ) -> None:
        """Take over what a ledger holds.

        Args:
            ledger: Where turns are read.
            state: What it held at the start.
            write: Makes changes in order; its future tells when they are written.
            now: Seconds since the epoch.
            table: Who exists; None is who the state says, and nobody else's.
            leases: Who may move them; None lets everyone.
        """
        self._ledger = ledger
        self._write = write
        self._now = now
        # Changes come one after another, and may read turns meanwhile.
        self._changes = threading.RLock()
        self._lock = threading.Lock()
        self._agents: AgentTable = table or OwnAgents(state.agents)
        self.is_shared: bool = self._agents.is_shared
        self.leases = leases or AgentLeases()
        self._tenants = {tenant.id: tenant for tenant in state.tenants}
        self.log = TurnLog(ledger, write)

    # -- tenants --------------------------------------------------------------------------------

    def principal(self, tenant: str = LOCAL_TENANT) -> Principal:
        """Find a tenant, or make it with a salt of its own."""
        with self._lock:
            known = self._tenants.get(tenant)
            if known is None:
                made = Tenant(tenant, secrets.token_bytes(_SALT_BYTES))
                self._write(PutTenant(made))
                known = self._ledger.tenant(tenant) or made  # another process may have been faster
                self._tenants[tenant] = known
            return Principal(known.id, known.salt)

    def principals(self) -> list[Principal]:
        """All tenants there are."""
        with self._lock:
            return [Principal(tenant.id, tenant.salt) for tenant in self._tenants.values()]

    # -- agents ---------------------------------------------------------------------------------

    def agents(self, tenant: str) -> list[Agent]:
        """A tenant's agents, the most recently used first."""
        found = self._agents.of_tenant(tenant)
        return sorted(found, key=lambda agent: agent.last_used, reverse=True)

    def recent(self, limit: int | None = None) -> list[Agent]:
        """The agents of all tenants that this process knows, the most recently used first."""
        return sorted(self._agents.known(), key=lambda agent: agent.last_used, reverse=True)[:limit]

    def get(self, tenant: str, agent_id: str) -> Agent:
        """Find an agent.

        Raises:
            AgentNotFoundError: the tenant has none of this name.
        """
        agent = self._agents.find(tenant, agent_id)
        if agent is None:
            raise AgentNotFoundError(f"there is no agent {agent_id!r}.")
        return agent

    def find(self, tenant: str, agent_id: str) -> Agent | None:
        """Find an agent, if there is one of this name."""
        return self._agents.find(tenant, agent_id)

    def create(self, agent: Agent, turns: Sequence[Turn] = ()) -> Agent:
        """Add an agent, with the turns that lead to its head if they are not there yet.

        Raises:
            ConflictError: there is one of this name.
        """
        with self._changes:
            if self.find(agent.tenant, agent.id) is not None:
                raise ConflictError(f"agent {agent.id!r} already exists.", param="id")
            for turn in turns:
                self.log.put(agent.tenant, turn)
            return self._put(agent, None)

    def update(self, tenant: str, agent_id: str, edit: Callable[[Agent], Agent]) -> Agent:
        """Change an agent's settings; its id, owner and past stay.

        Raises:
            AgentNotFoundError: it is gone.
        """
        with self._changes:
            known = self.get(tenant, agent_id)
            edited = edit(known)
            return self._put(replace(edited, head=known.head, num_turns=known.num_turns), known)

    def fork(
        self, tenant: str, agent_id: str, new_ids: Sequence[str], turn_id: str | None = None
    ) -> list[Agent]:
        """Make other agents with the same past, up to a turn if one is named: all or none.

        Raises:
            AgentNotFoundError: no such agent, or it has no such turn.
            ConflictError: the new name is taken.
        """
        with self._changes:
            source = self.get(tenant, agent_id)
            if turn_id is not None:
                source = self._rewound(source, turn_id)
            for new_id in new_ids:
                if self.find(tenant, new_id) is not None or new_ids.count(new_id) > 1:
                    raise ConflictError(f"agent {new_id!r} already exists.", param="ids")
            now = self._now()
            return [self.create(source.fork(new_id, at=now)) for new_id in new_ids]

    def preview_fork(self, agent: Agent, new_id: str, turn_id: str) -> Agent:
        """What a fork of an agent at one of its turns would be; it is not made.

        Raises:
            AgentNotFoundError: it has no such turn.
        """
        return self._rewound(agent, turn_id).fork(new_id, at=self._now())

    def rewind(self, tenant: str, agent_id: str, turn_id: str | None) -> Agent:
        """Take an agent back to an earlier turn; None goes back before the first.

        A turn that goes on from where the agent is takes it there: so a rewind can be undone.

        Raises:
            AgentNotFoundError: no such agent, or it has no such turn.
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
        """Remove an agent; its turns and blocks go with the next collection of garbage.

        Raises:
            AgentNotFoundError: there is none.
        """
        with self._changes:
            agent = self.get(tenant, agent_id)
            self._agents.drop(agent)
            self._write(DropAgent(tenant, agent_id))
            return agent

    def expire(self) -> list[Agent]:
        """Remove the agents that outlived their time, unless others may have used them since."""
        if self.is_shared:
            return []  # the collector removes them, by the ledger's clock
        now = self._now()
        with self._changes:
            late = [agent for agent in self.recent() if agent.is_expired(now)]
            return [self.delete(agent.tenant, agent.id) for agent in late]

    # -- turns ----------------------------------------------------------------------------------

    def turn(self, tenant: str, turn_id: str) -> Turn | None:
        """A turn, written or not; None if there is none."""
        return self.log.turn(tenant, turn_id)

    def place(self, agent: Agent) -> TurnPlace:
        """Where an agent's conversation ends; cheap, however long it is."""
        place = self.log.place(agent.tenant, agent.head) if agent.head else None
        return place or TurnPlace(0, None)

    def turns(self, agent: Agent, limit: int = _MAX_WALK) -> list[Turn]:
        """The turns of an agent, the latest first."""
        return self.log.turns(agent.tenant, agent.head, limit)

    def before(self, agent: Agent, turn_id: str) -> Agent:
        """An agent as it was before one of its turns.

        Raises:
            AgentNotFoundError: it has no such turn.
        """
        back = self._rewound(agent, turn_id)
        turn = self.log.turn(agent.tenant, turn_id)
        parent = turn.parent if turn else None
        return back.rewind(parent, back.num_turns - 1, at=agent.last_used)

    def conversation(self, agent: Agent) -> list[Message]:
        """All messages of an agent."""
        return self.log.messages(agent.tenant, agent.head)

    def tokens(self, agent: Agent) -> list[int]:
        """All tokens of an agent's conversation; reads every turn that is not in memory."""
        return self.log.tokens(agent.tenant, agent.head)

    def check_quota(self, agent: Agent) -> None:
        """See that an agent may have another turn.

        Raises:
            QuotaExceededError: it may not.
        """
        limit = agent.quota.max_turns
        if limit is not None and agent.num_turns >= limit:
            raise QuotaExceededError(f"agent {agent.id} has used all of its {limit} turns.")

    def commit(
        self,
        tenant: str,
        agent_id: str,
        exchange: Exchange,
        *,
        is_anonymous: bool = False,
        fork: Agent | None = None,
    ) -> tuple[Turn, Future[None]]:
        """Log a turn and move its agent there; the future tells when it is written.

        Where the client keeps the conversation, the turn continues the agent's latest one that the
        prompt begins with: where the client went back, so does the agent. Where another process
        took the agent meanwhile, the turn becomes that of a fork which nobody named.

        Args:
            tenant: Whose.
            agent_id: Its agent.
            exchange: What was said.
            is_anonymous: Nobody named the agent.
            fork: What the agent begins as if it is not there; None begins with no past.

        Raises:
            AgentNotFoundError: the server keeps the conversation, and the agent is gone.
            ConflictError: it does, and the agent moved to another turn meanwhile.
        """
        with self._changes:
            if exchange.continuation is not None:
                agent = self.get(tenant, agent_id)
                parent = self._named(agent, exchange.continuation)
                return self._append(agent, agent, exchange, (parent, agent.num_turns))
            before = self.find(tenant, agent_id)
            agent = before or fork or self._new(tenant, agent_id, is_anonymous=is_anonymous)
            continued = self._continued(agent, exchange.prompt)
            try:
                return self._append(agent, before, exchange, continued)
            except ConflictError:
                own = as_anonymous(agent.fork(f"anon-{secrets.token_hex(8)}", at=self._now()))
                return self._append(own, None, replace(exchange, epoch=None), continued)

    # -- inside ---------------------------------------------------------------------------------

    def _new(self, tenant: str, agent_id: str, *, is_anonymous: bool) -> Agent:
        """An agent with no past."""
        now = self._now()
        made = Agent(agent_id, now, tenant=tenant, last_used=now)
        return as_anonymous(made) if is_anonymous else made

    def _append(
        self,
        agent: Agent,
        before: Agent | None,
        exchange: Exchange,
        continued: tuple[Turn | None, int],
    ) -> tuple[Turn, Future[None]]:
        """Log a turn that continues another, and move the agent, which was `before`, there."""
        parent, depth = continued
        turn = self._turn(agent, parent, exchange)
        back = agent.rewind(turn.parent, depth, at=agent.last_used)
        moved = back.advance(turn.id, at=turn.created_at)
        change = self._agents.put(moved, before, exchange.epoch)
        return self.log.put(agent.tenant, turn, change)

    def _put(self, agent: Agent, before: Agent | None) -> Agent:
        self._write(self._agents.put(agent, before, None))
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
        """The agent at a turn that goes on from its head; None if the turn does not."""
        turn = self.turn(agent.tenant, turn_id) if turn_id else None
        if turn is None:
            return None
        ids = list(self.log.ancestry(agent.tenant, turn.id, until=agent.head or ""))
        if agent.head is None and turn.agent_id == agent.id:
            return agent.rewind(turn.id, len(ids), at=self._now())
        if ids[-1] != agent.head:
            return None  # others' turns are not there
        return agent.rewind(turn.id, agent.num_turns + len(ids) - 1, at=self._now())

    def _named(self, agent: Agent, continuation: Continuation) -> Turn | None:
        if agent.head != continuation.turn_id:
            raise ConflictError(f"agent {agent.id!r} moved to another turn meanwhile.")
        return self.turn(agent.tenant, agent.head) if agent.head else None

    def _turn(self, agent: Agent, parent: Turn | None, exchange: Exchange) -> Turn:
        """Make the turn that follows `parent`: what is new, or everything where it differs."""
        tokens = [*exchange.prompt, *exchange.reply]
        going_on = exchange.continuation or Continuation(parent.id if parent else None)
        is_prefix = parent is not None and _begins_with(exchange.prompt, parent)
        num_said = parent.num_messages if parent and not going_on.is_edited else 0
        messages = exchange.messages if exchange.is_stored else exchange.messages[:num_said]
        start = parent.num_tokens if parent and is_prefix else 0
        return Turn(
            id=exchange.turn_id or f"turn_{secrets.token_hex(12)}",
            parent=parent.id if parent else None,
            agent_id=agent.id,
            messages=tuple(messages[num_said:]),
            tokens=tuple(tokens[start:]) if exchange.is_stored else (),
            num_tokens=len(tokens),
            pointer=exchange.pointer,
            usage=exchange.usage,
            created_at=self._now(),
            reuse=exchange.reuse,
            num_messages=len(messages),
            digest=conversation_digest(tokens),
            num_dropped=going_on.num_dropped,
            divergence=self._divergence(agent, exchange.prompt),
            model=exchange.model,
            reason=exchange.reason,
        )

    def _divergence(self, agent: Agent, prompt: Sequence[int]) -> Divergence | None:
        """Where a prompt leaves the conversation of an agent's head."""
        head = self.turn(agent.tenant, agent.head) if agent.head else None
        if head is None or _begins_with(prompt, head):
            return None
        return Divergence(head.id, common_prefix(self.log.tokens(agent.tenant, head.id), prompt))

    def _continued(self, agent: Agent, prompt: Sequence[int]) -> tuple[Turn | None, int]:
        """The latest turn that a prompt goes on from, and how many turns led there."""
        head = self.turn(agent.tenant, agent.head) if agent.head else None
        if head is not None and _begins_with(prompt, head):
            return head, agent.num_turns  # the usual case; the others may have to be read
        for index, turn in enumerate(self.turns(agent)):
            if _begins_with(prompt, turn):
                return turn, agent.num_turns - index
        return None, 0


def _begins_with(prompt: Sequence[int], turn: Turn) -> bool:
    """Whether a prompt begins with the conversation that a turn ended."""
    if turn.num_tokens > len(prompt):
        return False
    return conversation_digest(prompt[: turn.num_tokens]) == turn.digest


def as_anonymous(agent: Agent) -> Agent:
    """The agent as one that nobody named: it expires."""
    return replace(agent, is_anonymous=True, ttl_s=ANONYMOUS_TTL_S)


def write_at_once(ledger: LedgerPort) -> WriteChanges:
    """Write changes without a thread, for ledgers that need none."""

    def write(*changes: LedgerChange) -> Future[None]:
        ledger.apply(changes, is_synced=False)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    return write
