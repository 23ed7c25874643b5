"""Agents: named pointers into the blocks, with a log of their turns.

An agent is to its turns what a branch is to commits. All values are immutable; an operation
returns the agent that follows. No tensor is touched by any of them.
"""

import enum
import re
from dataclasses import dataclass, field, replace

from semantic.domain.blocks import BlockName
from semantic.domain.chat import Message, ServiceClass, Usage
from semantic.domain.errors import AgentNotFoundError, InvalidRequestError

LOCAL_TENANT = "local"
_ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,128}")


def check_agent_id(text: str, param: str) -> None:
    """Refuse what cannot name an agent.

    Raises:
        InvalidRequestError: it cannot; names `param`.
    """
    if not _ID_PATTERN.fullmatch(text):
        raise InvalidRequestError(
            "an agent id is 1 to 128 of the characters A-Z a-z 0-9 . _ -", param=param
        )


def _check_weight(weight: float) -> None:
    # Written so that NaN fails too.
    if not weight > 0:
        raise InvalidRequestError(f"weight must be positive, got {weight}.", param="weight")


@dataclass(frozen=True, slots=True)
class Principal:
    """On whose behalf a request runs.

    Attributes:
        tenant: Owner of agents and blocks; everyone is `local` while no keys are configured.
        salt: Mixed into block names, so tenants cannot probe each other's cache.
        weight: Share of the device relative to other principals.
    """

    tenant: str = LOCAL_TENANT
    salt: bytes = b""
    weight: float = 1.0

    def __post_init__(self) -> None:
        _check_weight(self.weight)


class Tier(enum.Enum):
    """Where an agent's attention state is."""

    HOT = "hot"  # in memory
    WARM = "warm"  # on disk
    COLD = "cold"  # to be recomputed from the turn's tokens


@dataclass(frozen=True, slots=True)
class Pointer:
    """A place in a chain: `num_tokens` tokens from the root, ending inside or at `block`."""

    block: BlockName
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Quota:
    """What one agent may keep; None is unlimited."""

    max_bytes: int | None = None
    max_turns: int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange. Messages and token ids are the truth; attention state is a cache of them.

    Attributes:
        messages: What was said in this turn, question and reply.
        tokens: The ids this turn added to the conversation, as computed.
        pointer: Where the conversation ends after this turn; None while nothing is sealed.
        is_durable: Whether the turn survives a crash.
    """

    id: str
    messages: tuple[Message, ...]
    tokens: tuple[int, ...]
    pointer: Pointer | None
    usage: Usage
    created_at: float
    is_durable: bool = False


@dataclass(frozen=True, slots=True)
class Agent:
    """A conversation that can be continued, forked and rewound.

    Example:
        >>> turn = Turn("t1", (), (1, 2), None, Usage(prompt_tokens=2), created_at=0.0)
        >>> agent = Agent("coder").commit(turn)
        >>> agent.fork("reviewer").head == agent.head
        True
        >>> agent.rewind(None).head is None
        True
    """

    id: str
    tenant: str = LOCAL_TENANT
    turns: tuple[Turn, ...] = ()
    weight: float = 1.0
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    is_pinned: bool = False
    quota: Quota = field(default_factory=Quota)
    labels: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_agent_id(self.id, "agent_id")
        _check_weight(self.weight)

    @property
    def head(self) -> Turn | None:
        """The latest turn."""
        return self.turns[-1] if self.turns else None

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole conversation."""
        return sum(len(turn.tokens) for turn in self.turns)

    def commit(self, turn: Turn) -> "Agent":
        """Return the agent with one more turn."""
        return replace(self, turns=(*self.turns, turn))

    def rewind(self, turn_id: str | None) -> "Agent":
        """Return the agent as it was after a turn; None goes back before the first.

        Raises:
            AgentNotFoundError: the agent has no such turn.
        """
        if turn_id is None:
            return replace(self, turns=())
        for index, turn in enumerate(self.turns):
            if turn.id == turn_id:
                return replace(self, turns=self.turns[: index + 1])
        raise AgentNotFoundError(f"agent {self.id} has no turn {turn_id}")

    def fork(self, new_id: str) -> "Agent":
        """Return another agent with the same past; pins are not inherited."""
        return replace(self, id=new_id, is_pinned=False)
