"""Replies as OpenAI's older completions, whole or as a stream."""

from collections.abc import AsyncIterator, Sequence

from semantic.adapters.inbound.http import sse
from semantic.adapters.inbound.http.errors import openai_body
from semantic.adapters.inbound.openai.completions_schema import CompletionRequest
from semantic.adapters.inbound.openai.output import (
    FINISH_REASONS,
    durable_json,
    finite,
    head_of,
    total_usage,
    usage_json,
)
from semantic.adapters.inbound.openai.reply_set import Json, ReplySet
from semantic.domain.chat import (
    Failed,
    Finished,
    PrefillProgress,
    ScoredToken,
    Started,
    TextDelta,
)


class _Choice:
    """One reply while it is written; knows how long its text is so far."""

    def __init__(self, index: int, echo: str, *, has_logprobs: bool) -> None:
        self._index = index
        self._num_characters = len(echo)
        self._has_logprobs = has_logprobs

    def json(
        self, text: str, scored: Sequence[ScoredToken] = (), finished: Finished | None = None
    ) -> Json:
        """More of the text, with its tokens."""
        return {
            "index": self._index,
            "text": text,
            "logprobs": self._logprobs(scored) if self._has_logprobs else None,
            "finish_reason": FINISH_REASONS[finished.reason] if finished else None,
        }

    def _logprobs(self, scored: Sequence[ScoredToken]) -> Json:
        texts = [token.text.decode("utf-8", "replace") for token in scored]
        offsets = []
        for text in texts:
            offsets.append(self._num_characters)
            self._num_characters += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [finite(token.logprob) for token in scored],
            "top_logprobs": [
                {text.decode("utf-8", "replace"): finite(logprob) for text, logprob in token.top}
                for token in scored
            ],
            "text_offset": offsets,
        }


def _choices(replies: ReplySet, body: CompletionRequest, echoes: Sequence[str]) -> list[_Choice]:
    has_logprobs = body.logprobs is not None
    return [
        _Choice(index, echoes[index // body.num_replies], has_logprobs=has_logprobs)
        for index in range(len(replies))
    ]


async def collect_completions(
    replies: ReplySet, body: CompletionRequest, echoes: Sequence[str]
) -> Json:
    """Wait for all replies and make one object of them; `echoes` stand before each prompt's.

    Raises:
        SemanticError: one of them failed.
    """
    head: Json = {}
    texts = [[echoes[index // body.num_replies]] for index in range(len(replies))]
    scored: list[list[ScoredToken]] = [[] for _ in texts]
    finished: dict[int, Finished] = {}
    async for index, event in replies.events():
        match event:
            case Started():
                head = head or head_of(event, "cmpl", "text_completion")
            case TextDelta():
                texts[index].append(event.text)
                scored[index] += event.logprobs
            case Finished():
                finished[index] = event
            case Failed():
                raise event.error
            case _:
                pass
    choices = _choices(replies, body, echoes)
    made = [
        choice.json("".join(texts[index]), scored[index], finished[index])
        for index, choice in enumerate(choices)
    ]
    usages = [finished[index].usage for index in range(len(replies))]
    usage = usage_json(total_usage(usages, body.num_replies))
    return {**head, "choices": made, "usage": usage, **durable_json(finished.values())}


async def stream_completions(
    replies: ReplySet, body: CompletionRequest, echoes: Sequence[str]
) -> AsyncIterator[str]:
    """Write all replies as server-sent events."""
    head: Json = {}
    progress = ""
    choices = _choices(replies, body, echoes)
    finished: dict[int, Finished] = {}
    async for item in replies.events_and_heartbeats():
        if isinstance(item, sse.Heartbeat):
            yield sse.comment(progress or "waiting")
            continue
        index, event = item
        choice: Json | None = None
        match event:
            case Started():
                head = head or head_of(event, "cmpl", "text_completion")
                head |= {"usage": None} if body.has_usage else {}
                echo = echoes[index // body.num_replies]
                choice = choices[index].json(echo) if echo else None
            case PrefillProgress():
                progress = f"prefill {event.done}/{event.total}"
            case TextDelta():
                choice = choices[index].json(event.text, event.logprobs)
            case Finished():
                finished[index] = event
                choice = choices[index].json("", (), event)
            case Failed():
                yield sse.data(openai_body(event.error))
                return
            case _:
                pass
        if choice is not None:
            durable = durable_json([event] if isinstance(event, Finished) else [])
            yield sse.data({**head, "choices": [choice], **durable})
    if body.has_usage:
        usages = [finished[index].usage for index in sorted(finished)]
        usage = usage_json(total_usage(usages, body.num_replies))
        yield sse.data({**head, "choices": [], "usage": usage})
    yield "data: [DONE]\n\n"
