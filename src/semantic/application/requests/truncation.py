"""Drops the oldest turns of a conversation that is too long."""

import math
from collections.abc import Sequence
from dataclasses import replace

from semantic.domain.chat import ChatRequest, Message, Role, ToolResultPart, images_in
from semantic.domain.errors import ContextLengthError

_STEP = 0.3  # share of the limit
_MESSAGE_OVERHEAD = 16  # characters per message part, for the tokens that the template adds
_IMAGE_SIZE = 1500  # characters per image: models take 64 to 1,100 tokens for one


def opens_turn(message: Message) -> bool:
    """Whether a conversation may begin here; a tool result needs the call before it."""
    is_result = any(isinstance(part, ToolResultPart) for part in message.parts)
    return message.role is Role.USER and not is_result


def text_size(messages: Sequence[Message]) -> int:
    """Return the size of messages in characters, from which their tokens can be estimated."""
    texts = sum(_MESSAGE_OVERHEAD + len(repr(p)) for message in messages for p in message.parts)
    return texts + _IMAGE_SIZE * sum(1 for _ in images_in(messages)) or 1


def without_oldest(request: ChatRequest, refusal: ContextLengthError) -> ChatRequest | None:
    """Drop the oldest turns after the system prompt; the last turn stays.

    What is dropped grows in steps of 30 % of the limit, not with every request, so that the prompts
    of several turns in a row begin with the same tokens and reuse their KV cache. Token counts are
    estimated from characters, with the ratio of the refused prompt.

    Args:
        refusal: Holds the length of the refused prompt and the limit.

    Returns:
        A shorter request, which may still be too long; None if nothing is left to drop.
    """
    messages = request.messages
    first = next((i for i, m in enumerate(messages) if m.role is not Role.SYSTEM), len(messages))
    history = messages[first:]
    starts = [i for i, message in enumerate(history) if i and opens_turn(message)]
    if not starts:
        return None
    ratio = refusal.num_prompt / text_size(messages)
    step = max(1.0, _STEP * refusal.limit)
    wanted = max(1, math.ceil((refusal.num_prompt - refusal.limit) / step)) * step
    start = next((i for i in starts if text_size(history[:i]) * ratio >= wanted), starts[-1])
    return replace(
        request,
        messages=(*messages[:first], *history[start:]),
        num_dropped=request.num_dropped + start,
    )
