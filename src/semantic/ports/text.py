"""What the core asks of a tokenizer and a grammar: text to tokens, and which tokens may follow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Protocol

from semantic.domain.chat import JsonObject
from semantic.domain.reply_format import ReplyShape


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that steers the model; only the chat template may write it.

    Attributes:
        strips_left: White space before it is part of it.
        strips_right: White space after it is part of it.
    """

    id: int
    text: str
    strips_left: bool = False
    strips_right: bool = False


class TokenizerPort(Protocol):
    """Text to token ids and back. Immutable, safe on any thread."""

    @property
    def vocab_size(self) -> int:
        """Ids are in ``[0, vocab_size)``."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a reply."""

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Texts that are single ids and no part of a reply's text, e.g. ``<|im_end|>``."""

    @property
    def chat_template(self) -> str | None:
        """The template's source; None if the model has none."""

    def encode(self, text: str) -> list[int]:
        """Tokenise; special tokens written in the text become their ids, none is added."""

    @property
    def special_tokens(self) -> tuple[SpecialToken, ...]:
        """The tokens that `encode` finds in a text and `encode_plain` never makes."""

    def encode_prompt(self, text: str) -> list[int]:
        """Tokenise a whole prompt as `encode` does, begun as the model's texts begin."""

    def encode_plain(self, text: str, *, is_start: bool = False) -> list[int]:
        """Tokenise text as it is: no id of the result is special, whatever the text spells.

        Args:
            text: What stands between two special tokens.
            is_start: Nothing comes before it; some vocabularies write a first word differently.
        """

    def token_bytes(self, token: int) -> bytes:
        """What a token contributes to the text; empty for special and unknown tokens."""

    def render_chat(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] = (),
        *,
        add_generation_prompt: bool = True,
        today: date | None = None,
        is_thinking: bool | None = None,
    ) -> str:
        """Apply the model's chat template.

        Args:
            messages: In the shape templates expect: role, content, tool_calls, and so on.
            tools: Function definitions, for templates that show them.
            add_generation_prompt: End where a reply begins.
            today: The date shown by templates that show one; None is the real one.
            is_thinking: For templates that know the switch; None leaves it to them.

        Raises:
            InvalidRequestError: the template refuses the conversation, or there is none.
        """


class TokenConstraint(Protocol):
    """Which tokens one reply may go on with: a grammar's state. Used on the engine's thread."""

    def allowed(self) -> bytes | None:
        """One bit a token id, as in `Draw.allowed`; None allows every token."""

    def accept(self, token: int) -> None:
        """Advance by the token that was chosen; mutates."""

    def copy(self) -> "TokenConstraint":
        """Another that goes on from the same place, to look ahead with."""


class GrammarPort(Protocol):
    """Turns what a reply must look like into a constraint. Immutable, safe on any thread."""

    def constrain(self, shape: ReplyShape, max_tokens: int) -> TokenConstraint | None:
        """Compile a shape for one reply of at most `max_tokens`; None if nothing is enforced.

        Near the end of the budget only tokens are allowed that lead to the reply's end, where a
        short way there is known; else the budget cuts the reply.

        Raises:
            InvalidRequestError: a schema or pattern cannot be enforced, or takes too much to
                compile (it says where), or no such tool is offered.
            OverloadedError: too much is being compiled.
        """
