"""Exact replay: a reply that comes back from a client stands for the very tokens it was made of.

A client sends our replies again as text and parsed calls. Written out anew they would seldom give
the tokens that were sampled, and everything after them would be computed again. So the tokens are
kept under the prompt they followed and the reply as the client saw it, in memory and in the ledger.

Where a reply begins is where the prompt it followed ends: the same conversation up to it, with
the generation prompt. The prompt's digest decides whether that place is right, so a wrong one
only costs a lookup.
"""

import hashlib
import json
import sys
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from semantic.application.agents.turn_log import WriteChanges
from semantic.application.prompt.compose import Conversation
from semantic.application.prompt.encoding import TokenWalk
from semantic.application.prompt.normalising import canonical_json
from semantic.application.prompt.special_text import SpecialText
from semantic.application.prompt.template_probe import TemplateTraits
from semantic.domain.blocks import pack_tokens
from semantic.domain.chat import JsonValue, Message, TextPart, ThinkingPart, ToolUsePart
from semantic.domain.errors import CachePersistenceError, InvalidRequestError
from semantic.ports.storage import LedgerPort, PutReplay
from semantic.ports.text import TokenizerPort

_PROMPT_TAG = b"semantic.replay.prompt.v1"
_MESSAGE_TAG = b"semantic.replay.message.v1"
_DROPPED = True  # stands for thinking that was there and is not told
_NOWHERE = -1
# They are small, and their agents may have any age: kept for long after they were last of use.
REPLAY_TTL_S = 30 * 24 * 3600.0
_DAY_S = 24 * 3600.0
# Keys depend on a tenant's root of names, so tenants cannot meet; the column tells them apart too.
_TENANT = ""


@dataclass(frozen=True, slots=True)
class ReplayKey:
    """Names a reply by two digests: of root and prompt it followed, and of what it says."""

    prompt: bytes
    message: bytes


class ReplayStore(Protocol):
    """Where replies are kept. Safe on any thread; what it forgets costs time only."""

    def remember(self, key: ReplayKey, tokens: Sequence[int]) -> None:
        """Keep a reply's tokens, with its end token if it was sampled."""
        ...

    def lookup(self, key: ReplayKey) -> tuple[int, ...] | None:
        """Return a reply's tokens; None if unknown. What is of use lives on."""
        ...

    def peek(self, key: ReplayKey) -> tuple[int, ...] | None:
        """Return what `lookup` would, and let it get no younger."""
        ...


@dataclass(frozen=True, slots=True)
class Replay:
    """Replies of one tenant and model.

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
        look = self.store.lookup if self.is_used else self.store.peek
        return next((tokens for key in keys if (tokens := look(key)) is not None), None)


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


class KeptReplies:
    """A `ReplayStore` in memory over one in the ledger. Safe on any thread."""

    def __init__(
        self, ledger: LedgerPort, write: WriteChanges, now: Callable[[], float] = time.time
    ) -> None:
        self._ledger = ledger
        self._write = write
        self._now = now
        self._book = ReplayBook()
        self._lock = threading.Lock()
        self._day = now()
        self._written: set[ReplayKey] = set()  # today

    def remember(self, key: ReplayKey, tokens: Sequence[int]) -> None:
        """Keep a reply's tokens."""
        self._book.remember(key, tokens)
        self._put(key, tokens)

    def lookup(self, key: ReplayKey) -> tuple[int, ...] | None:
        """Return a reply's tokens; None if it is unknown."""
        tokens = self._book.lookup(key)
        if tokens is None:
            tokens = self._read(key)
            if tokens is None:
                return None
            self._book.remember(key, tokens)
        if not self._is_written_today(key):
            self._put(key, tokens)  # it is of use: it lives on
        return tokens

    def peek(self, key: ReplayKey) -> tuple[int, ...] | None:
        """Return what `lookup` would, and let it get no younger."""
        tokens = self._book.peek(key)
        return self._read(key) if tokens is None else tokens

    def _read(self, key: ReplayKey) -> tuple[int, ...] | None:
        try:
            return self._ledger.replay(_TENANT, key.prompt + key.message)
        except CachePersistenceError:
            return None  # it is rendered anew then

    def _put(self, key: ReplayKey, tokens: Sequence[int]) -> None:
        with self._lock:
            self._written.add(key)
        self._write(PutReplay(_TENANT, key.prompt + key.message, tuple(tokens), self._now()))

    def _is_written_today(self, key: ReplayKey) -> bool:
        with self._lock:
            if self._now() - self._day >= _DAY_S:
                self._day = self._now()
                self._written.clear()
            return key in self._written


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


