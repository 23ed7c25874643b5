"""Compares the request of a turn with that of an earlier turn, to explain a cache miss in words.

The comparison needs only what the ledger stores, so it works after a restart. It runs only if a
prompt diverges from the conversation before it or misses its KV cache, or if a request asks for it.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from semantic.domain.agents import Pointer, Reuse, Turn
from semantic.domain.blocks import BlockName, common_prefix
from semantic.domain.chat import (
    ImagePart,
    JsonValue,
    Message,
    Role,
    TextPart,
    ThinkingPart,
    ToolResultPart,
    ToolSpec,
    ToolUsePart,
    images_in,
)
from semantic.domain.events import CacheMiss, MissReason

_DIGEST_BYTES = 8
_MAX_NAMES = 8
# Fewer tokens are the end of a reply or of a block, which every turn computes.
MIN_MISSED = 16
_STATES = {None: "the model's default", True: "on", False: "off"}


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What a prompt is made from.

    Attributes:
        messages: All messages, of an earlier turn with its reply; empty for a raw prompt.
        tools: Name and digest of each tool that the prompt shows, see `tool_digests`.
        is_thinking: Whether the model was asked to think; None leaves that to the model.
    """

    messages: Sequence[Message]
    tools: Sequence[tuple[str, str]]
    is_thinking: bool | None = None


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """What the engine found when a prompt was computed.

    Attributes:
        root: Root of the blocks that it could use.
        num_stored: Leading tokens of the prompt whose blocks were stored.
        is_damaged: Whether stored blocks could not be loaded.
    """

    root: BlockName
    reuse: Reuse
    num_stored: int
    is_damaged: bool


def tool_digests(tools: Sequence[ToolSpec]) -> tuple[tuple[str, str], ...]:
    """Return the name of each tool that a prompt shows, with a digest of its definition."""
    return tuple((tool.name, _digest(tool)) for tool in tools if not tool.is_deferred)


