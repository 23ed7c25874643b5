"""Exact replay: a reply that comes back from a client stands for the very tokens it was made of.

A client sends our replies again as text and parsed calls. Tokenised again they would seldom give
the tokens that were sampled, and everything after them would be computed again. So the tokens are
kept under the prompt they followed and the reply as the client saw it, in memory and in the ledger.
"""

import hashlib
import json
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from semantic.application.prompt.lru_cache import LruCache
from semantic.domain.blocks import pack_tokens
from semantic.domain.chat import JsonObject, JsonValue, Message, TextPart, ThinkingPart, ToolUsePart
from semantic.domain.errors import CachePersistenceError
from semantic.ports.storage import LedgerPort, PutReplay, WriteChanges
from semantic.ports.text import TokenizerPort

_PROMPT_TAG = b"semantic.replay.prompt.v1"
_MESSAGE_TAG = b"semantic.replay.message.v1"
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_LARGEST_EXACT = 2**53  # beyond it, JavaScript rounds integers
_DROPPED = True  # stands for thinking that was there and is not told
# They are small, and their agents may have any age: kept for long after they were last of use.
REPLAY_TTL_S = 30 * 24 * 3600.0
_DAY_S = 24 * 3600.0
_ENTRY_BYTES = 400  # that a reply takes in memory beside its tokens
_MAX_WRITTEN = 20_000  # replies known to be written; others are written again when they are used
# Keys depend on a tenant's root of names, so tenants cannot meet; the column tells them apart too.
_TENANT = ""


@dataclass(frozen=True, slots=True)
class ReplayKey:
    """Names a reply by two digests: of root and prompt it followed, and of what it says."""

    prompt: bytes
    message: bytes


class ReplayStore:
    """Tokens of replies, in memory. Safe on any thread; what it forgets costs time only."""

    def __init__(self, max_bytes: int = 16 * 2**20) -> None:
        """Start empty; of more bytes the least recently used go."""
        self._replies: LruCache[ReplayKey, array[int]] = LruCache(max_bytes, _num_bytes)

    @property
    def num_bytes(self) -> int:
        """Memory that all replies kept take."""
        return self._replies.weight

    def remember(self, key: ReplayKey, tokens: Sequence[int]) -> None:
        """Keep a reply's tokens, with its end token if it was sampled."""
        self._replies.put(key, array("I", tokens))

    def lookup(self, key: ReplayKey, *, is_used: bool = True) -> tuple[int, ...] | None:
        """Return a reply's tokens; None if unknown. What is used lives on."""
        tokens = self._replies.get(key, is_used=is_used)
        return None if tokens is None else tuple(tokens)


class LedgerReplayStore(ReplayStore):
    """Keeps replies in the ledger too."""

    def __init__(
        self, ledger: LedgerPort, write: WriteChanges, now: Callable[[], float] = time.time
    ) -> None:
        super().__init__()
        self._ledger = ledger
        self._write = write
        self._now = now
        self._written: LruCache[ReplayKey, float] = LruCache(_MAX_WRITTEN)  # and when

    def remember(self, key: ReplayKey, tokens: Sequence[int]) -> None:
        """Keep a reply's tokens."""
        super().remember(key, tokens)
        self._put(key, tokens)

    def lookup(self, key: ReplayKey, *, is_used: bool = True) -> tuple[int, ...] | None:
        """Return a reply's tokens; None if unknown. What is used lives on."""
        known = super().lookup(key, is_used=is_used)
        tokens = self._read(key) if known is None else known
        if tokens is None or not is_used:
            return tokens
        if known is None:
            super().remember(key, tokens)
        if not self._is_written_today(key):
            self._put(key, tokens)
        return tokens

    def _read(self, key: ReplayKey) -> tuple[int, ...] | None:
        try:
            return self._ledger.replay(_TENANT, key.prompt + key.message)
        except CachePersistenceError:
            return None  # it is rendered again then

    def _put(self, key: ReplayKey, tokens: Sequence[int]) -> None:
        now = self._now()
        self._written.put(key, now)
        self._write(PutReplay(_TENANT, key.prompt + key.message, tuple(tokens), now))

    def _is_written_today(self, key: ReplayKey) -> bool:
        written = self._written.get(key)
        return written is not None and self._now() - written < _DAY_S


def _num_bytes(_: ReplayKey, tokens: "array[int]") -> int:
    return _ENTRY_BYTES + len(tokens) * tokens.itemsize


@dataclass(frozen=True, slots=True)
class TenantReplays:
    """The part of a store that holds the replies of one tenant and model.

    Attributes:
        root: The root of their block names.
        store: Has their tokens.
        is_used: Whether what is found counts as used.
    """

    root: bytes
    store: ReplayStore
    is_used: bool = True

    def tokens(self, keys: Sequence[ReplayKey]) -> tuple[int, ...] | None:
        """Return the tokens of the first reply that is known."""
        for key in keys:
            tokens = self.store.lookup(key, is_used=self.is_used)
            if tokens is not None:
                return tokens
        return None


