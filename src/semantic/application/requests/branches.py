"""What one agent may do with others: question them and try branches.

Clients that act on behalf of a model use this instead of `AgentService`, because a model may fork
without end. Every branch records its origin in labels, and their number and depth are limited.
"""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from semantic.application.agents.service import AgentService
from semantic.application.parsing import MessageFold
from semantic.application.requests.compaction.successor import AgentCompaction
from semantic.domain.agents import Agent, Principal
from semantic.domain.chat import Message, Role
from semantic.domain.errors import ConflictError, InvalidRequestError
from semantic.domain.events import Failed, Finished, Usage
from semantic.domain.sampling import StopRules
from semantic.ports.inbound import (
    AgentQuery,
    AgentView,
    Compacted,
    Compaction,
    NewTurn,
    StatefulInferencePort,
)

_ROOT, _DEPTH = "branch.root", "branch.depth"
_MAX_ID = 128


@dataclass(frozen=True, slots=True)
class BranchLimits:
    """How many branches a model may make.

    Attributes:
        max_branches: Living branches of one original agent.
        max_depth: Length of a chain of branches of branches.
    """

    max_branches: int = 16
    max_depth: int = 4


@dataclass(frozen=True, slots=True)
class BranchReply:
    """A reply of an agent.

    Attributes:
        agent_id: The agent that keeps the reply; None if none does.
    """

    agent_id: str | None
    message: Message
    usage: Usage


class AgentBranches:
    """Branches of agents, within limits.

    Methods raise AgentNotFoundError, as those of `AgentService` do.
    """

    def __init__(
        self,
        agents: AgentService,
        inference: StatefulInferencePort,
        compaction: AgentCompaction,
        limits: BranchLimits,
    ) -> None:
        self._agents = agents
        self._inference = inference
        self._compaction = compaction
        self._limits = limits

    def fork(
        self, principal: Principal, agent_id: str, names: Sequence[str], turn_id: str | None = None
    ) -> tuple[AgentView, ...]:
        """Fork an agent, all names or none; no KV cache is copied.

        Raises:
            ConflictError: a name is taken, or a limit is reached.
        """
        labels = self._branch_labels(principal, agent_id, len(names))
        self._agents.fork(principal, agent_id, names, turn_id)

        def label(agent: Agent) -> Agent:
            marked = dict(agent.labels) | labels
            return replace(agent, labels=tuple(sorted(marked.items())))

        return tuple(self._agents.update(principal, name, label) for name in names)

    async def ask(
        self,
        principal: Principal,
        agent_id: str,
        question: str,
        turn_id: str | None,
        stop: StopRules,
    ) -> BranchReply:
        """Answer a question as the agent would, or an earlier self; the agent does not change."""
        name = f"{agent_id[: _MAX_ID - 17]}-ask-{secrets.token_hex(6)}"
        await asyncio.to_thread(self.fork, principal, agent_id, [name], turn_id)
        try:
            reply = await self.send(principal, name, question, stop)
        finally:
            await asyncio.shield(asyncio.to_thread(self._agents.delete, principal, name))
        return replace(reply, agent_id=None)

    async def compact(self, principal: Principal, agent_id: str, ask: Compaction) -> Compacted:
        """Create a branch that continues from a summary; see `AgentCompaction`."""
        labels = await asyncio.to_thread(self._branch_labels, principal, agent_id, 1)
        labelled = replace(ask, labels=tuple(sorted(labels.items())))
        return await self._compaction.compact(principal, agent_id, labelled)

    async def send(
        self, principal: Principal, agent_id: str, message: str, stop: StopRules
    ) -> BranchReply:
        """Send a message to an agent as its next turn, and wait for the reply."""
        if not message.strip():
            raise InvalidRequestError("the message is empty.", param="message")
        turn = NewTurn((Message.of(Role.USER, message),), stop=stop)
        reply = await self._inference.generate(principal, agent_id, turn)
        fold = MessageFold()
        try:
            async for event in reply:
                fold.add(event)
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Finished):
                    return BranchReply(agent_id, fold.message(), event.usage)
        finally:
            reply.cancel()
        raise AssertionError("a reply ended without a final event")

    # -- inside ---------------------------------------------------------------------------------

    def _branch_labels(self, principal: Principal, agent_id: str, count: int) -> dict[str, str]:
        """Return the labels of new branches of an agent; raises if there may be no more."""
        parent = self._agents.get(principal, agent_id).agent
        labels = dict(parent.labels)
        root, depth = labels.get(_ROOT, parent.id), int(labels.get(_DEPTH, "0")) + 1
        self._require_room(principal, root, depth, count)
        return {_ROOT: root, _DEPTH: str(depth)}

    def _require_room(self, principal: Principal, root: str, depth: int, count: int) -> None:
        limits = self._limits
        if depth > limits.max_depth:
            raise ConflictError(
                f"this would be a chain of {depth} forks, and mcp_max_depth is {limits.max_depth}; "
                "fork an earlier agent of the chain instead.",
                param="agent",
            )
        query = AgentQuery(labels=((_ROOT, root),), limit=1)
        living = self._agents.page(principal, query).num_matching
        if living + count > limits.max_branches:
            raise ConflictError(
                f"{root} has {living} branches; {count} more exceed mcp_max_branches "
                f"({limits.max_branches}). Delete those that are not needed.",
                param="agent",
            )
