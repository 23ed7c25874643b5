"""Renders a conversation to the prompt's tokens.

The model's chat template writes the text. Only the template can produce special tokens, and replies
that this server generated are replayed with the tokens that were sampled. A conversation always
renders to the same tokens, so each prompt begins with the previous prompt and its reply, and the
KV cache of both is reused.

A reply in the text begins where its own prompt ended. That position is found by rendering the
conversation up to the reply with the generation prompt. The prompt's digest verifies the position,
so a wrong one only costs a lookup.
"""

import copy
import hashlib
import json
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import groupby, takewhile

from semantic.application.prompt.compose import Composer, TemplateInput, num_leading_system
from semantic.application.prompt.replay import (
    LruCache,
    PromptDigest,
    ReplayKey,
    ReplayStore,
    TenantReplays,
    canonical_json,
    keys_to_look_up,
)
from semantic.application.prompt.special_text import RunEncoder, SpecialText, TokenWalk
from semantic.application.prompt.template_probe import (
    ImageTraits,
    generation_prompt,
    lost_generation_prompt,
    probe,
    probe_images,
)
from semantic.domain.blocks import common_prefix
from semantic.domain.chat import (
    ChatRequest,
    JsonValue,
    Message,
    Role,
    json_fault,
    require_whole_characters,
)
from semantic.domain.errors import InvalidRequestError
from semantic.domain.images.spans import ImageSpan, PreparedImage, cut_before_image
from semantic.ports.text import TokenizerPort

