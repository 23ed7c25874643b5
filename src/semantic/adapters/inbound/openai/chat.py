"""Replies as OpenAI's chat completions, whole or as a stream of chunks."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from semantic.adapters.inbound.http import sse
from semantic.adapters.inbound.http.errors import openai_body
from semantic.adapters.inbound.openai.fields import outer_call_id
from semantic.adapters.inbound.openai.output import (
    FINISH_REASONS,
    durable_json,
    head_of,
    scored_json,
    total_usage,
    usage_json,
)
from semantic.adapters.inbound.openai.reply_set import Json, ReplySet
from semantic.domain.chat import (
    Event,
    Failed,
    Finished,
    PrefillProgress,
    ScoredToken,
    Started,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from semantic.domain.sampling import FinishReason


@dataclass(slots=True)
class _Choice:
    """One reply while it is collected."""

    text: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    calls: list[ToolCallStarted] = field(default_factory=list)
    arguments: dict[int, list[str]] = field(default_factory=dict)
    finished: Finished | None = None

    def add(self, event: Event) -> None:
        """Take the next event.

        Raises:
            SemanticError: the reply failed.
        """
        match event:
            case TextDelta():
                self.text.append(event.text)
                self.scored += event.logprobs
            case ThinkingDelta(text):
                self.thinking.append(text)
            case ToolCallStarted(index):
                self.calls.append(event)
                self.arguments[index] = []
            case ToolCallDelta(index, arguments):
                self.arguments[index].append(arguments)
            case Finished():
                self.finished = event
            case Failed(error):
                raise error
            case _:
                pass

    def message(self) -> Json:
        """The assistant's message; one of calls alone has no content."""
        text = "".join(self.text)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if self.thinking:
            message["reasoning_content"] = "".join(self.thinking)
        if self.calls:
            message["content"] = text or None
            message["tool_calls"] = [
                _call(call, "".join(self.arguments[call.index])) for call in self.calls
            ]
        return message


async def collect_chat(replies: ReplySet) -> Json:
    """Wait for all replies and make one object of them.

    Raises:
        SemanticError: one of them failed.
    """
    head: Json = {}
    choices = [_Choice() for _ in range(len(replies))]
    async for index, event in replies.events():
        if isinstance(event, Started):
            head = head or head_of(event, "chatcmpl", "chat.completion")
        else:
            choices[index].add(event)
    finished = [choice.finished for choice in choices if choice.finished is not None]
    usage = total_usage([event.usage for event in finished], len(replies))
    made = [
        _choice(index, {"message": choice.message()}, event.reason, choice.scored)
        for index, (choice, event) in enumerate(zip(choices, finished, strict=True))
    ]
    return {**head, "choices": made, "usage": usage_json(usage), **durable_json(finished)}


async def stream_chat(replies: ReplySet, *, has_usage: bool) -> AsyncIterator[str]:
    """Write all replies as server-sent events."""
    head: Json = {}
    progress = ""
    finished: dict[int, Finished] = {}
    async for item in replies.events_and_heartbeats():
        if isinstance(item, sse.Heartbeat):
            yield sse.comment(progress or "waiting")
            continue
        index, event = item
        match event:
            case Started():
                head = head or head_of(event, "chatcmpl", "chat.completion.chunk")
                head |= {"usage": None} if has_usage else {}
            case PrefillProgress():
                progress = f"prefill {event.done}/{event.total}"
            case Finished():
                finished[index] = event
            case Failed():
                yield sse.data(openai_body(event.error))
                return
        choice = _chunk(index, event)
        if choice is not None:
            durable = durable_json([event] if isinstance(event, Finished) else [])
            yield sse.data({**head, "choices": [choice], **durable})
    if has_usage:
        usages = [finished[index].usage for index in sorted(finished)]
        usage = usage_json(total_usage(usages, len(replies)))
        yield sse.data({**head, "choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def _chunk(index: int, event: Event) -> Json | None:
    """What an event adds to a reply; None if nothing."""
    delta: Json
    match event:
        case Started():
            # Empty text would open a text part in clients, also where only calls follow.
            delta = {"role": "assistant", "content": None, "refusal": None}
        case TextDelta():
            return _choice(index, {"delta": {"content": event.text}}, None, event.logprobs)
        case ThinkingDelta(text):
            delta = {"reasoning_content": text}
        case ToolCallStarted():
            delta = {"tool_calls": [{"index": event.index, **_call(event, "")}]}
        case ToolCallDelta():
            function = {"arguments": event.arguments}
            delta = {"tool_calls": [{"index": event.index, "function": function}]}
        case Finished():
            return _choice(index, {"delta": {}}, event.reason)
        case _:
            return None
    return _choice(index, {"delta": delta})


def _choice(
    index: int,
    content: Json,
    reason: FinishReason | None = None,
    scored: Sequence[ScoredToken] = (),
) -> Json:
    logprobs = {"content": [scored_json(s) for s in scored], "refusal": None} if scored else None
    return {
        "index": index,
        **content,
        "logprobs": logprobs,
        "finish_reason": FINISH_REASONS[reason] if reason else None,
    }


def _call(call: ToolCallStarted, arguments: str) -> Json:
    return {
        "id": outer_call_id(call.id),
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }
