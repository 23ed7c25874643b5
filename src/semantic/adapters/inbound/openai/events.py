"""Writes replies as OpenAI's chat completions and older completions, whole or as chunks.

A `ReplyForm` formats the choices of one protocol; `collect` and `stream` do the rest.
"""

import codecs
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NotRequired, Protocol

from pydantic import Field
from typing_extensions import TypedDict

from semantic.adapters.inbound.http import streaming
from semantic.adapters.inbound.http.errors import openai_body
from semantic.adapters.inbound.http.streaming import Json, ReplySet
from semantic.adapters.inbound.openai.custom_tools import CustomInput, input_text
from semantic.adapters.inbound.openai.fields import outer_call_id
from semantic.adapters.inbound.openai.requests import CompletionRequest
from semantic.adapters.inbound.wire import (
    CacheExplanation,
    Count,
    DraftDetails,
    Durable,
    Positive,
    draft_details,
    durable_json,
    explained,
)
from semantic.domain.events import (
    Event,
    Failed,
    Finished,
    PromptScored,
    ScoredToken,
    Started,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from semantic.domain.sampling import FinishReason

_FINISH_REASONS = {
    FinishReason.END_TURN: "stop",
    FinishReason.STOP_SEQUENCE: "stop",
    FinishReason.MAX_TOKENS: "length",
    FinishReason.CONTEXT_FULL: "length",
    FinishReason.TOOL_USE: "tool_calls",
    FinishReason.CANCELLED: "stop",
}
_IMPOSSIBLE = -9999.0


# -- response bodies: the fields that are always present; replies may have more ----------------


class PromptDetails(TypedDict):
    """Details of the prompt tokens."""

    cached_tokens: Count
    cache_write_tokens: Count


class OutputDetails(TypedDict):
    """Details of the reply's tokens."""

    reasoning_tokens: Count


class CompletionDetails(OutputDetails, DraftDetails):
    """Details of the reply's tokens, with the draft tokens of speculative decoding."""


class ReplyUsage(TypedDict):
    """Token counts of a request."""

    prompt_tokens: Positive
    completion_tokens: Count
    total_tokens: Positive
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    cache_explain: NotRequired[CacheExplanation]


class _ReplyFunction(TypedDict):
    name: str
    arguments: str


class _ReplyCustom(TypedDict):
    name: str
    input: str


class _ReplyToolCall(TypedDict):
    id: str
    type: Literal["function", "custom"]
    function: NotRequired[_ReplyFunction]
    custom: NotRequired[_ReplyCustom]


class _ReplyMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[_ReplyToolCall]]


class _ChatChoice(TypedDict):
    index: Count
    message: _ReplyMessage
    logprobs: Json | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class _Logprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _CompletionChoice(TypedDict):
    index: Count
    text: str
    logprobs: _Logprobs | None
    finish_reason: Literal["stop", "length"]


class _Reply(TypedDict):
    id: str
    created: int
    model: str
    usage: ReplyUsage
    durable: NotRequired[Durable]


class ChatCompletion(_Reply):
    """The response of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: Annotated[list[_ChatChoice], Field(min_length=1)]


class Completion(_Reply):
    """The response of `/v1/completions`."""

    object: Literal["text_completion"]
    choices: Annotated[list[_CompletionChoice], Field(min_length=1)]


# -- a reply, whole or as a stream --------------------------------------------------------------


@dataclass(slots=True)
class CollectedReply:
    """One reply, collected from its events."""

    text: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    calls: list[ToolCallStarted] = field(default_factory=list)
    arguments: dict[int, list[str]] = field(default_factory=dict)
    prompt: PromptScored | None = None
    finished: Finished | None = None

    def add(self, event: Event) -> None:
        """Add the next event; raises `SemanticError` if the reply failed."""
        match event:
            case TextDelta():
                self.text.append(event.text)
                self.scored += event.logprobs
            case ThinkingDelta(text):
                self.thinking.append(text)
            case ToolCallStarted(index):
                self.calls.append(event)
                self.arguments[index] = []
            case ToolCallDelta(index, arguments):
                self.arguments[index].append(arguments)
            case PromptScored():
                self.prompt = event
            case Finished():
                self.finished = event
            case Failed(error):
                raise error
            case _:
                pass

    def message(self) -> _ReplyMessage:
        """The assistant's message; `content` is null if it has only tool calls."""
        text = "".join(self.text)
        message: _ReplyMessage = {"role": "assistant", "content": text, "refusal": None}
        if self.thinking:
            message["reasoning_content"] = "".join(self.thinking)
        if self.calls:
            message["content"] = text or None
            message["tool_calls"] = [
                _call(call, "".join(self.arguments[call.index])) for call in self.calls
            ]
        return message


