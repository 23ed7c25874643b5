"""OpenAI's Chat Completions, older Completions, Embeddings and Models, over the inbound ports."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Request
from fastapi.responses import Response
from typing_extensions import TypedDict

from semantic.adapters.inbound.anthropic.events import (
    AnthropicModel,
    AnthropicModelPage,
    model_info,
    models_page,
)
from semantic.adapters.inbound.http.errors import (
    AnthropicErrorBody,
    ErrorBody,
    error_response,
    refusals,
)
from semantic.adapters.inbound.http.streaming import (
    EventStream,
    ReplySet,
    answer,
    reply_or_stream,
)
from semantic.adapters.inbound.openai.embeddings import add_embeddings
from semantic.adapters.inbound.openai.events import (
    ChatCompletion,
    ChatForm,
    Completion,
    CompletionForm,
    ReplyForm,
    collect,
    stream,
)
from semantic.adapters.inbound.openai.fields import Hint
from semantic.adapters.inbound.openai.requests import ChatCompletionRequest, CompletionRequest
from semantic.application.models.registry import ModelRegistry
from semantic.domain.agents import Principal
from semantic.domain.chat import ChatRequest
from semantic.domain.errors import InvalidRequestError
from semantic.ports.inbound import InferencePort, ModelState, ModelStatus, Reply

_STATES: dict[ModelState, Literal["loaded", "loading", "on_disk", "failed"]] = {
    ModelState.READY: "loaded",
    ModelState.SWAPPING: "loaded",  # until its last request has ended
    ModelState.LOADING: "loading",
    ModelState.ON_DISK: "on_disk",
    ModelState.UNLOADED: "on_disk",
}
_NOT_SERVED = ("moderations", "audio/{path:path}", "images/{path:path}")


class Model(TypedDict):
    """A model that requests may name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_context: int
    max_model_len: int
    state: Literal["loaded", "loading", "on_disk", "failed"]
    family: str
    size_bytes: int
    fits: bool | None


class ModelList(TypedDict):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


def openai_router(
    inference: InferencePort, models: ModelRegistry, principal: Callable[[], Principal]
) -> APIRouter:
    """Serve the endpoints under `/v1` on behalf of a principal."""
    router = APIRouter(prefix="/v1", tags=["openai"], responses=refusals("4XX", 503, 504))
    _add_replies(router, inference, principal)
    add_embeddings(router, inference, principal)
    _add_models(router, models)
    for path in _NOT_SERVED:
        router.add_api_route(f"/{path}", _not_served, methods=["POST"], include_in_schema=False)
    return router


def _add_replies(
    router: APIRouter, inference: InferencePort, principal: Callable[[], Principal]
) -> None:
    @router.post(
        "/chat/completions", response_model=None, responses=reply_or_stream(ChatCompletion)
    )
    async def chat_completions(body: ChatCompletionRequest, http: Request, hint: Hint) -> Response:
        """Answer a conversation, whole or as a stream."""
        try:
            requests = repeat(body.to_domain(hint), body.num_replies)
            replies = await start_all(inference, requests, principal())
        except InvalidRequestError as error:
            error.param = body.client_param(error.param)
            raise
        return await _reply(http, body, replies, ChatForm(body.num_replies))

    @router.post("/completions", response_model=None, responses=reply_or_stream(Completion))
    async def completions(body: CompletionRequest, http: Request, hint: Hint) -> Response:
        """Go on from a prompt as it stands, whole or as a stream."""
        try:
            prompts = body.to_domain(hint)
            requests = [r for prompt in prompts for r in repeat(prompt, body.num_replies)]
            replies = await start_all(inference, requests, principal())
        except InvalidRequestError as error:
            error.param = body.client_param(error.param)
            raise
        try:
            echoes = [await _echo(body, prompt, inference) for prompt in body.prompts]
        except BaseException:
            replies.cancel()
            raise
        return await _reply(http, body, replies, CompletionForm(body, echoes))


def _add_models(router: APIRouter, models: ModelRegistry) -> None:
    @router.get(
        "/models", response_model=None, responses=_in_both_shapes(ModelList | AnthropicModelPage)
    )
    async def list_models(
        anthropic_version: Annotated[str | None, Header()] = None,
    ) -> ModelList | AnthropicModelPage:
        """The models that requests may name, in the shape of the caller's vendor."""
        found = await asyncio.to_thread(models.models)
        if anthropic_version:
            return models_page(found)
        return {"object": "list", "data": [_model(status) for status in found]}

    @router.get(
        "/models/{model_id:path}",
        response_model=None,
        responses=_in_both_shapes(Model | AnthropicModel),
    )
    async def get_model(
        model_id: str, anthropic_version: Annotated[str | None, Header()] = None
    ) -> Model | AnthropicModel:
        """One of them."""
        status = await asyncio.to_thread(models.find, model_id)
        return model_info(status) if anthropic_version else _model(status)


def _in_both_shapes(body: Any) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": body}, **refusals("4XX", body=ErrorBody | AnthropicErrorBody)}


async def _reply(
    http: Request,
    body: ChatCompletionRequest | CompletionRequest,
    replies: ReplySet,
    form: ReplyForm,
) -> Response:
    if not body.stream:
        return await answer(http, collect(replies, form), replies)
    return EventStream(stream(replies, form, has_usage=body.has_usage), replies)


def repeat(request: ChatRequest, num_replies: int) -> list[ChatRequest]:
    """Repeat a request; each gets a seed of its own, the first the one that was given."""
    seed = request.sampling.seed
    if seed is None:
        return [request] * num_replies
    seeds = [(seed + index + 2**63) % 2**64 - 2**63 for index in range(1, num_replies)]
    others = [replace(request, sampling=replace(request.sampling, seed=seed)) for seed in seeds]
    return [request, *others]


async def start_all(
    inference: InferencePort, requests: Iterable[ChatRequest], principal: Principal
) -> ReplySet:
    """Start requests; if one is refused or fails to start, none runs.

    Raises:
        SemanticError: see `InferencePort.start`.
    """
    replies: list[Reply] = []
    try:
        for request in requests:
            replies.append(await inference.start(request, principal))  # noqa: PERF401
    except BaseException:
        ReplySet(replies).cancel()
        raise
    return ReplySet(replies)


async def _not_served(http: Request) -> Response:
    message = f"{http.url.path} is not served here: this server writes text."
    return error_response(404, message, "unsupported_endpoint")


async def _echo(
    body: CompletionRequest, prompt: str | tuple[int, ...], inference: InferencePort
) -> str:
    if not body.echo:
        return ""
    return prompt if isinstance(prompt, str) else await inference.decode(prompt)


def _model(status: ModelStatus) -> Model:
    return {
        "id": status.id,
        "object": "model",
        "created": int(status.created_at),
        "owned_by": "semantic",
        "max_context": status.max_context,
        "max_model_len": status.max_context,
        "state": _STATES.get(status.state, "failed"),
        "family": status.family,
        "size_bytes": status.num_bytes,
        "fits": status.fits,
    }
