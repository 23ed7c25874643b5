"""What happens to agents, as those who watch are told."""

import enum
from dataclasses import dataclass, field
from typing import TypeAlias

from semantic.domain.agents import Reuse
from semantic.domain.events import Usage


class AgentDeed(enum.Enum):
    """What was done to an agent."""

    CREATED = "created"
    UPDATED = "updated"
    FORKED = "forked"
    REWOUND = "rewound"
    IMPORTED = "imported"
    EVICTED = "evicted"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class AgentChanged:
    """Something was done to an agent."""

    tenant: str
    agent_id: str
    deed: AgentDeed


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """An agent's request was queued."""

    tenant: str
    agent_id: str
    turn_id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """An agent's request has its last event.

    Attributes:
        reason: Why the reply ended, or `failed`.
    """

    tenant: str
    agent_id: str
    turn_id: str
    reason: str
    usage: Usage
    reuse: Reuse = field(default_factory=Reuse)


FeedEvent: TypeAlias = AgentChanged | TurnStarted | TurnEnded


@dataclass(frozen=True, slots=True)
class Missed:
    """A reader was too slow: so many events before the next one are lost to it."""

    num_events: int
