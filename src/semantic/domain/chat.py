"""A conversation as every protocol means it.

Protocol adapters translate their own schema into a `ChatRequest` and the `events` of the reply into
their own stream; nothing here follows one vendor's field names.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from semantic.domain.errors import InvalidRequestError
from semantic.domain.sampling import SamplingParams, StopRules

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
JsonObject: TypeAlias = dict[str, "JsonValue"]
MAX_JSON_DEPTH = 128


def require_whole_characters(text: str, *, param: str) -> None:
    """JSON can spell half a surrogate pair; UTF-8, and so every tokenizer, cannot.

    Raises:
        InvalidRequestError: the text holds one; names `param`.
    """
    if not _is_whole(text):
        raise InvalidRequestError("the text holds half a surrogate pair.", param=param)


def json_fault(value: JsonValue) -> str:
    """Say why a value is not plain JSON that every parser takes; empty if it is.

    Python's own takes NaN, infinity, half a surrogate pair, and nests as deep as its stack.
    """
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        deeper: list[JsonValue] = []
        for item in level:
            if isinstance(item, dict):
                deeper += [*item, *item.values()]
            elif isinstance(item, list):
                deeper += item
            elif fault := _scalar_fault(item):
                return fault
        if not deeper:
            return ""
        level = deeper
    return f"it is nested more than {MAX_JSON_DEPTH} levels deep"


def _scalar_fault(value: bool | float | str | None) -> str:
    if isinstance(value, str) and not _is_whole(value):
        return "the text holds half a surrogate pair"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not a number of JSON"
    return ""


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Role(enum.Enum):
    """Who speaks. `SYSTEM` may stand anywhere in a conversation."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class TextPart:
    """Plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image; refused until a loaded model can see."""

    media_type: str
    data: str


@dataclass(frozen=True, slots=True)
class ThinkingPart:
    """What a model thought before it answered.

    Attributes:
        text: The thinking; empty if `is_redacted`.
        signature: The handle we issued with it, returned by the client byte for byte.
        is_redacted: The client holds only the signature.
    """

    text: str
    signature: str = ""
    is_redacted: bool = False


@dataclass(frozen=True, slots=True)
class ToolUsePart:
    """A call the model made; `arguments` is the parsed JSON object."""

    id: str
    name: str
    arguments: JsonObject


@dataclass(frozen=True, slots=True)
class ToolReferencePart:
    """Makes a deferred tool known at this place of the conversation."""

    tool_name: str


@dataclass(frozen=True, slots=True)
class ToolResultPart:
    """What a call returned."""

    tool_use_id: str
    content: "tuple[TextPart | ImagePart | ToolReferencePart, ...]"
    is_error: bool = False


Part: TypeAlias = TextPart | ImagePart | ThinkingPart | ToolUsePart | ToolResultPart


@dataclass(frozen=True, slots=True)
class Message:
    """One speaker's contribution.

    Attributes:
        is_instruction: It holds for one request; later ones leave it out.
    """

    role: Role
    parts: tuple[Part, ...]
    is_instruction: bool = False

    @classmethod
    def of(cls, role: Role, text: str) -> "Message":
        """Make a message of plain text."""
        return cls(role, (TextPart(text),))

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))


def is_continuable(messages: Sequence[Message]) -> bool:
    """Whether a conversation ends with text of the assistant's that a reply can go on with."""
    *before, last = messages or (Message(Role.USER, ()),)
    is_text = all(isinstance(part, TextPart) for part in last.parts)
    return bool(before) and last.role is Role.ASSISTANT and is_text


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function the model may call.

    Attributes:
        parameters: JSON schema of the arguments.
        is_strict: Arguments must follow the schema.
        is_deferred: Not shown to the model until a `ToolReferencePart` names it.
    """

    name: str
    description: str
    parameters: JsonObject
    is_strict: bool = False
    is_deferred: bool = False


class ToolMode(enum.Enum):
    """Whether the model may, must or must not call a tool."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tool calls are allowed; `name` is set with `NAMED` only."""

    mode: ToolMode = ToolMode.AUTO
    name: str | None = None
    is_parallel: bool = True


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """The reply must be JSON; with a schema, JSON of that shape.

    Attributes:
        is_strict: Parts of the schema that cannot be enforced are refused rather than ignored.
    """

    schema: JsonObject | None = None
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class RegexFormat:
    """The reply must match a regular expression."""

    pattern: str