class ReplyForm(Protocol):
    """The format of one protocol's replies.

    Attributes:
        prefix: Prefix of ids.
        kind: The field `object` of a whole reply.
        chunk_kind: The field `object` of a chunk.
        num_replies: The number of replies to each prompt.
    """

    prefix: str
    kind: str
    chunk_kind: str
    num_replies: int

    def whole(self, index: int, reply: CollectedReply) -> Json:
        """Format the choice of a whole reply."""

    def chunk(self, index: int, event: Event) -> Json | None:
        """Format what an event adds to a choice; None if it adds nothing."""


async def collect(replies: ReplySet, form: ReplyForm) -> Json:
    """Wait for all replies and build one object; raises `SemanticError` if one of them failed."""
    head: Json = {}
    collected = [CollectedReply() for _ in range(len(replies))]
    async for index, event in replies.events():
        if isinstance(event, Started):
            head = head or _head(event, form.prefix, form.kind)
        else:
            collected[index].add(event)
    finished = [reply.finished for reply in collected if reply.finished is not None]
    if len(finished) < len(collected):
        raise AssertionError("a reply ended without a final event")
    choices = [form.whole(index, reply) for index, reply in enumerate(collected)]
    usage = {**_usage(finished, form.num_replies), **explained(finished[0])}
    return {**head, "choices": choices, "usage": usage, **durable_json(finished)}


def stream(replies: ReplySet, form: ReplyForm, *, has_usage: bool) -> AsyncIterator[str]:
    """Yield all replies as server-sent events."""
    writer = _ChunkWriter(form, has_usage=has_usage)
    return replies.frames(writer.write, end=writer.end)


class _ChunkWriter:
    """Writes replies as chunks, and the usage at the end if the request wants it."""

    def __init__(self, form: ReplyForm, *, has_usage: bool) -> None:
        self._form = form
        self._has_usage = has_usage
        self._head: Json = {}
        self._finished: dict[int, Finished] = {}

    async def write(self, index: int, event: Event) -> str:
        match event:
            case Started() if not self._head:
                self._head = _head(event, self._form.prefix, self._form.chunk_kind)
                self._head |= {"usage": None} if self._has_usage else {}
            case Finished():
                self._finished[index] = event
            case Failed(error):
                return streaming.data(openai_body(error))
            case _:
                pass
        choice = self._form.chunk(index, event)
        if choice is None:
            return ""
        durable = durable_json([event] if isinstance(event, Finished) else [])
        return streaming.data({**self._head, "choices": [choice], **durable})

    def end(self) -> str:
        done = "data: [DONE]\n\n"
        if not self._has_usage:
            return done
        finished = [self._finished[index] for index in sorted(self._finished)]
        usage = {**_usage(finished, self._form.num_replies), **explained(finished[0])}
        return streaming.data({**self._head, "choices": [], "usage": usage}) + done


