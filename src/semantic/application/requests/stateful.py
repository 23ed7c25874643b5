"""Stateful chat: the server stores the conversation, and a client sends only new messages.

Turns of one agent run one after another.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from semantic.application.agents.ledger import AgentLedger
from semantic.application.agents.running_turns import TurnLanes
from semantic.application.requests.compaction.summary import Summariser, cut_to_fit
from semantic.application.requests.reply import LiveReply
from semantic.application.requests.service import InferenceService
from semantic.application.requests.truncation import opens_turn, text_size
from semantic.domain.agents import Agent, Overflow, Principal
from semantic.domain.chat import AgentHint, ChatRequest, Continuation, Message, Role
from semantic.domain.errors import (
    AgentNotFoundError,
    CompactionError,
    ContextLengthError,
    StateQuotaError,
)
from semantic.ports.inbound import NewTurn, Reply

_KEPT_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class Conversation:
    """The conversation before the new messages.

    Attributes:
        history: All messages after the system prompt.
    """

    system: tuple[Message, ...]
    history: tuple[Message, ...]
    continuation: Continuation

    @classmethod
    def of(cls, agent: Agent, logged: Sequence[Message]) -> "Conversation":
        """Combine the logged messages with the agent's system prompt, which replaces an old one."""
        num_system = 1 if logged and logged[0].role is Role.SYSTEM else 0
        system, history = tuple(logged[:num_system]), tuple(logged[num_system:])
        wanted = agent.profile.system
        is_edited = False
        if wanted is not None:
            own = (Message.of(Role.SYSTEM, wanted),) if wanted else ()
            is_edited = agent.head is not None and own != system
            system = own
        return cls(system, history, Continuation(agent.head, is_edited))

    def followed_by(self, new: Sequence[Message]) -> tuple[Message, ...]:
        return (*self.system, *self.history, *new)

    def with_room(self, num_tokens: int) -> "Conversation":
        """Return a copy that is refused if fewer than `num_tokens` are left for the reply."""
        return replace(self, continuation=replace(self.continuation, min_room=num_tokens))

    def shorten(
        self, new: Sequence[Message], refusal: ContextLengthError | StateQuotaError
    ) -> "Conversation | None":
        """Drop the oldest messages, so that the rest takes at most 70 % of the limit.

        Token counts are estimated from characters, with the ratio of the refused prompt. If the
        required room for the reply can never be free, the requirement is dropped first.

        Args:
            new: The new messages, which are always kept.
            refusal: Holds the length of the refused prompt and the limit.

        Returns:
            A shorter conversation whose history is empty or begins with a user message; None if
            nothing is left to drop.
        """
        min_room = self.continuation.min_room
        if min_room > 1 and (min_room >= refusal.limit or not self.history):
            return self.with_room(1)
        room = int(_KEPT_SHARE * refusal.limit)
        if isinstance(refusal, ContextLengthError):  # a reply may exceed a quota
            room = min(room, refusal.limit - min_room)
        ratio = refusal.num_prompt / text_size(self.followed_by(new))
        starts = [i for i, message in enumerate(self.history) if i and opens_turn(message)]
        if self.history:
            starts.append(len(self.history))
        fixed = text_size((*self.system, *new))
        for start in starts:
            is_last = start == len(self.history)
            if is_last or (fixed + text_size(self.history[start:])) * ratio <= room:
                num_dropped = self.continuation.num_dropped + start
                changed = replace(self.continuation, is_edited=True, num_dropped=num_dropped)
                return Conversation(self.system, self.history[start:], changed)
        return None


