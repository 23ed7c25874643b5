"""Response bodies of the agent API, with examples for the OpenAPI document.

A view reads each field from the attribute of a domain object that has the same name, or the one
that `validation_alias` names.
"""

from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import AliasPath, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from semantic.application.cache.index import BlockNode
from semantic.application.cache.watch import BlockPage
from semantic.domain.agents import Agent, Reuse, Tier
from semantic.domain.blocks import BlockName
from semantic.domain.chat import (
    ImagePart,
    Part,
    Role,
    TextPart,
    ThinkingPart,
    ToolReferencePart,
    ToolResultPart,
    ToolUsePart,
)
from semantic.domain.sampling import FinishReason
from semantic.ports.inbound import CacheOverview, Explanation

Json = dict[str, Any]
_TURN, _PARENT = "turn_57d6c033ac4c047f4192f7f7", "turn_0a31c8f2b4d94e6f83a1c7d2"
_SETTINGS: Json = {
    "system": "You write Python.",
    "tools": [],
    "model": None,
    "class": "interactive",
    "weight": 1.0,
    "pin": False,
    "ttl_s": None,
    "quota": {"max_bytes": None, "max_turns": None},
    "overflow": "error",
    "labels": {"project": "web"},
}


def _show_example(schema: Json, view: "type[View]") -> None:
    schema["examples"] = [view.example()]


class View(BaseModel):
    """Base of all response bodies; builds their examples from those of the fields."""

    model_config = ConfigDict(
        extra="forbid",
        from_attributes=True,
        populate_by_name=True,
        json_schema_extra=_show_example,
    )

    @classmethod
    def of(cls, value: object) -> Self:
        """Build the view of a domain object."""
        return cls.model_validate(value)

    @classmethod
    def json_of(cls, value: object) -> Json:
        """Build the view of a domain object as JSON, for an event of a stream."""
        return cls.of(value).model_dump(mode="json")

    @classmethod
    def example(cls) -> Json:
        """Return an example of this body."""
        return {name: _sample(entry) for name, entry in cls.model_fields.items()}


def _sample(entry: FieldInfo) -> object:
    if entry.examples:
        return entry.examples[0]
    kinds = (entry.annotation, *get_args(entry.annotation))
    inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, View)]
    if not inner:
        return entry.default
    example = inner[0].example()
    return [example] if get_origin(entry.annotation) is list else example


# -- agents and turns ----------------------------------------------------------------------------


def _short(name: BlockName | str | None) -> str | None:
    return name.short if isinstance(name, BlockName) else name


class StateOut(View):
    """Where the KV cache is."""

    tier: Tier = Field(examples=["hot"])
    tokens: int = Field(validation_alias="num_tokens", examples=[731])
    memory_tokens: int = Field(examples=[731])
    disk_tokens: int = Field(examples=[731])
    memory_bytes: int = Field(examples=[33685504])
    disk_bytes: int = Field(examples=[33690112])
    reusable_tokens: int = Field(description="what the next turn need not compute", examples=[731])
    note: str = Field(
        description="why the next turn cannot use what was kept; empty if it can", examples=[""]
    )
    block: Annotated[str | None, BeforeValidator(_short)] = Field(
        description="its last block", examples=["9f2c44a01b7e"]
    )


def _settings(agent: Agent | Json) -> Json:
    if isinstance(agent, dict):
        return agent
    profile = agent.profile
    return {
        "system": profile.system,
        "tools": [
            {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.is_strict,
            }
            for tool in profile.tools
        ],
        "model": profile.model,
        "class": agent.service_class.value,
        "weight": agent.weight,
        "pin": agent.is_pinned,
        "ttl_s": agent.ttl_s,
        "quota": {"max_bytes": agent.quota.max_bytes, "max_turns": agent.quota.max_turns},
        "overflow": profile.overflow.value,
        "labels": dict(agent.labels),
    }


class AgentOut(View):
    """An agent: its settings, its latest turn, and where its KV cache is."""

    object: Literal["agent"] = "agent"
    id: str = Field(validation_alias=AliasPath("agent", "id"), examples=["coder"])
    created_at: float = Field(
        validation_alias=AliasPath("agent", "created_at"), examples=[1767225600.0]
    )
    last_used: float = Field(
        validation_alias=AliasPath("agent", "last_used"), examples=[1767225661.5]
    )
    head: str | None = Field(validation_alias=AliasPath("agent", "head"), examples=[_TURN])
    turns: int = Field(validation_alias=AliasPath("agent", "num_turns"), examples=[3])
    tokens: int = Field(validation_alias="num_tokens", examples=[732])
    busy: bool = Field(validation_alias="is_busy", examples=[False])
    state: StateOut
    settings: Annotated[Json, BeforeValidator(_settings)] = Field(
        validation_alias="agent", examples=[_SETTINGS]
    )
    history: list[str] = Field(
        description="its latest turns, newest first", examples=[[_TURN, _PARENT]]
    )


