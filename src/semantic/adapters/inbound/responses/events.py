"""Translates a reply to an OpenAI response object and its stream events."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from semantic.adapters.inbound.http.streaming import Json
from semantic.adapters.inbound.openai.custom_tools import CustomInput
from semantic.adapters.inbound.openai.events import OutputDetails, PromptDetails, scored_json
from semantic.adapters.inbound.openai.fields import outer_call_id
from semantic.adapters.inbound.wire import (
    CacheExplanation,
    Count,
    Durable,
    Positive,
    durable_json,
    explained,
)
from semantic.domain.errors import PoolExhaustedError, QuotaExceededError, RateLimitedError
from semantic.domain.events import (
    CacheReport,
    Event,
    Failed,
    Finished,
    MissReason,
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

PREFIX = "resp_"
_CUT_SHORT = (FinishReason.MAX_TOKENS, FinishReason.CONTEXT_FULL)
_LIMITS = (RateLimitedError, QuotaExceededError, PoolExhaustedError)
_USED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


_MISS_REASONS = {
    MissReason.MODEL_CHANGED: "model_changed",
    MissReason.TOOLS_CHANGED: "tools_changed",
    MissReason.SYSTEM_CHANGED: "input_changed",
    MissReason.MESSAGES_CHANGED: "input_changed",
    MissReason.RENDERED_DIFFERENTLY: "input_changed",
    MissReason.PARAMETERS_CHANGED: "reasoning_effort_changed",
}


# -- response bodies: the fields that are always present; a response may have more -------------


class ResponseUsage(TypedDict):
    """Tokens of a response."""

    input_tokens: Positive
    input_tokens_details: PromptDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Positive
    cache_explain: NotRequired[CacheExplanation]


class _OutputItem(TypedDict):
    id: str
    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    status: Literal["completed", "incomplete"]


class _Failure(TypedDict):
    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class ResponseBody(TypedDict):
    """A response: its output items, its usage, and settings that repeat the request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "failed", "in_progress", "cancelled", "queued", "incomplete"]
    model: str
    output: list[_OutputItem]
    error: _Failure | None
    incomplete_details: dict[str, str] | None
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    frequency_penalty: float
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    store: bool
    temperature: float | None
    text: Json
    tool_choice: str | Json
    tools: list[Json]
    top_p: float | None
    prompt_cache_diagnostics: NotRequired[Json]
    durable: NotRequired[Durable]


class DeletedResponse(TypedDict):
    """The result of a delete."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(TypedDict):
    """A page of a response's input items."""

    object: Literal["list"]
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(TypedDict):
    """The number of tokens of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: Positive


# -- a response, while it is written ------------------------------------------------------------


# For each kind of item: the middle of its events' names, and the prefix of its ids.
_WRITTEN = {
    "reasoning": "reasoning_text",
    "message": "output_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}


@dataclass(slots=True)
class _Item:
    """The output item that is being written."""

    kind: str
    id: str
    index: int
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    handle: str | None = None
    call: ToolCallStarted | None = None
    input: CustomInput = field(default_factory=CustomInput)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def place(self) -> Json:
        """The position in its events; a call's arguments are not a content part."""
        content = {} if self.call else {"content_index": 0}
        return {"item_id": self.id, "output_index": self.index, **content}

    def scored(self, logprobs: list[Json]) -> Json:
        """The field `logprobs` of an event; only messages have it."""
        return {"logprobs": logprobs} if self.kind == "message" else {}

    def part(self, text: str | None = None) -> Json:
        """The content part of a reasoning or message item, by default with its text so far."""
        text = self.text if text is None else text
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self.logprobs if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def json(self, status: str) -> Json:
        """The item as JSON, without content while it is in progress."""
        is_begun = status != "in_progress"
        if self.kind == "reasoning":
            item: Json = {"id": self.id, "type": "reasoning", "summary": [], "status": status}
            item["content"] = [self.part()] if is_begun else []
            return item | ({"encrypted_content": self.handle} if self.handle else {})
        if self.kind == "message":
            content = [self.part()] if is_begun else []
            head: Json = {"id": self.id, "type": "message", "role": "assistant"}
            return head | {"status": status, "content": content}
        call = self.call
        return {
            "id": self.id,
            "type": self.kind,
            "call_id": outer_call_id(call.id) if call else "",
            "name": call.name if call else "",
            self.written: self.text if is_begun else "",
            "status": status,
        }

    @property
    def written(self) -> str:
        """The field of a call that has what the model wrote."""
        return "input" if self.kind == "custom_tool_call" else "arguments"


