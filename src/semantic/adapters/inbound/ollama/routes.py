"""Endpoints of Ollama's API, thin over the inbound ports."""

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, NotRequired

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders
from typing_extensions import TypedDict

from semantic.adapters.inbound.http.errors import OllamaErrorBody, error_response, refusals
from semantic.adapters.inbound.http.streaming import (
    CLIENT_LEFT,
    LINES,
    EventStream,
    Json,
    ReplySet,
    answer,
    one_line,
    reply_or_stream,
    unless_disconnected,
)
from semantic.adapters.inbound.ollama.events import (
    ChatReply,
    GeneratedText,
    OllamaWriter,
    collect,
    in_message,
    in_response,
    lines,
)
from semantic.adapters.inbound.ollama.models import (
    ModelTags,
    OllamaModels,
    RunningModels,
    ShownModel,
)
from semantic.adapters.inbound.ollama.requests import (
    EmbedRequest,
    GenerateRequest,
    KeptModelFields,
    ModelFields,
    OldEmbeddingRequest,
    OllamaChatRequest,
    PullRequest,
    request_id_of,
)
from semantic.adapters.inbound.openai.fields import Hint
from semantic.adapters.inbound.wire import Count, ReadImages, client_params, with_images
from semantic.application.agents.turn_log import PastTurns
from semantic.application.models.registry import FetchModel, ModelRegistry
from semantic.domain.agents import Principal
from semantic.domain.chat import ChatRequest
from semantic.domain.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    SemanticError,
)
from semantic.ports.inbound import (
    EmbeddingRequest,
    Embeddings,
    InferencePort,
    ModelState,
    ModelStatus,
    PastTurn,
)
from semantic.ports.models import FetchProgress

# The version of Ollama whose API this is. Clients require a minimum, and parse it as numbers.
_API_LEVEL = "0.32.7"
_NOT_MANAGED = ("create", "copy", "push", "blobs/{digest}")


