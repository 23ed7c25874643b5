"""A model's tokens as bit masks and bytes for constraints, and grammars compiled for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from semantic.domain.errors import InvalidRequestError
from semantic.ports.text import TokenizerPort

# Characters that open or separate elements of JSON, tool calls or thinking.
_SYNTAX = bytes(range(0x20)) + b'"\\\x7f{}[],:<>|`'
_MAX_LEXER_STATES = 50_000  # at 0.4 kB each; the lexer adds states while a reply is generated

Bits = NDArray[np.uint8]
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The tokens of a vocabulary, in a form that can be sent to other processes.

    Attributes:
        eos_ids: The tokens that end a reply; at least one.
        special: The names of special tokens.
    """

    pieces: tuple[bytes, ...]
    eos_ids: tuple[int, ...]
    special: dict[int, bytes]

    @classmethod
    def of(cls, tokenizer: TokenizerPort) -> "TokenTable":
        """Read the table; raises `InvalidRequestError` if the model has no end token."""
        eos_ids = tuple(sorted(tokenizer.eos_ids))
        if not eos_ids:
            raise InvalidRequestError(
                "this model has no end token, so replies cannot be constrained."
            )
        pieces = tuple(map(tokenizer.token_bytes, range(tokenizer.vocab_size)))
        special = {token: text.encode() for text, token in tokenizer.special_ids.items()}
        return cls(pieces, eos_ids, special)


class Vocabulary:
    """The tokens of one model. Slow to create, immutable and thread-safe.

    Attributes:
        byte_ids: The token of each byte; -1 where there is none.
        is_plain: Mask of the tokens without syntax characters, which open and separate nothing.
        is_end: Mask of the tokens that end a reply.
    """

    def __init__(self, table: TokenTable, encode: Encode | None = None) -> None:
        """Build masks and llguidance's tokenizer; without `encode`, text is encoded by bytes."""
        self.eos_ids = table.eos_ids
        self.pieces = table.pieces
        self.num_words = (len(table.pieces) + 31) // 32
        self.byte_ids = [-1] * 256
        for token, piece in enumerate(table.pieces):
            if len(piece) == 1:
                self.byte_ids[piece[0]] = token
        self.is_plain = self.pack([t for t, p in enumerate(table.pieces) if _is_plain(p)])
        self.is_end = self.pack(table.eos_ids)
        self._limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        wrapper = TokenizerWrapper(_Encoder(table, encode or self._bytewise))
        self._tokenizer = LLTokenizer(
            wrapper, n_vocab=len(table.pieces), eos_token=list(table.eos_ids)
        )

    def compile(self, grammar: str) -> LLMatcher:
        """Compile a grammar; the matcher reports an invalid grammar as its error.

        The library's limits do not bound this call: some grammars exhaust time and memory.
        """
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)

    def pack(self, tokens: Sequence[int]) -> Bits:
        """Make a mask with one bit per token id, little-endian within a byte."""
        flags = np.zeros(self.num_words * 32, bool)
        flags[list(tokens)] = True
        return np.packbits(flags, bitorder="little")

    def mask(self, matcher: LLMatcher) -> Bits:
        words = np.zeros((1, self.num_words), np.int32)
        fill_next_token_bitmask(matcher, words)
        mask: Bits = words.view(np.uint8)[0]
        return mask

    def fewest(self, tokens: Sequence[int]) -> list[int]:
        """Encode the same bytes in fewer tokens, where longer tokens exist."""
        shorter: list[int] = []
        run: list[int] = []
        for token in tokens:
            if self.pieces[token]:
                run.append(token)
                continue
            shorter += [*self._merged(run), token]
            run = []
        return shorter + self._merged(run)

    def spell(self, data: bytes) -> list[int] | None:
        """Encode bytes in few tokens; None if the vocabulary cannot."""
        try:  # the tokenizer accepts only text
            tokens: list[int] = self._tokenizer.greedy_tokenize(data.decode())
        except UnicodeDecodeError:
            tokens = [self.byte_ids[byte] for byte in data]
        is_known = min(tokens, default=0) >= 0
        return tokens if is_known and self._text(tokens) == data else None

    def _merged(self, run: list[int]) -> list[int]:
        return self.spell(self._text(run)) or run

    def _text(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.pieces[token] for token in tokens)

    def _bytewise(self, text: str) -> list[int]:
        return [token for byte in text.encode() if (token := self.byte_ids[byte]) >= 0]


class _Encoder:
    """The tokenizer interface that llguidance expects."""

    def __init__(self, table: TokenTable, encode: Encode) -> None:
        self.eos_token_id = table.eos_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(table.special)
        self.tokens = [table.special.get(t, piece) for t, piece in enumerate(table.pieces)]
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def _is_plain(piece: bytes) -> bool:
    """Whether a token consists of whole characters without syntax characters."""
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return bool(piece) and not any(byte in _SYNTAX for byte in piece)


def ids_in(mask: Bits) -> list[int]:
    """The token ids of a mask."""
    found: list[int] = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
    return found
