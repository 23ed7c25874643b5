"""Agents, which are named pointers to turns, and turns, which are the log of conversations.

An agent relates to its turns as a git branch relates to commits: each turn refers to the turn
before it, and an agent refers to its latest turn. All values are immutable; operations return a new
agent and touch no tensors.
"""

import enum
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from semantic.domain.blocks import BlockName, pack_tokens
from semantic.domain.chat import Message, ServiceClass, ToolSpec
from semantic.domain.errors import InvalidRequestError
from semantic.domain.events import CacheMiss, ReplyTiming, Usage
from semantic.domain.sampling import FinishReason

LOCAL_TENANT = "local"
# Ids of packs; no client can name an agent like this, since ids have no colon.
_PACK = "pack:"
_ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,128}")
# Limits of an agent's settings, whether set by a client or by an imported file.
MAX_COUNT = 2**62
MAX_LABELS, MAX_LABEL_CHARS = 64, 256
MAX_TOOLS = 1024
MAX_TTL_S = 1e10
MAX_WEIGHT = 1000.0
TOOL_NAME = r"^[A-Za-z0-9_.-]{1,128}$"


def check_agent_id(
    text: str, param: str, noun: str = "an agent id", *, is_new: bool = True
) -> None:
    """Check that a text is valid as the id of an agent or a tenant.

    Raises:
        InvalidRequestError: it is not valid; the error names `param`.
    """
    # `.` and `..` do not work in URLs: clients resolve them as directories.
    is_hidden = is_new and not text.strip(".")
    if is_hidden or not _ID_PATTERN.fullmatch(text):
        raise InvalidRequestError(
            f"{noun} must be 1 to 128 of the characters A-Z a-z 0-9 . _ -, and not only dots.",
            param=param,
        )


def _check_weight(weight: float) -> None:
    # `not weight > 0` also rejects NaN.
    if not weight > 0:
        raise InvalidRequestError(f"weight must be positive, got {weight}.", param="weight")


def pack_id(name: str) -> str:
    """Return the id of the agent that keeps the blocks of a pack.

    Raises:
        InvalidRequestError: the name is not valid.
    """
    check_agent_id(name, "name", "a pack's name")
    return f"{_PACK}{name}"


@dataclass(frozen=True, slots=True)
class Principal:
    """The tenant and key on whose behalf a request runs.

    Attributes:
        tenant: Owner of agents and blocks; always `local` while no keys are configured.
        salt: Mixed into block names, so that tenants cannot probe each other's cache.
        weight: Share of the device relative to other principals.
        key_id: The key of the request; empty while no keys are configured.
        is_admin: Whether it may view and change what affects all tenants.
    """

    tenant: str = LOCAL_TENANT
    salt: bytes = b""
    weight: float = 1.0
    key_id: str = ""
    is_admin: bool = False

    def __post_init__(self) -> None:
        _check_weight(self.weight)


class Tier(enum.Enum):
    """Location of an agent's KV cache."""

    HOT = "hot"  # in memory
    WARM = "warm"  # on disk
    COLD = "cold"  # more than half of it to be recomputed from the turn's tokens


@dataclass(frozen=True, slots=True)
class Pointer:
    """A position in a chain: `num_tokens` tokens after `root`, inside or at the end of `block`."""

    root: BlockName
    block: BlockName
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Quota:
    """Storage limits of one agent; None means unlimited.

    Attributes:
        max_bytes: Size of the conversation's KV cache, in the precision of computation.
    """

    max_bytes: int | None = None
    max_turns: int | None = None


class Overflow(enum.Enum):
    """What happens when a conversation exceeds the context, or its agent's quota of bytes."""

    ERROR = "error"  # the request is refused
    DROP_OLDEST = "drop_oldest"  # the oldest messages are left out, the system prompt stays
    COMPACT = "compact"  # a summary that the model writes replaces the oldest messages


@dataclass(frozen=True, slots=True)
class AgentProfile:
    """Settings that an agent adds to each of its turns.

    Attributes:
        system: System prompt, before the conversation; None keeps the conversation's own.
        model: The model that replies; None means the served model.
    """

    system: str | None = None
    tools: tuple[ToolSpec, ...] = ()
    model: str | None = None
    overflow: Overflow = Overflow.ERROR


