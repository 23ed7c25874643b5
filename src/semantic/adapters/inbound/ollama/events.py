"""Writes replies as Ollama's objects: one on each line of a stream, or one whole object."""

import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from semantic.adapters.inbound.http.errors import openai_body
from semantic.adapters.inbound.http.streaming import Json, ReplySet, one_line
from semantic.adapters.inbound.ollama.requests import context_of
from semantic.adapters.inbound.openai.events import CollectedReply, scored_json
from semantic.adapters.inbound.openai.fields import call_arguments, outer_call_id
from semantic.adapters.inbound.wire import CacheExplanation, Count, durable_json, explained
from semantic.domain.events import (
    Event,
    Failed,
    Finished,
    ModelProgress,
    PrefillProgress,
    Started,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from semantic.domain.sampling import FinishReason

_CUT = (FinishReason.MAX_TOKENS, FinishReason.CONTEXT_FULL)


# -- response bodies ------------------------------------------------------------------------------


class _CallFunction(TypedDict):
    index: Count
    name: str
    arguments: Json


class _ReplyCall(TypedDict):
    id: str
    function: _CallFunction


class _ReplyText(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[_ReplyCall]]


class _WholeReply(TypedDict):
    model: str
    created_at: str
    done: Literal[True]
    done_reason: Literal["stop", "length", "load", "unload"]
    total_duration: NotRequired[Count]
    load_duration: NotRequired[Count]
    prompt_eval_count: NotRequired[Count]
    prompt_eval_duration: NotRequired[Count]
    eval_count: NotRequired[Count]
    eval_duration: NotRequired[Count]
    cached_tokens: NotRequired[Count]
    cache_explain: NotRequired[CacheExplanation]
    logprobs: NotRequired[list[Json]]


class ChatReply(_WholeReply):
    """The response of `/api/chat`; durations are in nanoseconds."""

    message: _ReplyText


class GeneratedText(_WholeReply):
    """The response of `/api/generate`; `context` continues it in a later request."""

    response: str
    thinking: NotRequired[str]
    context: NotRequired[list[int]]


# -- a reply --------------------------------------------------------------------------------------


def timestamp(seconds: float | None = None) -> str:
    """Format a time, by default the present one, as RFC 3339."""
    at = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")


def in_message(content: Json) -> Json:
    """Format a piece of a reply for `/api/chat`."""
    return {"message": {"role": "assistant", "content": "", **content}}


def in_response(content: Json) -> Json:
    """Format a piece of a reply for `/api/generate`, whose text is the field `response`."""
    others = {name: value for name, value in content.items() if name != "content"}
    return {"response": content.get("content", ""), **others}


class OllamaWriter:
    """Turns the events of one reply into objects; `push` mutates it."""

    def __init__(
        self,
        model: str,
        form: Callable[[Json], Json],
        *,
        has_context: bool = False,
        on_start: Callable[[], object] = lambda: None,
    ) -> None:
        """Start the clock.

        Args:
            model: Name of the model as the client wrote it.
            form: Formats a piece of the reply: `in_message` or `in_response`.
            has_context: Whether the last object has a `context`.
            on_start: Called when the model is loaded and the request is queued.
        """
        self._model = model
        self._form = form
        self._has_context = has_context
        self._on_start = on_start
        self._received = time.monotonic_ns()
        self._started = self._computed = self._received
        self._request_id = ""
        self._calls: dict[int, tuple[ToolCallStarted, list[str]]] = {}
        self._whole_calls: list[Json] = []  # without one that was cut off

    def push(self, event: Event) -> Json | None:
        """Return the object for an event; None if it has none. Raises the error of `Failed`."""
        match event:
            case Started():
                self._started = self._computed = time.monotonic_ns()
                self._request_id = event.request_id
                self._on_start()
            case PrefillProgress() | ModelProgress():
                self._computed = time.monotonic_ns()
            case TextDelta(text, logprobs):
                scored = {"logprobs": [scored_json(token) for token in logprobs]}
                return self._piece({"content": text}, **(scored if logprobs else {}))
            case ThinkingDelta(text):
                return self._piece({"thinking": text})
            case ToolCallStarted(index):
                self._calls[index] = event, []
            case ToolCallDelta(index, arguments):
                self._calls[index][1].append(arguments)
            case ToolCallEnded(index):
                self._whole_calls.append(self._call(index))
                return self._piece({"tool_calls": self._whole_calls[-1:]})
            case Finished():
                return self._last(event)
            case Failed(error):
                raise error
            case _:
                pass
        return None

    def empty(self, reason: Literal["load", "unload"]) -> Json:
        """Return the whole response to a request without a prompt."""
        return self._object({}, done=True, done_reason=reason)

    def whole(self, reply: CollectedReply, last: Json) -> Json:
        """Return the whole reply; `last` is the object of its last event."""
        content: Json = {"content": "".join(reply.text)}
        if reply.thinking:
            content["thinking"] = "".join(reply.thinking)
        if self._whole_calls:
            content["tool_calls"] = self._whole_calls
        scored = {"logprobs": [scored_json(token) for token in reply.scored]}
        return {**last, **self._form(content), **(scored if reply.scored else {})}

    def _piece(self, content: Json, **more: Any) -> Json:
        return self._object(content, done=False, **more)

    def _object(self, content: Json, **more: Any) -> Json:
        head = {"model": self._model, "created_at": timestamp()}
        return {**head, **self._form(content), **more}

    def _call(self, index: int) -> Json:
        call, arguments = self._calls[index]
        function = {
            "index": index,
            "name": call.name,
            "arguments": call_arguments("".join(arguments)),
        }
        return {"id": outer_call_id(call.id), "function": function}

    def _last(self, finished: Finished) -> Json:
        now, usage = time.monotonic_ns(), finished.usage
        context = {"context": context_of(self._request_id)} if self._has_context else {}
        return self._object(
            {},
            done=True,
            done_reason="length" if finished.reason in _CUT else "stop",
            **context,
            total_duration=now - self._received,
            load_duration=self._started - self._received,
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=self._computed - self._started,
            eval_count=usage.completion_tokens,
            eval_duration=now - self._computed,
            cached_tokens=usage.cache_read_tokens,
            **explained(finished),
            **durable_json([finished]),
        )


async def lines(replies: ReplySet, writer: OllamaWriter) -> AsyncIterator[str]:
    """Yield a reply as one JSON object on each line; a failure is the last one."""
    async for _, event in replies.events():
        if isinstance(event, Failed):
            yield f"{one_line({'error': openai_body(event.error)['error']['message']})}\n"
            return
        if (made := writer.push(event)) is not None:
            yield f"{one_line(made)}\n"


async def collect(replies: ReplySet, writer: OllamaWriter) -> Json:
    """Wait for a reply and return it whole; raises `SemanticError` if it failed."""
    reply, last = CollectedReply(), Json()
    async for _, event in replies.events():
        reply.add(event)
        last = writer.push(event) or last
    return writer.whole(reply, last)
