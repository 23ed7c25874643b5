"""Endpoints of OpenAI's Chat Completions, older Completions, Embeddings and Models."""

import asyncio
import base64
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, field_validator
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
    CLIENT_LEFT,
    EventStream,
    ReplySet,
    answer,
    reply_or_stream,
    unless_disconnected,
)
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
from semantic.adapters.inbound.wire import ReadImages, Schema, client_params, example, with_images
from semantic.application.models.registry import ModelRegistry
from semantic.domain.agents import Principal
from semantic.domain.chat import ChatRequest
from semantic.domain.errors import InvalidRequestError
from semantic.ports.inbound import EmbeddingRequest, InferencePort, ModelState, ModelStatus, Reply

_MAX_INPUTS = 2048  # OpenAI's limit

_FORMS = "it must be a string, a list of strings, token ids, or lists of token ids"


class EmbeddingsRequest(Schema):
    """The body of `POST /v1/embeddings`: one text or several, as text or as token ids."""

    model_config = example({"input": ["a red apple", "a green pear"]})

    input: str | list[str] | list[int] | list[list[int]]
    model: str = ""
    dimensions: int | None = Field(None, ge=1)
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = Field(
        None, description="false returns the mean itself; otherwise it is scaled to length 1"
    )

    @field_validator("input", mode="before")
    @classmethod
    def _check_input(cls, value: object) -> object:
        """Report one error for an invalid input, not one for each type it could have."""
        entries: list[Any] = value if isinstance(value, list) else [value]
        if {type(entry) for entry in entries} not in (set(), {str}, {int}, {list}):
            raise ValueError(_FORMS)
        for index, ids in enumerate(entries):
            if isinstance(ids, list) and {type(token) for token in ids} - {int}:
                raise ValueError(f"{_FORMS}; entry {index} is a list of something else")
        return value

    def to_domain(self) -> EmbeddingRequest:
        given: list[Any] = [self.input] if isinstance(self.input, str) else list(self.input)
        if given and isinstance(given[0], int):
            given = [given]
        if not 0 < len(given) <= _MAX_INPUTS:
            raise InvalidRequestError(
                f"there are {len(given)} inputs; send between 1 and {_MAX_INPUTS}.", param="input"
            )
        inputs = tuple(each if isinstance(each, str) else tuple(each) for each in given)
        is_normalised = self.normalize is not False
        return EmbeddingRequest(self.model, inputs, self.dimensions, is_normalised=is_normalised)


class Embedding(TypedDict):
    """One text's vector: numbers, or the bytes of little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """Token counts over all texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    """Embeddings in the order of their inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def add_embeddings(
    router: APIRouter, inference: InferencePort, principal: Callable[[], Principal]
) -> None:
    """Serve `/embeddings`; `principal` returns the caller of the current request."""

    @router.post("/embeddings", response_model=None, responses={200: {"model": EmbeddingList}})
    async def embeddings(body: EmbeddingsRequest, http: Request) -> Response:
        """Return the mean of the model's last hidden states over each text."""
        work = inference.embed(body.to_domain(), principal())
        made = await unless_disconnected(work, http)
        if made is None:
            return Response(status_code=CLIENT_LEFT)
        is_packed = body.encoding_format == "base64"
        answer: EmbeddingList = {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": _base64(vector) if is_packed else list(vector),
                }
                for index, vector in enumerate(made.vectors)
            ],
            "model": made.model,
            "usage": {"prompt_tokens": made.num_tokens, "total_tokens": made.num_tokens},
        }
        return JSONResponse(answer)


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


_STATES: dict[ModelState, Literal["loaded", "loading", "on_disk", "failed"]] = {
    ModelState.READY: "loaded",
    ModelState.SWAPPING: "loaded",  # until its last request has ended
    ModelState.LOADING: "loading",
    ModelState.ON_DISK: "on_disk",
    ModelState.UNLOADED: "on_disk",
}
_NOT_SERVED = ("moderations", "audio/{path:path}", "images/{path:path}")


class OpenAIModel(TypedDict):
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
    draft_model: str
    draft_note: str
    images: Literal["vision", "ocr", "none"] | None


class ModelList(TypedDict):
    """The served model first, then those on this machine."""

    object: Literal["list"]
    data: list[OpenAIModel]


