"""Conversations the server keeps: a client sends what is new, and turns run one after another."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from semantic.application.agents.ledger import AgentLedger
from semantic.application.prompt.conversation import Conversation
from semantic.application.requests.reply import LiveReply
from semantic.application.requests.service import InferenceService
from semantic.domain.agents import Agent, Overflow, Principal
from semantic.domain.chat import AgentHint, ChatRequest, Role
from semantic.domain.errors import (
    AgentNotFoundError,
    ContextLengthError,
    GenerationTimeoutError,
    OverloadedError,
    StateQuotaError,
)
from semantic.ports.inbound import NewTurn, Reply

_Key: TypeAlias = tuple[str, str]


@dataclass(slots=True)
class _Lane:
    """The turns of one agent: one runs, the others wait in order."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_inside: int = 0
    num_cancels: int = 0
    reply: Reply | None = None


class StatefulChat:
    """Answers in agents' own conversations. On the event loop's thread, but for `cancel`."""

    def __init__(
        self,
        agents: AgentLedger,
        inference: InferenceService,
        *,
        max_waiting: int,
        timeout_s: float,
    ) -> None:
        """Start with nobody waiting.

        Args:
            agents: Where conversations are kept.
            inference: Answers them.
            max_waiting: Turns of all agents that may wait for the ones before them.
            timeout_s: The longest such a wait.
        """
        self._agents = agents
        self._inference = inference
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._lanes: dict[_Key, _Lane] = {}

    def num_inside(self, tenant: str, agent_id: str) -> int:
        """How many turns of an agent run or wait."""
        lane = self._lanes.get((tenant, agent_id))
        return lane.num_inside if lane else 0

    def cancel(self, tenant: str, agent_id: str) -> None:
        """End the turn that is running, if one is; safe on any thread."""
        lane = self._lanes.get((tenant, agent_id))
        if lane is None:
            return
        lane.num_cancels += 1
        if (reply := lane.reply) is not None:
            reply.cancel()

    async def generate(self, principal: Principal, agent_id: str, ask: NewTurn) -> Reply:
        """Answer new messages, after the turns that were asked for before."""
        agent = self._agents.get(principal.tenant, agent_id)
        key = (principal.tenant, agent_id)
        with contextlib.ExitStack() as turn:
            lane = turn.enter_context(self._inside(key))
            await self._await_turn(lane)
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

    @contextlib.contextmanager
    def _inside(self, key: _Key) -> Iterator[_Lane]:
        num_waiting = sum(lane.num_inside - 1 for lane in self._lanes.values())
        lane = self._lanes.get(key)
        if lane is not None and num_waiting >= self._max_waiting:
            raise OverloadedError("too many turns are waiting for those before.", retry_after_s=2)
        lane = lane or self._lanes.setdefault(key, _Lane())
        lane.num_inside += 1
        try:
            yield lane
        finally:
            lane.num_inside -= 1
            if not lane.num_inside:
                del self._lanes[key]

    async def _await_turn(self, lane: _Lane) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await lane.lock.acquire()
        except TimeoutError as error:
            raise GenerationTimeoutError("the agent's turns before this one took long.") from error

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
