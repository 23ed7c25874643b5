"""Fields that OpenAI's request bodies share, and the headers that identify a client's agent.

Unknown fields are ignored, as on OpenAI's own servers; known fields that the server cannot honour
are refused by name. A value must have the right JSON type: strings are not converted to numbers.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Protocol, TypeAlias

from fastapi import Depends, Header
from pydantic import Field, Strict

from semantic.adapters.inbound.wire import (
    EPHEMERAL,
    EXPLAIN,
    Limited,
    Schema,
    comparison_of,
    is_ephemeral,
    refuse,
    reply_limit,
    sampling_of,
    tool_choice_of,
)
from semantic.domain.agents import check_agent_id
from semantic.domain.chat import (
    AgentHint,
    ChoiceFormat,
    JsonFormat,
    JsonObject,
    OutputFormat,
    RegexFormat,
    Thinking,
    ToolChoice,
    ToolMode,
    ToolSpec,
    unparsed_arguments,
)
from semantic.domain.errors import InvalidRequestError
from semantic.domain.sampling import SamplingParams, StopRules

MAX_REPLIES = 128  # per request
_CALL_PREFIX = "call_"
# Constraints of other servers that this one lacks; ignoring them would give wrong replies.
_UNSUPPORTED = {
    "grammar": "GBNF is not supported; send json_schema or structured_outputs.",
    "guided_json": "send structured_outputs.json instead.",
    "guided_regex": "send structured_outputs.regex instead.",
    "guided_choice": "send structured_outputs.choice instead.",
    "guided_grammar": "grammars are not supported; send json_schema or structured_outputs.",
    "n_predict": "send max_tokens instead.",
    "min_tokens": "it is not supported; leave it out.",
    "bad_words": "it is not supported; send logit_bias.",
    "allowed_token_ids": "it is not supported; send structured_outputs.",
    "use_beam_search": "it is not supported; leave it out.",
    "logits_processors": "they are not supported; leave them out.",
}
_NOTHING: tuple[object, ...] = (None, "", 0, [])  # clients send these for "no constraint"

# Keys of a JSON object are strings, so these are converted.
_TokenId = Annotated[int, Strict(False)]
_HeaderText = Annotated[str | None, Header()]
_Ephemeral = Annotated[str | None, Header(description=EPHEMERAL)]


class StreamOptions(Schema):
    """What a stream contains besides the reply."""

    include_usage: bool | None = None


class StructuredOutputs(Schema):
    """The output format as clients of vLLM send it: exactly one of the fields is set."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = Field(None, max_length=10_000)
    choice: Limited[list[Annotated[str, Field(max_length=1000)]] | None] = None
    grammar: Any = None
    structural_tag: Any = None

    @property
    def kind(self) -> str:
        """The field that is set; raises `InvalidRequestError` unless it is one, and supported."""
        for name in ("grammar", "structural_tag"):
            refuse(getattr(self, name), f"structured_outputs.{name}", "it is not supported.")
        fields = {
            "json": self.json_ is not None,
            "json_object": bool(self.json_object),
            "regex": self.regex is not None,
            "choice": self.choice is not None,
        }
        chosen = [name for name, is_given in fields.items() if is_given]
        names = ", ".join(fields)
        refuse(len(chosen) != 1, "structured_outputs", f"it takes exactly one of {names}.")
        return chosen[0]

    def to_domain(self) -> OutputFormat:
        match self.kind:
            case "regex":
                return RegexFormat(self.regex or "")
            case "choice":
                return ChoiceFormat(tuple(self.choice or ()))
            case "json":
                return JsonFormat(self._schema())
            case _:
                return JsonFormat()

    def _schema(self) -> JsonObject:
        schema = self.json_
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError):
                schema = None
        if not isinstance(schema, dict):
            raise InvalidRequestError("it is not a JSON schema.", param="structured_outputs.json")
        return schema


