"""Anthropic's Messages, thin over the inbound ports.

Keys in `x-api-key` or `Authorization` are accepted and not looked at while none are configured.
"""

from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

from fastapi import APIRouter, Request
from fastapi.responses import Response

from semantic.adapters.inbound.anthropic.docs import (
    ANTHROPIC_ERRORS,
    AnthropicMessage,
    TokenCount,
)
from semantic.adapters.inbound.anthropic.schema import CountRequest, MessagesRequest
from semantic.adapters.inbound.anthropic.stream import MessageStream, whole_message
from semantic.adapters.inbound.http import sse
from semantic.adapters.inbound.openai.docs import reply_or_stream
from semantic.adapters.inbound.openai.reply_set import answer, with_heartbeats
from semantic.domain.agents import Principal
from semantic.domain.chat import Failed, PrefillProgress
from semantic.ports.inbound import InferencePort, Reply

Json: TypeAlias = dict[str, object]


def anthropic_router(inference: InferencePort, principal: Callable[[], Principal]) -> APIRouter:
    """Serve the Messages endpoints on behalf of a principal."""
    router = APIRouter(tags=["anthropic"], responses=ANTHROPIC_ERRORS)

    @router.post("/v1/messages", response_model=None, responses=reply_or_stream(AnthropicMessage))
    async def create_message(body: MessagesRequest, http: Request) -> Response:
        """Answer a conversation, whole or as a stream."""
        reply = await inference.start(body.to_domain(http.headers), principal())
        stream = MessageStream(shows_thinking=body.shows_thinking, marks_cache=body.marks_cache)
        if body.stream:
            return sse.event_stream(_stream(reply, stream), reply)
        return await answer(http, _collect(reply, stream), reply)

    @router.post("/v1/messages/count_tokens", responses={200: {"model": TokenCount}})
    async def count_tokens(body: CountRequest, http: Request) -> Json:
        """Count the tokens of the prompt that the same request would make."""
        request = body.to_domain(http.headers)
        return {"input_tokens": await inference.count_tokens(request, principal())}

    @router.get("/api/hello", include_in_schema=False)
    async def probe() -> Response:
        """Say that someone is there; Claude Code asks before it starts."""
        return Response()

    @router.post("/api/event_logging/batch", include_in_schema=False)
    async def event_logging() -> Json:
        """Take a client's telemetry and keep none of it."""
        return {}

    return router


async def _collect(reply: Reply, stream: MessageStream) -> Json:
    events: list[Json] = []
    async for event in reply:
        if isinstance(event, Failed):
            raise event.error
        events += stream.push(event)
    return whole_message(events)


async def _stream(reply: Reply, stream: MessageStream) -> AsyncIterator[str]:
    progress = "waiting"
    yield sse.comment(progress)
    async for event in with_heartbeats(reply, sse.HEARTBEAT_S):
        if isinstance(event, sse.Heartbeat):
            yield sse.comment(progress) + sse.named("ping", {"type": "ping"})
            continue
        if isinstance(event, PrefillProgress):
            progress = f"prefill {event.done}/{event.total}"
        frames = [sse.named(str(made["type"]), made) for made in stream.push(event)]
        if frames:
            yield "".join(frames)