class StatefulChat:
    """`StatefulInferencePort` over the agents' ledger and the inference service."""

    def __init__(
        self,
        agents: AgentLedger,
        lanes: TurnLanes,
        inference: InferenceService,
        summariser: Summariser | None = None,
    ) -> None:
        """Create the service; without a summariser, summaries follow the default policy."""
        self._agents = agents
        self._lanes = lanes
        self._inference = inference
        self._summariser = summariser or Summariser(inference)

    async def generate(self, principal: Principal, agent_id: str, ask: NewTurn) -> Reply:
        agent = await self._agent(principal, agent_id)
        return await self._inference.gate.reply(
            agent.profile.model or "", lambda: self._generate(principal, agent, ask)
        )

    async def _generate(self, principal: Principal, agent: Agent, ask: NewTurn) -> Reply:
        if ask.is_ephemeral:
            return await self._begin(principal, agent, ask, None)
        with contextlib.ExitStack() as turn:
            lane = turn.enter_context(self._lanes.lane(principal.tenant, agent.id))
            await self._lanes.wait(lane)
            turn.callback(lane.lock.release)
            epoch: int | None = None
            if (leases := self._agents.leases) is not None:
                timeout_s = self._inference.gate.timeout_s
                lease = await leases.wait(principal.tenant, agent.id, timeout_s)
                turn.callback(leases.release, lease)
                epoch = lease.epoch
            num_discards = lane.num_discards
            reply = await self._begin(principal, agent, ask, epoch)
            lane.discard = reply.discard
            turn.callback(setattr, lane, "discard", None)
            if lane.num_discards > num_discards:
                reply.discard()
            # The next turn may begin when the reply has ended, whether or not it is read.
            entered = turn.pop_all()
            reply.on_end(lambda *_: entered.close())
            return reply

    async def _agent(self, principal: Principal, agent_id: str) -> Agent:
        """Find an agent; in a thread if agents are shared, because that reads the ledger."""
        if self._agents.is_shared:
            return await asyncio.to_thread(self._agents.get, principal.tenant, agent_id)
        return self._agents.get(principal.tenant, agent_id)

    async def _begin(
        self, principal: Principal, known: Agent, ask: NewTurn, epoch: int | None
    ) -> LiveReply:
        agent = await self._agent(principal, known.id)
        if agent.created_at != known.created_at:
            raise AgentNotFoundError(f"agent {agent.id!r} was deleted and created again meanwhile.")
        if not ask.is_ephemeral:
            self._agents.check_quota(agent)
        logged = await asyncio.to_thread(self._agents.conversation, agent)
        conversation = Conversation.of(agent, logged)
        leased = replace(conversation.continuation, epoch=epoch)
        conversation = replace(conversation, continuation=leased)
        conversation = conversation.with_room(self._min_room(agent, ask))
        weighted = replace(principal, weight=principal.weight * agent.weight)
        while True:
            request = self._request(agent, conversation, ask)
            try:
                return await self._inference.begin(request, weighted)
            except (ContextLengthError, StateQuotaError) as refusal:
                shorter = await self._shorten(agent, conversation, ask, refusal, weighted)
                if shorter is None:
                    raise
                conversation = shorter

    def _min_room(self, agent: Agent, ask: NewTurn) -> int:
        match agent.profile.overflow:
            case Overflow.ERROR:
                return 1
            case Overflow.DROP_OLDEST:
                return ask.stop.max_tokens or 1
            case Overflow.COMPACT:
                limit = self._inference.max_context(agent.profile.model or "")
                return self._summariser.policy.room(limit, ask.stop.max_tokens)

    async def _shorten(
        self,
        agent: Agent,
        conversation: Conversation,
        ask: NewTurn,
        refusal: ContextLengthError | StateQuotaError,
        principal: Principal,
    ) -> Conversation | None:
        match agent.profile.overflow:
            case Overflow.ERROR:
                return None
            case Overflow.DROP_OLDEST:
                return conversation.shorten(ask.messages, refusal)
            case Overflow.COMPACT:
                is_new = not conversation.continuation.num_summarised
                shorter = (
                    await self._compact(agent, conversation, ask, refusal, principal)
                    if is_new
                    else None
                )
                has_less = conversation.continuation.min_room > 1
                return shorter or (conversation.with_room(1) if has_less else None)

    async def _compact(
        self,
        agent: Agent,
        conversation: Conversation,
        ask: NewTurn,
        refusal: ContextLengthError | StateQuotaError,
        principal: Principal,
    ) -> Conversation | None:
        """Replace the oldest messages by a summary; None if no cut makes enough room."""
        policy, history = self._summariser.policy, conversation.history
        longest = min(policy.max_tokens, conversation.continuation.min_room)
        policy = replace(policy, max_tokens=longest)
        end = cut_to_fit(conversation.system, history, ask.messages, refusal, policy)
        if end is None:
            return None
        older = replace(conversation, history=history[:end])
        request = replace(self._request(agent, older, ask), messages=older.followed_by(()))
        try:
            summary = await self._summariser.summarise(request, principal, policy)
        except CompactionError as error:
            raise CompactionError(
                f"the conversation is too long and could not be compacted: {error.message} The "
                "server's settings compaction_max_tokens and compaction_instructions apply."
            ) from error
        kept = (summary.message, *history[end:])
        changed = replace(conversation.continuation, is_edited=True, num_summarised=end)
        return Conversation(conversation.system, kept, changed).with_room(1)

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
            agent=AgentHint(
                agent.id,
                continuation=conversation.continuation,
                is_ephemeral=ask.is_ephemeral,
                comparison=ask.comparison,
            ),
            service_class=agent.service_class,
            is_continued=ask.messages[-1].role is Role.ASSISTANT,
        )
