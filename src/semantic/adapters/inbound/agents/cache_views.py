"""Response bodies for the KV cache and running requests; see `views.py`."""

from typing import Literal, Self

from pydantic import Field

from semantic.adapters.inbound.agents.views import EXAMPLE_TURN, ReuseOut, StateOut, View
from semantic.application.cache.index import BlockNode
from semantic.application.cache.watch import BlockPage
from semantic.ports.inbound import CacheOverview


class MemoryOut(View):
    """Memory for the KV cache, in bytes."""

    budget: int = Field(validation_alias="memory_budget", examples=[2**32])
    used: int = Field(validation_alias="memory_used", examples=[101056512])
    working: int = Field(validation_alias="memory_working", examples=[33685504])
    blocks: int = Field(validation_alias="num_blocks", examples=[9])
    pressure: str = Field(examples=["low"])


class DiskOut(View):
    """Disk usage in bytes; `other` is the part of the budget that the ledger and its backup use."""

    budget: int = Field(validation_alias="disk_budget", examples=[20 * 2**30])
    used: int = Field(validation_alias="disk_used", examples=[67380224])
    other: int = Field(validation_alias="disk_other", examples=[1245184])
    files: int = Field(validation_alias="num_files", examples=[9])
    queue_budget: int = Field(examples=[2**29])
    queue_used: int = Field(examples=[0])
    problem: str = Field(examples=[""])


class DeviceOut(View):
    """A device's own memory in bytes; `cached` are buffers that the backend's library reuses."""

    used: int = Field(examples=[18253611008])
    budget: int = Field(validation_alias="total", examples=[150754820096])
    weights: int = Field(examples=[16060522496])
    sequences: int = Field(examples=[1073741824])
    cached: int = Field(examples=[536870912])
    scratch: int = Field(examples=[582733776])


class CountersOut(View):
    """Numbers of block operations since the server started."""

    sealed: int = Field(examples=[120])
    evicted: int = Field(examples=[3])
    restored: int = Field(examples=[14])
    written: int = Field(examples=[118])
    corrupt: int = Field(examples=[0])


class CacheOut(View):
    """The state of the cache; rates and ratios are null while their denominator is 0."""

    object: Literal["cache"] = "cache"
    memory: MemoryOut
    disk: DiskOut
    device: DeviceOut | None = Field(
        description="null if the device has no memory of its own (a CPU), or is not queried"
    )
    agents: dict[str, int] = Field(examples=[{"hot": 3, "warm": 12, "cold": 1}])
    replies: int = Field(examples=[40])
    reuse: ReuseOut
    hit_rates: dict[str, float | None] = Field(
        examples=[{"hot": 0.75, "pool": 0.0969, "disk": 0.0281, "all": 0.875}]
    )
    dedup_ratio: float | None = Field(examples=[2.4])
    counters: CountersOut
    live_requests: int = Field(examples=[1])

    @classmethod
    def about(cls, cache: CacheOverview) -> Self:
        reuse = cache.reuse
        hits = {"hot": reuse.hot, "pool": reuse.pool, "disk": reuse.disk, "all": reuse.reused}
        num_prompt = reuse.reused + reuse.computed
        return cls(
            memory=MemoryOut.of(cache),
            disk=DiskOut.of(cache),
            device=DeviceOut.of(cache.device) if cache.device else None,
            agents={tier.value: count for tier, count in cache.tiers},
            replies=cache.num_replies,
            reuse=ReuseOut.of(reuse),
            hit_rates={name: _ratio(count, num_prompt) for name, count in hits.items()},
            dedup_ratio=_ratio(cache.logical_bytes, cache.unique_bytes),
            counters=CountersOut.of(cache.counters),
            live_requests=cache.num_live,
        )


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


class BlocksOut(View):
    """Blocks as compact rows, one row per block.

    A row is `[name, parent, start, tokens, memory_bytes, disk_bytes, last_used, pinned]`. The
    parent of a first block does not name a block.
    """

    object: Literal["cache.blocks"] = "cache.blocks"
    mark: int = Field(
        description="send it as `since` in the next request", examples=[1767225661500000]
    )
    total: int = Field(examples=[9])
    blocks: list[list[str | int]] = Field(
        examples=[[["9f2c44a01b7e", "51b0de02c9aa", 256, 256, 11796480, 0, 1767225661, 0]]]
    )
    gone: list[str] = Field(examples=[[]])
    next: str | None = Field(description="send it as `after` for the next page", examples=[None])
    stale: bool = Field(description="`since` is too old; read all pages again", examples=[False])

    @classmethod
    def about(cls, page: BlockPage) -> Self:
        """Build the view of a page, without validation: the values are the server's own."""
        return cls.model_construct(
            mark=page.mark,
            total=page.num_blocks,
            blocks=[_row(block) for block in page.blocks],
            gone=[name.short for name in page.gone],
            next=page.cursor,
            stale=page.is_stale,
        )


def _row(block: BlockNode) -> list[str | int]:
    return [
        block.name.short,
        block.parent.short,
        block.start,
        block.num_tokens,
        block.memory_bytes,
        block.disk_bytes,
        int(block.last_used),
        int(block.num_pins > 0),
    ]


class RunningOut(View):
    """A waiting or running request, and its progress."""

    agent_id: str = Field(examples=["coder"])
    turn_id: str = Field(examples=[EXAMPLE_TURN])
    state: Literal["queued", "prefill", "decoding"] = Field(examples=["decoding"])
    prompt_tokens: int = Field(examples=[724])
    reused_tokens: int = Field(examples=[701])
    computed_tokens: int = Field(
        description="prompt tokens reused or computed so far", examples=[724]
    )
    generated_tokens: int = Field(examples=[5])
    max_tokens: int = Field(examples=[2048])
    age_s: float = Field(description="seconds since the request arrived", examples=[0.31])


class RunningList(View):
    """Waiting and running requests, oldest first."""

    object: Literal["list"] = "list"
    data: list[RunningOut]


class EvictOut(View):
    """Where an agent's KV cache is after the eviction."""

    agent_id: str = Field(examples=["coder"])
    state: StateOut


class PrefetchOut(View):
    """The number of parts that are being read from disk."""

    agent_id: str = Field(examples=["coder"])
    parts: int = Field(examples=[3])


class CollectOut(View):
    """The bytes that a garbage collection freed."""

    freed_bytes: int = Field(examples=[33690112])
