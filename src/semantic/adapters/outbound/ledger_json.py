"""Agents, turns and what was said in them, as JSON text for the ledger.

Fields are stored under their names. What has a default may be absent and unknown keys are passed
over, so rows of older servers stay readable. It knows no SQL.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any, Self, TypeVar

from semantic.domain.agents import Agent, AgentProfile, Divergence, Overflow, Quota, Reuse, Turn
from semantic.domain.chat import (
    ImagePart,
    JsonObject,
    Message,
    Part,
    Role,
    ServiceClass,
    TextPart,
    ThinkingPart,
    ToolReferencePart,
    ToolResultPart,
    ToolSpec,
    ToolUsePart,
    Usage,
)
from semantic.domain.errors import InvalidRequestError
from semantic.domain.sampling import FinishReason

_AnyPart = Part | ToolReferencePart
_TAGS: dict[type[_AnyPart], str] = {
    TextPart: "text",
    ImagePart: "image",
    ThinkingPart: "thinking",
    ToolUsePart: "tool_use",
    ToolResultPart: "tool_result",
    ToolReferencePart: "tool_reference",
}
_PARTS = {tag: kind for kind, tag in _TAGS.items()}
# These two are columns of the agent's row.
_AGENT_KEY = ("id", "tenant")

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class TurnBody:
    """What of a turn is stored as JSON; the rest is columns."""

    messages: tuple[Message, ...]
    usage: Usage
    reuse: Reuse
    num_messages: int = 0
    digest: str = ""
    num_dropped: int = 0
    divergence: Divergence | None = None
    model: str = ""
    reason: FinishReason | None = None

    @classmethod
    def of(cls, turn: Turn) -> Self:
        """Take it from a turn."""
        return cls(**{field.name: getattr(turn, field.name) for field in dataclasses.fields(cls)})


def encode_agent(agent: Agent) -> str | bytes:
    """Write an agent, without its id and tenant."""
    stored = _fields_of(agent)
    for name in _AGENT_KEY:
        del stored[name]
    nested: JsonObject = {
        "service_class": agent.service_class.value,
        "quota": _fields_of(agent.quota),
        "profile": _profile_fields(agent.profile),
    }
    return _dump(stored | nested)


def decode_agent(tenant: str, agent_id: str, text: str | bytes) -> Agent:
    """Undo `encode_agent`.

    Raises:
        ValueError: it is no agent.
    """

    def make(stored: JsonObject) -> Agent:
        made: dict[str, Any] = {"id": agent_id, "tenant": tenant}
        for name, decode in _AGENT_FIELDS.items():
            if name in stored:
                made[name] = decode(stored[name])
        return _made(Agent, stored, **made)

    return _decoded("an agent", text, make)


def encode_turn(body: TurnBody) -> str | bytes:
    """Write what was said in a turn, and what it cost."""
    return _dump(
        {
            "messages": [_message_fields(message) for message in body.messages],
            "usage": _fields_of(body.usage),
            "reuse": _fields_of(body.reuse),
            "num_messages": body.num_messages,
            "digest": body.digest,
            "num_dropped": body.num_dropped,
            "divergence": _fields_of(body.divergence) if body.divergence else None,
            "model": body.model,
            "reason": body.reason.value if body.reason else None,
        }
    )


def decode_turn(text: str | bytes) -> TurnBody:
    """Undo `encode_turn`.

    Raises:
        ValueError: it is no turn.
    """

    def make(stored: dict[str, Any]) -> TurnBody:
        messages = tuple(_message(message) for message in stored["messages"])
        diverged, reason = stored.get("divergence"), stored.get("reason")
        return _made(
            TurnBody,
            stored,
            messages=messages,
            usage=_made(Usage, stored["usage"]),
            reuse=_made(Reuse, stored.get("reuse", {})),
            divergence=_made(Divergence, diverged) if diverged else None,
            reason=FinishReason(reason) if reason else None,
        )

    return _decoded("a turn", text, make)


def encode_tool(tool: ToolSpec) -> str | bytes:
    """Write the description of a tool."""
    return _dump(_fields_of(tool))


def decode_tool(text: str | bytes) -> ToolSpec:
    """Undo `encode_tool`.

    Raises:
        ValueError: it is no tool.
    """
    return _decoded("a tool", text, lambda stored: _made(ToolSpec, stored))


def _profile_fields(profile: AgentProfile) -> JsonObject:
    return _fields_of(profile) | {
        "tools": [_fields_of(tool) for tool in profile.tools],
        "overflow": profile.overflow.value,
    }


def _profile(stored: dict[str, Any]) -> AgentProfile:
    made: dict[str, Any] = {}
    if "tools" in stored:
        made["tools"] = tuple(_made(ToolSpec, tool) for tool in stored["tools"])
    if "overflow" in stored:
        made["overflow"] = Overflow(stored["overflow"])
    return _made(AgentProfile, stored, **made)


_AGENT_FIELDS: dict[str, Callable[[Any], object]] = {
    "service_class": ServiceClass,
    "quota": lambda stored: _made(Quota, stored),
    "labels": lambda stored: tuple((key, value) for key, value in stored),
    "profile": _profile,
}


def _message_fields(message: Message) -> JsonObject:
    stored: JsonObject = {
        "role": message.role.value,
        "parts": [_part_fields(part) for part in message.parts],
    }
    return stored | {"is_instruction": True} if message.is_instruction else stored


def _message(stored: dict[str, Any]) -> Message:
    parts = tuple(_part(part) for part in stored["parts"])
    is_instruction = stored.get("is_instruction") is True
    return Message(Role(stored["role"]), parts, is_instruction=is_instruction)


def _part_fields(part: _AnyPart) -> JsonObject:
    stored = {"type": _TAGS[type(part)]} | _fields_of(part)
    if isinstance(part, ToolResultPart):
        stored["content"] = [_part_fields(inner) for inner in part.content]
    return stored


def _part(stored: dict[str, Any]) -> Any:
    kind = _PARTS[stored["type"]]
    if kind is ToolResultPart:
        return _made(kind, stored, content=tuple(_part(inner) for inner in stored["content"]))
    return _made(kind, stored)


def _fields_of(value: Any) -> JsonObject:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _made(kind: type[_T], stored: dict[str, Any], **given: object) -> _T:
    """Make a value from the stored fields it knows; `given` ones are made already."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    known = {name: value for name, value in stored.items() if name in names}
    return kind(**(known | given))


def _decoded(what: str, text: str | bytes, make: Callable[[dict[str, Any]], _T]) -> _T:
    try:
        return make(_parse(text))
    except (AttributeError, InvalidRequestError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this is not {what}: {error!r}") from error


def _dump(stored: JsonObject) -> str | bytes:
    text = json.dumps(stored, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair, as JSON may carry one: no text to SQLite.
        return text.encode("utf-8", "surrogatepass")
    return text


def _parse(text: str | bytes) -> Any:
    return json.loads(text if isinstance(text, str) else text.decode("utf-8", "surrogatepass"))
