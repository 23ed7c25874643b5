"""OpenAI's older completions, and the endpoints of theirs that are not served."""

from collections.abc import Callable

from fastapi import APIRouter, Request
from fastapi.responses import Response

from semantic.adapters.inbound.http import sse
from semantic.adapters.inbound.http.errors import error_response
from semantic.adapters.inbound.openai.completions import collect_completions, stream_completions
from semantic.adapters.inbound.openai.completions_schema import CompletionRequest
from semantic.adapters.inbound.openai.docs import ERRORS, Completion, reply_or_stream
from semantic.adapters.inbound.openai.fields import Hint
from semantic.adapters.inbound.openai.reply_set import answer, start_all, times
from semantic.domain.agents import Principal
from semantic.domain.errors import InvalidRequestError
from semantic.ports.inbound import InferencePort

_NOT_SERVED = ("embeddings", "moderations", "audio/{path:path}", "images/{path:path}")


def completions_router(inference: InferencePort, principal: Callable[[], Principal]) -> APIRouter:
    """Serve `/v1/completions` on behalf of a principal."""
    router = APIRouter(prefix="/v1", tags=["openai"], responses=ERRORS)

    @router.post("/completions", response_model=None, responses=reply_or_stream(Completion))
    async def completions(body: CompletionRequest, http: Request, hint: Hint) -> Response:
        """Go on from a prompt as it stands, whole or as a stream."""
        try:
            prompts = body.to_domain(hint)
            requests = [r for prompt in prompts for r in times(prompt, body.num_replies)]
            replies = await start_all(inference, requests, principal())
        except InvalidRequestError as error:
            error.param = body.spelled(error.param)
            raise
        try:
            echoes = [await _echo(body, prompt, inference) for prompt in body.prompts]
        except BaseException:
            replies.cancel()
            raise
        if body.stream:
            return sse.event_stream(stream_completions(replies, body, echoes), replies)
        return await answer(http, collect_completions(replies, body, echoes), replies)

    for path in _NOT_SERVED:
        router.add_api_route(f"/{path}", _not_served, methods=["POST"], include_in_schema=False)
    return router


async def _not_served(http: Request) -> Response:
    message = f"{http.url.path} is not served here: this server writes text."
    return error_response(404, message, "unsupported_endpoint")


async def _echo(
    body: CompletionRequest, prompt: str | tuple[int, ...], inference: InferencePort
) -> str:
    if not body.echo:
        return ""
    return prompt if isinstance(prompt, str) else await inference.decode(prompt)