# First messages that a tokenizer merges with preceding white space in different ways, if at all.
BEGINNINGS = tuple(Message.of(Role.USER, text) for text in ("\ufdd3", "a", "1"))
_MAX_POSITIONS = 16_384
_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation.

    Attributes:
        boundaries: Positions to resume at, in ascending order: the end of tools and system
            messages, the end of the part of the generation prompt that later turns repeat, and the
            end of the prompt, and the start and end of each image.
        num_head: Tokens of tools and system messages; agents with the same ones share them.
        has_tool_markup: Tools are introduced by the markup of `compose`, not by the template.
        num_replayed: Number of replies that were replayed with their sampled tokens.
        num_begun: Tokens at the end of the prompt that are the beginning of the reply.
        num_marked: Tokens up to the last mark of `ChatRequest.num_marked`; 0 if there is none.
        images: The positions of the images in `tokens`, in ascending order.
    """

    tokens: tuple[int, ...]
    boundaries: tuple[int, ...] = ()
    num_head: int = 0
    has_tool_markup: bool = False
    num_replayed: int = 0
    num_begun: int = 0
    num_marked: int = 0
    images: tuple[ImageSpan, ...] = ()

    def followed_by(self, beginning: Sequence[int]) -> "Prompt":
        tokens = (*self.tokens, *beginning)
        boundaries = tuple(sorted({*self.boundaries, len(tokens)}))
        return replace(self, tokens=tokens, boundaries=boundaries, num_begun=len(beginning))

    def cut(self, end: int) -> "Prompt":
        """Return the first `end` tokens; fewer, if that is inside an image."""
        end = cut_before_image(end, self.images)
        boundaries = {*(place for place in self.boundaries if place < end), end} - {0}
        return replace(
            self,
            tokens=self.tokens[:end],
            boundaries=tuple(sorted(boundaries)),
            num_head=min(self.num_head, end),
            images=tuple(span for span in self.images if span.end <= end),
        )


def render(request: ChatRequest, tokenizer: TokenizerPort) -> Prompt:
    """Render one request; to render several, reuse a `Renderer`."""
    return Renderer(tokenizer).render(request)


@dataclass(frozen=True, slots=True)
class _ReplyPlace:
    """A reply, its position in the text, and whether a user message follows it."""

    reply: Message
    start: int
    is_old: bool


class Renderer:
    """Renders conversations for one model, with caches. Thread-safe."""

    def __init__(self, tokenizer: TokenizerPort, image_marker: int | None = None) -> None:
        """Probe the chat template.

        Args:
            image_marker: `VisionPort.marker_id`; None if the model does not accept images.
        """
        self.tokenizer = tokenizer
        self.traits = probe(tokenizer)
        self._special = SpecialText(tokenizer.special_tokens)
        self._special_texts = {token.id: token.text for token in tokenizer.special_tokens}
        self._image_marker = image_marker
        self._image_traits: ImageTraits | None = None
        if image_marker is not None:
            marker = self._special_texts[image_marker]
            self._image_traits = probe_images(tokenizer, self.traits, marker)
        self._reset_caches()
        self._lost = {
            is_thinking: lost_generation_prompt(tokenizer, self.traits, is_thinking=is_thinking)
            for is_thinking in (None, True, False)
        }
        self._endings = {
            is_thinking: generation_prompt(tokenizer, self.traits, is_thinking=is_thinking)
            for is_thinking in (None, True, False)
        }

    def with_empty_caches(self) -> "Renderer":
        """Return a renderer of the same model, for a request that must leave nothing behind."""
        other = copy.copy(self)
        other._reset_caches()
        return other

    def _reset_caches(self) -> None:
        self._composer = Composer(self.traits, self._special, self._image_traits)
        self._runs = RunEncoder(self.tokenizer)
        # Cached positions, by the digest of what they depend on.
        self._prompt_ends: LruCache[bytes, int] = LruCache(_MAX_POSITIONS)
        self._heads: LruCache[bytes, int] = LruCache(_MAX_POSITIONS)

    def render(
        self,
        request: ChatRequest,
        *,
        today: date | None = None,
        replays: TenantReplays | None = None,
        images: Sequence[PreparedImage] = (),
    ) -> Prompt:
        """Render a request to a prompt that ends where the reply begins.

        Args:
            today: The date for templates that show one; None means the current date. It must be
                the same in every turn of an agent, or the agent's prompt changes at midnight.
            replays: Replies that this server generated; None tokenises all replies again.
            images: The request's images, in order.

        Raises:
            InvalidRequestError: this model does not support a part of a message, its template
                refuses the conversation, or the text cannot be encoded.
        """
        conversation = self._composer.compose(request, today)
        try:
            text = self._write(conversation)
        except InvalidRequestError as error:
            error.param = _invalid_field(request) or error.param
            raise
        # Caches are separate per tenant: a shared one would leak prompts through timing.
        root = replays.root if replays else b""
        walk = self._walk(text, root, images)
        head = _head_digest(conversation, root)
        num_replayed = self._replay(walk, conversation, head, replays) if replays else 0
        num_kept = self._walk_to_end(walk, text, conversation)
        num_head = min(self._num_head(request, today, head.digest(), root), len(walk.tokens))
        if len(walk.images) != len(images):
            raise InvalidRequestError(
                f"the model's chat template shows {len(walk.images)} of {len(images)} images.",
                param="messages",
            )
        ends = {place for span in walk.images for place in (span.start, span.end)}
        return Prompt(
            tuple(walk.tokens),
            tuple(sorted({num_head, num_kept, len(walk.tokens), *ends} - {0})),
            num_head,
            has_tool_markup=bool(request.tools) and not self.traits.has_tools,
            num_replayed=num_replayed,
            num_marked=self._num_marked(request, conversation, text, walk, num_head),
            images=tuple(walk.images),
        )

    def _num_marked(
        self,
        request: ChatRequest,
        conversation: TemplateInput,
        text: str,
        walk: TokenWalk,
        num_head: int,
    ) -> int:
        """Count the tokens up to the last mark; a mark in the head counts as at the head's end."""
        num_marked = request.num_marked
        if num_marked is None or num_marked <= num_leading_system(request.messages):
            return 0 if num_marked is None else num_head
        ending, end = self._endings[conversation.is_thinking], len(text)
        if num_marked < len(request.messages):
            marked = replace(request, messages=request.messages[:num_marked])
            end = self._common_end(text, marked, conversation.today, ending)
        else:
            end -= len(ending) if text.endswith(ending) else 0
        later = self._walk(text[end:], b"", [span.image for span in walk.images])
        later.advance(len(text))
        return max(len(walk.tokens) - len(later.tokens), num_head)

    def _common_end(self, text: str, before: ChatRequest, today: date | None, ending: str) -> int:
        try:
            written = self._write(self._composer.compose(before, today))
        except InvalidRequestError:  # the template wants more messages
            return 0
        return common_prefix(text, written.removesuffix(ending))

    def _write(self, conversation: TemplateInput) -> str:
        wants_parts, images = self.traits.wants_parts, self._image_traits
        text = self.tokenizer.render_chat(
            [
                message.fields(wants_parts=wants_parts, images=images)
                for message in conversation.messages
            ],
            [{"type": "function", "function": function} for function in conversation.functions],
            today=conversation.today,
            is_thinking=conversation.is_thinking,
        )
        require_whole_characters(text, param="messages")
        return text

    def _walk(self, text: str, root: bytes, images: Sequence[PreparedImage] = ()) -> TokenWalk:
        """Begin to encode a text; its last image is the last of `images`."""
        spans, runs = self._special.split(text), self._runs.of_tenant(root)
        if not images:
            return TokenWalk(text, spans, runs)
        markers = [span for span in spans if span.token == self._image_marker]
        pairs = zip(reversed(markers), reversed(images), strict=False)
        return TokenWalk(text, spans, runs, dict(pairs))

    def _walk_to_end(self, walk: TokenWalk, text: str, conversation: TemplateInput) -> int:
        """Encode the rest; returns how many tokens of the prompt later turns repeat."""
        lost = self._lost[conversation.is_thinking]
        kept_end = len(text) - len(lost) if text.endswith(lost) else len(text)
        walk.advance(kept_end)
        num_tokens, cut = len(walk.tokens), walk.ahead(kept_end)
        walk.advance(len(text))
        return num_tokens + common_prefix(cut, walk.tokens[num_tokens:])

    def _num_head(
        self, request: ChatRequest, today: date | None, digest: bytes, root: bytes
    ) -> int:
        num_head = self._heads.get(digest)
        if num_head is None:
            leading = request.messages[: num_leading_system(request.messages)]
            first, *others = (
                self._tokens(replace(request, messages=(*leading, message)), today, root)
                for message in BEGINNINGS
            )
            num_head = min(common_prefix(first, other) for other in others)
            self._heads.put(digest, num_head)
        return num_head

    def _tokens(self, request: ChatRequest, today: date | None, root: bytes) -> "array[int]":
        text = self._write(self._composer.compose(request, today))
        walk = self._walk(text, root)
        walk.advance(len(text))
        return walk.tokens

    # -- replay of generated replies ------------------------------------------------------------

    def _replay(
        self,
        walk: TokenWalk,
        conversation: TemplateInput,
        head: "hashlib._Hash",
        replays: TenantReplays,
    ) -> int:
        digest, num_digested, num_replayed = PromptDigest(replays.root), 0, 0
        places = list(self._reply_places(conversation, head.copy()))
        limits = [place.start for place in places[1:]] + [sys.maxsize]
        for place, limit in zip(places, limits, strict=False):
            start = place.start
            if start < walk.position:
                continue
            walk.advance(start)
            digest.update(walk.tokens[num_digested:])
            num_digested = len(walk.tokens)
            before = walk.ahead(start)
            tokens = self._sampled(place, digest.followed_by(before), replays)
            if tokens and self._put(walk, tokens, start, limit):
                num_replayed += 1
        return num_replayed

    def _reply_places(
        self, conversation: TemplateInput, digest: "hashlib._Hash"
    ) -> Iterator[_ReplyPlace]:
        last_question = max(
            (i for i, message in enumerate(conversation.messages) if message.role == "user"),
            default=0,
        )
        for index, message in enumerate(conversation.messages):
            if message.source is not None:
                start = self._prompt_end(conversation, index, digest.digest())
                if start != _NOWHERE:
                    yield _ReplyPlace(message.source, start, is_old=index < last_question)
            digest.update(json.dumps(message.fields(wants_parts=False)).encode() + b"\n")

    def _prompt_end(self, conversation: TemplateInput, index: int, digest: bytes) -> int:
        end = self._prompt_ends.get(digest)
        if end is None:
            before = replace(conversation, messages=conversation.messages[:index])
            try:
                end = len(self._write(before))
            except InvalidRequestError:
                end = _NOWHERE
            self._prompt_ends.put(digest, end)
        return end

    def _sampled(
        self, place: _ReplyPlace, prompt: bytes, replays: TenantReplays
    ) -> tuple[int, ...] | None:
        traits = self.traits
        keeps = traits.keeps_old_thinking if place.is_old else traits.keeps_loop_thinking
        return replays.tokens(keys_to_look_up(prompt, place.reply, keeps_thinking=keeps))

    def _put(self, walk: TokenWalk, tokens: Sequence[int], start: int, limit: int) -> bool:
        """Replace a reply's text with its tokens, up to the template's end token if it has one.

        Returns False, and changes nothing, if the text does not match the tokens.
        """
        ends = self.tokenizer.eos_ids
        content = tokens[:-1] if tokens[-1] in ends else tokens
        written = walk.find_special(ends, start, limit)
        before = walk.ahead(start)
        if written is not None and written.token == tokens[-1]:
            walk.replace(written.end, (*before, *tokens))
            return True
        if written is not None:
            walk.replace(written.start, (*before, *content))
            return True
        text = self._written(content)
        if not walk.starts_with(text, start):
            return False
        walk.replace(start + len(text), (*before, *content))
        return True

    def _written(self, tokens: Sequence[int]) -> str:
        """Return a reply's text as the template writes it, with its special tokens."""
        pieces = groupby(tokens, self._special_texts.get)
        return "".join(
            special * len(list(run)) if special else self._special.guard(self._decoded(run))
            for special, run in pieces
        )

    def _decoded(self, tokens: Iterable[int]) -> str:
        return b"".join(map(self.tokenizer.token_bytes, tokens)).decode(errors="replace")


