"""Writes agents' replies, whole or as a stream of events, with the turn logged for each."""

import asyncio
from collections.abc import Callable

from semantic.adapters.inbound.agents.views import (
    MessageOut,
    ReplyOut,
    ReuseOut,
    TimingOut,
    UsageOut,
)
from semantic.adapters.inbound.http.errors import openai_body
from semantic.adapters.inbound.http.streaming import Json, ReplySet, data
from semantic.adapters.inbound.wire import explained
from semantic.application.agents.turn_log import turn_id
from semantic.application.parsing import MessageFold
from semantic.domain.agents import Reuse, Turn
from semantic.domain.chat import Message, Role
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
    ToolCallStarted,
)

GENERATED = {
    "description": "the reply, or its events if `stream` is true",
    "model": ReplyOut,
    "content": {
        "text/event-stream": {
            "schema": {},
            "example": 'data: {"type":"text","text":"Paris"}\n\n',
        }
    },
}


class ReplyWriter:
    """One reply, whole or as a stream; `find_turn` finds its logged turn by id, and may block."""

    def __init__(self, agent_id: str, find_turn: Callable[[str], Turn | None]) -> None:
        self._agent_id = agent_id
        self._find_turn = find_turn
        self._fold = MessageFold()
        self._started: Started | None = None

    async def collect(self, replies: ReplySet) -> Json:
        """Wait for the complete reply; raises `SemanticError` if it failed."""
        async for _, event in replies.events():
            if isinstance(event, Failed):
                raise event.error
            if (ended := await self._add(event)) is not None:
                return ended
        raise AssertionError("a reply ended without a final event")

    async def write(self, _: int, event: Event) -> str:
        ended = await self._add(event)
        frame = _frame(event) if ended is None else {"type": "finished", **ended}
        return "" if frame is None else data(frame)

    async def _add(self, event: Event) -> Json | None:
        self._fold.add(event)
        if isinstance(event, Started):
            self._started = event
        if isinstance(event, Finished) and self._started is not None:
            return await self._ended(self._started, event)
        return None

    async def _ended(self, started: Started, finished: Finished) -> Json:
        """Format a complete reply with its logged turn, which may be missing after a cancel."""
        turn = await asyncio.to_thread(self._find_turn, turn_id(started.request_id))
        message = turn.messages[-1] if turn and turn.messages else self._fold.message()
        if turn is None and not message.parts:
            message = Message.of(Role.ASSISTANT, "")
        return ReplyOut(
            agent_id=self._agent_id,
            turn_id=turn.id if turn else None,
            model=started.model,
            message=MessageOut.of(message),
            text=message.text,
            finish_reason=finished.reason,
            stop_sequence=finished.stop_sequence,
            usage=UsageOut.of(finished.usage),
            timing=TimingOut.of(turn.timing) if turn and turn.timing else None,
            reuse=ReuseOut.of(turn.reuse if turn else Reuse()),
            dropped_messages=turn.num_dropped if turn else 0,
            summarised_messages=turn.num_summarised if turn else 0,
            durable=finished.is_durable,
            **explained(finished),
        ).model_dump(mode="json")


def _frame(event: Event) -> Json | None:
    match event:
        case Started():
            usage = UsageOut.json_of(event.usage)
            named = turn_id(event.request_id)
            return {"type": "started", "turn_id": named, "model": event.model, "usage": usage}
        case ModelProgress() | PrefillProgress():
            return _progress(event)
        case TextDelta(text):
            return {"type": "text", "text": text}
        case ThinkingDelta(text):
            return {"type": "thinking", "text": text}
        case ToolCallStarted(index, call_id, name):
            return {"type": "tool_call", "index": index, "id": call_id, "name": name}
        case ToolCallDelta(index, arguments):
            return {"type": "tool_arguments", "index": index, "arguments": arguments}
        case Failed(error):
            return {"type": "error", **openai_body(error)}
        case _:
            return None


def _progress(event: ModelProgress | PrefillProgress) -> Json:
    if isinstance(event, ModelProgress):
        return {"type": "model", "detail": event.detail}
    return {"type": "prefill", "done": event.done, "total": event.total}
