"""What the agent API answers: models that describe themselves to clients."""

from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from semantic.domain.agents import Agent, Reuse, Turn
from semantic.domain.chat import (
    ImagePart,
    Message,
    Part,
    TextPart,
    ThinkingPart,
    ToolReferencePart,
    ToolResultPart,
    ToolUsePart,
)
from semantic.domain.events import Usage
from semantic.ports.inbound import AgentView, DivergenceView, Explanation, ImportedAgent, StateView

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
    """What all answers have in common: they show what they look like, from their fields."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_show_example)

    @classmethod
    def example(cls) -> Json:
        """One such answer."""
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


class StateOut(View):
    """Where attention state is."""

    tier: Literal["hot", "warm", "cold"] = Field(examples=["hot"])
    tokens: int = Field(examples=[731])
    memory_tokens: int = Field(examples=[731])
    disk_tokens: int = Field(examples=[731])
    memory_bytes: int = Field(examples=[33685504])
    disk_bytes: int = Field(examples=[33690112])

    @classmethod
    def of(cls, state: StateView) -> "StateOut":
        """Show a state."""
        return cls(
            tier=state.tier.value,
            tokens=state.num_tokens,
            memory_tokens=state.memory_tokens,
            disk_tokens=state.disk_tokens,
            memory_bytes=state.memory_bytes,
            disk_bytes=state.disk_bytes,
        )


class AgentOut(View):
    """An agent: its settings, where it is in its log, and where its state is."""

    object: Literal["agent"] = "agent"
    id: str = Field(examples=["coder"])
    created_at: float = Field(examples=[1767225600.0])
    last_used: float = Field(examples=[1767225661.5])
    head: str | None = Field(examples=[_TURN])
    turns: int = Field(examples=[3])
    tokens: int = Field(examples=[732])
    busy: bool = Field(examples=[False])
    state: StateOut
    settings: Json = Field(examples=[_SETTINGS])

    @classmethod
    def of(cls, view: AgentView) -> "AgentOut":
        """Show an agent."""
        agent = view.agent
        return cls(
            id=agent.id,
            created_at=agent.created_at,
            last_used=agent.last_used,
            head=agent.head,
            turns=agent.num_turns,
            tokens=view.num_tokens,
            busy=view.is_busy,
            state=StateOut.of(view.state),
            settings=_settings(agent),
        )


class ImportedOut(AgentOut):
    """An agent that came in as a file, and what became of its attention state."""

    import_state: Literal["imported", "recomputed"] = Field(examples=["imported"])
    import_reason: str = Field(examples=["signed by this server"])

    @classmethod
    def imported(cls, view: AgentView, taken: ImportedAgent) -> "ImportedOut":
        """Show an agent that was taken in."""
        return cls(
            **dict(AgentOut.of(view)),
            import_state="imported" if taken.has_state else "recomputed",
            import_reason=taken.reason,
        )


class AgentList(View):
    """A page of agents."""

    object: Literal["list"] = "list"
    data: list[AgentOut]
    total: int = Field(examples=[1])
    next: str | None = Field(examples=[None])


class ReuseOut(View):
    """Where the tokens of a prompt came from."""

    hot: int = Field(examples=[701])
    pool: int = Field(examples=[0])
    disk: int = Field(examples=[0])
    computed: int = Field(examples=[23])

    @classmethod
    def of(cls, reuse: Reuse) -> "ReuseOut":
        """Show what was reused."""
        return cls(hot=reuse.hot, pool=reuse.pool, disk=reuse.disk, computed=reuse.computed)


class UsageOut(View):
    """Tokens of one turn."""

    prompt_tokens: int = Field(examples=[724])
    completion_tokens: int = Field(examples=[8])
    cached_tokens: int = Field(examples=[701])
    thinking_tokens: int = Field(examples=[0])

    @classmethod
    def of(cls, usage: Usage) -> "UsageOut":
        """Show what was used."""
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cache_read_tokens,
            thinking_tokens=usage.thinking_tokens,
        )


class MessageOut(View):
    """A message; `content` is its parts."""

    role: Literal["system", "user", "assistant", "tool"] = Field(examples=["assistant"])
    content: list[Json] = Field(examples=[[{"type": "text", "text": "Use a set."}]])

    @classmethod
    def of(cls, message: Message) -> "MessageOut":
        """Show a message."""
        return cls(role=message.role.value, content=[part_out(part) for part in message.parts])


class TurnOut(View):
    """One turn: what was said, and what it cost."""

    object: Literal["turn"] = "turn"
    id: str = Field(examples=[_TURN])
    parent: str | None = Field(examples=[_PARENT])
    agent_id: str = Field(examples=["coder"])
    created_at: float = Field(examples=[1767225661.5])
    model: str | None = Field(examples=["smollm2-135m-instruct"])
    messages: list[MessageOut]
    finish_reason: str | None = Field(examples=["end_turn"])
    tokens: int = Field(examples=[732])
    new_tokens: int = Field(examples=[30])
    usage: UsageOut
    reuse: ReuseOut
    dropped_messages: int = Field(examples=[0])
    starts_anew: bool = Field(examples=[False])

    @classmethod
    def of(cls, turn: Turn) -> "TurnOut":
        """Show a turn."""
        return cls(
            id=turn.id,
            parent=turn.parent,
            agent_id=turn.agent_id,
            created_at=turn.created_at,
            model=turn.model or None,
            messages=[MessageOut.of(message) for message in turn.messages],
            finish_reason=turn.reason.value if turn.reason else None,
            tokens=turn.num_tokens,
            new_tokens=len(turn.tokens),
            usage=UsageOut.of(turn.usage),
            reuse=ReuseOut.of(turn.reuse),
            dropped_messages=turn.num_dropped,
            starts_anew=turn.parent is not None and turn.holds_all_messages,
        )


class TurnList(View):
    """Turns, the latest first; `next` asks for those before."""

    object: Literal["list"] = "list"
    data: list[TurnOut]
    next: str | None = Field(examples=[_TURN])


class ReplyOut(View):
    """A reply; `turn_id` is null where nothing was logged, such as after a cancel."""

    object: Literal["agent.reply"] = "agent.reply"
    agent_id: str = Field(examples=["coder"])
    turn_id: str | None = Field(examples=[_TURN])
    model: str = Field(examples=["smollm2-135m-instruct"])
    message: MessageOut
    text: str = Field(examples=["Use a set."])
    finish_reason: str = Field(examples=["end_turn"])
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
    """Where a prompt left the conversation that was there."""

    from_turn: str = Field(examples=[_PARENT])
    index: int = Field(examples=[412])
    before: str = Field(examples=["Today is "])
    expected: str = Field(examples=["Monday."])
    actual: str = Field(examples=["Tuesday."])

    @classmethod
    def of(cls, left: DivergenceView) -> "DivergenceOut":
        """Show where it was."""
        return cls(
            from_turn=left.turn_id,
            index=left.index,
            before=left.before,
            expected=left.expected,
            actual=left.actual,
        )


class ExplanationOut(View):
    """What the latest turn cost and why, and what the next one starts from."""

    object: Literal["agent.explanation"] = "agent.explanation"
    agent_id: str = Field(examples=["coder"])
    turn_id: str | None = Field(examples=[_TURN])
    prompt_tokens: int = Field(examples=[724])
    reuse: ReuseOut
    diverged: DivergenceOut | None
    next: StateOut
    summary: str = Field(examples=["Of the latest prompt's 724 tokens 701 were reused."])

    @classmethod
    def of(cls, agent_id: str, found: Explanation) -> "ExplanationOut":
        """Show an explanation."""
        turn, left = found.turn, found.divergence
        return cls(
            agent_id=agent_id,
            turn_id=turn.id if turn else None,
            prompt_tokens=turn.usage.prompt_tokens if turn else 0,
            reuse=ReuseOut.of(turn.reuse if turn else Reuse()),
            diverged=DivergenceOut.of(left) if left else None,
            next=StateOut.of(found.state),
            summary=_summary(found),
        )


def part_out(part: Part | ToolReferencePart) -> Json:
    """Show a part of a message."""
    match part:
        case TextPart(text):
            return {"type": "text", "text": text}
        case ThinkingPart():
            return {"type": "thinking", "thinking": part.text, "signature": part.signature}
        case ToolUsePart(call_id, name, arguments):
            return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}
        case ToolResultPart(call_id, content, is_error):
            shown = [part_out(inner) for inner in content]
            named = {"type": "tool_result", "tool_use_id": call_id}
            return {**named, "content": shown, "is_error": is_error}
        case ImagePart(media_type):
            return {"type": "image", "media_type": media_type}
        case ToolReferencePart(name):
            return {"type": "tool_reference", "tool_name": name}


def _settings(agent: Agent) -> Json:
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


def _summary(found: Explanation) -> str:
    turn, left = found.turn, found.divergence
    if turn is None:
        return "The agent has had no turn yet."
    reuse, total = turn.reuse, turn.usage.prompt_tokens
    said = (
        f"Of the latest prompt's {total} tokens {reuse.reused} were reused ({reuse.hot} from an "
        f"open working copy, {reuse.pool} from memory, {reuse.disk} from disk)."
    )
    if left is not None:
        said += f" It left the conversation at token {left.index}."
    if turn.num_dropped:
        said += f" {turn.num_dropped} of the oldest messages were dropped to make room."
    return f"{said} The next turn starts {found.state.tier.value}."
