"""A model's tokens, laid out for constraints."""

from collections.abc import Callable

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

_TEXT_PROBE = b"zQ {:"  # allowed together only where text is free
_STRING_SYNTAX = bytes(range(0x20)) + b'"\\\x7f'  # what means something in a JSON string
_MARKUP = b"<>[]|`"  # what markers of calls and thinking hold

Bits = NDArray[np.uint8]


class Vocabulary:
    """What the tokens of one model are made of, laid out for constraints."""

    def __init__(self, tokenizer: LLTokenizer, pieces: list[bytes], eos_ids: list[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.pieces = pieces
        self.num_words = (len(pieces) + 31) // 32
        self.byte_ids = np.full(256, -1, np.int64)
        for token, piece in enumerate(pieces):
            if len(piece) == 1:
                self.byte_ids[piece[0]] = token
        bits = np.where(self.byte_ids < 0, 0, 1 << (self.byte_ids & 7))
        self._byte_bits = bits.astype(np.uint8)
        self.is_special = self.pack(
            [t for t, piece in enumerate(pieces) if not piece and t not in eos_ids]
        )
        self.is_plain = self._pack_if(lambda piece: _is_free_of(piece, _STRING_SYNTAX))
        self.is_prose = self._pack_if(lambda piece: _is_free_of(piece, _MARKUP))
        self.is_end = self.pack(eos_ids)
        quoting = [t for t, piece in enumerate(pieces) if piece.startswith(b'"')]
        self.quote_ids = sorted(quoting, key=lambda token: len(pieces[token]))

    def pack(self, tokens: list[int]) -> Bits:
        """One bit a token id, little-endian within a byte."""
        flags = np.zeros(self.num_words * 32, bool)
        flags[tokens] = True
        return np.packbits(flags, bitorder="little")

    def _pack_if(self, is_kept: Callable[[bytes], bool]) -> Bits:
        return self.pack([t for t, piece in enumerate(self.pieces) if is_kept(piece)])

    def mask(self, matcher: LLMatcher) -> Bits:
        """The tokens a matcher allows next."""
        words = np.zeros((1, self.num_words), np.int32)
        fill_next_token_bitmask(matcher, words)
        mask: Bits = words.view(np.uint8)[0]
        return mask

    def bytes_in(self, mask: Bits) -> bytes:
        """The single bytes a mask allows."""
        found = np.flatnonzero(mask[self.byte_ids >> 3] & self._byte_bits)
        return found.astype(np.uint8).tobytes()

    def fewest(self, tokens: list[int]) -> list[int]:
        """The same bytes in fewer tokens, where longer ones exist."""
        shorter: list[int] = []
        run = b""
        for token in tokens:
            if self.pieces[token]:
                run += self.pieces[token]
                continue
            shorter += [*(self.spell(run) or []), token]
            run = b""
        return shorter + (self.spell(run) or [])

    def spell(self, data: bytes) -> list[int] | None:
        """Few tokens that spell the bytes; None if the vocabulary cannot."""
        is_text = _is_utf8(data)  # the tokenizer takes nothing else
        tokens: list[int] = (
            self.tokenizer.greedy_tokenize(data.decode())
            if is_text
            else self.byte_ids[list(data)].tolist()
        )
        return tokens if b"".join(self.pieces[token] for token in tokens) == data else None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_free_of(piece: bytes, syntax: bytes) -> bool:
    """Whether a token is whole characters, none of which means anything."""
    return bool(piece) and _is_utf8(piece) and not any(byte in syntax for byte in piece)


def is_text(allowed: bytes) -> bool:
    """Whether a place that allows these single bytes allows any text."""
    return all(byte in allowed for byte in _TEXT_PROBE)


def ids_in(mask: Bits) -> list[int]:
    """The tokens a mask allows."""
    ids: list[int] = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
    return ids


def has_token(mask: Bits, token: int) -> bool:
    """Whether a mask allows a token."""
    return bool(mask[token >> 3] >> (token & 7) & 1)
