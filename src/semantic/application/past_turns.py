"""Turns that are over, found again by the request that made them."""

from semantic.application.agent_ledger import AgentLedger
from semantic.domain.agents import Principal, Turn
from semantic.domain.chat import Role
from semantic.ports.inbound import PastTurn


def turn_id(request_id: str) -> str:
    """What the turn of a request is called."""
    return f"turn_{request_id}"


class PastTurns:
    """`PastTurnsPort` over the ledger. Thread-safe."""

    def __init__(self, agents: AgentLedger) -> None:
        self._agents = agents

    def find(self, request_id: str, principal: Principal) -> PastTurn | None:
        """Find the turn that a request made; None if it is unknown, or its text is not kept."""
        turn = self._turn(request_id, principal)
        if turn is None:
            return None
        messages = self._agents.messages_at(principal.tenant, turn.id)
        if len(messages) != turn.num_messages:
            return None  # the text of a turn before it was removed
        said = tuple(message for message in messages if not message.is_instruction)
        return PastTurn(
            *(turn.id, said, messages[-1], turn.usage),
            *(turn.created_at, turn.model, turn.reason),
        )

    def forget(self, request_id: str, principal: Principal) -> bool:
        """Remove what was said in a turn; False if there is nothing to remove."""
        turn = self._turn(request_id, principal)
        if turn is None:
            return False
        self._agents.forget_text(principal.tenant, turn)
        return True

    def _turn(self, request_id: str, principal: Principal) -> Turn | None:
        turn = self._agents.turn(principal.tenant, turn_id(request_id))
        is_told = turn is not None and bool(turn.messages)
        return turn if is_told and turn and turn.messages[-1].role is Role.ASSISTANT else None