class ChatForm:
    """Chat completions; see `ReplyForm`."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, num_replies: int) -> None:
        self.num_replies = num_replies
        self._inputs: dict[tuple[int, int], CustomInput] = {}  # by reply and call

    def whole(self, index: int, reply: CollectedReply) -> Json:
        return _choice(index, {"message": reply.message()}, reply.finished, reply.scored)

    def chunk(self, index: int, event: Event) -> Json | None:
        delta: Json
        match event:
            case Started():
                # As from OpenAI: some clients index `content`, others concatenate it, which fails
                # for null.
                delta = {"role": "assistant", "content": "", "refusal": None}
            case TextDelta():
                return _choice(index, {"delta": {"content": event.text}}, None, event.logprobs)
            case ThinkingDelta(text):
                delta = {"reasoning_content": text}
            case ToolCallStarted():
                if event.is_custom:
                    self._inputs[index, event.index] = CustomInput()
                delta = {"tool_calls": [{"index": event.index, **_call(event, "")}]}
            case ToolCallDelta() | ToolCallEnded():
                written = self._written(index, event)
                if written is None:
                    return None
                delta = {"tool_calls": [{"index": event.index, **written}]}
            case Finished():
                return _choice(index, {"delta": {}}, event)
            case _:
                return None
        return _choice(index, {"delta": delta})

    def _written(self, index: int, event: ToolCallDelta | ToolCallEnded) -> Json | None:
        """Format what an event adds to a call; None if it adds nothing."""
        arguments = event.arguments if isinstance(event, ToolCallDelta) else None
        reader = self._inputs.get((index, event.index))
        if reader is None:
            return None if arguments is None else {"function": {"arguments": arguments}}
        text = reader.finish() if arguments is None else reader.feed(arguments)
        return {"custom": {"input": text}} if text else None


class CompletionForm:
    """Older completions; see `ReplyForm`. Counts the characters of each text for its offsets.

    `echoes` is the text before the replies to each prompt; a scored prompt's follows its scores.
    """

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, body: CompletionRequest, echoes: Sequence[str]) -> None:
        self.num_replies = body.num_replies
        self._has_logprobs = body.logprobs is not None
        self._is_prompt_scored = body.is_prompt_scored
        self._echoes = [echo for echo in echoes for _ in range(body.num_replies)]
        self._num_characters = [len(echo) for echo in self._echoes]
        # A character may span several tokens, and counts once it is complete.
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in self._echoes]

    def whole(self, index: int, reply: CollectedReply) -> Json:
        text = "".join([self._echoes[index], *reply.text])
        return self._choice(index, text, reply.scored, reply.finished, reply.prompt)

    def chunk(self, index: int, event: Event) -> Json | None:
        match event:
            case Started() if self._echoes[index] and not self._is_prompt_scored:
                return self._choice(index, self._echoes[index])
            case PromptScored():
                return self._choice(index, self._echoes[index], prompt=event)
            case TextDelta():
                return self._choice(index, event.text, event.logprobs)
            case Finished():
                return self._choice(index, "", (), event)
            case _:
                return None

    def _choice(
        self,
        index: int,
        text: str,
        scored: Sequence[ScoredToken] = (),
        finished: Finished | None = None,
        prompt: PromptScored | None = None,
    ) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, scored, prompt) if self._has_logprobs else None,
            "finish_reason": _FINISH_REASONS[finished.reason] if finished else None,
        }

    def _logprobs(
        self, index: int, scored: Sequence[ScoredToken], prompt: PromptScored | None
    ) -> _Logprobs:
        first, rest = ([prompt.first], prompt.rest) if prompt else ([], ())
        offsets = list(_offsets(self._echoes[index], [*first, *(token.text for token in rest)]))
        for token in scored:
            offsets.append(self._num_characters[index])
            self._num_characters[index] += len(self._decoders[index].decode(token.text))
        tokens = (*rest, *scored)
        return {
            "tokens": [_decoded(text) for text in (*first, *(token.text for token in tokens))],
            "token_logprobs": [*(None for _ in first), *(_finite(t.logprob) for t in tokens)],
            "top_logprobs": [*(None for _ in first), *(_top(token) for token in tokens)],
            "text_offset": offsets,
        }


# -- helpers ------------------------------------------------------------------------------------


def _offsets(text: str, pieces: Iterable[bytes]) -> Iterator[int]:
    """Yield where each token begins in the text.

    The text may lack tokens that the server added before it, and the space with which some
    tokenizers begin the first word.
    """
    decoder, offset = codecs.getincrementaldecoder("utf-8")("replace"), 0
    for piece in pieces:
        yield offset
        decoded = decoder.decode(piece)
        forms = (decoded, decoded.removeprefix(" "))
        offset += next((len(form) for form in forms if text.startswith(form, offset)), 0)


def _top(token: ScoredToken) -> dict[str, float]:
    """Map texts to log-probabilities, the token's own included; the best of equal texts counts."""
    top: dict[str, float] = {}
    for text, logprob in (*token.top, (token.text, token.logprob)):
        top.setdefault(_decoded(text), _finite(logprob))
    return top


def _head(started: Started, prefix: str, kind: str) -> Json:
    return {
        "id": f"{prefix}-{started.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": started.model,
        "system_fingerprint": started.fingerprint,
    }


def _choice(
    index: int, content: Json, finished: Finished | None = None, scored: Sequence[ScoredToken] = ()
) -> Json:
    logprobs = {"content": [scored_json(s) for s in scored], "refusal": None} if scored else None
    return {
        "index": index,
        **content,
        "logprobs": logprobs,
        "finish_reason": _FINISH_REASONS[finished.reason] if finished else None,
    }


def _call(call: ToolCallStarted, arguments: str) -> _ReplyToolCall:
    if call.is_custom:
        custom: _ReplyCustom = {"name": call.name, "input": input_text(arguments)}
        return {"id": outer_call_id(call.id), "type": "custom", "custom": custom}
    function: _ReplyFunction = {"name": call.name, "arguments": arguments}
    return {"id": outer_call_id(call.id), "type": "function", "function": function}


def scored_json(token: ScoredToken) -> Json:
    """Format a token with its log-probability and those of the likeliest alternatives."""
    top = [_token(text, logprob) for text, logprob in token.top]
    return {**_token(token.text, token.logprob), "top_logprobs": top}


def _token(text: bytes, logprob: float) -> Json:
    return {"token": _decoded(text), "bytes": list(text), "logprob": _finite(logprob)}


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    """Replace minus infinity, which JSON cannot express, with OpenAI's -9999."""
    return max(logprob, _IMPOSSIBLE)


def _usage(finished: Sequence[Finished], num_replies: int) -> ReplyUsage:
    """Sum the tokens of all replies. Replies to one prompt are adjacent, and count it once."""
    usages = [event.usage for event in finished]
    prompts = usages[::num_replies]
    num_prompt = sum(usage.prompt_tokens for usage in prompts)
    num_completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.cache_read_tokens for usage in prompts),
            "cache_write_tokens": sum(usage.cache_creation_tokens for usage in prompts),
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(usage.thinking_tokens for usage in usages),
            **draft_details(usages),
        },
    }
