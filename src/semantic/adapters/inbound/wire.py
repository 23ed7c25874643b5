"""Base classes, limits and translation helpers that the request bodies of all protocols share."""

import contextlib
import re
from collections import Counter
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, NotRequired, Protocol, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)
from typing_extensions import TypedDict

from semantic.domain.chat import (
    CacheComparison,
    ChatRequest,
    ImagePart,
    Message,
    ToolChoice,
    ToolMode,
    ToolResultPart,
    ToolSpec,
)
from semantic.domain.errors import InvalidRequestError
from semantic.domain.events import CacheReport, Finished, Usage
from semantic.domain.sampling import UNSET_SAMPLING, SamplingParams
from semantic.ports.inbound import NewTurn

NO_LIMIT = -1  # clients of llama.cpp and vLLM send it for "no limit"
EPHEMERAL = "true leaves nothing behind: no turn, no text and no KV cache"
EXPLAIN = "true adds `cache_explain` to the usage: what the prompt reused, and why not more"
STORED_IMAGE = "sha256:"
MAX_MESSAGES = 10_000
MAX_ENTRIES = 1024  # in any list other than messages and their parts
_MAX_PARTS = 10_000  # in all messages together
_IMAGE_PLACE = re.compile(r"messages\[(\d+)\](?:\.content\[\d+\])?\.content\[(\d+)\]")
_T = TypeVar("_T")
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)

Count: TypeAlias = Annotated[int, Field(ge=0)]
Positive: TypeAlias = Annotated[int, Field(ge=1)]
Durable: TypeAlias = Annotated[
    bool | None, Field(description="whether the turn is durable on disk; only with durability sync")
]


@dataclass(frozen=True, slots=True)
class SentImage(ImagePart):
    """An image as a client sent it, which `with_images` reads and checks.

    Attributes:
        source: A data URI, base64 without a prefix, a URL, or `STORED_IMAGE` and the digest of an
            image in a stored turn.
    """

    source: str = ""

    @classmethod
    def of(cls, source: str) -> "SentImage":
        return cls("", "", 0, 0, source=source)


ReadImages: TypeAlias = Callable[[Sequence[Message]], Awaitable[tuple[Message, ...]]]
_RequestT = TypeVar("_RequestT", ChatRequest, NewTurn)


def sent_images(messages: Sequence[Message]) -> list[str]:
    """Return the fields of the images in messages, as our errors name them."""
    found: list[str] = []
    for index, message in enumerate(messages):
        for position, part in enumerate(message.parts):
            where = f"messages[{index}].content[{position}]"
            if isinstance(part, SentImage):
                found.append(where)
            elif isinstance(part, ToolResultPart):
                inner = enumerate(part.content)
                found += [f"{where}.content[{i}]" for i, p in inner if isinstance(p, SentImage)]
    return found


async def with_images(request: _RequestT, read_images: ReadImages) -> _RequestT:
    """Return a request whose images are read and checked.

    Raises:
        InvalidRequestError: an image is invalid or not allowed.
    """
    if not sent_images(request.messages):
        return request
    return replace(request, messages=await read_images(request.messages))


def image_place(param: str | None) -> tuple[int, int] | None:
    """Return the message and the part of a field that `sent_images` returns; None for another.

    For a part of a tool's result, it is the part's index in the result.

    Example:
        >>> image_place("messages[2].content[0].content[1]"), image_place("messages[2].content")
        ((2, 1), None)
    """
    match = _IMAGE_PLACE.fullmatch(param or "")
    return (int(match[1]), int(match[2])) if match else None


class Schema(BaseModel):
    """Base of a vendor's request schemas: ignores unknown fields and does not convert types."""

    model_config = ConfigDict(extra="ignore", strict=True)


def example(fields: dict[str, Any]) -> ConfigDict:
    """Return a model config that documents a body with an example for the starter model."""
    return ConfigDict(
        json_schema_extra={"examples": [{"model": "smollm2-135m-instruct", **fields}]}
    )