def _digest(tool: ToolSpec) -> str:
    # Prompts show schemas in canonical order, so the order of keys is no difference.
    text = json.dumps([tool.name, tool.description, tool.parameters], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def model_change(before: str, now: str, num_tokens: int) -> CacheMiss | None:
    """Compare two models by id; empty ids are unknown."""
    if not before or not now or before == now:
        return None
    detail = f"model changed from {before} to {now}"
    return CacheMiss(MissReason.MODEL_CHANGED, num_tokens, detail)


def request_change(before: RequestShape, now: RequestShape, num_tokens: int) -> CacheMiss | None:
    """Return the first difference between two requests, in the order of the prompt.

    None if the messages are the beginning of those before: the client went back to them.

    Args:
        num_tokens: Tokens that are computed again if there is a difference.
    """
    found = _tools_change(before.tools, now.tools)
    if found is not None:
        detail, names = found
        shown = tuple(names[:_MAX_NAMES])
        return CacheMiss(MissReason.TOOLS_CHANGED, num_tokens, detail, shown)
    old_system, new_system = _system(before.messages), _system(now.messages)
    if old_system != new_system:
        detail = _system_change(old_system, new_system)
        return CacheMiss(MissReason.SYSTEM_CHANGED, num_tokens, detail)
    old, new = _rest(before.messages), _rest(now.messages)
    for number, (one, other) in enumerate(zip(old, new, strict=False), 1):
        detail = _message_change(one, other, number)
        if detail:
            num_images = sum(1 for _ in images_in(old[: number - 1]))
            detail = _image_change(one, other, num_images) or detail
            return CacheMiss(MissReason.MESSAGES_CHANGED, num_tokens, detail)
    if len(new) < len(old):
        return None
    if before.is_thinking != now.is_thinking:
        old_state, new_state = _STATES[before.is_thinking], _STATES[now.is_thinking]
        detail = f"thinking changed from {old_state} to {new_state}"
        return CacheMiss(MissReason.PARAMETERS_CHANGED, num_tokens, detail)
    if not old:  # a raw prompt has no messages
        return CacheMiss(MissReason.MESSAGES_CHANGED, num_tokens, "prompt changed")
    detail = "the chat template writes earlier messages in another way"
    return CacheMiss(MissReason.RENDERED_DIFFERENTLY, num_tokens, detail)


def cache_miss(before: Turn, model: str, num_prompt: int, facts: CacheFacts) -> CacheMiss | None:
    """Return why a prompt that continues a turn did not reuse its KV cache; None if it did."""
    num_missed = min(before.num_tokens, num_prompt) - facts.reuse.reused
    if num_missed < MIN_MISSED:
        return None
    if (other := model_change(before.model, model, num_missed)) is not None:
        return other
    reason, detail = _cache_reason(before.pointer, facts)
    return CacheMiss(reason, num_missed, detail)


def says_same(one: Message, other: Message) -> bool:
    """Whether two messages say the same, apart from thinking and ids."""
    return _plain(one) == _plain(other)


def begins_alike(one: Sequence[Message], other: Sequence[Message]) -> bool:
    """Whether two conversations begin with the same message after the system prompt."""
    first, second = _rest(one)[:1], _rest(other)[:1]
    return bool(first and second) and says_same(first[0], second[0])


def _cache_reason(pointer: Pointer | None, facts: CacheFacts) -> tuple[MissReason, str]:
    num_reused = facts.reuse.reused
    if pointer is not None and pointer.root != facts.root:
        return MissReason.FORMAT_CHANGED, "KV cache was written in another format"
    if facts.is_damaged:
        return MissReason.DAMAGED, "stored KV cache could not be loaded"
    if pointer is None or pointer.num_tokens - num_reused < MIN_MISSED:
        return MissReason.NOT_STORED, "KV cache of the previous turn was not stored"
    if facts.num_stored - num_reused >= MIN_MISSED:
        return MissReason.NOT_LOADED, "stored KV cache was not loaded"
    return MissReason.EVICTED, "KV cache was evicted"


# -- tools ----------------------------------------------------------------------------------------


def _tools_change(
    before: Sequence[tuple[str, str]], now: Sequence[tuple[str, str]]
) -> tuple[str, list[str]] | None:
    """Describe the difference between two lists of tools, and name the tools; None if equal."""
    if list(before) == list(now):
        return None
    old, new = [name for name, _ in before], [name for name, _ in now]
    digests = dict(before)
    added = [place for place, name in enumerate(new) if name not in digests]
    removed = [place for place, name in enumerate(old) if name not in set(new)]
    changed = [
        place for place, (name, digest) in enumerate(now) if digests.get(name, digest) != digest
    ]
    clauses = [
        _places(places, verb)
        for places, verb in ((added, "added"), (removed, "removed"), (changed, "changed"))
        if places
    ]
    names = [*(new[place] for place in (*added, *changed)), *(old[place] for place in removed)]
    if not clauses:
        first = common_prefix(old, new)
        clauses, names = [f"tools reordered from position {first + 1}"], new[first:]
    return f"tool list changed: {', '.join(clauses)}", names


def _places(places: Sequence[int], verb: str) -> str:
    noun = "tool" if len(places) == 1 else "tools"
    is_together = places[-1] - places[0] < len(places)
    where = "at position" if is_together else "from position"
    return f"{len(places)} {noun} {verb} {where} {places[0] + 1}"


# -- messages -------------------------------------------------------------------------------------


def _system(messages: Sequence[Message]) -> str:
    leading = takewhile(lambda message: message.role is Role.SYSTEM, messages)
    return "\n".join(message.text for message in leading)


def _rest(messages: Sequence[Message]) -> Sequence[Message]:
    num_system = len(list(takewhile(lambda message: message.role is Role.SYSTEM, messages)))
    return messages[num_system:]


def _system_change(before: str, now: str) -> str:
    if not before or not now:
        return f"system prompt {'added' if now else 'removed'}"
    return f"system prompt changed after {common_prefix(before, now):,} characters"


def _message_change(before: Message, now: Message, number: int) -> str:
    """Describe how a message differs; empty if it does not. Numbers start after the system."""
    if not says_same(before, now):
        return f"message {number} ({now.role.value}) changed"
    if _thinking(before) and not any(isinstance(part, ThinkingPart) for part in now.parts):
        return f"message {number} ({now.role.value}) came back without its thinking"
    return ""


def _image_change(before: Message, now: Message, num_images: int) -> str:
    """Describe how an image differs; empty if something else does, too.

    `num_images` is the number of images in earlier messages.
    """
    if _plain(before, has_images=False) != _plain(now, has_images=False):
        return ""
    pairs = zip(images_in([before]), images_in([now]), strict=False)
    for number, (old, new) in enumerate(pairs, num_images + 1):
        if old != new:
            size, old_size = f"{new.width}x{new.height}", f"{old.width}x{old.height}"
            how = f"{size} instead of {old_size}" if size != old_size else f"both {size}"
            return f"image {number} differs ({how})"
    return ""


def _thinking(message: Message) -> str:
    return "".join(part.text for part in message.parts if isinstance(part, ThinkingPart))


def _plain(message: Message, *, has_images: bool = True) -> tuple[JsonValue, ...]:
    """Return what a message says, without ids and without how its text is divided into parts.

    Without `has_images`, all images are the same.
    """
    parts = (
        _part(part, has_images=has_images)
        for part in message.parts
        if not isinstance(part, TextPart | ThinkingPart)
    )
    return message.role.value, message.text, *parts


def _part(part: ImagePart | ToolUsePart | ToolResultPart, *, has_images: bool) -> JsonValue:
    match part:
        case ImagePart():
            return ["image", part.digest if has_images else ""]
        case ToolUsePart():
            return ["call", part.name, part.arguments]
        case ToolResultPart():
            text = "".join(each.text for each in part.content if isinstance(each, TextPart))
            others: list[JsonValue] = [
                _part(each, has_images=has_images)
                if isinstance(each, ImagePart)
                else each.tool_name
                for each in part.content
                if not isinstance(each, TextPart)
            ]
            return ["result", text, part.is_error, *others]
