"""Request bodies of the agent API, and their translation to the domain.

Unknown fields are refused: silently ignoring a misspelled setting is worse than an error.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal, Self, TypeVar

from fastapi import Path
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from semantic.adapters.inbound.wire import (
    MAX_ENTRIES,
    NO_LIMIT,
    SentImage,
    ToolSchema,
    image_place,
    reply_limit,
    sampling_of,
    tool_choice_of,
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
    Overflow,
    Quota,
    check_agent_id,
)
from semantic.domain.chat import (
    CacheComparison,
    ChoiceFormat,
    ImagePart,
    JsonFormat,
    Message,
    OutputFormat,
    Part,
    RegexFormat,
    Role,
    ServiceClass,
    TextPart,
    ToolResultPart,
    json_fault,
)
from semantic.domain.errors import InvalidRequestError
from semantic.domain.sampling import MAX_REPLY_TOKENS, MAX_STOP_STRINGS, StopRules
from semantic.ports.inbound import AgentQuery, Compaction, NewTurn

MAX_FORKS = 256
_T = TypeVar("_T", str, dict[str, Any])


def _require_plain(value: _T) -> _T:
    """Refuse numbers and text that Python's parser accepts but JSON and UTF-8 cannot express."""
    if fault := json_fault(value):
        raise ValueError(fault)
    return value


def _require_id(value: str, *, is_new: bool = False) -> str:
    try:
        check_agent_id(value, "id", is_new=is_new)
    except InvalidRequestError as error:
        raise ValueError(error.message) from error  # pydantic adds the field's name
    return value


def _require_new_id(value: str) -> str:
    return _require_id(value, is_new=True)


Text = Annotated[str, AfterValidator(_require_plain)]
AgentId = Annotated[
    str,
    AfterValidator(_require_new_id),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": r"^\.*[A-Za-z0-9_-][A-Za-z0-9._-]*$",
            "maxLength": 128,
            "description": "1 to 128 of A-Z a-z 0-9 . _ -, not dots alone",
        }
    ),
]
AgentPath = Annotated[
    str,
    AfterValidator(_require_id),
    Path(
        description="the agent's id",
        examples=["coder"],
        json_schema_extra={"pattern": "^[A-Za-z0-9._-]{1,128}$"},
    ),
]
TurnId = Annotated[Text, Field(min_length=1, max_length=128)]
_PlainJson = Annotated[dict[str, Any], AfterValidator(_require_plain)]
_Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
_Seconds = Annotated[float, Field(gt=0, le=MAX_TTL_S, allow_inf_nan=False)]
_Label = Annotated[Text, Field(max_length=MAX_LABEL_CHARS)]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)


class AgentTool(ToolSchema):
    """A function the model may call."""

    model_config = _Schema.model_config

    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: Text = ""
    parameters: _PlainJson = Field(default_factory=dict, description="JSON schema of the arguments")
    strict: bool = False


class AgentQuota(_Schema):
    """Limits on what an agent may store; null means unlimited."""

    max_bytes: _Count | None = Field(default=None, description="maximum size of its KV cache")
    max_turns: _Count | None = None


class AgentSettings(_Schema):
    """An agent's settings, on creation and later; absent fields keep their value."""

    system: Text | None = Field(
        None, description="system prompt; null keeps that of the conversation"
    )
    tools: list[AgentTool] = Field([], max_length=MAX_TOOLS)
    model: Text | None = Field(None, description="the model that replies; null: the served model")
    service_class: Literal["interactive", "background"] = Field("interactive", alias="class")
    weight: Annotated[float, Field(gt=0, le=MAX_WEIGHT, allow_inf_nan=False)] = 1.0
    pin: bool = Field(False, description="keep its KV cache on disk regardless of the budget")
    ttl_s: _Seconds | None = Field(None, description="deleted when unused for this long")
    quota: AgentQuota = AgentQuota()
    overflow: Literal["error", "drop_oldest", "compact"] = Field(
        "error", description="what happens when the conversation outgrows the context or its quota"
    )
    labels: dict[_Label, _Label] = Field({}, max_length=MAX_LABELS)

    def apply(self, agent: Agent) -> Agent:
        names_set = self.model_fields_set
        profile, changes = dict[str, Any](), dict[str, Any]()
        for name in names_set & {"system", "model"}:
            profile[name] = getattr(self, name)
        if "tools" in names_set:
            profile["tools"] = tuple(tool.to_domain() for tool in self.tools)
        if "overflow" in names_set:
            profile["overflow"] = Overflow(self.overflow)
        for name in names_set & {"weight", "ttl_s"}:
            changes[name] = getattr(self, name)
        if "pin" in names_set:
            changes["is_pinned"] = self.pin
        if "service_class" in names_set:
            changes["service_class"] = ServiceClass(self.service_class)
        if "quota" in names_set:
            changes["quota"] = Quota(self.quota.max_bytes, self.quota.max_turns)
        if "labels" in names_set:
            changes["labels"] = tuple(sorted(self.labels.items()))
        return replace(agent, **changes, profile=replace(agent.profile, **profile))


