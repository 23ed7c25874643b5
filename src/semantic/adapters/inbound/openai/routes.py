"""OpenAI's Chat Completions and Models, thin over the inbound ports."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from fastapi.responses import Response

from semantic.adapters.inbound.anthropic.docs import (
    AnthropicErrorBody,
    AnthropicModel,
    AnthropicModelPage,
)
from semantic.adapters.inbound.anthropic.models import model_info, models_page
from semantic.adapters.inbound.http import sse
from semantic.adapters.inbound.openai.chat import collect_chat, stream_chat
from semantic.adapters.inbound.openai.docs import (
    ERRORS,
    ChatCompletion,
    ErrorBody,
    Model,
    ModelList,
    reply_or_stream,
)
from semantic.adapters.inbound.openai.fields import Hint
from semantic.adapters.inbound.openai.reply_set import Json, answer, start_all, times
from semantic.adapters.inbound.openai.schema import ChatCompletionRequest
from semantic.domain.agents import Principal
from semantic.domain.errors import InvalidRequestError
from semantic.ports.inbound import InferencePort, ModelManagementPort, ModelStatus


def openai_router(
    inference: InferencePort, models: ModelManagementPort, principal: Callable[[], Principal]
) -> APIRouter:
    """Serve the endpoints under `/v1` on behalf of a principal."""
    router = APIRouter(prefix="/v1", tags=["openai"], responses=ERRORS)

    @router.post(
        "/chat/completions", response_model=None, responses=reply_or_stream(ChatCompletion)
    )
    async def chat_completions(body: ChatCompletionRequest, http: Request, hint: Hint) -> Response:
        """Answer a conversation, whole or as a stream."""
        try:
            requests = times(body.to_domain(hint), body.num_replies)
            replies = await start_all(inference, requests, principal())
        except InvalidRequestError as error:
            error.param = body.spelled(error.param)
            raise
        if body.stream:
            return sse.event_stream(stream_chat(replies, has_usage=body.has_usage), replies)
        return await answer(http, collect_chat(replies), replies)

    @router.get("/models", responses=_answers(ModelList | AnthropicModelPage))
    async def list_models(anthropic_version: Annotated[str | None, Header()] = None) -> Json:
        """The models that requests may name, in the shape of the caller's vendor."""
        if anthropic_version:
            return models_page(models.models())
        return {"object": "list", "data": [_model(status) for status in models.models()]}

    @router.get("/models/{model_id:path}", responses=_answers(Model | AnthropicModel))
    async def get_model(
        model_id: str, anthropic_version: Annotated[str | None, Header()] = None
    ) -> Json:
        """One of them."""
        found = models.find(model_id)
        return model_info(found) if anthropic_version else _model(found)

    return router


def _answers(model: Any) -> dict[int | str, dict[str, Any]]:
    """Document answers in the shape of the caller's vendor."""
    refusal = {"model": ErrorBody | AnthropicErrorBody, "description": "The request is refused."}
    return {200: {"model": model}, "4XX": refusal}


def _model(status: ModelStatus) -> Json:
    return {
        "id": status.id,
        "object": "model",
        "created": int(status.created_at),
        "owned_by": "semantic",
        "max_context": status.max_context,
        "max_model_len": status.max_context,
        "state": status.state.value,
    }