@dataclass(frozen=True, slots=True)
class ChoiceFormat:
    """The reply must be one of these texts."""

    choices: tuple[str, ...]


OutputFormat: TypeAlias = JsonFormat | RegexFormat | ChoiceFormat


@dataclass(frozen=True, slots=True)
class Thinking:
    """Whether the model thinks before it answers, and for how many tokens at most."""

    is_enabled: bool
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a request of an agent that keeps its own conversation goes on from its latest turn.

    Attributes:
        turn_id: That turn; None before the first.
        is_edited: The messages before the new ones are not those the turn led to.
        num_dropped: Messages left out to make room.
        min_room: Tokens that must be left for the reply, or the request is refused.
        epoch: Of the lease of the agent; None where it needs none.
    """

    turn_id: str | None
    is_edited: bool = False
    num_dropped: int = 0
    min_room: int = 1
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class AgentHint:
    """What a request says about who is asking.

    Attributes:
        agent_id: Named explicitly; decides.
        session: A session named explicitly; decides too.
        client_key: A client's own session or cache key; its agents share it.
        previous_turn: The turn it goes on from; its agent, or a fork of it, is meant.
        continuation: Given where the server keeps the conversation; such requests of one agent run
            one after another.
    """

    agent_id: str | None = None
    session: str | None = None
    client_key: str | None = None
    previous_turn: str | None = None
    continuation: Continuation | None = None


class ServiceClass(enum.Enum):
    """Interactive work goes before background work, which still ages into its turn."""

    INTERACTIVE = "interactive"
    BACKGROUND = "background"


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """What the model is to go on from as it stands: text, in which special tokens count, or ids."""

    content: str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Everything a client may ask for in one turn.

    Attributes:
        model: Its name or an alias; empty takes the one that is served.
        raw_prompt: Given instead of messages; no template is applied.
        is_stored: Whether what is said may be kept; the KV cache is in any case.
        is_continued: The last message is the assistant's, and the reply goes on with it.
        prediction: What the client expects much of the reply to be.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopRules = field(default_factory=StopRules)
    output_format: OutputFormat | None = None
    thinking: Thinking | None = None
    agent: AgentHint = field(default_factory=AgentHint)
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    raw_prompt: RawPrompt | None = None
    is_stored: bool = True
    is_continued: bool = False
    prediction: str = ""

    def __post_init__(self) -> None:
        if not self.messages and self.raw_prompt is None:
            raise InvalidRequestError("messages must hold at least one message.", param="messages")
        if self.is_continued and not is_continuable(self.messages):
            raise InvalidRequestError(
                "only an assistant's message of plain text that follows another message can be "
                "continued; let the conversation end with a user's message.",
                param=f"messages[{len(self.messages) - 1}]",
            )

    @property
    def without_beginning(self) -> "ChatRequest":
        """The same without the beginning of its reply."""
        if not self.is_continued:
            return self
        return replace(self, messages=self.messages[:-1], is_continued=False)

    @property
    def beginning(self) -> str:
        """The text that the reply goes on with."""
        return self.messages[-1].text if self.is_continued else ""

    @property
    def known_tools(self) -> tuple[ToolSpec, ...]:
        """The tools the model was told of: deferred ones only where something references them."""
        if not any(tool.is_deferred for tool in self.tools):
            return self.tools
        results = (
            part
            for message in self.messages
            for part in message.parts
            if isinstance(part, ToolResultPart)
        )
        referenced = {
            part.tool_name
            for result in results
            for part in result.content
            if isinstance(part, ToolReferencePart)
        }
        return tuple(t for t in self.tools if not t.is_deferred or t.name in referenced)
