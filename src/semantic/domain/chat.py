"""Conversations and requests, independent of any protocol.

Protocol adapters translate their own schema into a `ChatRequest`, and the `events` of the reply
into their own stream; field names here follow no particular vendor.
"""

import enum
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from semantic.domain.errors import InvalidRequestError
from semantic.domain.sampling import MAX_REPLY_TOKENS, SamplingParams, StopRules

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
JsonObject: TypeAlias = dict[str, "JsonValue"]
MAX_JSON_DEPTH = 128


def require_whole_characters(text: str, *, param: str) -> None:
    """Refuse unpaired surrogates, which JSON can express but UTF-8 and tokenizers cannot.

    Raises:
        InvalidRequestError: the text contains one; the error names `param`.
    """
    if not _is_whole(text):
        raise InvalidRequestError("the text contains half a surrogate pair.", param=param)


def json_fault(value: JsonValue) -> str:
    """Explain why a value is not JSON that every parser accepts; empty if it is.

    Python's parser also accepts NaN, infinity, unpaired surrogates and nesting up to its stack
    limit.
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
        return "the text contains half a surrogate pair"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not a valid JSON number"
    return ""


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Role(enum.Enum):
    """The author of a message. `SYSTEM` may occur anywhere in a conversation."""

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
    """An image that a client sent.

    Attributes:
        digest: SHA-256 of the file in hexadecimal; two parts with the same one are equal.
        media_type: Of the bytes, such as `image/png`.
        width: In pixels, as the image is shown.
        data: The file; empty in messages from the ledger, whose media store has it by digest.
    """

    digest: str
    media_type: str
    width: int
    height: int
    data: bytes = field(default=b"", repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ThinkingPart:
    """Thinking that a model wrote before its answer.

    Attributes:
        text: The thinking; empty if `is_redacted`.
        signature: The handle that the server issued with it; clients return it unchanged.
        is_redacted: Whether the client holds only the signature.
    """

    text: str
    signature: str = ""
    is_redacted: bool = False


@dataclass(frozen=True, slots=True)
class ToolUsePart:
    """A tool call that the model made.

    Attributes:
        arguments: The parsed JSON object; see `cut`.
        is_cut: Whether the reply ended inside the arguments; such a call must not be executed.
        is_custom: See `ToolSpec.is_custom`.
    """

    id: str
    name: str
    arguments: JsonObject
    is_cut: bool = False
    is_custom: bool = False

    @classmethod
    def cut(
        cls, call_id: str, name: str, written: str, *, is_custom: bool = False
    ) -> "ToolUsePart":
        """Make a call that was cut off, from the part of its arguments that was written.

        The text is kept as `unparsed_arguments`. A copy of the call that a client sends back is
        converted in the same way, so both are equal.
        """
        return cls(call_id, name, unparsed_arguments(written), is_cut=True, is_custom=is_custom)

    @property
    def written(self) -> str:
        return str(self.arguments.get(_UNPARSED, ""))


_UNPARSED = "arguments"


def unparsed_arguments(text: str) -> JsonObject:
    """Wrap arguments that are not a JSON object, so that the model is shown their text."""
    return {_UNPARSED: text} if text else {}


@dataclass(frozen=True, slots=True)
class ToolReferencePart:
    """Makes a deferred tool known to the model at this point of the conversation."""

    tool_name: str


@dataclass(frozen=True, slots=True)
class ToolResultPart:
    """The result of a tool call."""

    tool_use_id: str
    content: "tuple[TextPart | ImagePart | ToolReferencePart, ...]"
    is_error: bool = False


Part: TypeAlias = TextPart | ImagePart | ThinkingPart | ToolUsePart | ToolResultPart


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        is_instruction: Whether it applies to one request only; later requests omit it.
    """

    role: Role
    parts: tuple[Part, ...]
    is_instruction: bool = False

    @classmethod
    def of(cls, role: Role, text: str) -> "Message":
        return cls(role, (TextPart(text),))

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))


def images_in(messages: Iterable[Message]) -> Iterator[ImagePart]:
    """Yield the images in messages and in their tool results, in order."""
    for message in messages:
        for part in message.parts:
            inner = part.content if isinstance(part, ToolResultPart) else (part,)
            yield from (each for each in inner if isinstance(each, ImagePart))


