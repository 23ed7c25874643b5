"""Conversations the server keeps: a client sends what is new, and turns run one after another."""

import asyncio
import contextlib
from dataclasses import replace

from semantic.application.agents.ledger import AgentLedger
from semantic.application.agents.turns import TurnLanes
from semantic.application.prompt.conversation import Conversation
from semantic.application.requests.reply import LiveReply
from semantic.application.requests.service import InferenceService
from semantic.domain.agents import Agent, Overflow, Principal
from semantic.domain.chat import AgentHint, ChatRequest, Role
from semantic.domain.errors import (
    AgentNotFoundError,
    ContextLengthError,
    StateQuotaError,
)
from semantic.ports.inbound import NewTurn, Reply


class StatefulChat:
    """Answers in agents' own conversations. On the event loop's thread."""

    def __init__(self, agents: AgentLedger, lanes: TurnLanes, inference: InferenceService) -> None:
        self._agents = agents
        self._lanes = lanes
        self._inference = inference

    async def generate(self, principal: Principal, agent_id: str, ask: NewTurn) -> Reply:
        """Answer new messages, after the turns that were asked for before."""
        agent = self._agents.get(principal.tenant, agent_id)
        with contextlib.ExitStack() as turn:
            lane = turn.enter_context(self._lanes.lane(principal.tenant, agent_id))
            await self._lanes.wait(lane)
            turn.callback(lane.lock.release)
            num_cancels = lane.num_cancels
            lane.reply = reply = await self._begin(principal, agent, ask)
            turn.callback(setattr, lane, "reply", None)
            if lane.num_cancels > num_cancels:
                reply.cancel()
            # Whether the reply is read or not, the next turn may begin when it has ended.
            entered = turn.pop_all()
            reply.on_end(lambda *_: entered.close())
            return reply

    async def _begin(self, principal: Principal, known: Agent, ask: NewTurn) -> LiveReply:
        """Start a turn, leaving the oldest messages out if need be and permitted."""
        agent = self._agents.get(principal.tenant, known.id)
        if agent.created_at != known.created_at:
            raise AgentNotFoundError(f"agent {agent.id!r} was deleted and made anew meanwhile.")
        self._agents.check_quota(agent)
        said = await asyncio.to_thread(self._agents.conversation, agent)
        may_drop = agent.profile.overflow is Overflow.DROP_OLDEST
        conversation = Conversation.of(agent, said)
        if may_drop:
            conversation = conversation.with_room(ask.stop.max_tokens or 1)
        while True:
            request = self._request(agent, conversation, ask)
            weighted = replace(principal, weight=principal.weight * agent.weight)
            try:
                return await self._inference.start(request, weighted)
            except (ContextLengthError, StateQuotaError) as refusal:
                shorter = conversation.shortened(ask.messages, refusal) if may_drop else None
                if shorter is None:
                    raise
                conversation = shorter

    def _request(self, agent: Agent, conversation: Conversation, ask: NewTurn) -> ChatRequest:
        profile = agent.profile
        return ChatRequest(
            model=profile.model or "",
            messages=conversation.followed_by(ask.messages),
            tools=profile.tools,
            tool_choice=ask.tool_choice,
            sampling=ask.sampling,
            stop=ask.stop,
            output_format=ask.output_format,
            thinking=ask.thinking,
            agent=AgentHint(agent.id, continuation=conversation.continuation),
            service_class=agent.service_class,
            is_continued=ask.messages[-1].role is Role.ASSISTANT,
        )