def _invalid_field(request: ChatRequest) -> str:
    """Return the field that is not valid JSON (e.g. a lone surrogate); empty if not found."""
    for tool in request.tools:
        if json_fault([tool.name, tool.description, tool.parameters]):
            return "tools"
    invalid = (i for i, message in enumerate(request.messages) if json_fault(message.text))
    return next((f"messages[{index}]" for index in invalid), "")


def _head_digest(conversation: TemplateInput, root: bytes) -> "hashlib._Hash":
    today = conversation.today and conversation.today.isoformat()
    head = [conversation.functions, conversation.head, today, conversation.is_thinking]
    return hashlib.sha256(root + json.dumps(head).encode() + b"\n")


# -- the date in each agent's prompts -------------------------------------------------------------

_AGENT_TAG = b"semantic.date.agent.v1"
_BEGINNING_TAG = b"semantic.date.beginning.v1"


class FrozenDates:
    """The dates of the first turn of agents and of conversations without a name. Thread-safe.

    Some templates print the date at the head of the prompt. With the current date, the KV cache of
    every agent would become useless at midnight. So an agent's prompts repeat the date of its first
    turn, which is kept in the replay store.
    """

    def __init__(self, store: ReplayStore, today: Callable[[], date] = date.today) -> None:
        self._store = store
        self._today = today

    def of(self, root: bytes, request: ChatRequest) -> date:
        """Return the date that a prompt shows: the current date in an agent's first turn.

        Changes nothing: `keep` stores the date once the turn is logged.
        """
        # A conversation without a reply is new, even if an older one began with the same messages.
        key = None if _is_new(request) else _key_of(root, request)
        kept = self._store.lookup(key, is_used=False) if key else None
        return date.fromordinal(kept[0]) if kept else self._today()

    def keep(self, root: bytes, request: ChatRequest, day: date) -> None:
        key = _key_of(root, request)
        if _is_new(request) or self._store.lookup(key) is None:
            self._store.remember(key, (day.toordinal(),))


def _name(request: ChatRequest) -> str | None:
    hint = request.agent
    return hint.agent_id or hint.session or hint.client_key


def _is_new(request: ChatRequest) -> bool:
    return not _name(request) and len(_beginning(request)) == len(request.messages)


def _key_of(root: bytes, request: ChatRequest) -> ReplayKey:
    if name := _name(request):
        return _key(_AGENT_TAG, root, name)
    return _key(_BEGINNING_TAG, root, [message.text for message in _beginning(request)])


def _beginning(request: ChatRequest) -> list[Message]:
    return list(takewhile(lambda m: m.role is not Role.ASSISTANT, request.messages))


def _key(tag: bytes, root: bytes, what: JsonValue) -> ReplayKey:
    message = hashlib.sha256(tag + canonical_json(what).encode()).digest()
    return ReplayKey(hashlib.sha256(tag + root).digest(), message)
