"""`POST /v1/agents/{id}/generate`: only what is new is sent; the server keeps the rest."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from semantic.adapters.inbound.agents.routes import AgentPath, refusals
from semantic.adapters.inbound.agents.schema import Generate
from semantic.adapters.inbound.agents.views import MessageOut, ReplyOut, ReuseOut, UsageOut
from semantic.adapters.inbound.http import sse
from semantic.adapters.inbound.http.disconnects import CLIENT_LEFT, unless_disconnected
from semantic.adapters.inbound.http.errors import openai_body
from semantic.adapters.inbound.openai.reply_set import answer, with_heartbeats
from semantic.application.agents.turn_log import turn_id
from semantic.application.parsing import MessageFold
from semantic.domain.agents import Principal, Reuse, Turn
from semantic.domain.chat import (
    Event,
    Failed,
    Finished,
    Message,
    PrefillProgress,
    Role,
    Started,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from semantic.domain.errors import AgentNotFoundError
from semantic.ports.inbound import AgentManagementPort, Reply

Json = dict[str, Any]
_STREAM = {
    "description": "the reply, or its events if `stream` is true",
    "model": ReplyOut,
    "content": {
        "text/event-stream": {
            "schema": {},
            "example": 'data: {"type":"text","text":"Paris"}\n\n',
        }
    },
}


class GenerateApi:
    """Stateful generation."""

    def __init__(self, agents: AgentManagementPort, principal: Callable[[], Principal]) -> None:
        self._agents = agents
        self._principal = principal

    def router(self) -> APIRouter:
        """Say which method answers where."""
        router = APIRouter(prefix="/v1/agents", tags=["agents"])
        router.add_api_route(
            "/{agent_id}/generate",
            self.generate,
            methods=["POST"],
            response_model=None,
            responses={200: _STREAM, **refusals(404, 429, 503, 504)},
        )
        return router

    async def generate(self, agent_id: AgentPath, body: Generate, http: Request) -> Response:
        """Answer new messages in the agent's conversation, whole or as a stream.

        Turns of one agent run in the order they were asked for.
        """
        starting = self._agents.generate(self._principal(), agent_id, body.to_domain())
        reply = await unless_disconnected(starting, http)
        if reply is None:
            return Response(status_code=CLIENT_LEFT)
        if body.stream:
            return sse.event_stream(self._stream(agent_id, reply), reply)
        return await answer(http, self._collect(agent_id, reply), reply)

    async def _collect(self, agent_id: str, reply: Reply) -> Json:
        said, started = MessageFold(), None
        async for event in reply:
            said.add(event)
            match event:
                case Started():
                    started = event
                case Finished() if started is not None:
                    return await self._ended(agent_id, started, event, said)
                case Failed():
                    raise event.error
                case _:
                    continue
        raise AssertionError("a reply ended without a final event")

    async def _stream(self, agent_id: str, reply: Reply) -> AsyncIterator[str]:
        said, started, progress = MessageFold(), None, "waiting"
        async for event in with_heartbeats(reply):
            if isinstance(event, sse.Heartbeat):
                yield sse.comment(progress)
                continue
            said.add(event)
            if isinstance(event, Started):
                started = event
            if isinstance(event, PrefillProgress):
                progress = f"prefill {event.done}/{event.total}"
            if isinstance(event, Finished) and started is not None:
                ended = await self._ended(agent_id, started, event, said)
                yield sse.data({"type": "finished", **ended})
            elif (frame := _frame(event)) is not None:
                yield sse.data(frame)

    async def _ended(
        self, agent_id: str, started: Started, finished: Finished, said: MessageFold
    ) -> Json:
        """Show a reply that is complete, with the turn it became."""
        turn = await asyncio.to_thread(self._turn, agent_id, turn_id(started.request_id))
        message = turn.messages[-1] if turn and turn.messages else said.message()
        if turn is None and not message.parts:
            message = Message.of(Role.ASSISTANT, "")
        return ReplyOut(
            agent_id=agent_id,
            turn_id=turn.id if turn else None,
            model=started.model,
            message=MessageOut.of(message),
            text=message.text,
            finish_reason=finished.reason.value,
            stop_sequence=finished.stop_sequence,
            usage=UsageOut.of(finished.usage),
            reuse=ReuseOut.of(turn.reuse if turn else Reuse()),
            dropped_messages=turn.num_dropped if turn else 0,
            durable=finished.is_durable,
        ).model_dump()

    def _turn(self, agent_id: str, wanted: str) -> Turn | None:
        try:
            latest = self._agents.turns(self._principal(), agent_id, None, 1)
        except AgentNotFoundError:
            return None
        return next((turn for turn in latest if turn.id == wanted), None)


def _frame(event: Event) -> Json | None:
    """Show an event of a stream; None if there is nothing to show."""
    match event:
        case Started():
            usage = UsageOut.of(event.usage).model_dump()
            named = turn_id(event.request_id)
            return {"type": "started", "turn_id": named, "model": event.model, "usage": usage}
        case PrefillProgress(done, total):
            return {"type": "prefill", "done": done, "total": total}
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
