"""Pieces of what OpenAI's clients read: usage, finish reasons, scored tokens."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from semantic.adapters.inbound.openai.reply_set import Json
from semantic.domain.chat import Finished, ScoredToken, Started, Usage
from semantic.domain.sampling import FinishReason

FINISH_REASONS = {
    FinishReason.END_TURN: "stop",
    FinishReason.STOP_SEQUENCE: "stop",
    FinishReason.MAX_TOKENS: "length",
    FinishReason.CONTEXT_FULL: "length",
    FinishReason.TOOL_USE: "tool_calls",
    FinishReason.CANCELLED: "stop",
}
_IMPOSSIBLE = -9999.0


def head_of(started: Started, prefix: str, kind: str) -> Json:
    """The fields that every object of a reply begins with."""
    return {
        "id": f"{prefix}-{started.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": started.model,
        "system_fingerprint": started.fingerprint,
    }


def durable_json(replies: Iterable[Finished]) -> Json:
    """Whether turns are safe on disk, where that was promised: a field of ours beside OpenAI's."""
    told = [reply.is_durable for reply in replies if reply.is_durable is not None]
    return {"durable": all(told)} if told else {}


def scored_json(token: ScoredToken) -> Json:
    """A token with its log-probability and those of the likeliest in its place."""
    top = [_token(text, logprob) for text, logprob in token.top]
    return {**_token(token.text, token.logprob), "top_logprobs": top}


def _token(text: bytes, logprob: float) -> Json:
    return {
        "token": text.decode("utf-8", "replace"),
        "bytes": list(text),
        "logprob": finite(logprob),
    }


def finite(logprob: float) -> float:
    """A log-probability that JSON can spell: OpenAI's number for the impossible."""
    return max(logprob, _IMPOSSIBLE)


def usage_json(usage: Usage) -> Json:
    """Tokens of a request."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cache_read_tokens,
            "cache_write_tokens": usage.cache_creation_tokens,
        },
        "completion_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
    }


def total_usage(usages: Sequence[Usage], num_replies: int) -> Usage:
    """Tokens of all replies; those to one prompt, which lie together, count it once."""
    prompts = usages[::num_replies]
    return replace(
        _sum(prompts),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        thinking_tokens=sum(usage.thinking_tokens for usage in usages),
    )


def _sum(usages: Iterable[Usage]) -> Usage:
    total = Usage(0)
    for usage in usages:
        total = Usage(
            total.prompt_tokens + usage.prompt_tokens,
            cache_read_tokens=total.cache_read_tokens + usage.cache_read_tokens,
            cache_creation_tokens=total.cache_creation_tokens + usage.cache_creation_tokens,
        )
    return total
