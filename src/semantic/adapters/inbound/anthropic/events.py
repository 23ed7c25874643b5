"""Translates a reply's events to Anthropic's stream events, and those to a whole message.

Clients rely on an order: the message starts once, blocks are numbered from 0, one is open at a
time and stops before the next starts, thinking ends with its signature, and the message stops
once. `MessageStream` guarantees that order for any sequence of events. It does not depend on HTTP.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from semantic.adapters.inbound.anthropic.requests import MESSAGE_ID_PREFIX, TOOL_ID_PREFIX
from semantic.adapters.inbound.http.errors import anthropic_body
from semantic.adapters.inbound.http.streaming import Json
from semantic.adapters.inbound.wire import (
    CacheExplanation,
    Count,
    Durable,
    Positive,
    durable_json,
    explained,
)
from semantic.domain.events import (
    CacheMiss,
    Event,
    Failed,
    Finished,
    MissReason,
    PrefillProgress,
    Started,
    TextDelta,
    ThinkingDelta,
    ThinkingEnded,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from semantic.domain.sampling import FinishReason
from semantic.ports.inbound import ModelStatus

_STOP_REASONS = {
    FinishReason.END_TURN: "end_turn",
    FinishReason.STOP_SEQUENCE: "stop_sequence",
    FinishReason.MAX_TOKENS: "max_tokens",
    FinishReason.CONTEXT_FULL: "model_context_window_exceeded",
    FinishReason.TOOL_USE: "tool_use",
    FinishReason.CANCELLED: "end_turn",
}


_MISS_TYPES = {
    MissReason.MODEL_CHANGED: "model_changed",
    MissReason.TOOLS_CHANGED: "tools_changed",
    MissReason.SYSTEM_CHANGED: "system_changed",
    MissReason.MESSAGES_CHANGED: "messages_changed",
    MissReason.PARAMETERS_CHANGED: "unavailable",
    MissReason.UNAVAILABLE: "unavailable",
    MissReason.NOT_FOUND: "previous_message_not_found",
}


# -- response bodies: the fields that are always present; replies may have more ----------------


class _PromptUsage(TypedDict):
    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count


class _MessageUsage(_PromptUsage):
    output_tokens: Count
    cache_explain: NotRequired[CacheExplanation]


class _CacheMissReason(TypedDict):
    type: str
    cache_missed_input_tokens: NotRequired[Count]


class _Diagnostics(TypedDict):
    cache_miss_reason: _CacheMissReason


class AnthropicMessage(TypedDict):
    """The response of `/v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Json]
    stop_reason: str | None
    stop_sequence: str | None
    usage: _MessageUsage
    diagnostics: NotRequired[_Diagnostics | None]
    durable: NotRequired[Durable]


class TokenCount(TypedDict):
    """The response of `/v1/messages/count_tokens`."""

    input_tokens: Positive


class AnthropicModel(TypedDict):
    """A model that requests may name."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    max_tokens: int | None


class AnthropicModelPage(TypedDict):
    """Models in Anthropic's format, always on one page."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str
    last_id: str


# -- a reply ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _OpenBlock:
    """The open block; `call` is the index of its tool call."""

    kind: Literal["text", "thinking", "tool_use"]
    call: int = -1


class MessageStream:
    """Translates the events of one reply to stream events, each with its name in `type`.

    Args:
        shows_thinking: If false, thinking blocks have a signature but no text.
        has_diagnostics: Whether the message has the field `diagnostics`.
        is_explained: Whether the usage at the end has the field `cache_explain`.
    """

    def __init__(
        self,
        *,
        shows_thinking: bool = True,
        has_diagnostics: bool = False,
        is_explained: bool = False,
    ) -> None:
        self._shows_thinking = shows_thinking
        self._has_diagnostics = has_diagnostics
        self._is_explained = is_explained
        self._started: Started | None = None
        self._is_begun = False
        self._is_ended = False
        self._index = -1
        self._open: _OpenBlock | None = None
        self._pending: list[Json] = []

    def push(self, event: Event) -> list[Json]:
        """Translate the reply's next event; events after the final one are ignored."""
        if self._is_ended:
            return []
        match event:
            case Started():
                self._started = event
            case PrefillProgress(_, total, reused):
                self._begin(_prefill_usage(total, reused))
            case Finished():
                self._begin(event.usage)
                self._close()
                self._end(event)
            case Failed():
                self._is_ended = True
                self._pending.append({**anthropic_body(event.error)})
            case _:
                self._begin()
                self._add(event)
        events, self._pending = self._pending, []
        return events

    def _begin(self, usage: Usage | None = None) -> None:
        """Start the message once the number of reused prompt tokens is known."""
        started = self._started
        if self._is_begun or started is None:
            return
        self._is_begun = True
        counted = self._usage(usage or started.usage)
        message: AnthropicMessage = {
            "id": f"{MESSAGE_ID_PREFIX}{started.request_id}",
            "type": "message",
            "role": "assistant",
            "model": started.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": counted["input_tokens"],
                "cache_creation_input_tokens": counted["cache_creation_input_tokens"],
                "cache_read_input_tokens": counted["cache_read_input_tokens"],
                "output_tokens": 0,
            },
        }
        if self._has_diagnostics:
            message["diagnostics"] = _diagnostics(started.change)
        self._pending.append({"type": "message_start", "message": message})

    def _end(self, event: Finished) -> None:
        self._is_ended = True
        delta = {"stop_reason": _STOP_REASONS[event.reason], "stop_sequence": event.stop_sequence}
        usage = {
            **self._usage(event.usage),
            "output_tokens": event.usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": event.usage.thinking_tokens},
            **(explained(event) if self._is_explained else {}),
        }
        durable = durable_json([event])
        self._pending.append({"type": "message_delta", "delta": delta, "usage": usage, **durable})
        self._pending.append({"type": "message_stop"})

    def _usage(self, usage: Usage) -> _PromptUsage:
        """Split the prompt tokens into three counts that do not overlap.

        The client's last `cache_control` divides the computed tokens: those before it are written
        to the cache, those after it are input.
        """
        num_marked = self._started.num_marked if self._started else 0
        read = usage.cache_read_tokens
        written = min(usage.cache_creation_tokens, max(num_marked - read, 0))
        return {
            "input_tokens": usage.prompt_tokens - read - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": read,
        }

    # -- content --------------------------------------------------------------------------------

    def _add(self, event: Event) -> None:
        match event:
            case TextDelta(text):
                self._write("text", text)
            case ThinkingDelta(text):
                self._write("thinking", text)
            case ThinkingEnded(signature) if self._open == _OpenBlock("thinking"):
                self._close(signature)
            case ToolCallStarted(index, call_id, name):
                block: Json = {"id": TOOL_ID_PREFIX + call_id, "name": name, "input": {}}
                self._start(_OpenBlock("tool_use", index), block)
            case ToolCallDelta(index, arguments) if self._open == _OpenBlock("tool_use", index):
                if arguments:
                    self._delta({"type": "input_json_delta", "partial_json": arguments})
            case ToolCallEnded(index) if self._open == _OpenBlock("tool_use", index):
                self._close()

    def _write(self, kind: Literal["text", "thinking"], text: str) -> None:
        if not text:
            return
        if self._open != _OpenBlock(kind):
            content: Json = {kind: "", **({"signature": ""} if kind == "thinking" else {})}
            self._start(_OpenBlock(kind), content)
        if kind == "text" or self._shows_thinking:
            self._delta({"type": f"{kind}_delta", kind: text})

    def _start(self, block: _OpenBlock, content: Json) -> None:
        self._close()
        self._open = block
        self._index += 1
        started = {"type": block.kind, **content}
        self._pending.append(
            {"type": "content_block_start", "index": self._index, "content_block": started}
        )

    def _delta(self, delta: Json) -> None:
        self._pending.append({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self, signature: str = "") -> None:
        if self._open is None:
            return
        if self._open.kind == "thinking":
            self._delta({"type": "signature_delta", "signature": signature})
        self._open = None
        self._pending.append({"type": "content_block_stop", "index": self._index})


def whole_message(events: Sequence[Json]) -> Json:
    """Build the message from the events of a complete stream.

    Example:
        >>> stream = MessageStream()
        >>> reply = [
        ...     Started("1", "m", Usage(3)),
        ...     TextDelta("Hi"),
        ...     Finished(FinishReason.END_TURN, Usage(3, 2)),
        ... ]
        >>> whole_message([made for event in reply for made in stream.push(event)])["content"]
        [{'type': 'text', 'text': 'Hi'}]
    """
    message: Json = {}
    blocks: list[dict[str, str]] = []
    for event in events:
        match event:
            case {"type": "message_start", "message": dict(head)}:
                message = dict(head)
            case {"type": "content_block_start", "content_block": dict(block)}:
                blocks.append({**block, "input": ""} if "input" in block else dict(block))
            case {"type": "content_block_delta", "delta": {"type": _, **more}}:
                for field, value in more.items():
                    name = "input" if field == "partial_json" else str(field)
                    blocks[-1][name] += str(value)
            case {"type": "message_delta", "delta": dict(delta), "usage": usage, **more}:
                message |= {**delta, "usage": usage, **more}
    message["content"] = [made for block in blocks if (made := _parsed(block)) is not None]
    return message


def _parsed(block: dict[str, str]) -> Json | None:
    """Parse the input of a tool call; None if it is cut off or nested too deeply."""
    if "input" not in block:
        return {**block}
    try:
        return {**block, "input": json.loads(block["input"])}
    except (ValueError, RecursionError):
        return None


def _diagnostics(change: CacheMiss | None) -> _Diagnostics | None:
    """Translate how a request differs; None if it does not, as far as the vendor compares."""
    kind = _MISS_TYPES.get(change.reason) if change else None
    if change is None or kind is None:
        return None
    reason: _CacheMissReason = {"type": kind}
    if kind.endswith("_changed"):
        reason["cache_missed_input_tokens"] = change.num_tokens
    return {"cache_miss_reason": reason}


def _prefill_usage(total: int, reused: int) -> Usage:
    return Usage(total, cache_read_tokens=reused, cache_creation_tokens=total - reused)


# -- models --------------------------------------------------------------------------------------


def model_info(status: ModelStatus) -> AnthropicModel:
    """Describe a model in Anthropic's format."""
    created = datetime.fromtimestamp(int(status.created_at), UTC)
    return {
        "type": "model",
        "id": status.id,
        "display_name": status.id,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": status.max_context or None,
        "max_tokens": status.max_context or None,
    }


def models_page(models: Sequence[ModelStatus]) -> AnthropicModelPage:
    """List all models on one page."""
    return {
        "data": [model_info(status) for status in models],
        "has_more": False,
        "first_id": models[0].id,
        "last_id": models[-1].id,
    }