def is_continuable(messages: Sequence[Message]) -> bool:
    """Whether a conversation ends with assistant text that a reply can continue."""
    *before, last = messages or (Message(Role.USER, ()),)
    is_text = all(isinstance(part, TextPart) for part in last.parts)
    return bool(before) and last.role is Role.ASSISTANT and is_text


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of the arguments.
        is_deferred: Whether the model sees it only after a `ToolReferencePart` names it.
        is_custom: Whether clients receive the text of its only argument instead of a JSON object.
    """

    name: str
    description: str
    parameters: JsonObject
    is_strict: bool = False
    is_deferred: bool = False
    is_custom: bool = False


class ToolMode(enum.Enum):
    """Whether the model may, must or must not call a tool."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tool calls are allowed.

    Attributes:
        name: Set with `NAMED` only.
        allowed: Names of the tools that may be called; None allows all. The prompt shows all tools
            in any case, so that it stays the same between requests that allow different ones.
    """

    mode: ToolMode = ToolMode.AUTO
    name: str | None = None
    is_parallel: bool = True
    allowed: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """The reply must be JSON and, if a schema is given, follow that schema.

    Attributes:
        is_strict: Refuse parts of the schema that cannot be enforced, instead of ignoring them.
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
    """Whether the model thinks before it answers, and the maximum number of thinking tokens."""

    is_enabled: bool
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a request continues an agent's latest turn, where the server keeps the conversation.

    Attributes:
        turn_id: The latest turn; None before the first.
        is_edited: Whether the messages before the new ones differ from those of that turn.
        num_summarised: Messages that a summary replaced.
        min_room: Tokens that must be left for the reply; otherwise the request is refused.
        epoch: Epoch of the lease on the agent; None where no lease is needed.
    """

    turn_id: str | None
    is_edited: bool = False
    num_dropped: int = 0
    num_summarised: int = 0
    min_room: int = 1
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class CacheComparison:
    """Asks for an explanation of what the prompt reuses, compared with an earlier turn.

    Attributes:
        turn_id: The earlier turn; None means the latest turn of the conversation.
        is_first: Whether there is no earlier turn; the request only asks for what is reused.
    """

    turn_id: str | None = None
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class AgentHint:
    """What a request says about the agent it belongs to.

    Attributes:
        agent_id: Agent named explicitly; takes precedence.
        session: Session named explicitly; takes precedence if there is no `agent_id`.
        client_key: A client's session or cache key, which several of its agents may share.
        previous_turn: The turn that the request continues, as its agent or as a fork of it.
        continuation: Set where the server keeps the conversation; such requests of one agent run
            one after another.
        is_ephemeral: Whether the request leaves nothing behind: no turn, no text and no KV cache.
            It may read those of its agent and does not change them.
        comparison: Which earlier turn to compare the prompt with; None compares nothing.
    """

    agent_id: str | None = None
    session: str | None = None
    client_key: str | None = None
    previous_turn: str | None = None
    continuation: Continuation | None = None
    is_ephemeral: bool = False
    comparison: CacheComparison | None = None


class ServiceClass(enum.Enum):
    """Interactive requests run before background requests, whose priority rises as they wait."""

    INTERACTIVE = "interactive"
    BACKGROUND = "background"


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """A prompt used without a template: token ids, or text that may contain special tokens.

    Attributes:
        suffix: If not empty, the reply is the text between the content, as plain text, and this.
        is_scored: Whether to report the log-probabilities of its tokens.
    """

    content: str | tuple[int, ...]
    suffix: str = ""
    is_scored: bool = False


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """All parameters of one turn.

    Attributes:
        model: The model's name or an alias; empty means the served model.
        raw_prompt: Replaces messages; no template is applied.
        is_stored: Whether the messages may be stored. The KV cache is stored in any case, unless
            the request is ephemeral.
        is_continued: Whether the last message is the assistant's and the reply continues it.
        prediction: Text that the client expects in large parts of the reply.
        max_prompt: Maximum number of prompt tokens, below the model's own; None sets none.
        drops_oldest: Whether the oldest turns after the system prompt are dropped if the prompt is
            too long; otherwise the request is refused.
        num_dropped: Messages that were dropped.
        num_marked: Number of messages up to the last one that the client marks for caching; 0 if it
            marks only tools, None if it marks nothing. Everything is cached in any case.
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
    max_prompt: int | None = None
    drops_oldest: bool = False
    num_dropped: int = 0
    num_marked: int | None = None

    def __post_init__(self) -> None:
        if not self.messages and self.raw_prompt is None:
            raise InvalidRequestError(
                "messages must contain at least one message.", param="messages"
            )
        if self.stop.max_tokens == 0 and self.raw_prompt is None:
            raise InvalidRequestError(
                f"max_tokens must be between 1 and {MAX_REPLY_TOKENS}, got 0.", param="max_tokens"
            )
        if self.is_continued and not is_continuable(self.messages):
            raise InvalidRequestError(
                "cannot continue the last message: it must be an assistant message of plain text "
                "after another message. Otherwise, end the conversation with a user message.",
                param=f"messages[{len(self.messages) - 1}]",
            )

    @property
    def without_beginning(self) -> "ChatRequest":
        if not self.is_continued:
            return self
        return replace(self, messages=self.messages[:-1], is_continued=False)

    @property
    def beginning(self) -> str:
        """The text that the reply continues; empty if there is none."""
        return self.messages[-1].text if self.is_continued else ""

    @property
    def known_tools(self) -> tuple[ToolSpec, ...]:
        """The tools that the model knows: deferred ones only if a tool result references them."""
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
