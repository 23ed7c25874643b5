"""What protocol adapters ask about the cache: how full it is, and to tidy it up."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from semantic.domain.agents import Principal, Reuse, Tier
from semantic.ports.inbound import StateView


@dataclass(slots=True)
class CacheCounts:
    """What happened to blocks since the start; only ever grows. Its owner changes it."""

    sealed: int = 0
    evicted: int = 0
    restored: int = 0
    written: int = 0
    corrupt: int = 0


@dataclass(frozen=True, slots=True)
class CacheOverview:
    """The cache as dashboards see it; sizes are in bytes.

    Attributes:
        memory_working: Taken by sequences that are open, and by what is being read.
        disk_other: Of the budget, what the ledger and its backup take.
        tiers: How many agents start from which tier.
        logical_bytes: What agents would take if they shared nothing.
        unique_bytes: What they do take.
        num_replies: Replies since the start, whose prompts came from where `reuse` says.
        num_live: Requests that wait or run.
        problem: Why nothing can be written, for people; empty while all is well.
    """

    memory_budget: int
    memory_used: int
    memory_working: int
    pressure: str
    num_blocks: int
    disk_budget: int
    disk_used: int
    disk_other: int
    num_files: int
    queue_budget: int
    queue_used: int
    tiers: tuple[tuple[Tier, int], ...]
    logical_bytes: int
    unique_bytes: int
    num_replies: int
    reuse: Reuse
    counts: CacheCounts
    num_live: int
    problem: str


@dataclass(frozen=True, slots=True)
class CheckProgress:
    """How far a check of all files has come."""

    num_checked: int
    num_total: int
    num_bad: int


class CacheManagementPort(Protocol):
    """The attention state of all agents. Any thread; may read from disk.

    Methods raise ModelSwapError until the model, whose state it is, is loaded.
    """

    def overview(self, principal: Principal) -> CacheOverview:
        """Read all figures; agents are those of the principal."""
        ...

    def sample(self) -> tuple[CacheCounts, str]:
        """Read the counters and the memory's pressure, cheaply; zeros before the model is there."""
        ...

    def prefetch(self, principal: Principal, agent_id: str) -> int:
        """Begin to read an agent's state into memory; returns how many parts that are.

        Raises:
            AgentNotFoundError: there is no such agent.
        """
        ...

    def evict(self, principal: Principal, agent_id: str, *, is_cold: bool) -> StateView:
        """Drop an agent's own state from memory, and from disk too if it is to be cold.

        Raises:
            AgentNotFoundError: there is no such agent.
        """
        ...

    def collect(self, orphan_age_s: float | None) -> int:
        """Delete what no agent reaches and nobody used for a while; returns the bytes freed.

        Raises:
            CachePersistenceError: the ledger cannot be changed now.
        """
        ...

    def verify(self) -> Iterator[CheckProgress]:
        """Read and check every file; bad ones are dropped."""
        ...
