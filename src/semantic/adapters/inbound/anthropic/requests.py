"""Request bodies of Anthropic's Messages API, and their translation to chat requests.

Unknown fields are ignored: clients are newer than servers, and an error would end their session.

One class has the fields of all block types, so that an error names the invalid field instead of
every type that the block could have. `citations` and other fields that do not change the prompt
are ignored. `cache_control` only changes how tokens are counted: the server caches every prompt.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from semantic.adapters.inbound.wire import (
    MAX_MESSAGES,
    NO_LIMIT,
    Limited,
    Schema,
    SentImage,
    ToolSchema,
    client_params,
    comparison_of,
    example,
    is_ephemeral,
    limit_parts,
    refuse,
    renumber,
    reply_limit,
    sampling_of,
)
from semantic.application.agents.turn_log import turn_id
from semantic.domain.agents import check_agent_id
from semantic.domain.chat import (
    AgentHint,
    CacheComparison,
    ChatRequest,
    ImagePart,
    JsonFormat,
    Message,
    OutputFormat,
    Part,
    Role,
    TextPart,
    Thinking,
    ThinkingPart,
    ToolChoice,
    ToolMode,
    ToolReferencePart,
    ToolResultPart,
    ToolSpec,
    ToolUsePart,
    is_continuable,
)
from semantic.domain.errors import InvalidRequestError
from semantic.domain.sampling import MAX_REPLY_TOKENS, StopRules

MESSAGE_ID_PREFIX, TOOL_ID_PREFIX = "msg_", "toolu_"
_INDEX = re.compile(r"\[(\d+)\]")
_BILLING_PREFIX = "x-anthropic-billing-header:"

_REQUIRED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "tool_reference": ("tool_name",),
    "image": ("source",),
    "document": ("source",),
}


class Block(Schema):
    """A content block of any type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    is_error: bool | None = None
    tool_name: str | None = None
    title: str | None = None
    cache_control: dict[str, Any] | None = None
    source: dict[str, Any] | str | None = None

    @property
    def marks_cache(self) -> bool:
        inner = self.content if isinstance(self.content, list) else []
        return bool(self.cache_control) or any(block.marks_cache for block in inner)

    @model_validator(mode="after")
    def _require_own_fields(self) -> Self:
        for name in _REQUIRED.get(self.type, ()):
            if getattr(self, name) is None:
                raise ValueError(f"a block of type {self.type} needs the field {name}")
        return self

    def to_text(self, where: str) -> TextPart | ImagePart:
        """Translate a block that any role may send: text, image, document or search result."""
        match self.type:
            case "text":
                return TextPart(self.text or "")
            case "image":
                return self._image(where)
            case "document":
                return self._document(where)
            case "search_result" if not isinstance(self.content, str):
                texts = [block.text or "" for block in self.content or ()]
                return TextPart("\n".join([self.title or "", *texts]).strip())
            case _:
                raise InvalidRequestError(
                    f"a block of type {self.type!r} is not allowed here.", param=where
                )

    def to_reply(self) -> Part | None:
        """Translate a block of the assistant; None for blocks of Anthropic's own server tools."""
        match self.type:
            case "text":
                return TextPart(self.text or "")
            case "thinking":
                # A client may drop the text of thinking; the signature still identifies it.
                text, signature = self.thinking or "", self.signature or ""
                return ThinkingPart(text, signature, is_redacted=not text and bool(signature))
            case "redacted_thinking":
                return ThinkingPart("", self.data or "", is_redacted=True)
            case "tool_use":
                return ToolUsePart(_own_id(self.id or ""), self.name or "", self.input or {})
            case _:
                return None

    def to_result(self, where: str) -> ToolResultPart:
        content: tuple[TextPart | ImagePart | ToolReferencePart, ...]
        if isinstance(self.content, str):
            content = (TextPart(self.content),)
        else:
            content = tuple(
                ToolReferencePart(block.tool_name or "")
                if block.type == "tool_reference"
                else block.to_text(f"{where}.content[{index}]")
                for index, block in enumerate(self.content or ())
            )
        return ToolResultPart(_own_id(self.tool_use_id or ""), content, bool(self.is_error))

    def _image(self, where: str) -> ImagePart:
        source = self.source if isinstance(self.source, dict) else {}
        kind = source.get("type")
        given = source.get({"base64": "data", "url": "url"}.get(str(kind), ""))
        if isinstance(given, str):
            return SentImage.of(given)
        why = "an image needs a source of type base64 with data, or of type url with url."
        if kind == "file":
            why = "this server stores no files; send the image as a source of type base64."
        raise InvalidRequestError(why, param=f"{where}.source")

    def _document(self, where: str) -> TextPart:
        source = self.source if isinstance(self.source, dict) else {}
        text = source.get("data") if source.get("type") == "text" else source.get("content")
        if isinstance(text, list):
            text = "\n".join(str(part.get("text", "")) for part in text if isinstance(part, dict))
        if not isinstance(text, str):
            raise InvalidRequestError(
                "only documents in plain text are supported; send the text.", param=where
            )
        return TextPart("\n".join(filter(None, (self.title, text))))


