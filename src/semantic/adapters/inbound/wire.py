"""What the requests of all protocols have in common: numbers, and who left them out."""

from collections.abc import Mapping
from typing import Any

from semantic.domain.sampling import UNSET_SAMPLING, SamplingParams

NO_LIMIT = -1  # clients of llama.cpp and vLLM write it for "none"


def sampling_of(given: Mapping[str, Any]) -> SamplingParams:
    """Translate how tokens are chosen; None stands for what a request does not give.

    Raises:
        InvalidRequestError: a value is out of its range.
    """
    known = {name: value for name, value in given.items() if value is not None}
    if known.get("top_k") == NO_LIMIT:
        known["top_k"] = 0
    return SamplingParams(**known, unset=UNSET_SAMPLING - known.keys())


def reply_limit(max_tokens: int | None) -> int | None:
    """Translate how long a reply may be; None is as long as the server permits."""
    return None if max_tokens == NO_LIMIT else max_tokens
