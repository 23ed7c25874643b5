"""Exact replay: a reply that a client sends back is replaced by the tokens that were sampled.

Clients send earlier replies back as text and parsed tool calls. Tokenising them again seldom gives
the sampled tokens, and the KV cache of everything after the first difference would be recomputed.
So the sampled tokens are stored, in memory and in the ledger, under a digest of the prompt they
followed and a digest of the reply as the client sees it.
"""

import hashlib
import json
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from semantic.domain.blocks import pack_tokens
from semantic.domain.chat import JsonObject, JsonValue, Message, TextPart, ThinkingPart, ToolUsePart
from semantic.domain.errors import CachePersistenceError
from semantic.ports.storage import LedgerPort, PutReplay, WriteChanges
from semantic.ports.text import TokenizerPort

_PROMPT_TAG = b"semantic.replay.prompt.v1"
_MESSAGE_TAG = b"semantic.replay.message.v1"
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_LARGEST_EXACT = 2**53  # beyond it, JavaScript rounds integers
_DROPPED = True  # represents thinking that the client left out
# Time after the last use. Long, since entries are small and an agent may return at any age.
REPLAY_TTL_S = 30 * 24 * 3600.0
_DAY_S = 24 * 3600.0
_ENTRY_BYTES = 400  # memory overhead of an entry, without its tokens
_MAX_WRITTEN = 20_000  # replies known to be in the ledger; others are written again when used
# Keys include a tenant's root, so tenants cannot collide and the ledger's column stays empty.
_TENANT = ""

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Values by key; evicts the least recently used. Thread-safe."""

    def __init__(self, max_weight: int, weigh: Callable[[K, V], int] = lambda *_: 1) -> None:
        self.weight = 0
        self._max_weight = max_weight
        self._weigh = weigh
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K, *, is_used: bool = True) -> V | None:
        """Return a value; `is_used` marks it as the most recently used."""
        with self._lock:
            value = self._entries.get(key)
            if value is not None and is_used:
                self._entries.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> None:
        with self._lock:
            old = self._entries.pop(key, None)
            if old is not None:
                self.weight -= self._weigh(key, old)
            self._entries[key] = value
            self.weight += self._weigh(key, value)
            while self.weight > self._max_weight:
                self.weight -= self._weigh(*self._entries.popitem(last=False))


@dataclass(frozen=True, slots=True)
class ReplayKey:
    """Identifies a reply by two digests: of root and prompt, and of the reply's content."""

    prompt: bytes
    message: bytes


class ReplayStore:
    """Tokens of replies, in memory. Thread-safe; losing an entry only costs recomputation."""

    def __init__(self, max_bytes: int = 16 * 2**20) -> None:
        self._replies: LruCache[ReplayKey, array[int]] = LruCache(max_bytes, _num_bytes)

    @property
    def num_bytes(self) -> int:
        return self._replies.weight

    def remember(self, key: ReplayKey, tokens: Sequence[int]) -> None:
        """Store a reply's tokens, including the end token if it was sampled."""
        self._replies.put(key, array("I", tokens))

    def lookup(self, key: ReplayKey, *, is_used: bool = True) -> tuple[int, ...] | None:
        """Return a reply's tokens; None if unknown. `is_used` keeps the entry longer."""
        tokens = self._replies.get(key, is_used=is_used)
        return None if tokens is None else tuple(tokens)


class LedgerReplayStore(ReplayStore):
    """A `ReplayStore` that also stores replies in the ledger."""

    def __init__(
        self, ledger: LedgerPort, write: WriteChanges, now: Callable[[], float] = time.time
    ) -> None:
        super().__init__()
        self._ledger = ledger
        self._write = write
        self._now = now
        self._written: LruCache[ReplayKey, float] = LruCache(_MAX_WRITTEN)  # time of writing

    def remember(self, key: ReplayKey, tokens: Sequence[int]) -> None:
        super().remember(key, tokens)
        self._put(key, tokens)

    def lookup(self, key: ReplayKey, *, is_used: bool = True) -> tuple[int, ...] | None:
        """See `ReplayStore.lookup`; `is_used` also renews the ledger row."""
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
            return None  # the reply is tokenised again

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
    """The replies of one tenant and model in a store.

    Attributes:
        root: Identifies tenant and model.
        is_used: Whether a lookup marks the reply as used.
    """

    root: bytes
    store: ReplayStore
    is_used: bool = True

    def tokens(self, keys: Sequence[ReplayKey]) -> tuple[int, ...] | None:
        for key in keys:
            tokens = self.store.lookup(key, is_used=self.is_used)
            if tokens is not None:
                return tokens
        return None