def openai_router(
    inference: InferencePort,
    models: ModelRegistry,
    principal: Callable[[], Principal],
    read_images: ReadImages,
) -> APIRouter:
    """Serve the endpoints under `/v1`; `principal` returns the caller of the current request."""
    router = APIRouter(prefix="/v1", tags=["openai"], responses=refusals("4XX", 503, 504))
    _add_chat(router, inference, principal, read_images)
    _add_completions(router, inference, principal)
    add_embeddings(router, inference, principal)
    _add_models(router, models)
    for path in _NOT_SERVED:
        router.add_api_route(f"/{path}", _not_served, methods=["POST"], include_in_schema=False)
    return router


def _add_chat(
    router: APIRouter,
    inference: InferencePort,
    principal: Callable[[], Principal],
    read_images: ReadImages,
) -> None:
    @router.post(
        "/chat/completions", response_model=None, responses=reply_or_stream(ChatCompletion)
    )
    async def chat_completions(body: ChatCompletionRequest, http: Request, hint: Hint) -> Response:
        """Answer a conversation, whole or as a stream."""
        with client_params(body.client_param):
            request = await with_images(body.to_domain(hint), read_images)
            requests = repeat(request, body.num_replies)
            replies = await start_all(inference, requests, principal())
        return await _reply(http, body, replies, ChatForm(body.num_replies))


def _add_completions(
    router: APIRouter, inference: InferencePort, principal: Callable[[], Principal]
) -> None:
    @router.post("/completions", response_model=None, responses=reply_or_stream(Completion))
    async def completions(body: CompletionRequest, http: Request, hint: Hint) -> Response:
        """Continue a raw prompt, whole or as a stream."""
        with client_params(body.client_param):
            prompts = body.to_domain(hint)
            requests = [r for prompt in prompts for r in repeat(prompt, body.num_replies)]
            replies = await start_all(inference, requests, principal())
        try:
            echoes = [await _echo(body, prompt, inference) for prompt in body.prompts]
        except BaseException:
            replies.cancel()
            raise
        return await _reply(http, body, replies, CompletionForm(body, echoes))


def _add_models(router: APIRouter, models: ModelRegistry) -> None:
    @router.get("/models/", response_model=None, include_in_schema=False)
    @router.get(
        "/models", response_model=None, responses=_in_both_shapes(ModelList | AnthropicModelPage)
    )
    async def list_models(
        anthropic_version: Annotated[str | None, Header()] = None,
    ) -> ModelList | AnthropicModelPage:
        """List the models that requests may name, in the format of the caller's vendor."""
        found = await asyncio.to_thread(models.models)
        if anthropic_version:
            return models_page(found)
        return {"object": "list", "data": [_model(status) for status in found]}

    @router.get(
        "/models/{model_id:path}",
        response_model=None,
        responses=_in_both_shapes(OpenAIModel | AnthropicModel),
    )
    async def get_model(
        model_id: str, anthropic_version: Annotated[str | None, Header()] = None
    ) -> OpenAIModel | AnthropicModel:
        """Describe one model, by its name or an alias."""
        status = await asyncio.to_thread(models.find, model_id)
        return model_info(status) if anthropic_version else _model(status)


def _in_both_shapes(body: Any) -> dict[int | str, dict[str, Any]]:
    refused = {**refusals("4XX")["4XX"], "model": ErrorBody | AnthropicErrorBody}
    return {200: {"model": body}, "4XX": refused}


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
    """Repeat a request; if it has a seed, the first keeps it and the others get new ones."""
    seed = request.sampling.seed
    if seed is None:
        return [request] * num_replies
    seeds = [(seed + index + 2**63) % 2**64 - 2**63 for index in range(1, num_replies)]
    others = [replace(request, sampling=replace(request.sampling, seed=seed)) for seed in seeds]
    return [request, *others]


async def start_all(
    inference: InferencePort, requests: Iterable[ChatRequest], principal: Principal
) -> ReplySet:
    """Start all requests; if one is refused or fails to start, cancel the others."""
    replies: list[Reply] = []
    try:
        for request in requests:
            replies.append(await inference.start(request, principal))  # noqa: PERF401
    except BaseException:
        ReplySet(replies).cancel()
        raise
    return ReplySet(replies)


async def _not_served(http: Request) -> Response:
    message = f"{http.url.path} is not supported: this server generates only text."
    return error_response(404, message, "unsupported_endpoint")


async def _echo(
    body: CompletionRequest, prompt: str | tuple[int, ...], inference: InferencePort
) -> str:
    if not body.echo:
        return ""
    return prompt if isinstance(prompt, str) else await inference.decode(prompt)


def _model(status: ModelStatus) -> OpenAIModel:
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
        "draft_model": status.draft_model,
        "draft_note": status.draft_note,
        "images": status.images.value if status.images else None,
    }