class CreateAgent(AgentSettings):
    """The body of `POST /v1/agents`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"id": "coder", "system": "You write Python.", "labels": {"project": "web"}},
                {"system": "Be brief.", "overflow": "drop_oldest", "class": "background"},
            ]
        }
    )

    id: AgentId | None = Field(None, description="random if absent")


class PatchAgent(AgentSettings):
    """The body of `PATCH /v1/agents/{id}`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"pin": True}, {"system": "You review Python."}]}
    )


class _NewPart(_Schema):
    type: Literal["text", "image"] = "text"
    text: Text | None = Field(default=None, description="with type text")
    source: str | None = Field(
        default=None,
        description="with type image: a data URI, base64, a URL of an allowed domain, or "
        "sha256:… of an image in a stored turn",
    )

    @model_validator(mode="after")
    def _require_own_field(self) -> Self:
        needed, other = ("text", "source") if self.type == "text" else ("source", "text")
        if getattr(self, needed) is None or getattr(self, other) is not None:
            raise ValueError(f"a part of type {self.type} needs {needed}, and has no {other}")
        return self

    def to_domain(self) -> TextPart | ImagePart:
        return TextPart(self.text or "") if self.source is None else SentImage.of(self.source)


class NewMessage(_Schema):
    """A new message. A tool result names its call; the reply continues an assistant message."""

    role: Literal["user", "tool", "system", "assistant"] = "user"
    content: Text | list[_NewPart]
    tool_call_id: Text | None = None
    is_error: bool = False

    @model_validator(mode="after")
    def _require_call(self) -> Self:
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id is required with role tool, and not allowed with others")
        return self

    def to_domain(self) -> Message:
        given = [_NewPart(text=self.content)] if isinstance(self.content, str) else self.content
        content = tuple(part.to_domain() for part in given)
        parts: tuple[Part, ...] = content
        if self.tool_call_id is not None:
            parts = (ToolResultPart(self.tool_call_id, content, is_error=self.is_error),)
        return Message(Role(self.role), parts)


class _AgentToolChoice(_Schema):
    name: Text


class _OutputForm(_Schema):
    type: Literal["text", "json", "regex", "choice"] = "text"
    json_schema: _PlainJson | None = Field(None, description="with type json; absent: any object")
    pattern: Annotated[Text, Field(max_length=10_000)] | None = Field(
        None, description="with type regex; the whole reply must match it"
    )
    choices: list[Annotated[Text, Field(max_length=1000)]] | None = Field(
        None,
        min_length=1,
        max_length=MAX_ENTRIES,
        description="with type choice; the reply is one of them",
    )

    @model_validator(mode="after")
    def _require_what_belongs(self) -> Self:
        owners = {"json_schema": "json", "pattern": "regex", "choices": "choice"}
        for name, owner in owners.items():
            is_given = getattr(self, name) is not None
            if is_given and self.type != owner:
                raise ValueError(f"{name} is allowed only with type {owner}")
            if self.type == owner and not is_given and owner != "json":
                raise ValueError(f"type {owner} needs {name}")
        return self

    def to_domain(self) -> OutputFormat | None:
        match self.type:
            case "json":
                return JsonFormat(self.json_schema)
            case "regex":
                return RegexFormat(self.pattern or "")
            case "choice":
                return ChoiceFormat(tuple(self.choices or ()))
            case _:
                return None


def _require_words(message: str) -> str:
    if not message.strip():
        raise ValueError("the message is empty; send a text")
    return message


_Words = Annotated[
    Text, AfterValidator(_require_words), WithJsonSchema({"type": "string", "pattern": r"\S"})
]


class Generate(_Schema):
    """The body of `POST /v1/agents/{id}/generate`: only the new messages."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"message": "What is the capital of France?", "max_tokens": 40},
                {"messages": [{"role": "user", "content": "And of Italy?"}], "stream": True},
            ]
        }
    )

    message: _Words | None = Field(None, description="a user message; not only white space")
    messages: list[NewMessage] | None = Field(
        None,
        min_length=1,
        max_length=MAX_ENTRIES,
        description="several messages, instead of `message`",
    )
    stream: bool = False
    max_tokens: Annotated[int, Field(ge=NO_LIMIT, le=MAX_REPLY_TOKENS)] | None = Field(
        None, description="-1 or absent: as long as the server permits"
    )
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=NO_LIMIT, le=2**31, description="0 and -1 keep all tokens")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: list[Text] = Field([], max_length=MAX_STOP_STRINGS)
    ignore_eos: bool = False
    tool_choice: Literal["auto", "none", "required"] | _AgentToolChoice = "auto"
    response_format: _OutputForm | None = None

    @model_validator(mode="after")
    def _require_one(self) -> Self:
        if (self.message is None) == (self.messages is None):
            raise ValueError("send either message or messages")
        if any(message.role == "assistant" for message in (self.messages or ())[:-1]):
            raise ValueError("only the last message may be the assistant's: the reply continues it")
        return self

    def client_param(self, param: str | None) -> str | None:
        """Translate our name of a field of the new messages."""
        if param == "messages" and self.message is not None:
            return "message"
        place = image_place(param)
        return f"messages[{place[0]}].content[{place[1]}].source" if place else param

    def turn_param(self, param: str | None) -> str | None:
        """Translate our name of a field of the turn, whose messages follow the conversation's."""
        is_message = (param or "").startswith("messages[")
        return self.client_param("messages" if is_message else param)

    def to_domain(
        self, *, is_ephemeral: bool = False, comparison: CacheComparison | None = None
    ) -> NewTurn:
        messages = [NewMessage(content=self.message)] if self.message is not None else self.messages
        return NewTurn(
            messages=tuple(message.to_domain() for message in messages or ()),
            sampling=sampling_of(self),
            stop=StopRules(
                reply_limit(self.max_tokens), tuple(self.stop), ignore_eos=self.ignore_eos
            ),
            tool_choice=tool_choice_of(self.tool_choice),
            output_format=self.response_format.to_domain() if self.response_format else None,
            is_ephemeral=is_ephemeral,
            comparison=comparison,
        )