class PromptDigest:
    """Running digest of a prompt; `update` mutates it."""

    def __init__(self, root: bytes) -> None:
        self._hash = hashlib.sha256(_PROMPT_TAG + len(root).to_bytes(8, "little") + root)

    def update(self, tokens: Sequence[int]) -> None:
        self._hash.update(pack_tokens(tokens))

    def followed_by(self, tokens: Sequence[int]) -> bytes:
        """Return the digest of all tokens so far followed by these; changes nothing."""
        grown = self._hash.copy()
        grown.update(pack_tokens(tokens))
        return grown.digest()


def prompt_digest(root: bytes, tokens: Sequence[int]) -> bytes:
    """Return the digest of a prompt, including its generation prompt."""
    return PromptDigest(root).followed_by(tokens)


def keys_to_remember(prompt: bytes, reply: Message) -> tuple[ReplayKey, ...]:
    """Return a key for each form in which a client may send a reply back.

    A client may send the reply with or without its thinking. It may send a tool call that was cut
    off as it was written, without arguments, or not at all.
    """
    thinking = _thinking_of(reply)
    forms: list[JsonValue] = [None] if thinking is None else [thinking, _DROPPED]
    return tuple(
        ReplayKey(prompt, _message_digest(sent, form))
        for sent in _forms_of_cut_calls(reply)
        for form in forms
    )


def keys_to_look_up(
    prompt: bytes, message: Message, *, keeps_thinking: bool
) -> tuple[ReplayKey, ...]:
    """Return the keys of the replies that a client's message may represent.

    Args:
        keeps_thinking: Whether the template shows thinking at this position. If not, a message
            without thinking does not match a reply with thinking.
    """
    thinking = _thinking_of(message)
    forms: list[JsonValue] = [thinking]
    if thinking is None and keeps_thinking:
        forms.append(_DROPPED)
    return tuple(ReplayKey(prompt, _message_digest(message, form)) for form in forms)


def emitted_tokens(
    tokens: Sequence[int], emitted: str, tokenizer: TokenizerPort
) -> tuple[int, ...]:
    """Return the tokens of a reply that a stop string ended.

    Sampled tokens are kept as long as all of their text was emitted; the rest of the emitted text
    is encoded again.

    Args:
        tokens: The sampled tokens, without those after the stop string.
        emitted: The raw text that was emitted, including thinking and tool calls.
    """
    whole, position = emitted.encode(), 0
    num_kept, num_bytes = 0, 0
    for index, token in enumerate(tokens):
        piece = tokenizer.token_bytes(token)
        if position == len(whole) or not whole.startswith(piece, position):
            break
        position += len(piece)
        # Stop only between characters: a part of one could not be encoded again.
        if position == len(whole) or not 0x80 <= whole[position] < 0xC0:
            num_kept, num_bytes = index + 1, position
    rest = tokenizer.encode_plain(whole[num_bytes:].decode()) if num_bytes < len(whole) else []
    return (*tokens[:num_kept], *rest)


def _forms_of_cut_calls(reply: Message) -> list[Message]:
    whole = tuple(p for p in reply.parts if not (isinstance(p, ToolUsePart) and p.is_cut))
    if whole == reply.parts:
        return [reply]
    emptied = tuple(
        replace(part, arguments={}) if isinstance(part, ToolUsePart) and part.is_cut else part
        for part in reply.parts
    )
    return [reply, replace(reply, parts=emptied), replace(reply, parts=whole)]


def _thinking_of(message: Message) -> JsonValue:
    """Return the thinking as text, `_DROPPED` if only its signature came back, or None."""
    parts = [part for part in message.parts if isinstance(part, ThinkingPart)]
    if not parts:
        return None
    if any(part.is_redacted for part in parts):
        return _DROPPED
    return "".join(part.text for part in parts)


def _message_digest(message: Message, thinking: JsonValue) -> bytes:
    """Digest a reply without call ids and the order of parts, which differ between protocols."""
    text = "".join(part.text for part in message.parts if isinstance(part, TextPart))
    calls: list[JsonValue] = [
        [part.name, part.arguments] for part in message.parts if isinstance(part, ToolUsePart)
    ]
    if calls and not text.strip():
        text = ""  # clients drop blank text next to a call
    written = canonical_json([text, calls, thinking])
    return hashlib.sha256(_MESSAGE_TAG + written.encode()).digest()


def canonical_json(value: JsonValue) -> str:
    r"""Serialise JSON so that equal values give equal text.

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
