"""The table of agents that several servers share.

A server reads an agent from the ledger on every access. The ledger rejects a change if the agent's
head has moved since the writer read it, or if the writer's lease was taken over.
"""

import threading
from collections import OrderedDict

from semantic.domain.agents import Agent
from semantic.ports.storage import AdvanceHead, LedgerChange, LedgerPort

_MAX_SEEN = 4096


class SharedAgents:
    """`AgentTablePort` for agents that several processes use, read from the ledger."""

    is_shared = True

    def __init__(self, ledger: LedgerPort) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, str], Agent] = OrderedDict()

    def find_agent(self, tenant: str, agent_id: str) -> Agent | None:
        agent = self._ledger.agent(tenant, agent_id)
        if agent is not None:
            self._note(agent)
        else:
            self.forget(tenant, agent_id)
        return agent

    def of_tenant(self, tenant: str) -> list[Agent]:
        return list(self._ledger.agents(tenant))

    def known(self) -> list[Agent]:
        with self._lock:
            return list(self._seen.values())

    def put(self, agent: Agent, before: Agent | None, epoch: int | None) -> LedgerChange:
        """The change succeeds only if the ledger's agent still matches `before`."""
        self._note(agent)
        return AdvanceHead(agent, before, epoch)

    def drop(self, agent: Agent) -> None:
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