@dataclass(frozen=True, slots=True)
class Reuse:
    """Where the prompt tokens of a turn came from.

    Attributes:
        hot: From the agent's sequence that was still open, or from another running sequence.
        pool: From sealed blocks in memory.
        disk: From sealed blocks that were read for this turn.
        ahead: How many of `hot` were computed while the agent's tools ran.
    """

    hot: int = 0
    pool: int = 0
    disk: int = 0
    computed: int = 0
    ahead: int = 0

    @property
    def reused(self) -> int:
        return self.hot + self.pool + self.disk

    def __add__(self, other: "Reuse") -> "Reuse":
        hot, pool, disk = self.hot + other.hot, self.pool + other.pool, self.disk + other.disk
        computed, ahead = self.computed + other.computed, self.ahead + other.ahead
        return Reuse(hot, pool, disk, computed, ahead)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt differs from its agent's conversation: at token `index` of turn `turn_id`."""

    turn_id: str
    index: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange. Messages and token ids are authoritative; the KV cache is derived from them.

    Messages and tokens are those that the turn added. If the turn does not continue the one before
    it, because the client sent a different history or the oldest messages were dropped, they are
    those of the whole conversation.

    Attributes:
        agent_id: The agent that created it; forks of the agent share the turn.
        tokens: The token ids that this turn added to the conversation, as computed.
        num_tokens: Tokens of the whole conversation after this turn.
        num_messages: Messages of the whole conversation after this turn.
        digest: Digest of the conversation's tokens, see `conversation_digest`.
        pointer: Where its KV cache ends; None while no block is sealed.
        is_durable: Whether the turn and its KV cache are on disk.
        num_dropped: Messages that were dropped in this turn to make room.
        divergence: Where its prompt differs from the agent's latest conversation; None if it
            continues that conversation.
        model: The model that replied; empty in turns of older servers, which did not log it.
        reason: Why its reply ended; None if that was not logged.
        tools: Name and digest of each tool in its prompt; empty if the turn continues its parent,
            whose tools are the same.
        is_thinking: Whether its prompt asked for thinking; None leaves that to the model.
        miss: Why its prompt did not reuse an earlier turn's KV cache; None if it did.
        num_head: Leading tokens of the conversation that tools and system messages take, as the
            template writes them; 0 if there are none or that was not logged.
        num_summarised: Messages that a summary replaced in this turn.
        repairs: Names of the rules that changed the request before it was computed.
        timing: How long its reply took; None if that was not logged.
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
    tools: tuple[tuple[str, str], ...] = ()
    is_thinking: bool | None = None
    miss: CacheMiss | None = None
    num_head: int = 0
    num_summarised: int = 0
    repairs: tuple[str, ...] = ()
    timing: ReplyTiming | None = None

    @property
    def holds_all_messages(self) -> bool:
        return len(self.messages) >= self.num_messages

    @property
    def starts_anew(self) -> bool:
        """Whether the conversation no longer includes the messages of earlier turns."""
        return self.parent is not None and self.holds_all_messages

    @property
    def holds_all_tokens(self) -> bool:
        return len(self.tokens) >= self.num_tokens


def conversation_digest(tokens: Sequence[int]) -> str:
    """Return a digest that identifies a conversation by its tokens."""
    return hashlib.sha256(pack_tokens(tokens)).hexdigest()


@dataclass(frozen=True, slots=True)
class Agent:
    """A conversation that can be continued, forked and rewound.

    Attributes:
        head: The latest turn's id; None before the first.
        num_turns: Turns from the first to the head.
        ttl_s: Seconds without use after which the agent is deleted; None keeps it.
        is_anonymous: Whether the server chose its id, because no client named an agent or session.

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
        check_agent_id(self.id.removeprefix(_PACK), "agent_id", is_new=False)
        _check_weight(self.weight)

    @property
    def is_listed(self) -> bool:
        """Whether lists of agents include it.

        Clients send many one-off requests, e.g. for a title, so an anonymous agent is listed only
        from its second turn on or when it is pinned.
        """
        is_lasting = not self.is_anonymous or self.is_pinned or self.num_turns > 1
        return is_lasting and not self.pack

    @property
    def pack(self) -> str:
        """The name of the pack whose blocks it keeps; empty for an agent of a client."""
        return self.id.removeprefix(_PACK) if self.id.startswith(_PACK) else ""

    def advance(self, turn_id: str, *, at: float) -> "Agent":
        return replace(self, head=turn_id, num_turns=self.num_turns + 1, last_used=at)

    def rewind(self, turn_id: str | None, num_turns: int, *, at: float) -> "Agent":
        """Return the agent as it was after an earlier turn; None means before the first turn."""
        return replace(self, head=turn_id, num_turns=num_turns, last_used=at)

    def fork(self, new_id: str, *, at: float) -> "Agent":
        """Return a new agent with the same history; the fork is not pinned."""
        return replace(self.with_id(new_id), is_pinned=False, created_at=at, last_used=at)

    def with_id(self, new_id: str) -> "Agent":
        """Return the agent under a name chosen by a client.

        An anonymous agent loses its default time to live, which no client chose.
        """
        ttl_s = None if self.is_anonymous else self.ttl_s
        return replace(self, id=new_id, is_anonymous=False, ttl_s=ttl_s)

    def is_expired(self, now: float) -> bool:
        """Whether it was unused for longer than its time to live; pinned agents never expire."""
        if self.ttl_s is None or self.is_pinned:
            return False
        return now - max(self.last_used, self.created_at) >= self.ttl_s
