"""The texts of a request for embeddings as tokens, and its vectors."""

import math
from collections.abc import Sequence

from semantic.application.engine.model import LoadedModel
from semantic.domain.chat import require_whole_characters
from semantic.domain.errors import InvalidRequestError
from semantic.ports.inbound import EmbeddingRequest


def text_tokens(
    request: EmbeddingRequest, model: LoadedModel, longest: int
) -> list[tuple[int, ...]]:
    """Tokenise and check all texts; none may exceed `longest` tokens or the model's context.

    Raises:
        InvalidRequestError: a text is empty or too long, or has an unknown token id.
    """
    spec, texts = model.backend.spec, []
    limit, limited_by = spec.max_context, "the model's context"
    if longest < limit:
        limit, limited_by = longest, "this server's memory"
    for number, given in enumerate(request.inputs):
        tokens = given
        if isinstance(tokens, str):
            require_whole_characters(tokens, param="input")
            tokens = tuple(model.tokenizer.encode_prompt(tokens)) if tokens else ()
        if not tokens:
            raise InvalidRequestError(f"input {number} is empty.", param="input")
        if min(tokens) < 0 or max(tokens) >= spec.vocab_size:
            bad = [not 0 <= token < spec.vocab_size for token in tokens].index(True)
            raise InvalidRequestError(
                f"token {bad} of input {number} is {tokens[bad]}; this model's token ids are in "
                f"[0, {spec.vocab_size}). Send text, or ids of this model's tokenizer.",
                param="input",
            )
        if request.is_cut:
            tokens = tokens[:limit]
        if len(tokens) > limit:
            raise InvalidRequestError(
                f"input {number} has {len(tokens)} tokens, more than {limited_by} of {limit}; "
                "send it in pieces.",
                param="input",
            )
        texts.append(tokens)
    return texts


def mean_vector(
    sums: Sequence[float], num_tokens: int, request: EmbeddingRequest
) -> tuple[float, ...]:
    """Return the first dimensions of the mean over tokens, scaled to length 1 if requested.

    Raises:
        InvalidRequestError: the vector has fewer dimensions than requested.
    """
    dimensions = request.dimensions
    if dimensions is not None and dimensions > len(sums):
        raise InvalidRequestError(
            f"this model's vectors have {len(sums)} dimensions, not {dimensions}.",
            param="dimensions",
        )
    kept = sums[:dimensions]
    length = (math.hypot(*kept) or 1.0) if request.is_normalised else num_tokens
    return tuple(value / length for value in kept)