class PromptDigest:
    """The digest of a prompt that grows; mutated by `update`."""

    def __init__(self, root: bytes) -> None:
        self._hash = hashlib.sha256(_PROMPT_TAG + len(root).to_bytes(8, "little") + root)

    def update(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        self._hash.update(pack_tokens(tokens))

    def followed_by(self, tokens: Sequence[int]) -> bytes:
        """Return the digest of all tokens so far and these; changes nothing."""
        grown = self._hash.copy()
        grown.update(pack_tokens(tokens))
        return grown.digest()


def prompt_digest(root: bytes, tokens: Sequence[int]) -> bytes:
    """Digest a prompt, up to and including its generation prompt."""
    return PromptDigest(root).followed_by(tokens)


def keys_to_remember(prompt: bytes, reply: Message) -> tuple[ReplayKey, ...]:
    """Name a reply in each form a client may send it again: with its thinking, and without."""
    thinking = _thinking_of(reply)
    forms: list[JsonValue] = [None] if thinking is None else [thinking, _DROPPED]
    return tuple(ReplayKey(prompt, _message_digest(reply, form)) for form in forms)


def keys_to_look_up(
    prompt: bytes, message: Message, *, keeps_thinking: bool
) -> tuple[ReplayKey, ...]:
    """Name the replies that a client's message may stand for.

    Args:
        prompt: Digest of what comes before it.
        message: The assistant's message as the client tells it.
        keeps_thinking: Whether the template shows thinking at this place. Where it does not, a
            message told without its thinking must stay without it.
    """
    thinking = _thinking_of(message)
    forms: list[JsonValue] = [thinking]
    if thinking is None and keeps_thinking:
        forms.append(_DROPPED)
    return tuple(ReplayKey(prompt, _message_digest(message, form)) for form in forms)


def emitted_tokens(
    tokens: Sequence[int], emitted: str, tokenizer: TokenizerPort
) -> tuple[int, ...]:
    """Return the tokens of a reply that a stop string cut short.

    Those whose text went out whole are the sampled ones; text of a token that was cut in two is
    encoded again.

    Args:
        tokens: As sampled, without what came after the stop string.
        emitted: The raw text that went out, thinking and calls included.
        tokenizer: The model's.
    """
    whole, position = emitted.encode(), 0
    num_kept, num_bytes = 0, 0
    for index, token in enumerate(tokens):
        piece = tokenizer.token_bytes(token)
        if position == len(whole) or not whole.startswith(piece, position):
            break
        position += len(piece)
        # A character may lie in two tokens; half of it could not be encoded.
        if position == len(whole) or not 0x80 <= whole[position] < 0xC0:
            num_kept, num_bytes = index + 1, position
    rest = tokenizer.encode_plain(whole[num_bytes:].decode()) if num_bytes < len(whole) else []
    return (*tokens[:num_kept], *rest)


def _thinking_of(message: Message) -> JsonValue:
    """Return the thinking as text, `_DROPPED` if only its signature came back, or None."""
    parts = [part for part in message.parts if isinstance(part, ThinkingPart)]
    if not parts:
        return None
    if any(part.is_redacted for part in parts):
        return _DROPPED
    return "".join(part.text for part in parts)


def _message_digest(message: Message, thinking: JsonValue) -> bytes:
    """Digest what a reply says; ids and the order of text and calls are the protocols' business."""
    text = "".join(part.text for part in message.parts if isinstance(part, TextPart))
    calls: list[JsonValue] = [
        [part.name, part.arguments] for part in message.parts if isinstance(part, ToolUsePart)
    ]
    if calls and not text.strip():
        text = ""  # clients leave blank text beside a call out
    written = canonical_json([text, calls, thinking])
    return hashlib.sha256(_MESSAGE_TAG + written.encode()).digest()


def canonical_json(value: JsonValue) -> str:
    r"""Write JSON so that equal values are equal text.

    Example:
        >>> canonical_json({"b": 1000.0, "a": "\u00e9"}) == canonical_json({"a": "é", "b": 1e3})
        True
    """
    return _ENCODER.encode(_by_value(value))


def _by_value(value: JsonValue) -> JsonValue:
    match value:
        case dict():
            members: JsonObject = {key: _by_value(item) for key, item in value.items()}
            return members
        case list():
            return [_by_value(item) for item in value]
        case bool():
            return value
        case int() if abs(value) > _LARGEST_EXACT:
            return _rounded(value)
        case float() if value.is_integer() and abs(value) <= _LARGEST_EXACT:
            return int(value)
        case _:
            return value


def _rounded(value: int) -> JsonValue:
    try:
        return float(value)
    except OverflowError:
        return str(value)
