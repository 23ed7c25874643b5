"""From a conversation to the tokens the model reads.

The model's chat template writes the text; special tokens in it are the template's alone, replies
we made are the very tokens that were sampled, and what was rendered before comes out the same, so
that each turn's prompt begins with the last one and its reply.

Where a reply begins is where the prompt it followed ends: the same conversation up to it, with
the generation prompt. The prompt's digest decides whether that place is right, so a wrong one
only costs a lookup.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import takewhile

from semantic.application.prompt.compose import Composer, TemplateInput, num_leading_system
from semantic.application.prompt.lru_cache import LruCache
from semantic.application.prompt.replay import (
    PromptDigest,
    ReplayKey,
    ReplayStore,
    TenantReplays,
    canonical_json,
    keys_to_look_up,
)
from semantic.application.prompt.special_text import RunEncoder, SpecialText, TokenWalk
from semantic.application.prompt.template_probe import lost_generation_prompt, probe
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
from semantic.ports.text import TokenizerPort

# First messages that white space before them merges with in different ways, if at all.
_BEGINNINGS = tuple(Message.of(Role.USER, text) for text in ("\ufdd3", "a", "1"))
_MAX_POSITIONS = 16_384
_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation.

    Attributes:
        boundaries: Positions worth resuming at, in order: where tools and system messages end,
            where the generation prompt ceases to be what later turns keep of it, and the end.
        num_head: Tokens of tools and system messages; all agents that have them share these.
        has_tool_markup: Calls are asked for in the markup of `compose`, not the template's.
        num_replayed: Replies in it that are the tokens which were sampled.
        num_begun: Tokens at its end that are the beginning of the reply.
    """

    tokens: tuple[int, ...]
    boundaries: tuple[int, ...] = ()
    num_head: int = 0
    has_tool_markup: bool = False
    num_replayed: int = 0
    num_begun: int = 0

    def followed_by(self, beginning: Sequence[int]) -> "Prompt":
        """The same prompt with the beginning of its reply."""
        tokens = (*self.tokens, *beginning)
        boundaries = tuple(sorted({*self.boundaries, len(tokens)}))
        return replace(self, tokens=tokens, boundaries=boundaries, num_begun=len(beginning))


def render(request: ChatRequest, tokenizer: TokenizerPort) -> Prompt:
    """Turn one request into a prompt; for more than one, keep a `Renderer`."""
    return Renderer(tokenizer).render(request)


@dataclass(frozen=True, slots=True)
class _ReplyPlace:
    """A reply, where in the text it begins, and whether a question follows it."""

    reply: Message
    start: int
    is_old: bool


class Renderer:
    """Renders conversations for one model, remembering what it has seen. Safe on any thread."""

    def __init__(self, tokenizer: TokenizerPort) -> None:
        self.tokenizer = tokenizer
        self.traits = probe(tokenizer)
        self._special = SpecialText(tokenizer.special_tokens)
        self._composer = Composer(self.traits, self._special)
        self._runs = RunEncoder(tokenizer)
        # Positions that were found before, by the digest of what they depend on.
        self._prompt_ends: LruCache[bytes, int] = LruCache(_MAX_POSITIONS)
        self._heads: LruCache[bytes, int] = LruCache(_MAX_POSITIONS)
        self._lost = {
            is_thinking: lost_generation_prompt(tokenizer, self.traits, is_thinking=is_thinking)
            for is_thinking in (None, True, False)
        }

    def render(
        self,
        request: ChatRequest,
        *,
        today: date | None = None,
        replays: TenantReplays | None = None,
    ) -> Prompt:
        """Turn a request into a prompt that ends where the reply begins.

        Args:
            request: The whole conversation.
            today: The day shown by templates that show one. To be the same in every turn of an
                agent, or its prompt changes at midnight; None is the real one.
            replays: Replies that were made here; None tokenises all of them again.

        Raises:
            InvalidRequestError: a part cannot be shown to this model, its template refuses, or
                the text cannot be encoded.
        """
        conversation = self._composer.compose(request, today)
        try:
            text = self._write(conversation)
        except InvalidRequestError as error:
            error.param = _spoilt_field(request) or error.param
            raise
        # What was worked out for one tenant must not save time for another: that could be measured.
        root = replays.root if replays else b""
        walk = self._walk(text, root)
        head = _head_digest(conversation, root)
        num_replayed = self._replay(walk, conversation, head, replays) if replays else 0
        num_kept = self._walk_to_end(walk, text, conversation)
        num_head = min(self._num_head(request, today, head.digest(), root), len(walk.tokens))
        return Prompt(
            tuple(walk.tokens),
            tuple(sorted({num_head, num_kept, len(walk.tokens)} - {0})),
            num_head,
            has_tool_markup=bool(request.tools) and not self.traits.has_tools,
            num_replayed=num_replayed,
        )

    def _write(self, conversation: TemplateInput) -> str:
        """Apply the template."""
        wants_parts = self.traits.wants_parts
        text = self.tokenizer.render_chat(
            [message.fields(wants_parts=wants_parts) for message in conversation.messages],
            [{"type": "function", "function": function} for function in conversation.functions],
            today=conversation.today,
            is_thinking=conversation.is_thinking,
        )
        require_whole_characters(text, param="messages")
        return text

    def _walk(self, text: str, root: bytes) -> TokenWalk:
        return TokenWalk(text, self._special.split(text), self._runs.of_tenant(root))

    def _walk_to_end(self, walk: TokenWalk, text: str, conversation: TemplateInput) -> int:
        """Encode the rest; returns how many tokens of the prompt later turns will keep."""
        lost = self._lost[conversation.is_thinking]
        kept_end = len(text) - len(lost) if text.endswith(lost) else len(text)
        walk.advance(kept_end)
        num_tokens, cut = len(walk.tokens), walk.ahead(kept_end)
        walk.advance(len(text))
        return num_tokens + common_prefix(list(cut), walk.tokens[num_tokens:])

    def _num_head(
        self, request: ChatRequest, today: date | None, digest: bytes, root: bytes
    ) -> int:
        """Return how many tokens are the same whatever the first message says."""
        num_head = self._heads.get(digest)
        if num_head is None:
            leading = request.messages[: num_leading_system(request.messages)]
            first, *others = (
                self._tokens(replace(request, messages=(*leading, message)), today, root)
                for message in _BEGINNINGS
            )
            num_head = min(common_prefix(first, other) for other in others)
            self._heads.put(digest, num_head)
        return num_head

    def _tokens(self, request: ChatRequest, today: date | None, root: bytes) -> list[int]:
        text = self._write(self._composer.compose(request, today))
        walk = self._walk(text, root)
        walk.advance(len(text))
        return walk.tokens

    # -- replies that were made here ------------------------------------------------------------

    def _replay(
        self,
        walk: TokenWalk,
        conversation: TemplateInput,
        head: "hashlib._Hash",
        replays: TenantReplays,
    ) -> int:
        """Walk up to the last reply that is known, putting tokens in; returns how many are."""
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
        """Replace a reply's text, up to the end token if the template writes one after it."""
        ends = self.tokenizer.eos_ids
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
        return b"".join(map(self.tokenizer.token_bytes, tokens)).decode(errors="replace")


