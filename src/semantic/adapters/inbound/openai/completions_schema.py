"""OpenAI's older request for plain completions, and its translation to ours."""

from typing import Annotated, Any, TypeAlias

from pydantic import ConfigDict, Field, StrictInt, StrictStr, field_validator

from semantic.adapters.inbound.openai.fields import (
    MAX_REPLIES,
    RequestFields,
    StreamOptions,
    refuse,
)
from semantic.adapters.inbound.wire import NO_LIMIT
from semantic.domain.chat import AgentHint, ChatRequest, RawPrompt
from semantic.domain.errors import InvalidRequestError
from semantic.domain.sampling import MAX_TOP_LOGPROBS

_DEFAULT_MAX_TOKENS = 16  # OpenAI's
_MAX_IDS = 2_000_000
_Ids: TypeAlias = list[StrictInt]
_Prompt: TypeAlias = StrictStr | _Ids | list[StrictStr] | list[_Ids]


class CompletionRequest(RequestFields):
    """The body of `POST /v1/completions`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "smollm2-135m-instruct",
                    "prompt": "The capital of France is",
                }
            ]
        }
    )

    prompt: Annotated[_Prompt, Field(union_mode="left_to_right")]
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=NO_LIMIT)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    n: int | None = Field(None, ge=1, le=MAX_REPLIES)
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, value: object) -> object:
        """Say what is wrong with a prompt once, not for every type it could have been."""
        entries: list[Any] = value if isinstance(value, list) else [value]
        kinds = {type(entry) for entry in entries}
        is_known = kinds in ({str}, {int}) or (
            kinds == {list}
            and all(ids and {type(token) for token in ids} == {int} for ids in entries)
        )
        if not is_known:
            raise ValueError("it must be a string, a list of strings, token ids, or lists of them")
        if len(entries) > (_MAX_IDS if kinds == {int} else MAX_REPLIES):
            raise ValueError(f"at most {MAX_REPLIES} prompts are allowed, not {len(entries)}")
        return value

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        """The prompts, each as text or as ids."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        ids = tuple(entry for entry in given if isinstance(entry, int))
        if ids:
            return [ids]
        return [p if isinstance(p, str) else tuple(p) for p in given if not isinstance(p, int)]

    @property
    def num_replies(self) -> int:
        """How many replies each prompt gets."""
        return self.n or 1

    @property
    def has_usage(self) -> bool:
        """Whether a stream is to end with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def to_domain(self, said: AgentHint) -> list[ChatRequest]:
        """Translate to our terms, a request for each prompt.

        Raises:
            InvalidRequestError: a field has a value we cannot honour.
        """
        refuse(self.suffix, "suffix", "suffix is not supported: models here write on, not between.")
        refuse(
            self.best_of not in (None, 1, self.num_replies),
            "best_of",
            "best_of is not supported; leave it out, or let it equal n.",
        )
        refuse(
            self.echo and self.logprobs is not None,
            "echo",
            "echo with logprobs is not supported: the prompt's tokens are not scored.",
        )
        if len(self.prompts) * self.num_replies > MAX_REPLIES:
            raise InvalidRequestError(
                f"at most {MAX_REPLIES} replies a request are allowed.", param="n"
            )
        output_format = self.form(None, "response_format")
        max_tokens = _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return [
            ChatRequest(
                model=self.model or "",
                messages=(),
                raw_prompt=RawPrompt(prompt),
                sampling=self.sampling(self.logprobs),
                stop=self.stop_rules(max_tokens),
                output_format=output_format,
                agent=self.hint(said),
            )
            for prompt in self.prompts
        ]

    def spelled(self, param: str | None) -> str | None:
        """Return our name of a field as this client spelled it."""
        if param == "response_format":
            return self.form_param(param)
        return "prompt" if param == "messages" else param