class _JsonRoute(APIRoute):
    """Reads every body as JSON, as Ollama does: its documentation sends `curl -d` without a type.

    `OriginCheck` refuses web pages of other origins, which may send such requests too.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            MutableHeaders(scope=request.scope)["content-type"] = "application/json"
            return await handle(request)

        return handle_json


class ApiVersion(TypedDict):
    """The response of `/api/version`."""

    version: str


class EmbeddedTexts(TypedDict):
    """The response of `/api/embed`: a vector of length 1 for each text."""

    model: str
    embeddings: list[list[float]]
    total_duration: NotRequired[Count]
    load_duration: NotRequired[Count]
    prompt_eval_count: NotRequired[Count]


class EmbeddedText(TypedDict):
    """The response of `/api/embeddings`."""

    embedding: list[float]


class PullStatus(TypedDict):
    """The response of `/api/pull`, and each line of its stream."""

    status: str
    total: NotRequired[Count]
    completed: NotRequired[Count]


class OllamaApi:
    """Ollama's endpoints under `/api`."""

    def __init__(
        self,
        inference: InferencePort,
        models: ModelRegistry,
        past: PastTurns,
        principal: Callable[[], Principal],
        read_images: ReadImages,
    ) -> None:
        """`principal` returns the caller of the current request."""
        self._read_images = read_images
        self._inference = inference
        self._registry = models
        self._models = OllamaModels(models)
        self._past = past
        self._principal = principal

    def router(self) -> APIRouter:
        errors = refusals("4XX", 503, 504, body=OllamaErrorBody)
        router = APIRouter(prefix="/api", tags=["ollama"], responses=errors, route_class=_JsonRoute)
        add = functools.partial(router.add_api_route, response_model=None)
        add("/version", self.version, responses={200: {"model": ApiVersion}})
        add("/tags", self.tags, responses={200: {"model": ModelTags}})
        add("/ps", self.running, responses={200: {"model": RunningModels}})
        add = functools.partial(add, methods=["POST"])
        add("/show", self.show, responses={200: {"model": ShownModel}})
        add("/chat", self.chat, responses=reply_or_stream(ChatReply, LINES))
        add("/generate", self.generate, responses=reply_or_stream(GeneratedText, LINES))
        add("/embed", self.embed, responses={200: {"model": EmbeddedTexts}})
        add("/embeddings", self.embeddings, responses={200: {"model": EmbeddedText}})
        add("/pull", self.pull, responses=reply_or_stream(PullStatus, LINES))
        router.add_api_route("/delete", self.delete, methods=["DELETE"], response_class=Response)
        refuse = functools.partial(router.add_api_route, include_in_schema=False)
        for path in _NOT_MANAGED:
            refuse(f"/{path}", self.refuse, methods=["GET", "POST"])
        return router

    # -- models ---------------------------------------------------------------------------------

    async def version(self) -> ApiVersion:
        """Return the version of Ollama that this API corresponds to, not that of this server."""
        return {"version": _API_LEVEL}

    async def tags(self) -> ModelTags:
        """List the models that requests may name."""
        return await asyncio.to_thread(self._models.tags)

    async def running(self) -> RunningModels:
        """List the loaded model, with the context that fits this server's memory."""
        return await asyncio.to_thread(self._models.running)

    async def show(self, body: ModelFields) -> ShownModel:
        """Describe a model: context length, size, template, capabilities."""
        return await asyncio.to_thread(self._models.show, body.model)

    async def pull(self, body: PullRequest) -> Response:
        """Download a model, as `semantic models pull`; names are those of Hugging Face.

        With keys, only an admin key downloads models.
        """
        try:
            await asyncio.to_thread(self._models.find, body.model)
            steps = _steps(lambda *_: None)  # it is here
        except ModelNotFoundError:
            if not self._principal().is_admin:
                return _needs_admin("downloading a model")
            steps = _steps(await asyncio.to_thread(self._registry.fetch, body.model))
        if body.stream is not False:
            return EventStream(_lines_of(steps), None, LINES)
        *_, last = [step async for step in steps]
        return JSONResponse(last)

    async def delete(self, body: ModelFields) -> Response:
        """Delete a model's files, as `semantic models rm`; with keys, only with an admin key."""
        if not self._principal().is_admin:
            return _needs_admin("deleting a model")
        status = await asyncio.to_thread(self._models.find, body.model)
        await asyncio.to_thread(self._registry.remove, status.id)
        return Response()

    async def refuse(self, http: Request) -> Response:
        """Refuse to create, copy or upload models."""
        message = (
            f"{http.url.path} is not supported: this server runs models as they are published. "
            "Add one with: semantic models pull MODEL"
        )
        return error_response(501, message, "not_implemented")

    # -- replies --------------------------------------------------------------------------------

    async def chat(self, body: OllamaChatRequest, http: Request, hint: Hint) -> Response:
        """Answer a conversation, by default as a stream; without messages, load or unload."""
        status = await asyncio.to_thread(self._models.find, body.model)
        writer = self._writer(body, in_message)
        if body.is_empty:
            return await self._load_or_unload(status, body, writer)
        with client_params(body.client_param):
            request = body.to_domain(status.id, hint)
            return await self._reply(http, body, request, writer)

    async def generate(self, body: GenerateRequest, http: Request, hint: Hint) -> Response:
        """Answer one prompt, by default as a stream; without a prompt, load or unload."""
        status = await asyncio.to_thread(self._models.find, body.model)
        has_context = not (body.is_raw or hint.is_ephemeral)
        writer = self._writer(body, in_response, has_context=has_context)
        if body.is_empty:
            return await self._load_or_unload(status, body, writer)
        past = await self._past_turn(body.context or ())
        with client_params(body.client_param):
            request = body.to_domain(status.id, hint, past)
            return await self._reply(http, body, request, writer)

    async def _past_turn(self, context: Sequence[int]) -> PastTurn | None:
        if not context:
            return None
        found, caller = None, self._principal()
        if request_id := request_id_of(context):
            found = await asyncio.to_thread(self._past.find_turn, request_id, caller)
        if found is None:
            raise InvalidRequestError(
                "it names no stored reply of this server; leave it out, or send the whole "
                "conversation to /api/chat.",
                param="context",
            )
        return found

    async def _reply(
        self,
        http: Request,
        body: OllamaChatRequest | GenerateRequest,
        request: ChatRequest,
        writer: OllamaWriter,
    ) -> Response:
        if body.think and not await asyncio.to_thread(self._models.can_think, request.model):
            raise InvalidRequestError(f'"{body.model}" does not support thinking', param="think")
        request = await with_images(request, self._read_images)
        replies = ReplySet([await self._inference.start(request, self._principal())])
        if not body.is_streamed:
            return await answer(http, collect(replies, writer), replies)
        return EventStream(lines(replies, writer), replies, LINES)

    def _writer(
        self,
        body: OllamaChatRequest | GenerateRequest,
        form: Callable[[Json], Json],
        *,
        has_context: bool = False,
    ) -> OllamaWriter:
        on_start = functools.partial(self._keep, body, self._principal())
        return OllamaWriter(body.model, form, has_context=has_context, on_start=on_start)

    # -- loading --------------------------------------------------------------------------------

    def _keep(self, body: KeptModelFields, caller: Principal) -> None:
        """Apply `keep_alive`, which concerns all tenants: only an admin key may set it."""
        if body.keep_s is not None and caller.is_admin:
            self._registry.keep_loaded(body.keep_s)

    async def _load_or_unload(
        self, status: ModelStatus, body: KeptModelFields, writer: OllamaWriter
    ) -> Response:
        caller = self._principal()
        if body.keep_s == 0:
            if not caller.is_admin:
                return _needs_admin("unloading a model")
            if status.id == self._registry.current().id:
                unloading = self._registry.keep_loaded(0)
                if unloading is not None:  # otherwise it follows when no request runs
                    await asyncio.shield(asyncio.wrap_future(unloading))
            return JSONResponse(writer.empty("unload"))
        if status.state is not ModelState.READY:
            may_swap = self._registry.policy.swap_on_request
            load = self._registry.swap if may_swap else self._registry.load
            loading = await asyncio.to_thread(load, status.id)
            await asyncio.shield(asyncio.wrap_future(loading))
        self._keep(body, caller)
        return JSONResponse(writer.empty("load"))

    # -- embeddings -----------------------------------------------------------------------------

    async def embed(self, body: EmbedRequest, http: Request) -> Response:
        """Return the vectors of texts; by default, texts that are too long are cut."""
        received = time.monotonic_ns()
        status = await asyncio.to_thread(self._models.find, body.model)
        made: EmbeddedTexts = {"model": body.model, "embeddings": []}
        if body.input:
            found = await self._embedded(body, body.to_domain(status.id), http)
            if found is None:
                return Response(status_code=CLIENT_LEFT)
            made["embeddings"] = [list(vector) for vector in found.vectors]
            made["prompt_eval_count"] = found.num_tokens
        made["total_duration"] = time.monotonic_ns() - received
        return JSONResponse(made)

    async def embeddings(self, body: OldEmbeddingRequest, http: Request) -> Response:
        """Return the vector of one text; older than `/api/embed`."""
        status = await asyncio.to_thread(self._models.find, body.model)
        made: EmbeddedText = {"embedding": []}
        if body.prompt:
            found = await self._embedded(body, body.to_domain(status.id), http)
            if found is None:
                return Response(status_code=CLIENT_LEFT)
            made["embedding"] = list(found.vectors[0])
        return JSONResponse(made)

    async def _embedded(
        self, body: KeptModelFields, request: EmbeddingRequest, http: Request
    ) -> Embeddings | None:
        caller = self._principal()
        made = await unless_disconnected(self._inference.embed(request, caller), http)
        self._keep(body, caller)
        return made