class Places:
    """Positions that were found before, by what they depend on; bounded. Safe on any thread."""

    def __init__(self, max_places: int = 16_384) -> None:
        self._max_places = max_places
        self._places: OrderedDict[bytes, int] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, name: bytes, search: Callable[[], int]) -> int:
        """Return a position, searching for it only if it is not known."""
        with self._lock:
            known = self._places.get(name)
            if known is not None:
                self._places.move_to_end(name)
                return known
        found = search()
        with self._lock:
            self._places[name] = found
            if len(self._places) > self._max_places:
                self._places.popitem(last=False)
        return found


@dataclass(frozen=True, slots=True)
class _ReplyPlace:
    """A reply, where in the text it begins, and whether a question follows it."""

    reply: Message
    start: int
    is_old: bool


class Replayer:
    """Finds replies in conversations of one model and puts their tokens in place."""

    def __init__(
        self,
        tokenizer: TokenizerPort,
        traits: TemplateTraits,
        special: SpecialText,
        write: Callable[[Conversation], str],
    ) -> None:
        """Start with no place known; `write` applies the template."""
        self._tokenizer = tokenizer
        self._traits = traits
        self._special = special
        self._write = write
        self._places = Places()

    def replay(self, walk: TokenWalk, conversation: Conversation, replay: Replay) -> int:
        """Walk up to the last reply that is known, putting tokens in; returns how many are."""
        digest, num_digested, num_replayed = PromptDigest(replay.root), 0, 0
        places = list(self._reply_places(conversation))
        limits = [place.start for place in places[1:]] + [sys.maxsize]
        for place, limit in zip(places, limits, strict=False):
            start = place.start
            if start < walk.position:
                continue
            walk.advance(start)
            digest.update(walk.tokens[num_digested:])
            num_digested = len(walk.tokens)
            before = walk.ahead(start)
            tokens = self._sampled(place, digest.followed_by(before), replay)
            if tokens and self._put(walk, tokens, start, limit):
                num_replayed += 1
        return num_replayed

    def _reply_places(self, conversation: Conversation) -> Iterator[_ReplyPlace]:
        digest = head_digest(conversation)
        last_question = max(
            (i for i, message in enumerate(conversation.messages) if message.role == "user"),
            default=0,
        )
        for index, message in enumerate(conversation.messages):
            if message.source is not None:

                def search(index: int = index) -> int:
                    return self._prompt_end(conversation, index)

                start = self._places.find(digest.digest(), search)
                if start != _NOWHERE:
                    yield _ReplyPlace(message.source, start, is_old=index < last_question)
            digest.update(json.dumps(message.fields(wants_parts=False)).encode() + b"\n")

    def _prompt_end(self, conversation: Conversation, index: int) -> int:
        before = replace(conversation, messages=conversation.messages[:index])
        try:
            return len(self._write(before))
        except InvalidRequestError:
            return _NOWHERE

    def _sampled(self, place: _ReplyPlace, prompt: bytes, replay: Replay) -> tuple[int, ...] | None:
        traits = self._traits
        keeps = traits.keeps_old_thinking if place.is_old else traits.keeps_loop_thinking
        return replay.tokens(keys_to_look_up(prompt, place.reply, keeps_thinking=keeps))

    def _put(self, walk: TokenWalk, tokens: Sequence[int], start: int, limit: int) -> bool:
        """Replace a reply's text, up to the end token if the template writes one after it."""
        ends = self._tokenizer.eos_ids
        said = tokens[:-1] if tokens[-1] in ends else tokens
        written = walk.find(ends, start, limit)
        before = walk.ahead(start)
        if written is not None and written.token == tokens[-1]:
            walk.replace(written.end, (*before, *tokens))
            return True
        if written is not None:
            walk.replace(written.start, (*before, *said))
            return True
        text = self._special.guard(self._decoded(said))
        if not walk.starts_with(text, start):
            return False
        walk.replace(start + len(text), (*before, *said))
        return True

    def _decoded(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self._tokenizer.token_bytes, tokens)).decode(errors="replace")


def head_digest(conversation: Conversation) -> "hashlib._Hash":
    """Digest what comes before the first message, and what else the template is told."""
    today = conversation.today and conversation.today.isoformat()
    head = [conversation.functions, conversation.head, today, conversation.is_thinking]
    return hashlib.sha256(json.dumps(head).encode() + b"\n")


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
