"""The table of agents, and leases on them, for one process or several that share a ledger.

A single process keeps all of its agents in memory and writes changes in the background. Processes
that share a ledger read an agent from it on every access, and lease the agent to one request at a
time. The ledger rejects a change if its lease was taken over, or if the agent's head has moved
since the writer read it.
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
PATIENCE_S = 0.3  # a request that just ended may not have released its agent yet
_POLL_S = 0.05
_MAX_SEEN = 4096


class OwnAgents:
    """The table of agents that only this process uses, held in memory. Thread-safe.

    Attributes:
        is_shared: Whether other processes use the same agents.
    """

    is_shared = False

    def __init__(self, agents: Iterable[Agent]) -> None:
        # Never held across I/O: the event loop acquires it and must not wait for the disk.
        self._lock = threading.Lock()
        self._agents = {(agent.tenant, agent.id): agent for agent in agents}

    def find(self, tenant: str, agent_id: str) -> Agent | None:
        """Return an agent; None if it does not exist."""
        with self._lock:
            return self._agents.get((tenant, agent_id))

    def of_tenant(self, tenant: str) -> list[Agent]:
        """Return all agents of a tenant."""
        with self._lock:
            return [agent for (owner, _), agent in self._agents.items() if owner == tenant]

    def known(self) -> list[Agent]:
        """Return all agents."""
        with self._lock:
            return list(self._agents.values())

    def put(self, agent: Agent, before: Agent | None, epoch: int | None) -> LedgerChange:  # noqa: ARG002
        """Store an agent; returns the ledger change to write.

        The change is unconditional, since no other process moves the agent.
        """
        with self._lock:
            self._agents[agent.tenant, agent.id] = agent
        return PutAgent(agent)

    def drop(self, agent: Agent) -> None:
        """Forget an agent."""
        with self._lock:
            del self._agents[agent.tenant, agent.id]


class SharedAgents:
    """The table of agents that several processes use, read from the ledger. Thread-safe."""

    is_shared = True

    def __init__(self, ledger: LedgerPort) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, str], Agent] = OrderedDict()

    def find(self, tenant: str, agent_id: str) -> Agent | None:
        """Read an agent from the ledger; None if it does not exist."""
        agent = self._ledger.agent(tenant, agent_id)
        if agent is not None:
            self._note(agent)
        else:
            self.forget(tenant, agent_id)
        return agent

    def of_tenant(self, tenant: str) -> list[Agent]:
        """Read all agents of a tenant from the ledger."""
        return list(self._ledger.agents(tenant))

    def known(self) -> list[Agent]:
        """Return the agents this process used recently, whose KV cache it may hold."""
        with self._lock:
            return list(self._seen.values())

    def put(self, agent: Agent, before: Agent | None, epoch: int | None) -> LedgerChange:
        """Remember an agent; returns the ledger change to write.

        The change succeeds only if the ledger's agent still matches `before`.
        """
        self._note(agent)
        return AdvanceHead(agent, before, epoch)

    def drop(self, agent: Agent) -> None:
        """Forget an agent."""
        self.forget(agent.tenant, agent.id)

    def forget(self, tenant: str, agent_id: str) -> None:
        """Remove an agent from the recently used ones, after another process moved it."""
        with self._lock:
            self._seen.pop((tenant, agent_id), None)

    def _note(self, agent: Agent) -> None:
        with self._lock:
            self._seen[agent.tenant, agent.id] = agent
            self._seen.move_to_end((agent.tenant, agent.id))
            if len(self._seen) > _MAX_SEEN:
                self._seen.popitem(last=False)


AgentTable: TypeAlias = OwnAgents | SharedAgents


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to move an agent's head; `epoch` is None if no other process uses the agent."""

    tenant: str
    agent_id: str
    epoch: int | None = None


class AgentLeases:
    """Leases held by this process's requests, renewed until released. Thread-safe.

    Without a port every lease is granted, since no other process uses the agents. If a process
    dies, others may take over its leases after `ttl_s`.
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
        """Acquire a lease; None if another request still holds it after `patience_s`.

        Blocks: queries the ledger if other processes share the agents.
        """
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
        """Acquire a lease, waiting until the requests that hold it have released it.

        Raises:
            GenerationTimeoutError: the lease was not available within `timeout_s`.
        """
        if self._port is None:
            return Lease(tenant, agent_id)
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            asked = asyncio.ensure_future(asyncio.to_thread(self.acquire, tenant, agent_id))
            try:
                lease = await asyncio.shield(asked)
            except asyncio.CancelledError:
                asked.add_done_callback(self._release_unclaimed)
                raise
            if lease is not None:
                return lease
            await asyncio.sleep(_POLL_S)
        raise GenerationTimeoutError("the agent's earlier turns took too long.")

    def _release_unclaimed(self, asked: "asyncio.Future[Lease | None]") -> None:
        """Release a lease whose request was cancelled while it was being acquired."""
        if asked.cancelled() or asked.exception() is not None:
            return
        if (lease := asked.result()) is not None:
            self.release(lease)

    def release(self, lease: Lease) -> None:
        """Release a lease; returns at once, and a background thread informs the ledger."""
        with self._lock:
            self._held.discard(lease)
        if self._port is not None and not self._is_closed.is_set():
            self._releases.submit(self._release, lease)

    def close(self) -> None:
        """Stop renewing and release all leases; waits until they are released."""
        self._is_closed.set()
        with self._lock:
            left, self._held = self._held, set()
        for lease in left:
            self._releases.submit(self._release, lease)
        self._releases.shutdown()

    def _hold(self, lease: Lease) -> None:
        with self._lock:
            if self._renewer is None:
                renewer = threading.Thread(
                    target=self._renew, name="semantic-lease-renewer", daemon=True
                )
                renewer.start()  # if this raises, the lease expires and the next request retries
                self._renewer = renewer
            self._held.add(lease)

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
                return True  # released meanwhile
        try:
            is_renewed = self._port.renew(
                lease.tenant, lease.agent_id, lease.epoch, ttl_s=self._ttl_s
            )
        except CachePersistenceError as error:
            _log.warning("a lease could not be renewed: %s", error.message)
            return True  # retried in the next round
        with self._lock:
            return is_renewed or lease not in self._held

    def _release(self, lease: Lease) -> None:
        if self._port is None or lease.epoch is None:
            return
        try:
            self._port.release(lease.tenant, lease.agent_id, lease.epoch)
        except CachePersistenceError as error:
            _log.warning("a lease could not be released, and runs out: %s", error.message)