class RequestFields(Schema):
    """Model, sampling, stop rules, output format, and the client's session."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Limited[dict[_TokenId, float] | None] = None
    seed: int | None = None
    stop: Limited[str | list[str] | None] = None
    stop_token_ids: Limited[list[int] | None] = None
    ignore_eos: bool | None = None
    session_id: str | None = Field(None, max_length=512)
    prompt_cache_key: str | None = Field(None, max_length=512)
    structured_outputs: StructuredOutputs | None = None
    json_schema: dict[str, Any] | None = None
    grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    n_predict: Any = None
    min_tokens: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    use_beam_search: Any = None
    logits_processors: Any = None

    def form(self, own: OutputFormat | None, param: str) -> OutputFormat | None:
        """The output format: `own` (in the field `param`), vLLM's or llama.cpp's; at most one."""
        for name, why in _UNSUPPORTED.items():
            refuse(getattr(self, name) not in _NOTHING, name, why)
        wanted = self.structured_outputs
        forms: dict[str, OutputFormat | None] = {
            param: own,
            "structured_outputs": wanted.to_domain() if wanted else None,
            "json_schema": None if self.json_schema is None else JsonFormat(self.json_schema),
        }
        chosen = [name for name, form in forms.items() if form is not None]
        if len(chosen) > 1:
            raise InvalidRequestError(f"send it or {chosen[0]}, not both.", param=chosen[1])
        return forms[chosen[0]] if chosen else None

    def form_param(self, param: str) -> str:
        if self.json_schema is not None:
            return "json_schema"
        wanted = self.structured_outputs
        return f"structured_outputs.{wanted.kind}" if wanted else param

    def hint(self, headers: AgentHint) -> AgentHint:
        key = headers.client_key or self.prompt_cache_key
        return replace(headers, session=self.session_id, client_key=key)

    def sampling(self, top_logprobs: int | None) -> SamplingParams:
        bias = tuple((self.logit_bias or {}).items())
        return sampling_of(self, top_logprobs=top_logprobs, logit_bias=bias)

    def stop_rules(self, max_tokens: int | None) -> StopRules:
        strings = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return StopRules(
            max_tokens=reply_limit(max_tokens),
            strings=strings,
            token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )


def client_hint(
    x_agent_id: _HeaderText = None,
    thread_id: _HeaderText = None,
    session_id: _HeaderText = None,
    x_session_affinity: _HeaderText = None,
    x_agent_ephemeral: _Ephemeral = None,
    x_cache_explain: Annotated[str | None, Header(description=EXPLAIN)] = None,
) -> AgentHint:
    """Read the client's agent and session from the headers, and what else they ask for.

    The thread comes first: it belongs to one agent, while several may share a session.
    """
    if x_agent_id is not None:
        check_agent_id(x_agent_id, "X-Agent-ID")
    key = thread_id or session_id or x_session_affinity
    return AgentHint(
        agent_id=x_agent_id,
        client_key=key,
        is_ephemeral=is_ephemeral(x_agent_ephemeral),
        comparison=comparison_of(x_cache_explain),
    )


Hint: TypeAlias = Annotated[AgentHint, Depends(client_hint)]


def thinking_of(effort: str | None) -> Thinking | None:
    """Translate a reasoning effort: `none` disables thinking, any other value enables it."""
    return None if effort is None else Thinking(is_enabled=effort != "none")


class ChosenTools(Protocol):
    """A tool choice: the tool to call or, if it has a `mode`, the tools that may be called."""

    @property
    def name(self) -> str | None: ...

    @property
    def mode(self) -> str | None: ...

    @property
    def allowed(self) -> list[str]: ...


def choice_of(
    choice: str | ChosenTools | None, is_parallel: bool | None, tools: Sequence[ToolSpec]
) -> ToolChoice:
    """Translate which of the offered tools the model may call; None is the default.

    Raises:
        InvalidRequestError: the choice allows a tool that is not offered, or none.
    """
    if choice is None or isinstance(choice, str):
        return tool_choice_of(choice, is_parallel)
    if choice.mode is None:
        return ToolChoice(ToolMode.NAMED, choice.name, is_parallel is not False)
    offered = [tool.name for tool in tools]
    unknown = [name for name in choice.allowed if name not in offered]
    refuse(unknown, "tool_choice", f"it allows {unknown}, but the tools are {offered}.")
    refuse(not choice.allowed, "tool_choice", f"it allows no tool; name some of {offered}.")
    made = tool_choice_of(choice.mode, is_parallel)
    return replace(made, allowed=frozenset(choice.allowed))


def outer_call_id(call_id: str) -> str:
    """Add the prefix that call ids have for OpenAI's clients."""
    return f"{_CALL_PREFIX}{call_id}"


def inner_call_id(call_id: str) -> str:
    """Undo `outer_call_id`; ids without the prefix are unchanged."""
    return call_id.removeprefix(_CALL_PREFIX)


def call_arguments(text: str) -> JsonObject:
    """Parse the arguments of an earlier call that a client sends back.

    Text that is not an object was cut off or comes from another server. It goes into the prompt
    unchanged, because an error would repeat in every later turn.
    """
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return unparsed_arguments(text)
    return value if isinstance(value, dict) else {"arguments": value}