class InputMessage(Schema):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    def to_domain(self, index: int) -> Message:
        role = Role(self.role)
        if isinstance(self.content, str):
            return Message.of(role, self.content)
        if role is Role.SYSTEM:
            return Message(role, system_parts(self.content, f"messages[{index}].content"))
        if role is Role.ASSISTANT:
            parts = (block.to_reply() for block in self.content)
            return Message(role, tuple(part for part in parts if part is not None))
        return Message(role, tuple(self._inputs(index)))

    def _inputs(self, index: int) -> list[Part]:
        parts: list[Part] = []
        for position, block in enumerate(self.content):
            where = f"messages[{index}].content[{position}]"
            if isinstance(block, Block):
                is_result = block.type == "tool_result"
                parts.append(block.to_result(where) if is_result else block.to_text(where))
        return parts


def system_parts(system: str | list[Block], where: str = "system") -> tuple[Part, ...]:
    """Translate a system prompt, without the line that is only for the vendor's billing."""
    if isinstance(system, str):
        parts: list[Part] = [TextPart(system)]
    else:
        parts = [block.to_text(f"{where}[{index}]") for index, block in enumerate(system)]
    if parts and isinstance(parts[0], TextPart):
        parts[0] = TextPart(_without_billing_line(parts[0].text))
    return tuple(part for part in parts if part != TextPart(""))


def _is_marked(content: str | list[Block] | None) -> bool:
    return isinstance(content, list) and any(block.marks_cache for block in content)


def _without_billing_line(text: str) -> str:
    r"""Remove a first line that is only for the vendor's billing.

    Example:
        >>> _without_billing_line("x-anthropic-billing-header: cc_version=2; cch=1f;\nBe terse.")
        'Be terse.'
    """
    if not text.lstrip().lower().startswith(_BILLING_PREFIX):
        return text
    return text.lstrip().partition("\n")[2].lstrip("\n")


def _own_id(given: str) -> str:
    """Remove the prefix that `events.py` adds to a call's id for Anthropic's clients."""
    return given.removeprefix(TOOL_ID_PREFIX)


_OLD_SESSION = re.compile(r"_session_([0-9a-fA-F-]{8,64})$")
_TOOL_MODES = {
    "auto": ToolMode.AUTO,
    "any": ToolMode.REQUIRED,
    "tool": ToolMode.NAMED,
    "none": ToolMode.NONE,
}


class _MessagesTool(ToolSchema):
    type: str | None = None
    parameters: dict[str, Any] | None = Field(None, alias="input_schema")
    defer_loading: bool | None = None
    cache_control: dict[str, Any] | None = None

    @property
    def is_custom(self) -> bool:
        """Whether the request defines it; only Anthropic's models and servers know other tools."""
        return self.parameters is not None or self.type in (None, "custom")

    def to_domain(self) -> ToolSpec:
        return replace(super().to_domain(), is_deferred=bool(self.defer_loading))

    def check(self, index: int) -> None:
        refuse(not self.name, f"tools[{index}].name", "Field required")
        refuse(self.parameters is None, f"tools[{index}].input_schema", "Field required")


