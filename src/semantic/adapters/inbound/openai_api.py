"""OpenAI's Chat Completions and Models, thin over the inbound ports."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, TypeAlias

from fastapi import APIRouter, Header, Request
from fastapi.responses import JSONResponse, Response

from semantic.adapters.inbound import sse
from semantic.adapters.inbound.anthropic_models import model_info, models_page, served_model
from semantic.adapters.inbound.http_errors import openai_body
from semantic.adapters.inbound.openai_schema import ChatCompletionRequest
from semantic.domain.agents import Principal
from semantic.domain.chat import (
    Failed,
    Finished,
    PrefillProgress,
    ScoredToken,
    Started,
    TextDelta,
    Usage,
)
from semantic.domain.errors import InvalidRequestError, ModelNotFoundError
from semantic.domain.sampling import FinishReason
from semantic.ports.inbound import InferencePort, ModelManagementPort, ModelStatus, Reply

Json: TypeAlias = dict[str, object]

_FINISH_REASONS = {
    FinishReason.END_TURN: "stop",
    FinishReason.STOP_SEQUENCE: "stop",
    FinishReason.MAX_TOKENS: "length",
    FinishReason.CONTEXT_FULL: "length",
    FinishReason.TOOL_USE: "tool_calls",
    FinishReason.CANCELLED: "stop",
}


def openai_router(
    inference: InferencePort, models: ModelManagementPort, principal: Callable[[], Principal]
) -> APIRouter:
    """Serve the endpoints under `/v1` on behalf of a principal."""
    router = APIRouter(prefix="/v1", tags=["openai"])

    @router.post("/chat/completions", response_model=None)
    async def chat_completions(
        body: ChatCompletionRequest,
        http: Request,
        x_agent_id: Annotated[str | None, Header()] = None,
    ) -> Response:
        """Answer a conversation, whole or as a stream."""
        try:
            reply = await inference.start(body.to_domain(x_agent_id), principal())
        except InvalidRequestError as error:
            error.param = body.spelled(error.param)
            raise
        if body.stream:
            has_usage = bool(body.stream_options and body.stream_options.include_usage)
            return sse.event_stream(_stream(reply, has_usage=has_usage), reply)
        return await _respond(reply, http)

    @router.get("/models")
    async def list_models(anthropic_version: Annotated[str | None, Header()] = None) -> Json:
        """The models that requests may name, in the shape of the caller's vendor."""
        if anthropic_version:
            return models_page(models.models())
        return {"object": "list", "data": [_model(status) for status in models.models()]}

    @router.get("/models/{model_id:path}")
    async def get_model(
        model_id: str, anthropic_version: Annotated[str | None, Header()] = None
    ) -> Json:
        """One of them."""
        if anthropic_version:
            return model_info(served_model(model_id, models.models()))
        for status in models.models():
            if status.id == model_id:
                return _model(status)
        raise ModelNotFoundError(f"the model {model_id!r} is not served here.")

    return router


# -- a whole reply ----------------------------------------------------------------------------


async def _respond(reply: Reply, http: Request) -> Response:
    """Collect a reply, unless the client goes away first."""
    collecting = asyncio.create_task(_collect(reply))
    leaving = asyncio.create_task(_disconnected(http))
    try:
        await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if collecting.done():
            return JSONResponse(collecting.result())
        return Response(status_code=499)
    finally:
        collecting.cancel()
        leaving.cancel()
        reply.cancel()


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _collect(reply: Reply) -> Json:
    head: Json = {}
    text: list[str] = []
    scored: list[ScoredToken] = []
    async for event in reply:
        match event:
            case Started():
                head = _head(event, "chat.completion")
            case TextDelta():
                text.append(event.text)
                scored += event.logprobs
            case Finished():
                message = {"role": "assistant", "content": "".join(text), "refusal": None}
                choice = _choice({"message": message}, event.reason, scored)
                return {**head, "choices": [choice], "usage": _usage(event.usage)}
            case Failed():
                raise event.error
            case _:
                continue
    raise AssertionError("a reply ended without a final event")


# -- a stream ---------------------------------------------------------------------------------


async def _stream(reply: Reply, *, has_usage: bool) -> AsyncIterator[str]:
    head: Json = {}
    progress = ""
    async for event in sse.with_heartbeats(reply):
        match event:
            case Started():
                head = _head(event, "chat.completion.chunk")
                if has_usage:
                    head["usage"] = None
                first = {"role": "assistant", "content": "", "refusal": None}
                yield sse.data({**head, "choices": [_choice({"delta": first})]})
            case PrefillProgress():
                progress = f"prefill {event.done}/{event.total}"
            case sse.Heartbeat():
                yield sse.comment(progress or "waiting")
            case TextDelta():
                choice = _choice({"delta": {"content": event.text}}, None, event.logprobs)
                yield sse.data({**head, "choices": [choice]})
            case Finished():
                yield sse.data({**head, "choices": [_choice({"delta": {}}, event.reason)]})
                if has_usage:
                    yield sse.data({**head, "choices": [], "usage": _usage(event.usage)})
            case Failed():
                yield sse.data(openai_body(event.error))
                return
            case _:
                continue
    yield "data: [DONE]\n\n"


# -- pieces -----------------------------------------------------------------------------------


def _head(started: Started, kind: str) -> Json:
    return {
        "id": f"chatcmpl-{started.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": started.model,
    }


def _choice(
    content: Json, reason: FinishReason | None = None, scored: Sequence[ScoredToken] = ()
) -> Json:
    return {
        "index": 0,
        **content,
        "logprobs": {"content": [_scored(s) for s in scored], "refusal": None} if scored else None,
        "finish_reason": _FINISH_REASONS[reason] if reason else None,
    }


def _scored(token: ScoredToken) -> Json:
    top = [_token(text, logprob) for text, logprob in token.top]
    return {**_token(token.text, token.logprob), "top_logprobs": top}


def _token(text: bytes, logprob: float) -> Json:
    return {"token": text.decode("utf-8", "replace"), "bytes": list(text), "logprob": logprob}


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cache_read_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
    }


def _model(status: ModelStatus) -> Json:
    return {
        "id": status.id,
        "object": "model",
        "created": int(status.created_at),
        "owned_by": "semantic",
        "max_context": status.max_context,
        "state": status.state.value,
    }
