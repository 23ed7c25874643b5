"""The conversation an agent keeps: what was said, its own system prompt, and what has to go."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from semantic.domain.agents import Agent
from semantic.domain.chat import Continuation, Message, Role, ToolResultPart
from semantic.domain.errors import ContextLengthError, StateQuotaError

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

    def shortened(
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
