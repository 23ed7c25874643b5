"""Endpoints of Anthropic's Messages API, thin over the inbound ports.

While no API keys are configured, keys in `x-api-key` and `Authorization` are ignored.
"""

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Header, Request
from fastapi.responses import Response

from semantic.adapters.inbound.anthropic.events import (
    AnthropicMessage,
    MessageStream,
    TokenCount,
    whole_message,
)
from semantic.adapters.inbound.anthropic.requests import CountRequest, MessagesRequest
from semantic.adapters.inbound.http.errors import AnthropicErrorBody, refusals
from semantic.adapters.inbound.http.streaming import (
    WAITING,
    EventStream,
    Json,
    ReplySet,
    answer,
    comment,
    named_event,
    reply_or_stream,
)
from semantic.adapters.inbound.wire import (
    EXPLAIN,
    ReadImages,
    client_params,
    comparison_of,
    with_images,
)
from semantic.domain.agents import Principal
from semantic.domain.events import Event, Failed
from semantic.ports.inbound import InferencePort

_ERRORS = refusals("4XX", 503, 504, 529, body=AnthropicErrorBody)


def anthropic_router(
    inference: InferencePort, principal: Callable[[], Principal], read_images: ReadImages
) -> APIRouter:
    """Serve the Messages endpoints; `principal` returns the caller of the current request."""
    router = APIRouter(tags=["anthropic"], responses=_ERRORS)

    @router.post("/v1/messages", response_model=None, responses=reply_or_stream(AnthropicMessage))
    async def create_message(
        body: MessagesRequest,
        http: Request,
        x_cache_explain: Annotated[str | None, Header(description=EXPLAIN)] = None,
    ) -> Response:
        """Answer a conversation, whole or as a stream."""
        request = body.to_domain(http.headers)
        with client_params(body.client_param, request):
            request = await with_images(request, read_images)
            replies = ReplySet([await inference.start(request, principal())])
        stream = MessageStream(
            shows_thinking=body.shows_thinking,
            has_diagnostics=body.diagnostics is not None,
            is_explained=comparison_of(x_cache_explain) is not None,
        )
        if not body.stream:
            return await answer(http, _collect(replies, stream), replies)

        async def write(_: int, event: Event) -> str:
            return "".join(named_event(str(made["type"]), made) for made in stream.push(event))

        ping = named_event("ping", {"type": "ping"})
        return EventStream(replies.frames(write, opening=comment(WAITING), ping=ping), replies)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest, http: Request) -> TokenCount:
        """Count the prompt tokens that the same request would have."""
        request = body.to_domain(http.headers)
        with client_params(body.client_param, request):
            request = await with_images(request, read_images)
            return {"input_tokens": await inference.count_tokens(request, principal())}

    @router.get("/api/hello", include_in_schema=False)
    async def probe() -> Response:
        """Answer the probe that Claude Code sends before it starts."""
        return Response()

    @router.post("/api/event_logging/batch", include_in_schema=False)
    async def event_logging() -> Json:
        """Accept and discard a client's telemetry."""
        return {}

    return router


async def _collect(replies: ReplySet, stream: MessageStream) -> Json:
    events: list[Json] = []
    async for _, event in replies.events():
        if isinstance(event, Failed):
            raise event.error
        events += stream.push(event)
    return whole_message(events)
