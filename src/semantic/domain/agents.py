"""Agents: named pointers at turns, and turns: the log of what was said.

An agent is to its turns what a branch is to commits: turns know the turn before them, an agent
knows its latest. All values are immutable; an operation returns the agent that follows. No tensor
is touched by any of them.
"""

import enum
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from semantic.domain.blocks import BlockName, pack_tokens
from semantic.domain.chat import Message, ServiceClass, ToolSpec
from semantic.domain.errors import InvalidRequestError
from semantic.domain.events import Usage
from semantic.domain.sampling import FinishReason

LOCAL_TENANT = "local"
_ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,128}")
# What an agent's settings may be, whoever sets them: a client, or a file that is imported.
MAX_COUNT = 2**62
MAX_LABELS, MAX_LABEL_CHARS = 64, 256
MAX_TOOLS = 1024
MAX_TTL_S = 1e10
MAX_WEIGHT = 1000.0
TOOL_NAME = r"^[A-Za-z0-9_.-]{1,128}$"


def check_agent_id(
    text: str, param: str, noun: str = "an agent id", *, is_new: bool = True
) -> None:
    """Refuse what cannot name an agent, or a tenant.

    Raises:
        InvalidRequestError: it cannot; names `param`.
    """
    # No URL can name `.` and `..`: clients take them for directories, and ask for something else.
    is_hidden = is_new and not text.strip(".")
    if is_hidden or not _ID_PATTERN.fullmatch(text):
        raise InvalidRequestError(
            f"{noun} is 1 to 128 of the characters A-Z a-z 0-9 . _ -, and not dots alone.",
            param=param,
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
        key_id: The key it came with; empty while no keys are configured.
        is_admin: Whether it may see and do what concerns all tenants.
    """

    tenant: str = LOCAL_TENANT
    salt: bytes = b""
    weight: float = 1.0
    key_id: str = ""
    is_admin: bool = False

    def __post_init__(self) -> None:
        _check_weight(self.weight)


class Tier(enum.Enum):
    """Where an agent's KV cache is."""

    HOT = "hot"  # in memory
    WARM = "warm"  # on disk
    COLD = "cold"  # to be recomputed from the turn's tokens


@dataclass(frozen=True, slots=True)
class Pointer:
    """A place in a chain: `num_tokens` tokens from `root`, ending inside or at `block`."""

    root: BlockName
    block: BlockName
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Quota:
    """What one agent may keep; None is unlimited.

    Attributes:
        max_bytes: Of the conversation's KV cache, in the precision it is computed in.
    """

    max_bytes: int | None = None
    max_turns: int | None = None


class Overflow(enum.Enum):
    """What happens when a conversation outgrows the context, or its agent's quota of bytes."""

    ERROR = "error"  # the request is refused
    DROP_OLDEST = "drop_oldest"  # the oldest messages are left out, the system prompt stays


@dataclass(frozen=True, slots=True)
class AgentProfile:
    """What an agent brings to every turn of its own.

    Attributes:
        system: Comes before the conversation; None leaves the one that is in it.
        model: The model that answers; None takes the one that is served.
    """

    system: str | None = None
    tools: tuple[ToolSpec, ...] = ()
    model: str | None = None
    overflow: Overflow = Overflow.ERROR


@dataclass(frozen=True, slots=True)
class Reuse:
    """Where the prompt tokens of a turn came from.

    Attributes:
        hot: From a working copy that was still open, or another sequence that was running.
        pool: From sealed blocks in memory.
        disk: From sealed blocks that were read for this turn.
        computed: Computed.
    """

    hot: int = 0
    pool: int = 0
    disk: int = 0
    computed: int = 0

    @property
    def reused(self) -> int:
        """Tokens that were not computed."""
        return self.hot + self.pool + self.disk

    def __add__(self, other: "Reuse") -> "Reuse":
        hot, pool, disk = self.hot + other.hot, self.pool + other.pool, self.disk + other.disk
        return Reuse(hot, pool, disk, self.computed + other.computed)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt left the conversation its agent had: at token `index` of turn `turn_id`'s."""

    turn_id: str
    index: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange. Messages and token ids are the truth; the KV cache is a cache of them.

    Messages and tokens are what the turn added. Where it could not simply go on, because the
    client said other things or the oldest messages were dropped, they are all there are.

    Attributes:
        parent: The turn before, if any.
        agent_id: Whose turn it was first; forks share it.
        messages: What was said in this turn, question and reply.
        tokens: The ids this turn added to the conversation, as computed.
        num_tokens: Tokens of the whole conversation after it.
        num_messages: Messages that it and the turns before it hold.
        digest: Of the conversation's tokens, see `conversation_digest`.
        pointer: Where its KV cache ends; None while nothing is sealed.
        is_durable: Whether the turn and its KV cache are on disk.
        num_dropped: Messages that were left out in this turn to make room.
        divergence: Where its prompt left the agent's latest conversation; None if it went on.
        model: Which model replied; empty if that was not logged, as by older servers.
        reason: Why its reply ended; None if that was not logged.
    """

    id: str
    parent: str | None
    agent_id: str
    messages: tuple[Message, ...]
    tokens: tuple[int, ...]
    num_tokens: int
    pointer: Pointer | None
    usage: Usage
    created_at: float
    reuse: Reuse = field(default_factory=Reuse)
    num_messages: int = 0
    digest: str = ""
    is_durable: bool = False
    num_dropped: int = 0
    divergence: Divergence | None = None
    model: str = ""
    reason: FinishReason | None = None

    @property
    def holds_all_messages(self) -> bool:
        """Whether the conversation's messages begin with this turn."""
        return len(self.messages) >= self.num_messages

    @property
    def starts_anew(self) -> bool:
        """Whether it leaves the messages of the turns before it behind."""
        return self.parent is not None and self.holds_all_messages

    @property
    def holds_all_tokens(self) -> bool:
        """Whether the conversation's tokens begin with this turn."""
        return len(self.tokens) >= self.num_tokens


def conversation_digest(tokens: Sequence[int]) -> str:
    """Tell conversations apart by their tokens."""
    return hashlib.sha256(pack_tokens(tokens)).hexdigest()


@dataclass(frozen=True, slots=True)
class Agent:
    """A conversation that can be continued, forked and rewound.

    Attributes:
        head: The latest turn's id; None before the first.
        num_turns: Turns from the first to the head.
        ttl_s: It is forgotten when it was not used for so long; None keeps it.
        is_anonymous: Nobody named it.

    Example:
        >>> agent = Agent("coder", created_at=0.0).advance("t1", at=1.0)
        >>> agent.fork("reviewer", at=2.0).head
        't1'
    """

    id: str
    created_at: float
    tenant: str = LOCAL_TENANT
    head: str | None = None
    num_turns: int = 0
    last_used: float = 0.0
    weight: float = 1.0
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    is_pinned: bool = False
    ttl_s: float | None = None
    quota: Quota = field(default_factory=Quota)
    labels: tuple[tuple[str, str], ...] = ()
    is_anonymous: bool = False
    profile: AgentProfile = field(default_factory=AgentProfile)

    def __post_init__(self) -> None:
        check_agent_id(self.id, "agent_id", is_new=False)
        _check_weight(self.weight)

    @property
    def is_listed(self) -> bool:
        """Whether lists show it.

        Clients ask many things once, such as for a title: what nobody named must come back first.
        """
        return not self.is_anonymous or self.is_pinned or self.num_turns > 1

    def advance(self, turn_id: str, *, at: float) -> "Agent":
        """Return the agent with one more turn."""
        return replace(self, head=turn_id, num_turns=self.num_turns + 1, last_used=at)

    def rewind(self, turn_id: str | None, num_turns: int, *, at: float) -> "Agent":
        """Return the agent as it was after an earlier turn; None goes back before the first."""
        return replace(self, head=turn_id, num_turns=num_turns, last_used=at)

    def fork(self, new_id: str, *, at: float) -> "Agent":
        """Return another agent with the same past; pins are not inherited."""
        return replace(self.with_id(new_id), is_pinned=False, created_at=at, last_used=at)

    def with_id(self, new_id: str) -> "Agent":
        """Return the agent under a name that somebody chose.

        If nobody had named it before, its time was not chosen either: it no longer expires.
        """
        ttl_s = None if self.is_anonymous else self.ttl_s
        return replace(self, id=new_id, is_anonymous=False, ttl_s=ttl_s)

    def is_expired(self, now: float) -> bool:
        """Whether it outlived its time unused; pinned agents do not."""
        if self.ttl_s is None or self.is_pinned:
            return False
        return now - max(self.last_used, self.created_at) >= self.ttl_s
