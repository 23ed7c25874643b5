"""Request bodies of Ollama's API, and their translation.

Unknown fields and options are ignored, as by Ollama. Options that would change how a model is
loaded have no effect: the model keeps its memory, and with it the KV cache of all agents.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, ConfigDict, Field, field_validator

from semantic.adapters.inbound.ollama.conversation import (
    OllamaMessage,
    OllamaTool,
    conversation_of,
    images_of,
)
from semantic.adapters.inbound.wire import (
    MAX_ENTRIES,
    MAX_MESSAGES,
    Limited,
    Schema,
    example,
    image_place,
    refuse,
    sampling_of,
)
from semantic.domain.chat import (
    AgentHint,
    ChatRequest,
    JsonFormat,
    Message,
    OutputFormat,
    RawPrompt,
    Role,
    TextPart,
    Thinking,
    is_continuable,
)
from semantic.domain.sampling import MAX_TOP_LOGPROBS, SamplingParams, StopRules
from semantic.ports.inbound import EmbeddingRequest, PastTurn

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_DURATION = re.compile(rf"([+-]?)((?:{_AMOUNT.pattern})+|\d+(?:\.\d+)?)")
_RANDOM_SEED = -1
# Our names of fields that Ollama calls something else.
_OWN_NAMES = {
    "response_format": "format",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
}
_OPTIONS = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed", "stop"}
    | {"presence_penalty", "frequency_penalty"}
)
# `context` names a turn by its request id: 12 bytes as numbers that look like token ids.
_CONTEXT_LENGTH, _DIGITS = 4, 6

ModelName = Annotated[str, Field(validation_alias=AliasChoices("model", "name"))]
KeepAlive = Annotated[
    Annotated[float, Field(allow_inf_nan=False)] | str | None,
    Field(description='seconds, or a duration such as "5m"; negative: keep the model loaded'),
]


def duration_s(value: float | str | None) -> float | None:
    """Return a duration in seconds; None if there is none.

    Example:
        >>> duration_s("1h30m"), duration_s("-1"), duration_s(0)
        (5400.0, -1.0, 0.0)
    """
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        return float(value)
    match = _DURATION.fullmatch(value)
    if match is None:
        raise ValueError('it must be a number of seconds, or a duration such as "5m"')
    sign, text = -1.0 if match[1] == "-" else 1.0, match[2]
    amounts = [float(number) * _UNITS[unit] for number, unit in _AMOUNT.findall(text)]
    return sign * (sum(amounts) if amounts else float(text))


def context_of(request_id: str) -> list[int]:
    """Return the `context` by which a client continues the turn of a request."""
    return [int(request_id[at : at + _DIGITS], 16) for at in range(0, len(request_id), _DIGITS)]


def request_id_of(context: Sequence[int]) -> str:
    """Undo `context_of`; empty if the numbers are not from this server."""
    is_ours = len(context) == _CONTEXT_LENGTH and all(0 <= n < 16**_DIGITS for n in context)
    return "".join(f"{number:0{_DIGITS}x}" for number in context) if is_ours else ""


class Options(Schema):
    """Sampling parameters and limits; Ollama's clients send whole numbers also as floats."""

    model_config = ConfigDict(strict=False)

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Limited[str | list[str] | None] = None
    num_predict: int | None = None
    num_ctx: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def sampling(self, top_logprobs: int | None) -> SamplingParams:
        return sampling_of(
            self,
            top_logprobs=top_logprobs,
            repetition_penalty=self.repeat_penalty,
            seed=None if self.seed == _RANDOM_SEED else self.seed,
        )

    @property
    def stop_rules(self) -> StopRules:
        """The rules; a `num_predict` of 0 or less means no limit."""
        strings = [self.stop] if isinstance(self.stop, str) else self.stop or []
        limit = self.num_predict if (self.num_predict or 0) > 0 else None
        return StopRules(max_tokens=limit, strings=tuple(filter(None, strings)))

    @property
    def max_prompt(self) -> int | None:
        return self.num_ctx if (self.num_ctx or 0) > 0 else None


class ModelFields(Schema):
    """The model, which older clients send as `name`."""

    model_config = example({}) | ConfigDict(populate_by_name=True)

    model: ModelName = ""


class KeptModelFields(ModelFields):
    """The model, and how long it stays loaded when it is idle."""

    keep_alive: KeepAlive = None
    options: Options | None = None

    @field_validator("keep_alive")
    @classmethod
    def _check_duration(cls, value: float | str | None) -> float | None:
        return duration_s(value)

    @property
    def keep_s(self) -> float | None:
        return duration_s(self.keep_alive)


class PullRequest(ModelFields):
    """The body of `POST /api/pull`."""

    stream: bool | None = None


