"""OpenAI's Embeddings: texts as vectors of the loaded model, thin over the inbound port."""

import base64
import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field
from typing_extensions import TypedDict

from semantic.adapters.inbound.http.streaming import CLIENT_LEFT, unless_disconnected
from semantic.adapters.inbound.wire import Schema, example
from semantic.domain.agents import Principal
from semantic.domain.errors import InvalidRequestError
from semantic.ports.inbound import EmbeddingRequest, InferencePort

_MAX_INPUTS = 2048  # as at OpenAI

_Tokens = list[Annotated[int, Field(ge=0)]]


class EmbeddingsRequest(Schema):
    """The body: one text or several, as text or as token ids."""

    model_config = example({"input": ["a red apple", "a green pear"]})

    input: str | _Tokens | list[str] | list[_Tokens]
    model: str = ""
    dimensions: int | None = Field(None, ge=1)
    encoding_format: Literal["float", "base64"] | None = None

    def to_domain(self) -> EmbeddingRequest:
        """Translate.

        Raises:
            InvalidRequestError: there are none, or too many.
        """
        given: list[Any] = [self.input] if isinstance(self.input, str) else list(self.input)
        if given and isinstance(given[0], int):
            given = [given]
        if not 0 < len(given) <= _MAX_INPUTS:
            raise InvalidRequestError(
                f"there are {len(given)} inputs; send between 1 and {_MAX_INPUTS}.", param="input"
            )
        inputs = tuple(each if isinstance(each, str) else tuple(each) for each in given)
        return EmbeddingRequest(self.model, inputs, self.dimensions)


class Embedding(TypedDict):
    """One text's vector: numbers, or the bytes of little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    """The answer."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def add_embeddings(
    router: APIRouter, inference: InferencePort, principal: Callable[[], Principal]
) -> None:
    """Serve the endpoint on behalf of a principal."""

    @router.post("/embeddings", response_model=None, responses={200: {"model": EmbeddingList}})
    async def embeddings(body: EmbeddingsRequest, http: Request) -> Response:
        """The mean of the model's last hidden states over each text, scaled to length 1."""
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
