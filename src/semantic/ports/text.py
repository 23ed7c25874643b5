"""Interfaces of tokenizers and grammars.

A tokenizer converts text to tokens; a grammar determines which tokens may follow in a reply.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Protocol

from semantic.domain.chat import JsonObject
from semantic.domain.reply_format import ReplyShape


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A control token of the model; only the chat template may produce it.

    Attributes:
        strips_left: Whether the token absorbs white space before it.
        strips_right: Whether the token absorbs white space after it.
    """

    id: int
    text: str
    strips_left: bool = False
    strips_right: bool = False


class TokenizerPort(Protocol):
    """Converts text to token ids and back. Immutable and thread-safe."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: ids are in ``[0, vocab_size)``."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a reply."""

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Texts that are single ids and never part of a reply's text, e.g. ``<|im_end|>``."""

    @property
    def chat_template(self) -> str | None:
        """Source of the model's chat template; None if it has none."""

    def encode(self, text: str) -> list[int]:
        """Tokenise text; special tokens spelled in the text become their ids, none is added."""

    @property
    def special_tokens(self) -> tuple[SpecialToken, ...]:
        """The tokens that `encode` recognises in text and `encode_plain` never produces."""

    def encode_prompt(self, text: str) -> list[int]:
        """Tokenise a whole prompt as `encode` does, prepending the model's BOS token if needed."""

    def encode_plain(self, text: str, *, is_start: bool = False) -> list[int]:
        """Tokenise text literally: the result has no special ids, even if the text spells them.

        Args:
            text: The text between two special tokens.
            is_start: Whether nothing precedes the text; some vocabularies encode the first word
                differently.
        """

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token's text; empty for special and unknown tokens."""

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
            messages: In the format templates expect: role, content, tool_calls, and so on.
            tools: Function definitions, for templates that include them.
            add_generation_prompt: Whether to append the header of the assistant's reply.
            today: The date, for templates that include one; None is the current date.
            is_thinking: Thinking switch, for templates that have one; None is the template's
                default.

        Raises:
            InvalidRequestError: the template rejects the conversation, or the model has none.
        """


class TokenConstraint(Protocol):
    """Grammar state of one reply, which limits its next token. Used on the engine's thread."""

    def allowed(self) -> bytes | None:
        """Return the bit mask of allowed tokens, as in `Draw.allowed`; None allows every token."""

    def accept(self, token: int) -> None:
        """Advance the state by a sampled token."""

    def copy(self) -> "TokenConstraint":
        """Return an independent copy of the state, for lookahead."""


class GrammarPort(Protocol):
    """Compiles the required shape of a reply to a constraint. Immutable and thread-safe."""

    def constrain(self, shape: ReplyShape, max_tokens: int) -> TokenConstraint | None:
        """Compile a shape for one reply of at most `max_tokens`; None if nothing is enforced.

        Near the end of the token budget the constraint allows only tokens that complete the reply,
        if it knows a short completion; otherwise the budget truncates the reply.

        Raises:
            InvalidRequestError: a schema or pattern cannot be enforced or is too expensive to
                compile (the message names the place), or a required tool is not offered.
            OverloadedError: too many compilations are in progress.
        """
