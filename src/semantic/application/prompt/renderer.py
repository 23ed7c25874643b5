"""From a conversation to the tokens the model reads.

The model's chat template writes the text; special tokens in it are the template's alone, replies
we made are the very tokens that were sampled, and what was rendered before comes out the same, so
that each turn's prompt begins with the last one and its reply.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date

from semantic.application.engine.request import common_prefix
from semantic.application.prompt.compose import Composer, Conversation, num_leading_system
from semantic.application.prompt.encoding import RunEncoder, TokenWalk
from semantic.application.prompt.replay import Places, Replay, Replayer, head_digest
from semantic.application.prompt.special_text import SpecialText
from semantic.application.prompt.template_probe import lost_generation_prompt, probe
from semantic.domain.chat import ChatRequest, Message, Role, require_whole_characters
from semantic.ports.text import TokenizerPort

# First messages that white space before them merges with in different ways, if at all.
_BEGINNINGS = tuple(Message.of(Role.USER, text) for text in ("\ufdd3", "a", "1"))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation.

    Attributes:
        boundaries: Positions worth resuming at, in order: where tools and system messages end,
            where the generation prompt ceases to be what later turns keep of it, and the end.
        num_head: Tokens of tools and system messages; all agents that have them share these.
        has_tool_markup: Calls are asked for in the markup of `tool_prompt`, not the template's.
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


class Renderer:
    """Renders conversations for one model, remembering what it has seen. Safe on any thread."""

    def __init__(self, tokenizer: TokenizerPort) -> None:
        self.tokenizer = tokenizer
        self.traits = probe(tokenizer)
        self._special = SpecialText(tokenizer.special_tokens)
        self._composer = Composer(self.traits, self._special)
        self._runs = RunEncoder(tokenizer)
        self._replayer = Replayer(tokenizer, self.traits, self._special, self._write)
        self._heads = Places()
        self._lost = {
            is_thinking: lost_generation_prompt(tokenizer, is_thinking=is_thinking)
            for is_thinking in (None, True, False)
        }

    def render(
        self, request: ChatRequest, *, today: date | None = None, replay: Replay | None = None
    ) -> Prompt:
        """Turn a request into a prompt that ends where the reply begins.

        Args:
            request: The whole conversation.
            today: The day shown by templates that show one. To be the same in every turn of an
                agent, or its prompt changes at midnight; None is the real one.
            replay: Replies that were made here; None writes all of them out anew.

        Raises:
            InvalidRequestError: a part cannot be shown to this model, its template refuses, or
                the text cannot be encoded.
        """
        conversation = self._composer.compose(request, today)
        text = self._write(conversation)
        walk = self._walk(text)
        num_replayed = self._replayer.replay(walk, conversation, replay) if replay else 0
        num_kept = self._walk_to_end(walk, text, conversation)
        num_head = self._num_head(request, conversation, len(walk.tokens))
        return Prompt(
            tuple(walk.tokens),
            tuple(sorted({num_head, num_kept, len(walk.tokens)} - {0})),
            num_head,
            has_tool_markup=bool(request.tools) and not self.traits.has_tools,
            num_replayed=num_replayed,
        )

    def _write(self, conversation: Conversation) -> str:
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

    def _walk(self, text: str) -> TokenWalk:
        return TokenWalk(text, self._special.split(text), self._runs)

    def _walk_to_end(self, walk: TokenWalk, text: str, conversation: Conversation) -> int:
        """Encode the rest; returns how many tokens of the prompt later turns will keep."""
        lost = self._lost[conversation.is_thinking]
        kept_end = len(text) - len(lost) if text.endswith(lost) else len(text)
        walk.advance(kept_end)
        num_tokens, cut = len(walk.tokens), walk.ahead(kept_end)
        walk.advance(len(text))
        return num_tokens + common_prefix(list(cut), walk.tokens[num_tokens:])

    def _num_head(self, request: ChatRequest, conversation: Conversation, num_tokens: int) -> int:
        """Return how many tokens are the same whatever the first message says."""

        def search() -> int:
            leading = request.messages[: num_leading_system(request.messages)]
            first, *others = (
                self._tokens(replace(request, messages=(*leading, message)), conversation.today)
                for message in _BEGINNINGS
            )
            return min(common_prefix(first, other) for other in others)

        known = self._heads.find(head_digest(conversation).digest(), search)
        return min(known, num_tokens)

    def _tokens(self, request: ChatRequest, today: date | None) -> list[int]:
        text = self._write(self._composer.compose(request, today))
        walk = self._walk(text)
        walk.advance(len(text))
        return walk.tokens