def _needs_admin(action: str) -> Response:
    message = f"{action} needs an admin key, because it concerns all tenants."
    return error_response(403, message, "admin_key_required")


async def _steps(fetch: FetchModel) -> AsyncIterator[Json]:
    """Yield the steps of a download; raises `SemanticError` if it fails.

    A client that disconnects does not stop the download; the end of the server does.
    """
    loop, steps, done = asyncio.get_running_loop(), asyncio.Queue[str | None](), Future[None]()
    transfer = FetchProgress()

    def on_progress(step: str) -> None:
        loop.call_soon_threadsafe(steps.put_nowait, step)

    def work() -> None:
        try:
            fetch(on_progress, transfer)
        except BaseException as error:  # noqa: BLE001 - raised where the steps are read
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=work, name="pull", daemon=True).start()
    ended = asyncio.wrap_future(done)
    ended.add_done_callback(lambda _: steps.put_nowait(None))
    step: str | None = "pulling manifest"
    while step is not None:
        counted = {"total": transfer.num_total, "completed": transfer.num_done}
        yield {"status": step, **(counted if transfer.num_total else {})}
        step = await steps.get()
    await ended
    yield {"status": "success"}


async def _lines_of(steps: AsyncIterator[Json]) -> AsyncIterator[str]:
    try:
        async for step in steps:
            yield f"{one_line(step)}\n"
    except SemanticError as error:
        yield f"{one_line({'error': error.message})}\n"