class VariantSchema(Schema):
    """One class for an entry of several types, so that an error names the invalid field.

    A union of classes would report errors for every type that the entry could have.

    Attributes:
        needed: The required fields of each type or role. The type or role must be the first field
            of the class, because validators see only the fields before their own.
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


class ToolSchema(Schema):
    """A function that the model may call; each protocol narrows or adds fields."""

    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_domain(self) -> ToolSpec:
        return ToolSpec(
            self.name or "",
            self.description or "",
            self.parameters or {},
            is_strict=bool(self.strict),
        )


class NamedTool(Protocol):
    """A tool choice that names the one tool the model must call."""

    @property
    def name(self) -> str: ...


def limit_entries(value: object, limit: int = MAX_ENTRIES) -> object:
    """Refuse a list or object with too many entries.

    This runs before the entries are validated: building a million validation errors would delay
    all other requests.
    """
    if isinstance(value, list | dict) and len(value) > limit:
        raise ValueError(f"at most {limit} entries are allowed, not {len(value)}")
    return value


Limited: TypeAlias = Annotated[_T, BeforeValidator(limit_entries)]


def limit_parts(value: object, noun: str) -> object:
    """Refuse messages with too many parts in total."""
    messages = value if isinstance(value, list) else []
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    if num_parts > _MAX_PARTS:
        raise ValueError(f"at most {_MAX_PARTS} {noun} are allowed, not {num_parts}")
    return value


def sampling_of(body: BaseModel, **more: object) -> SamplingParams:
    """Translate sampling parameters; None means that the request does not set one."""
    values = {name: getattr(body, name, None) for name in _SAMPLING} | more
    known = {name: value for name, value in values.items() if value is not None}
    if known.get("top_k") == NO_LIMIT:
        known["top_k"] = 0
    return SamplingParams(**known, unset=UNSET_SAMPLING - known.keys())


def reply_limit(max_tokens: int | None) -> int | None:
    """Translate the maximum reply length; None means as long as the server permits."""
    return None if max_tokens == NO_LIMIT else max_tokens


def tool_choice_of(choice: str | NamedTool | None, is_parallel: bool | None = None) -> ToolChoice:
    """Translate which tools the model may call; None means that the request does not say."""
    at_once = is_parallel is not False
    if choice is None or isinstance(choice, str):
        return ToolChoice(ToolMode(choice or "auto"), is_parallel=at_once)
    return ToolChoice(ToolMode.NAMED, choice.name, at_once)


def renumber(param: str, name: str, places: Sequence[int]) -> str:
    """Translate an index into our list to the index in the client's longer list.

    `places` has the client's index of each of our entries.

    Example:
        >>> renumber("tools[0].parameters", "tools", [2])
        'tools[2].parameters'
    """
    match = re.fullmatch(rf"{name}\[(\d+)\](.*)", param)
    return f"{name}[{places[int(match[1])]}]{match[2]}" if match else param


@contextlib.contextmanager
def client_params(client_param: Callable[..., str | None], *about: object) -> Iterator[None]:
    """Make errors name a field as the client does: `client_param` translates our name of it."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = client_param(error.param, *about)
        raise


def is_ephemeral(header: str | None) -> bool:
    """Read the header `X-Agent-Ephemeral`; None means that the request has none."""
    return _is_true(header, "X-Agent-Ephemeral")


def comparison_of(header: str | None) -> CacheComparison | None:
    """Read the header `X-Cache-Explain`; None means that the request has none."""
    return CacheComparison() if _is_true(header, "X-Cache-Explain") else None


def _is_true(header: str | None, param: str) -> bool:
    values = {None: False, "false": False, "0": False, "true": True, "1": True}
    value = header.strip().lower() if header is not None else None
    if value not in values:
        raise InvalidRequestError("it must be true or false.", param=param)
    return values[value]


def refuse(is_given: object, param: str, why: str) -> None:
    """Raise `InvalidRequestError` about a field if `is_given` is true."""
    if is_given:
        raise InvalidRequestError(why, param=param)


class DraftDetails(TypedDict):
    """Draft tokens of speculative decoding; where they came from is our extension."""

    accepted_prediction_tokens: Count
    rejected_prediction_tokens: Count
    accepted_by_source: NotRequired[dict[str, Count]]


def draft_details(usages: Sequence[Usage]) -> DraftDetails:
    """Sum the draft tokens of replies."""
    sources: Counter[str] = Counter()
    for usage in usages:
        sources.update(usage.accepted_by_source)
    details: DraftDetails = {
        "accepted_prediction_tokens": sum(u.accepted_prediction_tokens for u in usages),
        "rejected_prediction_tokens": sum(u.rejected_prediction_tokens for u in usages),
    }
    if sources:
        details["accepted_by_source"] = dict(sources)
    return details


class CacheExplanation(TypedDict):
    """Our extension of the vendors' usage, for requests with the header `X-Cache-Explain`."""

    reason: str | None
    text: str
    missed_tokens: Count
    changed_tools: list[str]
    compared_with: str | None
    hot: Count
    pool: Count
    disk: Count
    computed: Count


def explanation_of(report: CacheReport) -> CacheExplanation:
    """Format what a prompt reused, and why not more."""
    miss = report.miss
    return {
        "reason": miss.reason.value if miss else None,
        "text": report.text,
        "missed_tokens": miss.num_tokens if miss else 0,
        "changed_tools": list(miss.names) if miss else [],
        "compared_with": report.turn_id,
        "hot": report.hot,
        "pool": report.pool,
        "disk": report.disk,
        "computed": report.computed,
    }


def explained(finished: Finished) -> dict[str, Any]:
    """Return the field `cache_explain`; empty unless the request asks for it."""
    return {"cache_explain": explanation_of(finished.cache)} if finished.cache else {}


def durable_json(replies: Iterable[Finished]) -> dict[str, object]:
    """Return the field `durable`, our extension of the vendors' objects.

    It says whether all turns are on disk. The result is empty unless durability is `sync`.
    """
    promised = [reply.is_durable for reply in replies if reply.is_durable is not None]
    return {"durable": all(promised)} if promised else {}