def _spoilt_field(request: ChatRequest) -> str:
    """Where a request holds what JSON cannot: half a character; empty if that is not known."""
    for tool in request.tools:
        if json_fault([tool.name, tool.description, tool.parameters]):
            return "tools"
    spoilt = (i for i, message in enumerate(request.messages) if json_fault(message.text))
    return next((f"messages[{index}]" for index in spoilt), "")


def _head_digest(conversation: TemplateInput, root: bytes) -> "hashlib._Hash":
    """Digest what comes before the first message, what else the template gets, and whose it is."""
    today = conversation.today and conversation.today.isoformat()
    head = [conversation.functions, conversation.head, today, conversation.is_thinking]
    return hashlib.sha256(root + json.dumps(head).encode() + b"\n")


# -- the day each agent believes it is ------------------------------------------------------------

_AGENT_TAG = b"semantic.date.agent.v1"
_BEGINNING_TAG = b"semantic.date.beginning.v1"


class FrozenDates:
    """Days on which agents, and conversations that nobody named, first spoke. Safe on any thread.

    Some templates print the date at the head of the prompt; were it today's, every agent's state
    would be worthless at midnight. Like replies that a client sends again, it is repeated as it
    was, and kept where they are.
    """

    def __init__(self, store: ReplayStore, today: Callable[[], date] = date.today) -> None:
        self._store = store
        self._today = today

    def of(self, root: bytes, request: ChatRequest) -> date:
        """Return the date a prompt shows: today's if the agent speaks for the first time.

        Changes nothing: a day is kept once its conversation is logged.

        Args:
            root: The root of the names of a tenant's blocks, under which the day is kept.
            request: Names its agent, or is known by how the conversation begins.
        """
        # A new conversation that begins like an older one is another conversation.
        key = None if _is_new(request) else _key_of(root, request)
        kept = self._store.lookup(key, is_used=False) if key else None
        return date.fromordinal(kept[0]) if kept else self._today()

    def keep(self, root: bytes, request: ChatRequest, day: date) -> None:
        """Let a request's agent, or the conversation it begins, go on with the day it was shown."""
        key = _key_of(root, request)
        if _is_new(request) or self._store.lookup(key) is None:
            self._store.remember(key, (day.toordinal(),))


def _name(request: ChatRequest) -> str | None:
    hint = request.agent
    return hint.agent_id or hint.session or hint.client_key


def _is_new(request: ChatRequest) -> bool:
    """Whether nobody named the conversation and it has no reply yet."""
    return not _name(request) and len(_beginning(request)) == len(request.messages)


def _key_of(root: bytes, request: ChatRequest) -> ReplayKey:
    if name := _name(request):
        return _key(_AGENT_TAG, root, name)
    return _key(_BEGINNING_TAG, root, [message.text for message in _beginning(request)])


def _beginning(request: ChatRequest) -> list[Message]:
    """What was said before the first reply."""
    return list(takewhile(lambda m: m.role is not Role.ASSISTANT, request.messages))


def _key(tag: bytes, root: bytes, what: JsonValue) -> ReplayKey:
    said = hashlib.sha256(tag + canonical_json(what).encode()).digest()
    return ReplayKey(hashlib.sha256(tag + root).digest(), said)
