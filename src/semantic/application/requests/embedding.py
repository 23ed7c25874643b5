"""Before and after an embedding: texts become tokens that fit, sums become vectors of length 1."""

import math
from collections.abc import Sequence

from semantic.application.engine.model import LoadedModel
from semantic.domain.chat import require_whole_characters
from semantic.domain.errors import InvalidRequestError
from semantic.ports.inbound import EmbeddingRequest


def text_tokens(
    request: EmbeddingRequest, model: LoadedModel, longest: int
) -> list[tuple[int, ...]]:
    """Tokenise and check all texts, of which none may have more than `longest` tokens.

    Raises:
        InvalidRequestError: a text is empty or too long, or has an unknown token.
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
            raise InvalidRequestError(
                f"a token id of input {number} is not in [0, {spec.vocab_size}).", param="input"
            )
        if len(tokens) > limit:
            raise InvalidRequestError(
                f"input {number} has {len(tokens)} tokens, more than {limited_by} of {limit}; "
                "send it in pieces.",
                param="input",
            )
        texts.append(tokens)
    return texts


def unit_vector(sums: Sequence[float], dimensions: int | None) -> tuple[float, ...]:
    """The direction of the mean, which is that of the sum, in its first dimensions.

    Raises:
        InvalidRequestError: there are not so many.
    """
    if dimensions is not None and dimensions > len(sums):
        raise InvalidRequestError(
            f"this model's vectors have {len(sums)} dimensions, not {dimensions}.",
            param="dimensions",
        )
    kept = sums[:dimensions]
    length = math.hypot(*kept) or 1.0
    return tuple(value / length for value in kept)
