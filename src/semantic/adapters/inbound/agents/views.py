"""Response bodies for agents and turns, with examples for the OpenAPI document.

A view reads each field from the attribute of a domain object that has the same name, or the one
that `validation_alias` names.
"""

from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import AliasPath, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from semantic.adapters.inbound.wire import CacheExplanation
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
from semantic.domain.events import MissReason
from semantic.domain.sampling import FinishReason
from semantic.ports.inbound import BranchComparison, Explanation

Json = dict[str, Any]
EXAMPLE_TURN, _PARENT = "turn_57d6c033ac4c047f4192f7f7", "turn_0a31c8f2b4d94e6f83a1c7d2"
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
_STARTS = {
    Tier.HOT: "starts from memory",
    Tier.WARM: "reads its KV cache from disk",
    Tier.COLD: "computes most of its prompt again",
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
        return cls.model_validate(value)

    @classmethod
    def json_of(cls, value: object) -> Json:
        return cls.of(value).model_dump(mode="json")

    @classmethod
    def example(cls) -> Json:
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
    reusable_tokens: int = Field(
        description="tokens that the next turn does not compute", examples=[731]
    )
    note: str = Field(
        description="why the next turn cannot use the stored KV cache; empty if it can",
        examples=[""],
    )
    block: Annotated[str | None, BeforeValidator(_short)] = Field(
        description="the last block of its KV cache", examples=["9f2c44a01b7e"]
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
    head: str | None = Field(validation_alias=AliasPath("agent", "head"), examples=[EXAMPLE_TURN])
    turns: int = Field(validation_alias=AliasPath("agent", "num_turns"), examples=[3])
    tokens: int = Field(validation_alias="num_tokens", examples=[732])
    busy: bool = Field(validation_alias="is_busy", examples=[False])
    state: StateOut
    settings: Annotated[Json, BeforeValidator(_settings)] = Field(
        validation_alias="agent", examples=[_SETTINGS]
    )
    history: list[str] = Field(
        description="its latest turns, newest first", examples=[[EXAMPLE_TURN, _PARENT]]
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
    accepted_by_source: dict[str, int] = Field(examples=[{"memory": 5}])


class TimingOut(View):
    """How long a reply took."""

    first_token_s: float = Field(
        description="seconds from the request to the first token", examples=[0.21]
    )
    decode_s: float = Field(
        description="seconds from the first token to the last one", examples=[0.25]
    )


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
        case ImagePart():
            sizes: Json = {"width": part.width, "height": part.height}
            return {"type": "image", "media_type": part.media_type, "sha256": part.digest, **sizes}
        case ToolReferencePart(name):
            return {"type": "tool_reference", "tool_name": name}


class MessageOut(View):
    """A message; `content` is its parts."""

    role: Role = Field(examples=["assistant"])
    content: list[Annotated[Json, BeforeValidator(_part)]] = Field(
        validation_alias="parts", examples=[[{"type": "text", "text": "Use a set."}]]
    )


class MissOut(View):
    """Why a prompt did not reuse the KV cache of an earlier turn."""

    reason: MissReason = Field(examples=["tools_changed"])
    missed_tokens: int = Field(validation_alias="num_tokens", examples=[11204])
    changed_tools: list[str] = Field(validation_alias="names", examples=[["grep", "glob", "ls"]])
    text: str = Field(
        examples=["tool list changed: 3 tools added at position 2, 11,204 tokens recomputed"]
    )


class TurnOut(View):
    """One turn: its messages, and the tokens it used and reused."""

    object: Literal["turn"] = "turn"
    id: str = Field(examples=[EXAMPLE_TURN])
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
    timing: TimingOut | None = Field(description="null in turns of older servers")
    reuse: ReuseOut
    miss: MissOut | None
    dropped_messages: int = Field(validation_alias="num_dropped", examples=[0])
    summarised_messages: int = Field(
        validation_alias="num_summarised",
        description="messages that a summary replaced in this turn",
        examples=[0],
    )
    repairs: list[str] = Field(
        description="rules that changed the prompt before it was computed", examples=[[]]
    )
    starts_anew: bool = Field(examples=[False])


class TurnList(View):
    """Turns, latest first; `next` is the cursor of the page with earlier ones."""

    object: Literal["list"] = "list"
    data: list[TurnOut]
    next: str | None = Field(examples=[EXAMPLE_TURN])


class ComparisonOut(View):
    """Two agents: the turns that they share, and those of each after that, oldest first."""

    object: Literal["agent.comparison"] = "agent.comparison"
    first_agent: str = Field(examples=["coder"])
    second_agent: str = Field(examples=["coder-2"])
    common_turns: int = Field(examples=[12])
    common_tokens: int = Field(description="computed once for both", examples=[3412])
    fork: str | None = Field(description="the last turn of both", examples=[_PARENT])
    first: list[TurnOut]
    second: list[TurnOut]
    first_turns: int = Field(description="how many there are; `first` has the oldest", examples=[1])
    second_turns: int = Field(examples=[1])

    @classmethod
    def between(cls, first: str, second: str, found: BranchComparison) -> Self:
        return cls(
            first_agent=first,
            second_agent=second,
            common_turns=found.num_common,
            common_tokens=found.fork.num_tokens if found.fork else 0,
            fork=found.fork.id if found.fork else None,
            first=[TurnOut.of(turn) for turn in found.first],
            second=[TurnOut.of(turn) for turn in found.second],
            first_turns=found.num_turns[0],
            second_turns=found.num_turns[1],
        )


class TimelineEntry(View):
    """What the prompt of one turn reused and computed, and why it did not reuse more."""

    turn_id: str = Field(validation_alias="id", examples=[EXAMPLE_TURN])
    agent_id: str = Field(examples=["coder"])
    created_at: float = Field(examples=[1767225661.5])
    prompt_tokens: int = Field(validation_alias=AliasPath("usage", "prompt_tokens"), examples=[724])
    reuse: ReuseOut
    miss: MissOut | None


class Timeline(View):
    """Turns in the order in which they were made, latest first."""

    object: Literal["list"] = "list"
    data: list[TimelineEntry]


class ReplyOut(View):
    """A reply; `turn_id` is null if no turn was logged, such as after a rewind meanwhile."""

    object: Literal["agent.reply"] = "agent.reply"
    agent_id: str = Field(examples=["coder"])
    turn_id: str | None = Field(examples=[EXAMPLE_TURN])
    model: str = Field(examples=["smollm2-135m-instruct"])
    message: MessageOut
    text: str = Field(examples=["Use a set."])
    finish_reason: FinishReason = Field(examples=["end_turn"])
    stop_sequence: str | None = Field(examples=[None])
    usage: UsageOut
    timing: TimingOut | None = Field(description="null if no turn was logged")
    reuse: ReuseOut
    dropped_messages: int = Field(examples=[0])
    summarised_messages: int = Field(examples=[0])
    durable: bool | None = Field(
        None,
        description="whether the turn is durable on disk; null unless durability is sync",
        examples=[True],
    )
    cache_explain: CacheExplanation | None = Field(
        None,
        description="what the prompt reused, and why not more; null without `X-Cache-Explain`",
    )


class CompactedOut(View):
    """A branch that continues an agent from a summary; the agent itself is unchanged."""

    object: Literal["agent.compaction"] = "agent.compaction"
    agent: AgentOut = Field(validation_alias="view", description="the branch")
    parent: str = Field(validation_alias="parent_id", examples=["coder"])
    summary: str = Field(examples=["The user asked for a parser…"])
    tokens_before: int = Field(validation_alias="num_before", examples=[24_310])
    tokens_after: int = Field(validation_alias="num_after", examples=[1_954])
    summarised_messages: int = Field(validation_alias="num_summarised", examples=[38])
    kept_messages: int = Field(validation_alias="num_kept", examples=[4])
    usage: UsageOut = Field(
        validation_alias="summary_usage", description="the request that wrote the summary"
    )
    reuse: ReuseOut = Field(
        validation_alias="summary_reuse", description="where that request's prompt came from"
    )
    computed_tokens: int = Field(
        validation_alias=AliasPath("reuse", "computed"),
        description="tokens of the branch that were computed, ahead of its next turn",
        examples=[1_310],
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
    turn_id: str | None = Field(examples=[EXAMPLE_TURN])
    prompt_tokens: int = Field(examples=[724])
    reuse: ReuseOut
    miss: MissOut | None
    diverged: DivergenceOut | None
    repairs: list[str] = Field(
        description="rules that changed the prompt before it was computed", examples=[[]]
    )
    next: StateOut
    note: str = Field(
        description="why the turn could not use the previous turn's KV cache; empty if it could",
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
            miss=MissOut.of(turn.miss) if turn and turn.miss else None,
            diverged=DivergenceOut.of(divergence) if divergence else None,
            repairs=list(turn.repairs) if turn else [],
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
    if reuse.ahead:
        text += f" {reuse.ahead:,} of these were computed while the agent's tools ran."
    if divergence is not None:
        text += f" It diverged from the stored conversation at token {divergence.index:,}."
    if turn.miss is not None:
        text += f" {turn.miss.text[0].upper()}{turn.miss.text[1:]}."
    if turn.repairs:
        text += f" Before that, rules changed the prompt: {', '.join(turn.repairs)}."
    if turn.num_dropped:
        text += f" {turn.num_dropped} of the oldest messages were dropped to make room."
    if turn.num_summarised:
        text += f" A summary replaced {turn.num_summarised} of the oldest messages (compaction)."
    state = explanation.state
    start = f"The next turn {_STARTS[state.tier]} and reuses {state.reusable_tokens:,} tokens."
    return " ".join(filter(None, (text, explanation.note, start, state.note)))
