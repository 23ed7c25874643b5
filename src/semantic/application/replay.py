"""Exact replay: a reply that comes back from a client stands for the very tokens it was made of.

A client sends our replies again as text and parsed calls. Written out anew they would seldom give
the tokens that were sampled, and everything after them would be computed again. So the tokens are
kept under the prompt they followed and the reply as the client saw it.
"""

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from semantic.application.normalising import canonical_json
from semantic.domain.blocks import pack_tokens
from semantic.domain.chat import JsonValue, Message, TextPart, ThinkingPart, ToolUsePart
from semantic.ports.outbound import TokenizerPort

_PROMPT_TAG = b"semantic.replay.prompt.v1"
_MESSAGE_TAG = b"semantic.replay.message.v1"
_DROPPED = True  # stands for thinking that was there and is not told


@dataclass(frozen=True, slots=True)
class ReplayKey:
    """Names a reply by two digests: of root and prompt it followed, and of what it says."""

    prompt: bytes
    message: bytes


class ReplayLookup(Protocol):
    """Where rendering asks for the tokens of a reply. Safe on any thread."""

    def lookup(self, key: ReplayKey) -> tuple[int, ...] | None:
        """Return the reply's tokens, with its end token if it was sampled; None if unknown."""
        ...


class ReplayStore(ReplayLookup, Protocol):
    """Where replies are kept. Safe on any thread; what it forgets costs time only."""

    def peek(self, key: ReplayKey) -> tuple[int, ...] | None:
        """Return what `lookup` would, and let it get no younger."""
        ...

    def remember(self, key: ReplayKey, tokens: Sequence[int]) -> None:
        """Keep a reply's tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Peek:
    """A `ReplayLookup` that changes nothing in a store."""

    store: ReplayStore

    def lookup(self, key: ReplayKey) -> tuple[int, ...] | None:
        """Return the reply's tokens; None if unknown."""
        return self.store.peek(key)


@dataclass(frozen=True, slots=True)
class Replay:
    """Replies of one tenant and model: `root` is the root of their block names."""

    root: bytes
    book: ReplayLookup


class ReplayBook:
    """A `ReplayStore` in memory, bounded in tokens; the least recently used goes first."""

    def __init__(self, max_tokens: int = 4_000_000) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._entries: OrderedDict[ReplayKey, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        """Tokens of all replies kept."""
        return self._num_tokens

    def remember(self, key: ReplayKey, tokens: Sequence[int]) -> None:
        """Keep a reply's tokens, in place of what was kept under the same key."""
        with self._lock:
            self._num_tokens -= len(self._entries.pop(key, ()))
            self._entries[key] = array("I", tokens)
            self._num_tokens += len(tokens)
            while self._num_tokens > self._max_tokens:
                _, dropped = self._entries.popitem(last=False)
                self._num_tokens -= len(dropped)

    def lookup(self, key: ReplayKey) -> tuple[int, ...] | None:
        """Return a reply's tokens; None if it is unknown or was dropped."""
        with self._lock:
            tokens = self._entries.get(key)
            if tokens is None:
                return None
            self._entries.move_to_end(key)
            return tuple(tokens)

    def peek(self, key: ReplayKey) -> tuple[int, ...] | None:
        """Return what `lookup` would, and let it get no younger."""
        with self._lock:
            tokens = self._entries.get(key)
            return None if tokens is None else tuple(tokens)


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
    encoded anew.

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
    """Return the thinking as text, `_DROPPED` if only its signature is told, or None."""
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
