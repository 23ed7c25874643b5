"""Turns an agent into a branch that continues from a summary, computed before its next turn."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from semantic.application.agents.ledger import AgentLedger
from semantic.application.agents.running_turns import TurnLane, TurnLanes
from semantic.application.agents.service import AgentService
from semantic.application.agents.turn_log import FinishedTurn
from semantic.application.requests.compaction.prefill import Prefilled
from semantic.application.requests.compaction.summary import (
    Summariser,
    expected_after,
    first_kept,
)
from semantic.application.requests.reply import LiveReply
from semantic.application.requests.service import InferenceService
from semantic.application.requests.stateful import Conversation
from semantic.domain.agents import Agent, Pointer, Principal
from semantic.domain.chat import AgentHint, ChatRequest, Continuation, Message
from semantic.domain.errors import ConflictError
from semantic.ports.inbound import AgentView, Compacted, Compaction

_MAX_ID = 128


class AgentCompaction:
    """Compacts agents. Used on the event loop's thread."""

    def __init__(
        self,
        agents: AgentLedger,
        service: AgentService,
        lanes: TurnLanes,
        inference: InferenceService,
        summariser: Summariser,
    ) -> None:
        self._agents = agents
        self._service = service
        self._lanes = lanes
        self._inference = inference
        self._summariser = summariser

    async def compact(self, principal: Principal, agent_id: str, ask: Compaction) -> Compacted:
        """Create a branch of an agent that continues from a summary; the agent does not change.

        Waits for the agent's running turns, and turns that come later wait for it.

        Raises:
            AgentNotFoundError: there is no such agent.
            CompactionError: the conversation is too short, or no whole summary could be written.
            ConflictError: the new id is taken, or the agent changed meanwhile.
        """
        await asyncio.to_thread(self._agents.get, principal.tenant, agent_id)
        with self._lanes.lane(principal.tenant, agent_id) as lane:
            await self._lanes.wait(lane)
            try:
                return await self._compact(principal, agent_id, ask, lane)
            finally:
                lane.discard = None
                lane.lock.release()

    async def _compact(
        self, principal: Principal, agent_id: str, ask: Compaction, lane: TurnLane
    ) -> Compacted:
        agent = await asyncio.to_thread(self._agents.get, principal.tenant, agent_id)
        policy = self._summariser.policy.changed_by(ask)
        successor = await asyncio.to_thread(self._successor, agent, ask)
        logged = await asyncio.to_thread(self._agents.conversation, agent)
        conversation = Conversation.of(agent, logged)
        start = first_kept(conversation.history, policy.keep_turns)
        older = (*conversation.system, *conversation.history[:start])
        request = ChatRequest(
            model=agent.profile.model or "",
            messages=older,
            tools=agent.profile.tools,
            agent=AgentHint(agent.id),
            service_class=agent.service_class,
        )
        weighted = replace(principal, weight=principal.weight * agent.weight)

        def watch(reply: LiveReply) -> None:
            lane.discard = reply.discard

        summary = await self._summariser.summarise(request, weighted, policy, watch)
        messages = (*conversation.system, summary.message, *conversation.history[start:])
        next_request = replace(request, agent=AgentHint(successor.id))
        expected = expected_after(next_request, messages)
        prefill = await self._inference.prefill(expected, weighted, successor)
        computed = await prefill.result()
        continuation = Continuation(agent.head, is_edited=True, num_summarised=start)
        view = await asyncio.to_thread(
            self._add, agent, successor, _finished(computed, next_request, messages, continuation)
        )
        return Compacted(
            view=view,
            parent_id=agent.id,
            summary=summary.text,
            num_before=self._agents.place(agent).num_tokens,
            num_summarised=start,
            num_kept=len(conversation.history) - start,
            summary_usage=summary.usage,
            summary_reuse=summary.reuse,
            reuse=computed.state.reuse,
        )

    def _successor(self, agent: Agent, ask: Compaction) -> Agent:
        self._agents.check_quota(agent)
        suffix = f"-compact-{secrets.token_hex(3)}"
        new_id = ask.new_id or f"{agent.id[: _MAX_ID - len(suffix)]}{suffix}"
        if self._agents.find_agent(agent.tenant, new_id) is not None:
            raise ConflictError(f"agent {new_id!r} already exists.", param="id")
        labels = tuple(sorted((dict(agent.labels) | dict(ask.labels)).items()))
        return replace(agent.fork(new_id, at=time.time()), labels=labels)

    def _add(self, agent: Agent, successor: Agent, finished: FinishedTurn) -> AgentView:
        if self._agents.get(agent.tenant, agent.id).head != agent.head:
            raise ConflictError(
                f"another request moved agent {agent.id!r} to another turn while it was compacted; "
                "compact it again."
            )
        parent = self._agents.turn(agent.tenant, agent.head) if agent.head else None
        now = time.time()
        turn = self._agents.log.next_turn(successor, parent, finished, now)
        return self._service.add_branch(successor.advance(turn.id, at=now), turn)


def _finished(
    computed: Prefilled,
    request: ChatRequest,
    messages: Sequence[Message],
    continuation: Continuation,
) -> FinishedTurn:
    job, state = computed.job, computed.state
    pointer = None if state.block is None else Pointer(job.root, state.block, state.num_sealed)
    return FinishedTurn(
        prompt=job.tokens,
        reply=(),
        messages=messages,
        pointer=pointer,
        usage=computed.usage,
        reuse=state.reuse,
        continuation=continuation,
        model=computed.model,
        tools=request.tools,
    )