class ImportedOut(AgentOut):
    """An imported agent, and whether its KV cache was imported or is recomputed."""

    import_state: Literal["imported", "recomputed"] = Field(examples=["imported"])
    import_reason: str = Field(examples=["signed by this server"])


class AgentList(View):
    """A page of agents."""

    object: Literal["list"] = "list"
    data: list[AgentOut] = Field(validation_alias="agents")
    total: int = Field(validation_alias="num_matching", examples=[1])
    next: str | None = Field(validation_alias="cursor", examples=[None])


class ReuseOut(View):
    """Where the tokens of a prompt came from."""

    hot: int = Field(examples=[701])
    pool: int = Field(examples=[0])
    disk: int = Field(examples=[0])
    computed: int = Field(examples=[23])


class UsageOut(View):
    """Tokens of one turn."""

    prompt_tokens: int = Field(examples=[724])
    completion_tokens: int = Field(examples=[8])
    cached_tokens: int = Field(validation_alias="cache_read_tokens", examples=[701])
    thinking_tokens: int = Field(examples=[0])
    accepted_prediction_tokens: int = Field(examples=[5])
    rejected_prediction_tokens: int = Field(examples=[1])


def _part(part: Part | ToolReferencePart) -> Json:
    match part:
        case TextPart(text):
            return {"type": "text", "text": text}
        case ThinkingPart():
            return {"type": "thinking", "thinking": part.text, "signature": part.signature}
        case ToolUsePart(call_id, name, is_cut=True):
            named = {"type": "incomplete_tool_use", "id": call_id, "name": name}
            return {**named, "partial_input": part.written}
        case ToolUsePart(call_id, name, arguments):
            return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}
        case ToolResultPart(call_id, content, is_error):
            parts = [_part(inner) for inner in content]
            named = {"type": "tool_result", "tool_use_id": call_id}
            return {**named, "content": parts, "is_error": is_error}
        case ImagePart(media_type):
            return {"type": "image", "media_type": media_type}
        case ToolReferencePart(name):
            return {"type": "tool_reference", "tool_name": name}


class MessageOut(View):
    """A message; `content` is its parts."""

    role: Role = Field(examples=["assistant"])
    content: list[Annotated[Json, BeforeValidator(_part)]] = Field(
        validation_alias="parts", examples=[[{"type": "text", "text": "Use a set."}]]
    )


class TurnOut(View):
    """One turn: its messages, and the tokens it used and reused."""

    object: Literal["turn"] = "turn"
    id: str = Field(examples=[_TURN])
    parent: str | None = Field(examples=[_PARENT])
    agent_id: str = Field(examples=["coder"])
    created_at: float = Field(examples=[1767225661.5])
    model: Annotated[str | None, BeforeValidator(lambda name: name or None)] = Field(
        examples=["smollm2-135m-instruct"]
    )
    messages: list[MessageOut]
    finish_reason: FinishReason | None = Field(validation_alias="reason", examples=["end_turn"])
    tokens: int = Field(validation_alias="num_tokens", examples=[732])
    new_tokens: Annotated[int, BeforeValidator(len)] = Field(
        validation_alias="tokens", examples=[30]
    )
    usage: UsageOut
    reuse: ReuseOut
    dropped_messages: int = Field(validation_alias="num_dropped", examples=[0])
    starts_anew: bool = Field(examples=[False])


class TurnList(View):
    """Turns, latest first; `next` is the cursor of the page with earlier ones."""

    object: Literal["list"] = "list"
    data: list[TurnOut]
    next: str | None = Field(examples=[_TURN])


class ReplyOut(View):
    """A reply; `turn_id` is null if no turn was logged, such as after a cancel."""

    object: Literal["agent.reply"] = "agent.reply"
    agent_id: str = Field(examples=["coder"])
    turn_id: str | None = Field(examples=[_TURN])
    model: str = Field(examples=["smollm2-135m-instruct"])
    message: MessageOut
    text: str = Field(examples=["Use a set."])
    finish_reason: FinishReason = Field(examples=["end_turn"])
    stop_sequence: str | None = Field(examples=[None])
    usage: UsageOut
    reuse: ReuseOut
    dropped_messages: int = Field(examples=[0])
    durable: bool | None = Field(
        None,
        description="whether the turn is safe on disk; null unless the setting durability is sync",
        examples=[True],
    )


