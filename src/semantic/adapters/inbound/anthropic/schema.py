"""Anthropic's request as clients send it, and its translation to ours.

Unknown fields are ignored: clients are newer than servers, and a refusal would end their session.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator

from semantic.adapters.inbound.anthropic.blocks import Block, InputMessage, Schema, system_parts
from semantic.adapters.inbound.wire import NO_LIMIT, reply_limit, sampling_of
from semantic.domain.agents import check_agent_id
from semantic.domain.chat import (
    AgentHint,
    ChatRequest,
    JsonFormat,
    Message,
    OutputFormat,
    Role,
    Thinking,
    ToolChoice,
    ToolMode,
    ToolSpec,
    is_continuable,
)
from semantic.domain.errors import InvalidRequestError
from semantic.domain.sampling import StopRules

_MAX_MESSAGES = 10_000
_MAX_BLOCKS = 10_000  # in all messages together
_MAX_ENTRIES = 1024  # in any other list
_OLD_SESSION = re.compile(r"_session_([0-9a-fA-F-]{8,64})$")
_TOOL_MODES = {
    "auto": ToolMode.AUTO,
    "any": ToolMode.REQUIRED,
    "tool": ToolMode.NAMED,
    "none": ToolMode.NONE,
}


class _Tool(Schema):
    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: dict[str, Any] | None = None

    @property
    def is_custom(self) -> bool:
        """Whether its schema is here; others are known to Anthropic's models and servers alone."""
        return self.input_schema is not None or self.type in (None, "custom")

    def to_domain(self, index: int) -> ToolSpec:
        if not self.name:
            raise InvalidRequestError("Field required", param=f"tools[{index}].name")
        if self.input_schema is None:
            raise InvalidRequestError("Field required", param=f"tools[{index}].input_schema")
        return ToolSpec(
            self.name,
            self.description or "",
            self.input_schema,
            is_strict=bool(self.strict),
            is_deferred=bool(self.defer_loading),
        )


class _ToolChoice(Schema):
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
    budget_tokens: int | None = Field(None, ge=0)
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


_EXAMPLE: dict[str, Any] = {
    "model": "smollm2-135m-instruct",
    "messages": [{"role": "user", "content": "Say hi."}],
}


class CountRequest(Schema):
    """The body of `POST /v1/messages/count_tokens`."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    model: str | None = None
    messages: list[InputMessage] = Field(min_length=1, max_length=_MAX_MESSAGES)
    system: str | list[Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: _OutputFormat | None = None
    metadata: _Metadata | None = None
    session_id: str | None = Field(None, max_length=512)

    # Before their entries are looked at: a million complaints would keep everyone waiting.
    @field_validator("tools", "system", mode="before")
    @classmethod
    def _cap_entries(cls, value: object) -> object:
        if isinstance(value, list) and len(value) > _MAX_ENTRIES:
            raise ValueError(f"at most {_MAX_ENTRIES} entries are allowed, not {len(value)}")
        return value

    @field_validator("messages", mode="before")
    @classmethod
    def _cap_blocks(cls, value: object) -> object:
        messages = value if isinstance(value, list) else []
        contents = (message.get("content") for message in messages if isinstance(message, dict))
        num_blocks = sum(len(content) for content in contents if isinstance(content, list))
        if num_blocks > _MAX_BLOCKS:
            raise ValueError(f"at most {_MAX_BLOCKS} blocks are allowed, not {num_blocks}")
        return value

    def to_domain(self, headers: Mapping[str, str]) -> ChatRequest:
        """Translate to our terms.

        Args:
            headers: Of the HTTP request; they may tell who is asking.

        Raises:
            InvalidRequestError: a field has a value we cannot honour.
        """
        messages = self._messages()
        return ChatRequest(
            model=self.model or "",
            messages=messages,
            tools=tuple(
                tool.to_domain(index)
                for index, tool in enumerate(self.tools or ())
                if tool.is_custom
            ),
            tool_choice=self.tool_choice.to_domain() if self.tool_choice else ToolChoice(),
            output_format=self._output_format(),
            # Whoever does not ask for thinking takes the first block for the answer.
            thinking=self.thinking.to_domain() if self.thinking else Thinking(is_enabled=False),
            agent=self._agent(headers),
            is_continued=is_continuable(messages),
        )

    def _messages(self) -> tuple[Message, ...]:
        head = system_parts(self.system) if self.system else ()
        told = tuple(message.to_domain(i) for i, message in enumerate(self.messages))
        return ((Message(Role.SYSTEM, head),) if head else ()) + told

    def _output_format(self) -> OutputFormat | None:
        wanted = (self.output_config and self.output_config.format) or self.output_format
        if wanted is None:
            return None
        if wanted.type != "json_schema" or wanted.schema_ is None:
            raise InvalidRequestError(
                "must be {type: json_schema, schema: …}.", param="output_config.format"
            )
        return JsonFormat(wanted.schema_)

    def _agent(self, headers: Mapping[str, str]) -> AgentHint:
        agent_id = headers.get("x-agent-id")
        if agent_id is not None:
            check_agent_id(agent_id, "X-Agent-ID")
        return AgentHint(agent_id, self.session_id, self._client_key(headers))

    def _client_key(self, headers: Mapping[str, str]) -> str | None:
        """A client's session, and which of its agents is asking; None if it tells neither."""
        session = headers.get("x-claude-code-session-id") or self._told_session()
        session = session or headers.get("x-session-affinity")
        agent = headers.get("x-claude-code-agent-id")
        return f"{session}/{agent}" if session and agent else session

    def _told_session(self) -> str | None:
        """The session in `metadata.user_id`; a user's plain id says nothing of who is asking."""
        user_id = (self.metadata.user_id if self.metadata else None) or ""
        old = _OLD_SESSION.search(user_id)
        if old:
            return old[1]
        try:
            told = json.loads(user_id)
        except ValueError:
            return None
        session = told.get("session_id") if isinstance(told, dict) else None
        return session if isinstance(session, str) and session else None


class MessagesRequest(CountRequest):
    """The body of `POST /v1/messages`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{**_EXAMPLE, "max_tokens": 100}]})

    max_tokens: int = Field(ge=NO_LIMIT)
    stream: bool | None = None
    cache_control: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    @field_validator("stop_sequences", mode="before")
    @classmethod
    def _cap_stops(cls, value: object) -> object:
        return cls._cap_entries(value)

    @property
    def shows_thinking(self) -> bool:
        """Whether the client wants to read thinking, or only to hand it back."""
        return self.thinking is None or self.thinking.display != "omitted"

    @property
    def marks_cache(self) -> bool:
        """Whether the client says anywhere what is to be kept for later requests."""
        contents = [self.system, *(message.content for message in self.messages)]
        blocks = [block for content in contents if isinstance(content, list) for block in content]
        is_tool_marked = any(tool.cache_control for tool in self.tools or ())
        is_block_marked = any(block.marks_cache for block in blocks)
        return bool(self.cache_control) or is_tool_marked or is_block_marked

    def to_domain(self, headers: Mapping[str, str]) -> ChatRequest:
        """Translate to our terms; see `CountRequest.to_domain`."""
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        limit = reply_limit(self.max_tokens)
        return replace(
            super().to_domain(headers),
            # Here what cannot be continued is refused; it can be counted.
            is_continued=self.messages[-1].role == "assistant",
            sampling=sampling_of(given),
            stop=StopRules(max_tokens=limit, strings=tuple(self.stop_sequences or ())),
        )
