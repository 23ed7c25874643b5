"""Conversations the server keeps: a client sends what is new, and turns run one after another."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from semantic.application.agents.ledger import AgentLedger
from semantic.application.agents.turns import TurnLanes
from semantic.application.requests.reply import LiveReply
from semantic.application.requests.service import InferenceService
from semantic.domain.agents import Agent, Overflow, Principal
from semantic.domain.chat import AgentHint, ChatRequest, Continuation, Message, Role, ToolResultPart
from semantic.domain.errors import AgentNotFoundError, ContextLengthError, StateQuotaError
from semantic.ports.inbound import NewTurn, Reply

_KEPT_SHARE = 0.7
_MESSAGE_OVERHEAD = 16  # characters that stand for a template's tokens around a message


@dataclass(frozen=True, slots=True)
class Conversation:
    """What comes before new messages.

    Attributes:
        system: The system prompt, if there is one.
        history: Everything after it.
        continuation: How it relates to the agent's latest turn.
    """

    system: tuple[Message, ...]
    history: tuple[Message, ...]
    continuation: Continuation

    @classmethod
    def of(cls, agent: Agent, said: Sequence[Message]) -> "Conversation":
        """Put an agent's system prompt before what was said; a changed one replaces the old."""
        num_system = 1 if said and said[0].role is Role.SYSTEM else 0
        system, history = tuple(said[:num_system]), tuple(said[num_system:])
        wanted = agent.profile.system
        is_edited = False
        if wanted is not None:
            own = (Message.of(Role.SYSTEM, wanted),) if wanted else ()
            is_edited = agent.head is not None and own != system
            system = own
        return cls(system, history, Continuation(agent.head, is_edited))

    def followed_by(self, new: Sequence[Message]) -> tuple[Message, ...]:
        """All messages of a request."""
        return (*self.system, *self.history, *new)

    def with_room(self, num_tokens: int) -> "Conversation":
        """The same, refused where fewer tokens are left for the reply."""
        return replace(self, continuation=replace(self.continuation, min_room=num_tokens))

    def shorten(
        self, new: Sequence[Message], refusal: ContextLengthError | StateQuotaError
    ) -> "Conversation | None":
        """Leave out the oldest messages, so that the rest takes up to 70 % of what fits.

        Tokens are judged by characters, from how many the refused prompt had. Room that cannot be
        made for the reply is no longer asked for.

        Args:
            new: The messages that must stay.
            refusal: Says how long the prompt was and how much fits.

        Returns:
            A shorter conversation that begins with a user's message; None if there is none.
        """
        min_room = self.continuation.min_room
        if min_room > 1 and (min_room >= refusal.limit or not self.history):
            return self.with_room(1)
        room = int(_KEPT_SHARE * refusal.limit)
        if isinstance(refusal, ContextLengthError):  # a reply may go beyond a quota
            room = min(room, refusal.limit - min_room)
        ratio = refusal.num_prompt / _size(self.followed_by(new))
        starts = [i for i, message in enumerate(self.history) if i and _opens(message)]
        if self.history:
            starts.append(len(self.history))
        fixed = _size((*self.system, *new))
        for start in starts:
            is_last = start == len(self.history)
            if is_last or (fixed + _size(self.history[start:])) * ratio <= room:
                num_dropped = self.continuation.num_dropped + start
                changed = replace(self.continuation, is_edited=True, num_dropped=num_dropped)
                return Conversation(self.system, self.history[start:], changed)
        return None


def _opens(message: Message) -> bool:
    """Whether a conversation may begin here: a tool's result needs the call before it."""
    is_result = any(isinstance(part, ToolResultPart) for part in message.parts)
    return message.role is Role.USER and not is_result


def _size(messages: Sequence[Message]) -> int:
    return sum(_MESSAGE_OVERHEAD + len(repr(p)) for message in messages for p in message.parts) or 1


class StatefulChat:
    """Answers in agents' own conversations. On the event loop's thread."""

    def __init__(self, agents: AgentLedger, lanes: TurnLanes, inference: InferenceService) -> None:
        self._agents = agents
        self._lanes = lanes
        self._inference = inference

    async def generate(self, principal: Principal, agent_id: str, ask: NewTurn) -> Reply:
        """Answer new messages, after the turns that were asked for before."""
        agent = await self._agent(principal, agent_id)
        return await self._inference.gate.reply(
            agent.profile.model or "", lambda: self._generate(principal, agent, ask)
        )

    async def _generate(self, principal: Principal, agent: Agent, ask: NewTurn) -> Reply:
        with contextlib.ExitStack() as turn:
            lane = turn.enter_context(self._lanes.lane(principal.tenant, agent.id))
            await self._lanes.wait(lane)
            turn.callback(lane.lock.release)
            leases = self._agents.leases
            timeout_s = self._inference.gate.timeout_s
            lease = await leases.wait(principal.tenant, agent.id, timeout_s)
            turn.callback(leases.release, lease)
            num_cancels = lane.num_cancels
            lane.reply = reply = await self._begin(principal, agent, ask, lease.epoch)
            turn.callback(setattr, lane, "reply", None)
            if lane.num_cancels > num_cancels:
                reply.cancel()
            # Whether the reply is read or not, the next turn may begin when it has ended.
            entered = turn.pop_all()
            reply.on_end(lambda *_: entered.close())
            return reply

    async def _agent(self, principal: Principal, agent_id: str) -> Agent:
        """Find an agent, which may have to be read elsewhere."""
        if self._agents.is_shared:
            return await asyncio.to_thread(self._agents.get, principal.tenant, agent_id)
        return self._agents.get(principal.tenant, agent_id)

    async def _begin(
        self, principal: Principal, known: Agent, ask: NewTurn, epoch: int | None
    ) -> LiveReply:
        """Start a turn, leaving the oldest messages out if need be and permitted."""
        agent = await self._agent(principal, known.id)
        if agent.created_at != known.created_at:
            raise AgentNotFoundError(f"agent {agent.id!r} was deleted and created again meanwhile.")
        self._agents.check_quota(agent)
        said = await asyncio.to_thread(self._agents.conversation, agent)
        may_drop = agent.profile.overflow is Overflow.DROP_OLDEST
        conversation = Conversation.of(agent, said)
        leased = replace(conversation.continuation, epoch=epoch)
        conversation = replace(conversation, continuation=leased)
        if may_drop:
            conversation = conversation.with_room(ask.stop.max_tokens or 1)
        while True:
            request = self._request(agent, conversation, ask)
            weighted = replace(principal, weight=principal.weight * agent.weight)
            try:
                return await self._inference.begin(request, weighted)
            except (ContextLengthError, StateQuotaError) as refusal:
                shorter = conversation.shorten(ask.messages, refusal) if may_drop else None
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