class DivergenceOut(View):
    """Where a prompt diverged from the stored conversation."""

    from_turn: str = Field(validation_alias="turn_id", examples=[_PARENT])
    index: int = Field(examples=[412])
    before: str = Field(examples=["Today is "])
    expected: str = Field(examples=["Monday."])
    actual: str = Field(examples=["Tuesday."])


class ExplanationOut(View):
    """What a turn reused and why, and what the next turn starts from."""

    object: Literal["agent.explanation"] = "agent.explanation"
    agent_id: str = Field(examples=["coder"])
    turn_id: str | None = Field(examples=[_TURN])
    prompt_tokens: int = Field(examples=[724])
    reuse: ReuseOut
    diverged: DivergenceOut | None
    next: StateOut
    note: str = Field(
        description="why the turn could not use the KV cache of the one before; empty if it could",
        examples=[""],
    )
    summary: str = Field(examples=["Of the latest prompt's 724 tokens, 701 were reused."])

    @classmethod
    def about(cls, agent_id: str, explanation: Explanation) -> Self:
        turn, divergence = explanation.turn, explanation.divergence
        return cls(
            agent_id=agent_id,
            turn_id=turn.id if turn else None,
            prompt_tokens=turn.usage.prompt_tokens if turn else 0,
            reuse=ReuseOut.of(turn.reuse if turn else Reuse()),
            diverged=DivergenceOut.of(divergence) if divergence else None,
            next=StateOut.of(explanation.state),
            note=explanation.note,
            summary=_summary(explanation),
        )


def _summary(explanation: Explanation) -> str:
    turn, divergence = explanation.turn, explanation.divergence
    if turn is None:
        return "The agent has had no turn yet."
    reuse, total = turn.reuse, turn.usage.prompt_tokens
    text = (
        f"Of the latest prompt's {total:,} tokens, {reuse.reused:,} were reused ({reuse.hot:,} "
        f"from an open working copy, {reuse.pool:,} from memory, {reuse.disk:,} from disk)."
    )
    if divergence is not None:
        text += f" It diverged from the stored conversation at token {divergence.index:,}."
    if turn.num_dropped:
        text += f" {turn.num_dropped} of the oldest messages were dropped to make room."
    state = explanation.state
    start = f"The next turn starts {state.tier.value} and reuses {state.reusable_tokens:,} tokens."
    return " ".join(filter(None, (text, explanation.note, start, state.note)))


# -- the cache -----------------------------------------------------------------------------------


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
    """A device's own memory in bytes, used by weights, sequences and anything else on it."""

    used: int = Field(examples=[18253611008])
    budget: int = Field(validation_alias="total", examples=[150754820096])


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
        description="null if the device has none of its own, as a CPU, or is not queried"
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
        """Build the view of the cache's statistics."""
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
    mark: int = Field(description="`since` of the next request", examples=[1767225661500000])
    total: int = Field(examples=[9])
    blocks: list[list[str | int]] = Field(
        examples=[[["9f2c44a01b7e", "51b0de02c9aa", 256, 256, 11796480, 0, 1767225661, 0]]]
    )
    gone: list[str] = Field(examples=[[]])
    next: str | None = Field(description="`after` of the next page", examples=[None])
    stale: bool = Field(description="`since` is too old: read all pages", examples=[False])

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
        *(block.name.short, block.parent.short, block.start, block.num_tokens),
        *(block.memory_bytes, block.disk_bytes, int(block.last_used), int(block.num_pins > 0)),
    ]


class RunningOut(View):
    """A waiting or running request, and its progress."""

    agent_id: str = Field(examples=["coder"])
    turn_id: str = Field(examples=[_TURN])
    state: Literal["queued", "prefill", "decoding"] = Field(examples=["decoding"])
    prompt_tokens: int = Field(examples=[724])
    reused_tokens: int = Field(examples=[701])
    computed_tokens: int = Field(
        description="prompt tokens that are ready, reused or computed", examples=[724]
    )
    generated_tokens: int = Field(examples=[5])
    max_tokens: int = Field(examples=[2048])
    age_s: float = Field(description="seconds since it arrived", examples=[0.31])


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