class ListAgents(BaseModel):
    """Query parameters of `GET /v1/agents`."""

    limit: int = Field(20, ge=1, le=100)
    after: str | None = Field(None, description="`next` of the previous page")
    sort: Literal["last_used", "created_at", "turns", "id"] = "last_used"
    order: Literal["asc", "desc"] = "desc"
    label: list[Text] = Field([], description="key:value; all must match")
    prefix: Text = Field("", description="only agents whose id begins with this")
    pin: bool | None = None
    history: int = Field(
        0, ge=0, le=100, description="how many ids of each agent's latest turns to return"
    )

    def to_domain(self) -> AgentQuery:
        return AgentQuery(
            sort="num_turns" if self.sort == "turns" else self.sort,
            is_descending=self.order == "desc",
            limit=self.limit,
            after=self.after,
            labels=tuple(_label(text) for text in self.label),
            id_prefix=self.prefix,
            is_pinned=self.pin,
            num_history=self.history,
        )


def _label(text: str) -> tuple[str, str]:
    key, colon, value = text.partition(":")
    if not colon:
        raise InvalidRequestError("a label must have the form key:value.", param="label")
    return key, value


class Fork(_Schema):
    """The body of `POST /v1/agents/{id}/fork`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"ids": ["reviewer"]}, {"n": 4, "turn_id": "turn_5f2a"}]}
    )

    ids: list[AgentId] | None = Field(None, min_length=1, max_length=MAX_FORKS)
    n: int | None = Field(None, ge=1, le=MAX_FORKS, description="number of forks, with random ids")
    turn_id: TurnId | None = Field(None, description="fork from this turn; null: the latest")

    @model_validator(mode="after")
    def _require_one(self) -> Self:
        if self.ids is not None and self.n is not None:
            raise ValueError("send either ids or n")
        return self


class Rewind(_Schema):
    """The body of `POST /v1/agents/{id}/rewind`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"turn_id": "turn_5f2a"}]})

    turn_id: TurnId | None = Field(description="the turn to rewind to; null: before the first turn")


class Compact(_Schema):
    """The body of `POST /v1/agents/{id}/compact`; absent fields follow the server's settings."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{}, {"id": "coder-2", "keep_turns": 1}]}
    )

    id: AgentId | None = Field(None, description="id of the branch; random if absent")
    instructions: Annotated[Text, Field(min_length=1)] | None = Field(
        None, description="the message that asks for the summary"
    )
    keep_turns: Annotated[int, Field(ge=0, le=1000)] | None = Field(
        None, description="latest turns that stay as they are"
    )
    max_tokens: Annotated[int, Field(ge=1, le=MAX_REPLY_TOKENS)] | None = Field(
        None, description="longest summary; one that is cut off changes nothing"
    )
    temperature: float | None = Field(None, ge=0, le=100)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)

    def to_domain(self) -> Compaction:
        return Compaction(
            new_id=self.id,
            instructions=self.instructions,
            keep_turns=self.keep_turns,
            max_tokens=self.max_tokens,
            sampling=sampling_of(self),
        )


class Evict(_Schema):
    """The body of `POST /v1/agents/{id}/evict`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"to": "disk"}, {"to": "cold"}]})

    to: Literal["disk", "cold"] = Field("disk", description="cold deletes it from disk too")


class Collect(_Schema):
    """The body of `POST /v1/cache/gc`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{}, {"orphan_age_s": 0}]})

    orphan_age_s: Annotated[float, Field(ge=0, le=1e10, allow_inf_nan=False)] | None = Field(
        None, description="keep data used within this time; null: the setting orphan_ttl_h"
    )


def new_agent(body: CreateAgent, tenant: str, agent_id: str, now: float) -> Agent:
    """Create an agent from a client's settings."""
    return body.apply(Agent(agent_id, now, tenant, last_used=now, profile=AgentProfile()))
