"""What OpenAI's request bodies have in common, and what their clients' headers say.

Unknown fields are ignored, as OpenAI's own servers do; fields we know and cannot honour are
refused by name. A value must have the type JSON gives it: no number comes from a string.
"""

import json
from dataclasses import replace
from typing import Annotated, Any, TypeAlias

from fastapi import Depends, Header
from pydantic import BaseModel, ConfigDict, Field, Strict, field_validator

from semantic.domain.agents import check_agent_id
from semantic.domain.chat import AgentHint, JsonObject, Thinking
from semantic.domain.errors import InvalidRequestError
from semantic.domain.sampling import SamplingParams, StopRules

MAX_ENTRIES = 1024  # in any list but those of messages and parts
MAX_REPLIES = 128  # of one request
_CALL_PREFIX = "call_"

# Keys of a JSON object are strings, whatever they mean.
_TokenId = Annotated[int, Strict(False)]
_HeaderText = Annotated[str | None, Header()]


class Schema(BaseModel):
    """Part of a request body."""

    model_config = ConfigDict(extra="ignore", strict=True)


class StreamOptions(Schema):
    """What a stream carries besides the reply."""

    include_usage: bool | None = None


class RequestFields(Schema):
    """Who asks which model, how it samples, and when it stops."""

    model: str
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[_TokenId, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    session_id: str | None = Field(None, max_length=512)
    prompt_cache_key: str | None = Field(None, max_length=512)

    # Before their entries are looked at: a million complaints would keep everyone waiting.
    @field_validator("logit_bias", "stop", "stop_token_ids", mode="before")
    @classmethod
    def _cap_entries(cls, value: object) -> object:
        return capped(value)

    def hint(self, said: AgentHint) -> AgentHint:
        """Who is asking, by headers and body."""
        key = said.client_key or self.prompt_cache_key
        return replace(said, session=self.session_id, client_key=key)

    def sampling(self, top_logprobs: int | None) -> SamplingParams:
        """Translate how tokens are chosen.

        Raises:
            InvalidRequestError: a value is out of its range.
        """
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": self.seed,
            "top_logprobs": top_logprobs,
        }
        bias = tuple((self.logit_bias or {}).items())
        known: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**known, logit_bias=bias)

    def stop_rules(self, max_tokens: int | None) -> StopRules:
        """Translate when the reply ends.

        Raises:
            InvalidRequestError: a stop string is empty, or there are too many.
        """
        strings = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return StopRules(
            max_tokens=max_tokens,
            strings=strings,
            token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )


def capped(value: object, limit: int = MAX_ENTRIES) -> object:
    """Refuse a list or object of too many entries.

    Raises:
        ValueError: it has more.
    """
    if isinstance(value, list | dict) and len(value) > limit:
        raise ValueError(f"at most {limit} entries are allowed, not {len(value)}")
    return value


def client_hint(
    x_agent_id: _HeaderText = None,
    thread_id: _HeaderText = None,
    session_id: _HeaderText = None,
    x_session_affinity: _HeaderText = None,
) -> AgentHint:
    """Read who is asking off the headers.

    A thread is one agent's; a session may be shared by several.

    Raises:
        InvalidRequestError: the agent's id cannot name one.
    """
    if x_agent_id is not None:
        check_agent_id(x_agent_id, "X-Agent-ID")
    key = thread_id or session_id or x_session_affinity
    return AgentHint(agent_id=x_agent_id, client_key=key)


Hint: TypeAlias = Annotated[AgentHint, Depends(client_hint)]


def thinking_of(effort: str | None) -> Thinking | None:
    """Whether to think, by how much effort is asked for."""
    return None if effort is None else Thinking(is_enabled=effort != "none")


def outer_call_id(call_id: str) -> str:
    """A call's id as OpenAI's clients know it."""
    return f"{_CALL_PREFIX}{call_id}"


def inner_call_id(call_id: str) -> str:
    """Undo `outer_call_id`; ids that others made stay as they are."""
    return call_id.removeprefix(_CALL_PREFIX)


def call_arguments(text: str) -> JsonObject:
    """Parse a call's arguments as a client sends them again.

    What is not an object was cut short or made elsewhere; it is shown as it is rather than refused,
    since it would be refused in every later turn too.
    """
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {"arguments": text}
    return value if isinstance(value, dict) else {"arguments": value}


def refuse(is_given: object, param: str, why: str) -> None:
    """Refuse a field that cannot be honoured.

    Raises:
        InvalidRequestError: it is given.
    """
    if is_given:
        raise InvalidRequestError(why, param=param)
