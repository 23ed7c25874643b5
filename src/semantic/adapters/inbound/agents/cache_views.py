"""What the cache's endpoints answer."""

from typing import Literal

from semantic.adapters.inbound.agents import examples
from semantic.adapters.inbound.agents.views import ReuseOut, StateOut, View, shown_as
from semantic.domain.agents import Reuse
from semantic.ports.inbound import CacheOverview


class MemoryOut(View):
    """Memory for attention state, in bytes."""

    budget: int
    used: int
    working: int
    blocks: int
    pressure: str


class DiskOut(View):
    """The disk, in bytes; `other` is what the ledger and its backup take of the budget."""

    budget: int
    used: int
    other: int
    files: int
    queue_budget: int
    queue_used: int
    problem: str


class CacheOut(View):
    """The cache at a glance; rates and ratios are null before there is anything to divide."""

    model_config = shown_as(examples.CACHE)

    object: Literal["cache"] = "cache"
    memory: MemoryOut
    disk: DiskOut
    agents: dict[str, int]
    replies: int
    reuse: ReuseOut
    hit_rates: dict[str, float | None]
    dedup_ratio: float | None
    counters: dict[str, int]
    live_requests: int

    @classmethod
    def of(cls, seen: CacheOverview) -> "CacheOut":
        """Show the figures."""
        return cls(
            memory=MemoryOut(
                budget=seen.memory_budget,
                used=seen.memory_used,
                working=seen.memory_working,
                blocks=seen.num_blocks,
                pressure=seen.pressure,
            ),
            disk=DiskOut(
                budget=seen.disk_budget,
                used=seen.disk_used,
                other=seen.disk_other,
                files=seen.num_files,
                queue_budget=seen.queue_budget,
                queue_used=seen.queue_used,
                problem=seen.problem,
            ),
            agents={tier.value: count for tier, count in seen.tiers},
            replies=seen.num_replies,
            reuse=ReuseOut.of(seen.reuse),
            hit_rates=_hit_rates(seen.reuse),
            dedup_ratio=_ratio(seen.logical_bytes, seen.unique_bytes),
            counters=_counters(seen),
            live_requests=seen.num_live,
        )


class EvictOut(View):
    """Where an agent's state is after it was evicted."""

    model_config = shown_as({"agent_id": "coder", "state": examples.STATE})

    agent_id: str
    state: StateOut


class PrefetchOut(View):
    """How many parts are being read."""

    model_config = shown_as({"agent_id": "coder", "parts": 3})

    agent_id: str
    parts: int


class CollectOut(View):
    """What a collection freed."""

    model_config = shown_as({"freed_bytes": 33690112})

    freed_bytes: int


def _counters(seen: CacheOverview) -> dict[str, int]:
    """Show what happened to blocks."""
    counts = seen.counts
    names = ("sealed", "evicted", "restored", "written", "corrupt")
    return {name: getattr(counts, name) for name in names}


def _hit_rates(reuse: Reuse) -> dict[str, float | None]:
    total = reuse.reused + reuse.computed
    found = {"hot": reuse.hot, "pool": reuse.pool, "disk": reuse.disk, "all": reuse.reused}
    return {name: _ratio(count, total) for name, count in found.items()}


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
