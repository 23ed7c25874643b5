"""The table of agents of a single server, in memory."""

import threading
from collections.abc import Iterable

from semantic.domain.agents import Agent
from semantic.ports.storage import LedgerChange, PutAgent


class AgentsInMemory:
    """`AgentTablePort` for agents that only this process uses."""

    is_shared = False

    def __init__(self, agents: Iterable[Agent]) -> None:
        # Never held across I/O: the event loop acquires it and must not wait for the disk.
        self._lock = threading.Lock()
        self._agents = {(agent.tenant, agent.id): agent for agent in agents}

    def find(self, tenant: str, agent_id: str) -> Agent | None:
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
