"""Puts the tokens that were sampled in the place of replies a client sends again.

Where a reply begins is where the prompt it followed ends: the same conversation up to it, with
the generation prompt. The prompt's digest decides whether that place is right, so a wrong one
only costs a lookup.
"""

import hashlib
import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from semantic.application.composing import Conversation
from semantic.application.encoding import TokenWalk
from semantic.application.replay import PromptDigest, Replay, keys_to_look_up
from semantic.application.special_text import SpecialText
from semantic.application.template_traits import TemplateTraits
from semantic.domain.chat import Message
from semantic.domain.errors import InvalidRequestError
from semantic.ports.outbound import TokenizerPort

_NOWHERE = -1


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
        for key in keys_to_look_up(prompt, place.reply, keeps_thinking=keeps):
            tokens = replay.book.lookup(key)
            if tokens is not None:
                return tokens
        return None

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