class _ReplyFields(KeptModelFields):
    stream: bool | None = None
    format: str | Limited[dict[str, Any]] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    truncate: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False

    @property
    def thinking(self) -> Thinking | None:
        return None if self.think is None else Thinking(is_enabled=self.think is not False)

    @property
    def output_format(self) -> OutputFormat | None:
        if isinstance(self.format, dict):
            return JsonFormat(self.format)
        why = 'it must be "json" or a JSON schema.'
        refuse(self.format not in (None, "", "json"), "format", why)
        return JsonFormat() if self.format else None

    def request(
        self, model: str, hint: AgentHint, messages: tuple[Message, ...], **more: Any
    ) -> ChatRequest:
        """Translate; `more` are fields of the `ChatRequest`."""
        options = self.options or Options()
        return ChatRequest(
            model=model,
            messages=messages,
            sampling=options.sampling((self.top_logprobs or 0) if self.logprobs else None),
            stop=options.stop_rules,
            output_format=self.output_format,
            thinking=self.thinking,
            max_prompt=options.max_prompt,
            drops_oldest=self.truncate is not False,
            **{"agent": hint, **more},
        )

    def client_param(self, param: str | None) -> str | None:
        if param in _OPTIONS:
            return f"options.{param}"
        if place := image_place(param):
            return f"messages[{place[0]}].images[{place[1] - 1}]" if place[1] else param
        return _OWN_NAMES.get(param or "", param)


class OllamaChatRequest(_ReplyFields):
    """The body of `POST /api/chat`; without messages it loads or unloads the model."""

    model_config = example({"messages": [{"role": "user", "content": "Say hi."}]})

    messages: list[OllamaMessage] | None = Field(None, max_length=MAX_MESSAGES)
    tools: Limited[list[OllamaTool] | None] = None

    @property
    def is_empty(self) -> bool:
        return not self.messages

    def to_domain(self, model: str, hint: AgentHint) -> ChatRequest:
        messages = conversation_of(self.messages or ())
        return self.request(
            model,
            hint,
            messages,
            tools=tuple(tool.function.to_domain() for tool in self.tools or ()),
            is_continued=is_continuable(messages),
        )


class GenerateRequest(_ReplyFields):
    """The body of `POST /api/generate`; without a prompt it loads or unloads the model."""

    model_config = example({"prompt": "Say hi."})

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: list[int] | None = Field(None, max_length=10_000_000)
    images: Limited[list[str] | None] = None
    suffix: str | None = None
    template: str | None = None

    @property
    def is_empty(self) -> bool:
        return not self.prompt

    @property
    def is_raw(self) -> bool:
        """Whether no chat template applies."""
        return bool(self.raw or self.suffix)

    def to_domain(self, model: str, hint: AgentHint, past: PastTurn | None) -> ChatRequest:
        """Translate; `past` is the turn that `context` names."""
        why = "template is not supported: the server uses the model's own."
        refuse(self.template, "template", why)
        if self.is_raw:
            why = "raw and suffix do not support system, context or images."
            refuse(self.system or self.context or self.images, "raw", why)
            raw_prompt = RawPrompt(self.prompt or "", self.suffix or "")
            return self.request(model, hint, (), raw_prompt=raw_prompt)
        messages = past.messages if past else ()
        system = Message.of(Role.SYSTEM, self.system or "")
        if self.system and system not in messages[:1]:
            messages = (*messages, system)
        asked = Message(Role.USER, (TextPart(self.prompt or ""), *images_of(self.images)))
        if past is not None:
            hint = replace(hint, session=None, client_key=None, previous_turn=past.turn_id)
        return self.request(model, hint, (*messages, asked))

    def client_param(self, param: str | None) -> str | None:
        if not (param or "").startswith("messages"):
            return super().client_param(param)
        place = image_place(param)
        return f"images[{place[1] - 1}]" if place and place[1] else "prompt"


class EmbedRequest(KeptModelFields):
    """The body of `POST /api/embed`: one text or several."""

    model_config = example({"input": ["a red apple", "a green pear"]})

    input: str | list[str] = Field("", max_length=MAX_ENTRIES)
    truncate: bool | None = None
    dimensions: int | None = Field(None, ge=0)

    @field_validator("input", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return [value] if isinstance(value, str) and value else value or []

    def to_domain(self, model: str) -> EmbeddingRequest:
        is_cut = self.truncate is not False
        return EmbeddingRequest(model, tuple(self.input), self.dimensions or None, is_cut)


class OldEmbeddingRequest(KeptModelFields):
    """The body of `POST /api/embeddings`, which `/api/embed` replaces: one text."""

    model_config = example({"prompt": "a red apple"})

    prompt: str = ""

    def to_domain(self, model: str) -> EmbeddingRequest:
        return EmbeddingRequest(model, (self.prompt,), is_cut=True)
