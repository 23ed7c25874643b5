"""Encodes agents and turns as JSON, and validates such JSON against one schema.

Ledger rows and exported agents share the schema. Its fields are those of the domain's dataclasses;
its limits are those of the agent API. A field with a default may be absent and unknown keys are
ignored, so that rows of older servers stay readable. This module contains no SQL.
"""

import dataclasses
import enum
import functools
import json
import operator
from collections.abc import Callable
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    create_model,
)

from semantic.domain.agents import (
    MAX_COUNT,
    MAX_LABEL_CHARS,
    MAX_LABELS,
    MAX_TOOLS,
    MAX_TTL_S,
    MAX_WEIGHT,
    TOOL_NAME,
    Agent,
    AgentProfile,
    Divergence,
    Overflow,
    Quota,
    Reuse,
    Turn,
)
from semantic.domain.chat import (
    ImagePart,
    JsonObject,
    Message,
    Role,
    ServiceClass,
    TextPart,
    ThinkingPart,
    ToolReferencePart,
    ToolResultPart,
    ToolSpec,
    ToolUsePart,
    json_fault,
)
from semantic.domain.errors import InvalidRequestError
from semantic.domain.events import CacheMiss, MissReason, ReplyTiming, Usage
from semantic.domain.sampling import FinishReason

_TAGS: dict[type, str] = {
    TextPart: "text",
    ImagePart: "image",
    ThinkingPart: "thinking",
    ToolUsePart: "tool_use",
    ToolResultPart: "tool_result",
    ToolReferencePart: "tool_reference",
}
# Stored in columns of the agent's row.
_AGENT_KEY = ("id", "tenant")
_MAX_DETAIL_CHARS = 10_000
# Left out of a turn's row if they are empty, as in most turns.
_OPTIONAL = ("tools", "is_thinking", "miss", "repairs", "timing")

# Made once: a start decodes every agent.
_OWN_JSON = json.JSONDecoder(parse_constant=lambda _: None)

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class TurnBody:
    """The fields of a turn that are stored as JSON; the others are columns."""

    messages: tuple[Message, ...]
    usage: Usage
    reuse: Reuse = dataclasses.field(default_factory=Reuse)
    num_messages: int = 0
    digest: str = ""
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

    @classmethod
    def of(cls, turn: Turn) -> Self:
        return cls(**{field.name: getattr(turn, field.name) for field in dataclasses.fields(cls)})

    def turn(self, **columns: Any) -> Turn:
        return Turn(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, **columns)


# -- the schema -------------------------------------------------------------------------------

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
# JSON has lists and strings instead of tuples and enums; the items themselves stay strict.
_LISTED = Field(strict=False)
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]


def _require_plain(value: JsonObject) -> JsonObject:
    if fault := json_fault(value):
        raise ValueError(fault)
    return value


def _schema(kind: type[Any], **limits: Any) -> Any:
    """Build the schema of a dataclass from its fields; `limits` replaces the types of some."""
    shape: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        default: Any = ... if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = Field(default_factory=field.default_factory)
        plain = Count if field.type is int else field.type
        shape[field.name] = (limits.get(field.name, plain), default)
    model = create_model(kind.__name__, __config__=_STRICT, **shape)
    return Annotated[model, AfterValidator(lambda made: kind(**vars(made)))]


def _tuple_of(item: Any, **limits: Any) -> Any:
    return Annotated[tuple[item, ...], Field(strict=False, **limits)]


def _one_of(schemas: dict[type, Any]) -> Any:
    tagged = [Annotated[schema, Tag(_TAGS[kind])] for kind, schema in schemas.items()]
    tag_of = Discriminator(lambda part: part.get("type") if isinstance(part, dict) else None)
    return Annotated[functools.reduce(operator.or_, tagged), tag_of]


_digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_SHOWN = {TextPart: _schema(TextPart), ImagePart: _schema(ImagePart, digest=_digest)}
_results = _one_of(_SHOWN | {ToolReferencePart: _schema(ToolReferencePart)})
_part = _one_of(
    _SHOWN
    | {
        ThinkingPart: _schema(ThinkingPart),
        ToolUsePart: _schema(ToolUsePart, arguments=dict[str, Any]),
        ToolResultPart: _schema(ToolResultPart, content=_tuple_of(_results)),
    }
)
_miss = _schema(
    CacheMiss,
    reason=Annotated[MissReason, _LISTED],
    detail=Annotated[str, Field(max_length=_MAX_DETAIL_CHARS)],
    names=_tuple_of(str, max_length=MAX_TOOLS),
)
_seconds = Annotated[float, Field(ge=0)]
_message = _schema(Message, role=Annotated[Role, _LISTED], parts=_tuple_of(_part))
_TURN = TypeAdapter[TurnBody](
    _schema(
        TurnBody,
        messages=_tuple_of(_message),
        usage=_schema(Usage, accepted_by_source=dict[str, Count]),
        reuse=_schema(Reuse),
        divergence=_schema(Divergence) | None,
        reason=Annotated[FinishReason, _LISTED] | None,
        tools=_tuple_of(Annotated[tuple[str, str], _LISTED]),
        miss=_miss | None,
        repairs=_tuple_of(str),
        timing=_schema(ReplyTiming, first_token_s=_seconds, decode_s=_seconds) | None,
    )
)
_label = Annotated[str, Field(max_length=MAX_LABEL_CHARS)]
_tool = _schema(
    ToolSpec,
    name=Annotated[str, Field(pattern=TOOL_NAME)],
    parameters=Annotated[dict[str, Any], AfterValidator(_require_plain)],
)
_profile = _schema(
    AgentProfile,
    tools=_tuple_of(_tool, max_length=MAX_TOOLS),
    overflow=Annotated[Overflow, _LISTED],
)
_AGENT = TypeAdapter[Agent](
    _schema(
        Agent,
        weight=Annotated[float, Field(gt=0, le=MAX_WEIGHT)],
        service_class=Annotated[ServiceClass, _LISTED],
        ttl_s=Annotated[float, Field(gt=0, le=MAX_TTL_S)] | None,
        quota=_schema(Quota, max_bytes=Count | None, max_turns=Count | None),
        labels=_tuple_of(Annotated[tuple[_label, _label], _LISTED], max_length=MAX_LABELS),
        profile=_profile,
    )
)


# -- agents and turns -------------------------------------------------------------------------


def encode_agent(agent: Agent) -> str:
    """Encode an agent without its id and tenant, which are columns."""
    stored = _fields(agent)
    for name in _AGENT_KEY:
        del stored[name]
    return _dump(stored)


def decode_agent(
    tenant: str, agent_id: str, text: str | bytes, *, is_foreign: bool = False
) -> Agent:
    """Decode the result of `encode_agent`.

    Raises:
        ValueError: the text is not an agent, or `is_foreign` is set and `parse` rejects it.
    """

    def decode() -> Agent:
        stored = parse(text, is_foreign=is_foreign)
        key = {"id": agent_id, "tenant": tenant}
        return _AGENT.validate_python(stored | key if isinstance(stored, dict) else stored)

    return _decoded("an agent", decode)


def encode_turn(body: TurnBody) -> str:
    """Encode a turn's messages, usage and other fields that are not columns."""
    return _dump(body)


def decode_turn(text: str | bytes, *, is_foreign: bool = False) -> TurnBody:
    """Decode the result of `encode_turn`; raises `ValueError` like `decode_agent`."""
    return _decoded("a turn", lambda: _TURN.validate_python(parse(text, is_foreign=is_foreign)))


def parse(text: str | bytes, *, is_foreign: bool = False) -> Any:
    """Parse JSON; if `is_foreign`, the text is untrusted.

    Text of clients and models may contain values that JSON does not allow: unpaired surrogates, NaN
    and infinity. Rows of older servers store them unchanged; they become a question mark or null.
    Untrusted text with such values or deep nesting is rejected.

    Raises:
        ValueError: the text is not JSON, or is rejected.
    """
    whole = text if isinstance(text, str) else text.decode("utf-8", "surrogatepass")
    if not is_foreign:
        return _OWN_JSON.decode(_whole_characters(whole))
    value = json.loads(whole)
    if fault := json_fault(value):
        raise ValueError(fault)
    return value


def _decoded(what: str, decode: Callable[[], _T]) -> _T:
    try:
        return decode()
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"this is not {what}: {place}: {first['msg']}") from error
    except (InvalidRequestError, RecursionError, ValueError) as error:
        raise ValueError(f"this is not {what}: {error!r}") from error


def _fields(value: Any) -> Any:
    """Convert one domain value for JSON; `json.dumps` calls it again for nested values."""
    if isinstance(value, enum.Enum):
        return value.value
    stored = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Message) and not value.is_instruction:
        del stored["is_instruction"]
    if isinstance(value, TurnBody):
        stored = {k: v for k, v in stored.items() if k not in _OPTIONAL or v not in (None, ())}
    if isinstance(value, ToolUsePart):
        stored = {k: v for k, v in stored.items() if v or k not in ("is_cut", "is_custom")}
    if isinstance(value, ImagePart):
        del stored["data"]  # the media store has it
    tag = _TAGS.get(type(value))
    return {"type": tag} | stored if tag else stored


def _dump(stored: object) -> str:
    try:
        text = _compact(stored)
    except ValueError:
        # NaN or infinity, which Python's JSON parser accepts from clients.
        loose = json.dumps(stored, default=_fields)
        text = _compact(json.loads(loose, parse_constant=lambda _: None))
    return _whole_characters(text)


def _compact(stored: object) -> str:
    compact = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    return json.dumps(stored, default=_fields, **compact)  # type: ignore[arg-type]


def _whole_characters(text: str) -> str:
    """Replace unpaired surrogates by a question mark, as prompts do."""
    return text.encode(errors="replace").decode()
