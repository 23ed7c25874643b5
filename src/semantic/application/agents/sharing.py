"""Agents of one process, or of several that share a ledger: who exists, and who may move them.

One process knows all of its agents, and writes behind. Where several share a ledger, each reads an
agent there when it is asked for, and an agent is leased to one request at a time: whoever lost its
lease, or finds the head elsewhere than it saw it, is refused by the ledger.
"""

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

from semantic.domain.agents import Agent
from semantic.domain.errors import CachePersistenceError, GenerationTimeoutError
from semantic.ports.storage import AdvanceHead, LeasePort, LedgerChange, LedgerPort, PutAgent

_log = logging.getLogger(__name__)
PATIENCE_S = 0.3  # a request that just ended may not have let its agent go yet
_POLL_S = 0.05
_MAX_SEEN = 4096


class OwnAgents:
    """All agents there are, in memory: nobody else has them. Thread-safe.

    Attributes:
        is_shared: Whether other processes have these agents too.
    """

    is_shared = False

    def __init__(self, agents: Iterable[Agent]) -> None:
        # Held for a look into memory alone: the event loop takes it, and never waits for the disk.
        self._lock = threading.Lock()
        self._agents = {(agent.tenant, agent.id): agent for agent in agents}

    def find(self, tenant: str, agent_id: str) -> Agent | None:
        """Find an agent."""
        with self._lock:
            return self._agents.get((tenant, agent_id))

    def of_tenant(self, tenant: str) -> list[Agent]:
        """All agents of a tenant."""
        with self._lock:
            return [agent for (owner, _), agent in self._agents.items() if owner == tenant]

    def known(self) -> list[Agent]:
        """All agents."""
        with self._lock:
            return list(self._agents.values())

    def put(self, agent: Agent, before: Agent | None, epoch: int | None) -> LedgerChange:  # noqa: ARG002
        """Note an agent, and say what is to be written: it as it is, for nobody else moves it."""
        with self._lock:
            self._agents[agent.tenant, agent.id] = agent
        return PutAgent(agent)

    def drop(self, agent: Agent) -> None:
        """Forget an agent."""
        with self._lock:
            del self._agents[agent.tenant, agent.id]


class SharedAgents:
    """Agents that are read from the ledger whenever they are asked for. Thread-safe."""

    is_shared = True

    def __init__(self, ledger: LedgerPort) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, str], Agent] = OrderedDict()

    def find(self, tenant: str, agent_id: str) -> Agent | None:
        """Read an agent."""
        agent = self._ledger.agent(tenant, agent_id)
        if agent is not None:
            self._note(agent)
        else:
            self.forget(tenant, agent_id)
        return agent

    def of_tenant(self, tenant: str) -> list[Agent]:
        """Read all agents of a tenant."""
        return list(self._ledger.agents(tenant))

    def known(self) -> list[Agent]:
        """The agents that were here of late, whose KV cache this process may have."""
        with self._lock:
            return list(self._seen.values())

    def put(self, agent: Agent, before: Agent | None, epoch: int | None) -> LedgerChange:
        """Note an agent, and say what is to be written: it over what it was, and nothing else."""
        self._note(agent)
        return AdvanceHead(agent, before, epoch)

    def drop(self, agent: Agent) -> None:
        """Forget an agent."""
        self.forget(agent.tenant, agent.id)

    def forget(self, tenant: str, agent_id: str) -> None:
        """Forget what was seen of an agent: another process moved it."""
        with self._lock:
            self._seen.pop((tenant, agent_id), None)

    def _note(self, agent: Agent) -> None:
        with self._lock:
            self._seen[agent.tenant, agent.id] = agent
            self._seen.move_to_end((agent.tenant, agent.id))
            if len(self._seen) > _MAX_SEEN:
                self._seen.popitem(last=False)


AgentTable: TypeAlias = OwnAgents | SharedAgents  # who exists


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to move an agent; `epoch` is None where nobody else could."""

    tenant: str
    agent_id: str
    epoch: int | None = None


class AgentLeases:
    """Leases of this process's requests, renewed until they are let go. Thread-safe.

    Without a port every lease is granted: the process has its agents to itself. After `ttl_s` the
    agents of a process that died may be taken over.
    """

    def __init__(self, port: LeasePort | None = None, ttl_s: float = 15.0) -> None:
        self._port = port
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._held: set[Lease] = set()
        self._is_closed = threading.Event()
        self._renewer: threading.Thread | None = None
        self._releases = ThreadPoolExecutor(1, "semantic-leases")

    def acquire(self, tenant: str, agent_id: str, *, patience_s: float = 0.0) -> Lease | None:
        """Lease an agent; None if another request has it all the while. May ask the ledger."""
        if self._port is None:
            return Lease(tenant, agent_id)
        end = time.monotonic() + patience_s
        while True:
            epoch = self._port.acquire(tenant, agent_id, ttl_s=self._ttl_s)
            if epoch is not None:
                lease = Lease(tenant, agent_id, epoch)
                self._hold(lease)
                return lease
            if time.monotonic() >= end:
                return None
            time.sleep(_POLL_S)

    async def wait(self, tenant: str, agent_id: str, timeout_s: float) -> Lease:
        """Lease an agent when the requests that have it elsewhere are over.

        Raises:
            GenerationTimeoutError: they took too long.
        """
        if self._port is None:
            return Lease(tenant, agent_id)
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if (lease := await asyncio.to_thread(self.acquire, tenant, agent_id)) is not None:
                return lease
            await asyncio.sleep(_POLL_S)
        raise GenerationTimeoutError("the agent's earlier turns took too long.")

    def release(self, lease: Lease) -> None:
        """Let an agent go; returns at once."""
        with self._lock:
            self._held.discard(lease)
        if self._port is not None and not self._is_closed.is_set():
            self._releases.submit(self._release, lease)

    def close(self) -> None:
        """Stop renewing, and let go of what is still held."""
        self._is_closed.set()
        with self._lock:
            left, self._held = self._held, set()
        for lease in left:
            self._releases.submit(self._release, lease)
        self._releases.shutdown()

    def _hold(self, lease: Lease) -> None:
        with self._lock:
            self._held.add(lease)
            if self._renewer is None:
                self._renewer = threading.Thread(
                    target=self._renew, name="semantic-lease-renewer", daemon=True
                )
                self._renewer.start()

    def _renew(self) -> None:
        while not self._is_closed.wait(self._ttl_s / 3):
            with self._lock:
                held = tuple(self._held)
            for lease in held:
                if not self._is_renewed(lease):
                    _log.warning("agent %s was taken over by another server", lease.agent_id)
                    with self._lock:
                        self._held.discard(lease)

    def _is_renewed(self, lease: Lease) -> bool:
        assert self._port is not None and lease.epoch is not None  # noqa: S101, PT018 - it is held
        with self._lock:
            if lease not in self._held:
                return True  # it ended meanwhile
        try:
            is_renewed = self._port.renew(
                lease.tenant, lease.agent_id, lease.epoch, ttl_s=self._ttl_s
            )
        except CachePersistenceError as error:
            _log.warning("a lease could not be renewed: %s", error.message)
            return True  # the next round tries again
        with self._lock:
            return is_renewed or lease not in self._held

    def _release(self, lease: Lease) -> None:
        if self._port is None or lease.epoch is None:
            return
        try:
            self._port.release(lease.tenant, lease.agent_id, lease.epoch)
        except CachePersistenceError as error:
            _log.warning("a lease could not be released, and runs out: %s", error.message)