class _MessagesToolChoice(Schema):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def to_domain(self) -> ToolChoice:
        if self.type == "tool" and not self.name:
            raise InvalidRequestError("Field required", param="tool_choice.name")
        name = self.name if self.type == "tool" else None
        return ToolChoice(_TOOL_MODES[self.type], name, not self.disable_parallel_tool_use)


class _Thinking(Schema):
    type: str
    budget_tokens: int | None = Field(None, ge=0, le=MAX_REPLY_TOKENS)
    display: str | None = None

    def to_domain(self) -> Thinking:
        return Thinking(self.type != "disabled", self.budget_tokens)


class _Metadata(Schema):
    user_id: str | None = Field(None, max_length=4096)


class _OutputFormat(Schema):
    type: str
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class _OutputConfig(Schema):
    format: _OutputFormat | None = None


_EXAMPLE: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hi."}]}


class CountRequest(Schema):
    """The body of `POST /v1/messages/count_tokens`."""

    model_config = example(_EXAMPLE)

    model: str | None = None
    messages: list[InputMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Limited[str | list[Block] | None] = None
    tools: Limited[list[_MessagesTool] | None] = None
    tool_choice: _MessagesToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: _OutputFormat | None = None
    metadata: _Metadata | None = None
    session_id: str | None = Field(None, max_length=512)

    @field_validator("messages", mode="before")
    @classmethod
    def _cap_blocks(cls, value: object) -> object:
        return limit_parts(value, "blocks")

    def to_domain(self, headers: Mapping[str, str]) -> ChatRequest:
        """Translate to a chat request; the HTTP headers may identify the session and the agent."""
        messages = self._messages()
        for index, tool in enumerate(self.tools or ()):
            if tool.is_custom:
                tool.check(index)
        return ChatRequest(
            model=self.model or "",
            messages=messages,
            tools=tuple(tool.to_domain() for tool in self.tools or () if tool.is_custom),
            tool_choice=self.tool_choice.to_domain() if self.tool_choice else ToolChoice(),
            output_format=self._output_format(),
            # Clients that do not request thinking take the first block for the answer.
            thinking=self.thinking.to_domain() if self.thinking else Thinking(is_enabled=False),
            agent=self._agent(headers),
            is_continued=is_continuable(messages),
        )

    def client_param(self, param: str | None, request: ChatRequest) -> str | None:
        """Translate our name of a field to the one that the client used.

        In `request`, the result of `to_domain`, the system prompt is the first message.
        """
        if param is None:
            return None
        if param == "response_format":
            return self._format_field
        num_heads = len(request.messages) - len(self.messages)
        if num_heads and param.startswith("messages[0]"):
            return "system"
        shown = {tool.name for tool in request.known_tools}
        tools = [i for i, t in enumerate(self.tools or ()) if t.is_custom and t.name in shown]
        messages = [index - num_heads for index in range(len(request.messages))]
        field = renumber(renumber(param, "messages", messages), "tools", tools)
        return f"{field}.source" if self._is_image(field) else field

    def _is_image(self, field: str) -> bool:
        message, *path = map(int, _INDEX.findall(field)) if field.startswith("messages[") else (0,)
        inner: str | list[Block] | None = self.messages[message].content
        block: Block | None = None
        for index in path:
            if not isinstance(inner, list) or index >= len(inner):
                return False
            block, inner = inner[index], inner[index].content
        return block is not None and block.type == "image"

    def _messages(self) -> tuple[Message, ...]:
        head = system_parts(self.system) if self.system else ()
        messages = tuple(message.to_domain(i) for i, message in enumerate(self.messages))
        return ((Message(Role.SYSTEM, head),) if head else ()) + messages

    def _output_format(self) -> OutputFormat | None:
        output_format = (self.output_config and self.output_config.format) or self.output_format
        if output_format is None:
            return None
        if output_format.type != "json_schema" or output_format.schema_ is None:
            raise InvalidRequestError(
                "must be {type: json_schema, schema: …}.", param=self._format_field
            )
        return JsonFormat(output_format.schema_)

    @property
    def _format_field(self) -> str:
        is_newer = self.output_config is not None and self.output_config.format is not None
        return "output_config.format" if is_newer else "output_format"

    def _agent(self, headers: Mapping[str, str]) -> AgentHint:
        agent_id = headers.get("x-agent-id")
        if agent_id is not None:
            check_agent_id(agent_id, "X-Agent-ID")
        return AgentHint(
            agent_id,
            self.session_id,
            self._client_key(headers),
            is_ephemeral=is_ephemeral(headers.get("x-agent-ephemeral")),
            comparison=comparison_of(headers.get("x-cache-explain")),
        )

    def _client_key(self, headers: Mapping[str, str]) -> str | None:
        """The client's session, with the id of its agent if given; None without a session."""
        session = headers.get("x-claude-code-session-id") or self._metadata_session()
        session = session or headers.get("x-session-affinity")
        agent = headers.get("x-claude-code-agent-id")
        return f"{session}/{agent}" if session and agent else session

    def _metadata_session(self) -> str | None:
        """The session in `metadata.user_id`; a plain user id does not identify a session."""
        user_id = (self.metadata.user_id if self.metadata else None) or ""
        old = _OLD_SESSION.search(user_id)
        if old:
            return old[1]
        try:
            metadata = json.loads(user_id)
        except ValueError:
            return None
        session = metadata.get("session_id") if isinstance(metadata, dict) else None
        return session if isinstance(session, str) and session else None


class _Diagnostics(Schema):
    previous_message_id: str | None = Field(None, max_length=256)

    def to_domain(self) -> CacheComparison:
        """Translate to the turn of a message; null only opts in, without a turn to compare."""
        if self.previous_message_id is None:
            return CacheComparison(is_first=True)
        return CacheComparison(turn_id(self.previous_message_id.removeprefix(MESSAGE_ID_PREFIX)))


class MessagesRequest(CountRequest):
    """The body of `POST /v1/messages`."""

    model_config = example({**_EXAMPLE, "max_tokens": 100})

    max_tokens: int = Field(ge=NO_LIMIT)
    stream: bool | None = None
    cache_control: dict[str, Any] | None = None
    stop_sequences: Limited[list[str] | None] = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    diagnostics: _Diagnostics | None = None

    @property
    def shows_thinking(self) -> bool:
        """Whether the client wants the text of thinking, or only the signature to send back."""
        return self.thinking is None or self.thinking.display != "omitted"

    def to_domain(self, headers: Mapping[str, str]) -> ChatRequest:
        limit = reply_limit(self.max_tokens)
        request = replace(
            super().to_domain(headers),
            sampling=sampling_of(self),
            stop=StopRules(max_tokens=limit, strings=tuple(self.stop_sequences or ())),
        )
        num_heads = len(request.messages) - len(self.messages)
        request = replace(request, num_marked=self._num_marked(num_heads))
        if self.diagnostics is not None:
            compared = replace(request.agent, comparison=self.diagnostics.to_domain())
            request = replace(request, agent=compared)
        with client_params(self.client_param, request):
            # A last message that cannot be continued is refused here, but not when counting tokens.
            return replace(request, is_continued=self.messages[-1].role == "assistant")

    def _num_marked(self, num_heads: int) -> int | None:
        """Number of messages up to the last `cache_control`; see `ChatRequest.num_marked`."""
        if self.cache_control:
            return num_heads + len(self.messages)
        for index in range(len(self.messages), 0, -1):
            if _is_marked(self.messages[index - 1].content):
                return num_heads + index
        if _is_marked(self.system):
            return num_heads
        return 0 if any(tool.cache_control for tool in self.tools or ()) else None