class ResponseWriter:
    """Translates one reply's events to a response, kept in `response`. Not thread-safe."""

    def __init__(
        self,
        settings: Json,
        *,
        wants_handles: bool = False,
        has_diagnostics: bool = False,
        is_explained: bool = False,
    ) -> None:
        """Start a response, which repeats the request's `settings`.

        Args:
            has_diagnostics: Whether the response has `prompt_cache_diagnostics` at its end.
            is_explained: Whether the usage has `cache_explain`.
        """
        self.response: Json = settings
        self._wants_handles = wants_handles
        self._has_diagnostics = has_diagnostics
        self._is_explained = is_explained
        self._output: list[Json] = []
        self._item: _Item | None = None
        self._request_id = ""
        self._num_events = 0
        self._pending: list[Json] = []

    def feed(self, event: Event) -> list[Json]:
        """Add the next event of the reply; return the stream events for it."""
        match event:
            case Started():
                self._start(event)
            case Finished():
                self._finish(event)
            case Failed():
                self._fail(event)
            case _:
                self._proceed()
                self._go_on(event)
        events, self._pending = self._pending, []
        return events

    def _go_on(self, event: Event) -> None:
        match event:
            case TextDelta():
                self._write("message", event.text, [scored_json(t) for t in event.logprobs])
            case ThinkingDelta(text):
                self._write("reasoning", text)
            case ThinkingEnded(signature) if self._item and self._item.kind == "reasoning":
                self._item.handle = signature if self._wants_handles else None
                self._close("completed")
            case ToolCallStarted():
                self._open("custom_tool_call" if event.is_custom else "function_call", event)
            case ToolCallDelta() if self._item and self._item.call:
                self._write_call(self._item, event.arguments)
            case ToolCallEnded():
                self._close("completed")

    # -- the response ---------------------------------------------------------------------------

    def _start(self, started: Started) -> None:
        head = self._head(started.request_id, started.model)
        used: Json = {name: getattr(started.sampling, name) for name in _USED}
        self.response = head | self.response | used
        is_queued = self.response.get("background")
        self.response["status"] = "queued" if is_queued else "in_progress"
        self._emit_response("response.created")
        self._emit_response("response.queued" if is_queued else "response.in_progress")

    def _proceed(self) -> None:
        """Report that a response in the background is no longer queued."""
        if self.response.get("status") == "queued":
            self.response["status"] = "in_progress"
            self._emit_response("response.in_progress")

    def _head(self, request_id: str, model: str) -> Json:
        self._request_id = request_id
        return {
            "id": f"{PREFIX}{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": model,
            "output": self._output,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }

    def _finish(self, event: Finished) -> None:
        is_cut = event.reason in _CUT_SHORT
        is_cancelled = event.reason is FinishReason.CANCELLED
        told = explained(event) if self._is_explained else {}
        ending: Json = {"usage": {**usage_json(event.usage), **told}, **durable_json([event])}
        if self._has_diagnostics and event.cache is not None:
            ending["prompt_cache_diagnostics"] = _diagnostics(event.cache)
        if is_cut:
            ending["incomplete_details"] = {"reason": "max_output_tokens"}
        self._end("cancelled" if is_cancelled else "incomplete" if is_cut else "completed", ending)

    def _fail(self, event: Failed) -> None:
        is_limit = isinstance(event.error, _LIMITS)
        failure: _Failure = {
            "code": "rate_limit_exceeded" if is_limit else "server_error",
            "message": event.error.message,
        }
        self._end("failed", {"error": failure})

    def _end(self, status: str, ending: Json) -> None:
        if not self._request_id:  # it ended before its model was loaded
            asked = str(self.response.get("model") or "")
            self.response = self._head(secrets.token_hex(12), asked) | self.response
        is_whole = status == "completed" and not self._is_in_call
        self._close("completed" if is_whole else "incomplete")
        self.response |= {"status": status, **ending}
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        self._emit_response(f"response.{'incomplete' if status == 'cancelled' else status}")

    @property
    def _is_in_call(self) -> bool:
        return self._item is not None and self._item.call is not None

    def _emit_response(self, kind: str) -> None:
        self._emit(kind, {"response": {**self.response, "output": list(self._output)}})

    def _emit(self, kind: str, content: Json) -> None:
        self._pending.append({"type": kind, "sequence_number": self._num_events, **content})
        self._num_events += 1

    # -- its items ------------------------------------------------------------------------------

    def _write(self, kind: str, text: str, logprobs: list[Json] | None = None) -> None:
        item = self._item if self._item and self._item.kind == kind else self._open(kind)
        item.pieces.append(text)
        item.logprobs += logprobs or []
        delta = {**item.place, "delta": text, **item.scored(logprobs or [])}
        self._emit(f"response.{_WRITTEN[kind]}.delta", delta)

    def _write_call(self, item: _Item, arguments: str) -> None:
        is_custom = item.kind == "custom_tool_call"
        text = item.input.feed(arguments) if is_custom else arguments
        if text or not is_custom:
            self._write(item.kind, text)

    def _open(self, kind: str, call: ToolCallStarted | None = None) -> _Item:
        self._close("incomplete" if self._is_in_call else "completed")
        index = len(self._output)
        name = f"{_PREFIXES[kind]}_{self._request_id}_{index}"
        item = self._item = _Item(kind, name, index, call=call)
        added = {"output_index": index, "item": item.json("in_progress")}
        self._emit("response.output_item.added", added)
        if call is None:
            self._emit("response.content_part.added", {**item.place, "part": item.part("")})
        return item

    def _close(self, status: str) -> None:
        if self._item and (rest := self._item.input.finish()):
            self._write(self._item.kind, rest)
        item, self._item = self._item, None
        if item is None:
            return
        done = f"response.{_WRITTEN[item.kind]}.done"
        if item.call is not None:
            named = {} if item.call.is_custom else {"name": item.call.name}
            if status == "completed":  # clients run the call on this event
                self._emit(done, {**item.place, item.written: item.text, **named})
        else:
            self._emit(done, {**item.place, "text": item.text, **item.scored(item.logprobs)})
            self._emit("response.content_part.done", {**item.place, "part": item.part()})
        self._output.append(item.json(status))
        closed = {"output_index": item.index, "item": self._output[-1]}
        self._emit("response.output_item.done", closed)


def _diagnostics(report: CacheReport) -> Json:
    """Describe what a prompt reused, in the vendor's words, which know no loss of the cache."""
    miss = report.miss
    if miss is None:
        return {"type": "cache_hit"}
    if miss.reason is MissReason.NOT_FOUND:
        return {"type": "comparison_response_not_found"}
    reason = _MISS_REASONS.get(miss.reason)
    if reason is None:
        return {"type": "unavailable"}
    return {"type": "cache_miss", "reason": reason, "cache_missed_tokens": miss.num_tokens}


def usage_json(usage: Usage) -> ResponseUsage:
    """Translate token counts."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cache_read_tokens,
            "cache_write_tokens": usage.cache_creation_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
        "total_tokens": usage.total_tokens,
    }
