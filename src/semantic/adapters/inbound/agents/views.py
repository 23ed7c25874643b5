"""What the agent API answers: models that describe themselves to clients."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from semantic.adapters.inbound.agents import examples
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
    Usage,
)
from semantic.ports.inbound import AgentView, DivergenceView, Explanation, ImportedAgent, StateView

Json = dict[str, Any]


def shown_as(example: Json) -> ConfigDict:
    """Put an example into the document."""
    return ConfigDict(json_schema_extra={"examples": [example]})


class View(BaseModel):
    """What all answers have in common."""

    model_config = ConfigDict(extra="forbid")


class StateOut(View):
    """Where attention state is."""

    tier: Literal["hot", "warm", "cold"]
    tokens: int
    memory_tokens: int
    disk_tokens: int
    memory_bytes: int
    disk_bytes: int

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

    model_config = shown_as(examples.AGENT)

    object: Literal["agent"] = "agent"
    id: str
    created_at: float
    last_used: float
    head: str | None
    turns: int
    tokens: int
    busy: bool
    state: StateOut
    settings: Json

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

    model_config = shown_as(examples.IMPORTED)

    import_state: Literal["imported", "recomputed"]
    import_reason: str

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

    model_config = shown_as(examples.AGENTS)

    object: Literal["list"] = "list"
    data: list[AgentOut]
    total: int
    next: str | None


class ReuseOut(View):
    """Where the tokens of a prompt came from."""

    hot: int
    pool: int
    disk: int
    computed: int

    @classmethod
    def of(cls, reuse: Reuse) -> "ReuseOut":
        """Show what was reused."""
        return cls(hot=reuse.hot, pool=reuse.pool, disk=reuse.disk, computed=reuse.computed)


class UsageOut(View):
    """Tokens of one turn."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    thinking_tokens: int

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

    role: Literal["system", "user", "assistant", "tool"]
    content: list[Json]

    @classmethod
    def of(cls, message: Message) -> "MessageOut":
        """Show a message."""
        return cls(role=message.role.value, content=[part_out(part) for part in message.parts])


class TurnOut(View):
    """One turn: what was said, and what it cost."""

    object: Literal["turn"] = "turn"
    id: str
    parent: str | None
    agent_id: str
    created_at: float
    model: str | None
    messages: list[MessageOut]
    finish_reason: str | None
    tokens: int
    new_tokens: int
    usage: UsageOut
    reuse: ReuseOut
    dropped_messages: int
    starts_anew: bool

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

    model_config = shown_as(examples.TURNS)

    object: Literal["list"] = "list"
    data: list[TurnOut]
    next: str | None


class ReplyOut(View):
    """A reply; `turn_id` is null where nothing was logged, such as after a cancel."""

    model_config = shown_as(examples.REPLY)

    object: Literal["agent.reply"] = "agent.reply"
    agent_id: str
    turn_id: str | None
    model: str
    message: MessageOut
    text: str
    finish_reason: str
    stop_sequence: str | None
    usage: UsageOut
    reuse: ReuseOut
    dropped_messages: int
    durable: bool | None = Field(
        None,
        description="whether the turn is safe on disk; null unless the setting durability is sync",
    )


class DivergenceOut(View):
    """Where a prompt left the conversation that was there."""

    from_turn: str
    index: int
    before: str
    expected: str
    actual: str

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

    model_config = shown_as(examples.EXPLANATION)

    object: Literal["agent.explanation"] = "agent.explanation"
    agent_id: str
    turn_id: str | None
    prompt_tokens: int
    reuse: ReuseOut
    diverged: DivergenceOut | None
    next: StateOut
    summary: str

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
