"""What the bodies of all protocols have in common: their base, limits, builders, and numbers."""

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Protocol, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

from semantic.domain.chat import ToolChoice, ToolMode, ToolSpec
from semantic.domain.errors import InvalidRequestError
from semantic.domain.events import Finished
from semantic.domain.sampling import UNSET_SAMPLING, SamplingParams

NO_LIMIT = -1  # clients of llama.cpp and vLLM write it for "none"
MAX_MESSAGES = 10_000
MAX_ENTRIES = 1024  # in any list but those of messages and parts
_MAX_PARTS = 10_000  # in all messages together
_T = TypeVar("_T")
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)

Count: TypeAlias = Annotated[int, Field(ge=0)]
Positive: TypeAlias = Annotated[int, Field(ge=1)]
Durable: TypeAlias = Annotated[
    bool | None, Field(description="whether the turn is safe on disk; only with durability sync")
]


class Schema(BaseModel):
    """Part of a vendor's request: unknown fields are ignored, values have the types JSON gives."""

    model_config = ConfigDict(extra="ignore", strict=True)


def example(fields: dict[str, Any]) -> ConfigDict:
    """Document a body with a call that works on the starter model."""
    return ConfigDict(
        json_schema_extra={"examples": [{"model": "smollm2-135m-instruct", **fields}]}
    )


class VariantSchema(Schema):
    """An entry of several types in one class, so that an error names the field that is wrong.

    Attributes:
        needed: The fields that each type, or role, must have. The type is the first field.
    """

    model_config = ConfigDict(validate_default=True)
    needed: ClassVar[Mapping[str, Collection[str]]] = {}

    @field_validator("*")
    @classmethod
    def _require_own_fields(cls, value: object, info: ValidationInfo) -> object:
        kind = "type" if "type" in info.data else "role"
        variant = info.data.get(kind, "")
        if value is None and info.field_name in cls.needed.get(variant, ()):
            raise ValueError(f"it is required for {kind} {variant}")
        return value


class FunctionSchema(Schema):
    """A function that the model may call, as OpenAI's clients describe it."""

    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_domain(self) -> ToolSpec:
        """The function as a tool; whatever is absent is empty."""
        return ToolSpec(
            self.name or "",
            self.description or "",
            self.parameters or {},
            is_strict=bool(self.strict),
        )


class NamedTool(Protocol):
    """The one tool that must be called."""

    @property
    def name(self) -> str:
        """Of the tool that must be called."""


def limit_entries(value: object, limit: int = MAX_ENTRIES) -> object:
    """Refuse a list or object of too many entries.

    Before they are looked at: a million complaints would keep everyone waiting.

    Raises:
        ValueError: it has more.
    """
    if isinstance(value, list | dict) and len(value) > limit:
        raise ValueError(f"at most {limit} entries are allowed, not {len(value)}")
    return value


Limited: TypeAlias = Annotated[_T, BeforeValidator(limit_entries)]


def limit_parts(value: object, noun: str) -> object:
    """Refuse messages with too many parts in all.

    Raises:
        ValueError: there are more.
    """
    messages = value if isinstance(value, list) else []
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    if num_parts > _MAX_PARTS:
        raise ValueError(f"at most {_MAX_PARTS} {noun} are allowed, not {num_parts}")
    return value


def sampling_of(body: BaseModel, **more: object) -> SamplingParams:
    """Translate how tokens are chosen; None stands for what a request does not give.

    Raises:
        InvalidRequestError: a value is out of its range.
    """
    values = {name: getattr(body, name, None) for name in _SAMPLING} | more
    known = {name: value for name, value in values.items() if value is not None}
    if known.get("top_k") == NO_LIMIT:
        known["top_k"] = 0
    return SamplingParams(**known, unset=UNSET_SAMPLING - known.keys())


def reply_limit(max_tokens: int | None) -> int | None:
    """Translate how long a reply may be; None is as long as the server permits."""
    return None if max_tokens == NO_LIMIT else max_tokens


def tool_choice_of(choice: str | NamedTool | None, is_parallel: bool | None = None) -> ToolChoice:
    """Translate which tools the model may call; None stands for what a request does not give."""
    at_once = is_parallel is not False
    if choice is None or isinstance(choice, str):
        return ToolChoice(ToolMode(choice or "auto"), is_parallel=at_once)
    return ToolChoice(ToolMode.NAMED, choice.name, at_once)


def renumber(param: str, name: str, places: Sequence[int]) -> str:
    """Write an index of a list of ours as the client's, which has more entries.

    Example:
        >>> renumber("tools[0].parameters", "tools", [2])
        'tools[2].parameters'
    """
    match = re.fullmatch(rf"{name}\[(\d+)\](.*)", param)
    return f"{name}[{places[int(match[1])]}]{match[2]}" if match else param


@contextlib.contextmanager
def client_params(client_param: Callable[..., str | None], *about: object) -> Iterator[None]:
    """Let refusals name fields as the client spelled them.

    Args:
        client_param: Translates our name of a field.
        about: What it has to know beside that.
    """
    try:
        yield
    except InvalidRequestError as error:
        error.param = client_param(error.param, *about)
        raise


def refuse(is_given: object, param: str, why: str) -> None:
    """Refuse a field that cannot be honoured.

    Raises:
        InvalidRequestError: it is given.
    """
    if is_given:
        raise InvalidRequestError(why, param=param)


def durable_json(replies: Iterable[Finished]) -> dict[str, object]:
    """Whether turns are safe on disk, where that was promised: a field of ours beside theirs."""
    promised = [reply.is_durable for reply in replies if reply.is_durable is not None]
    return {"durable": all(promised)} if promised else {}
