"""Prompts with pictures, and pictures for the fake model."""

import struct
from dataclasses import dataclass

import numpy as np

from semantic.domain.images.spans import ImageSpan, PreparedImage


@dataclass(frozen=True, slots=True)
class PicturePrompt:
    """A prompt's tokens and the images in them."""

    tokens: tuple[int, ...]
    images: tuple[ImageSpan, ...]

    @classmethod
    def of(cls, *pieces: "list[int] | PreparedImage | PicturePrompt") -> "PicturePrompt":
        tokens: list[int] = []
        images: list[ImageSpan] = []
        for piece in pieces:
            match piece:
                case PreparedImage():
                    images.append(ImageSpan.placed(piece, len(tokens)))
                    tokens += piece.tokens
                case PicturePrompt():
                    assert not tokens
                    tokens, images = list(piece.tokens), list(piece.images)
                case _:
                    tokens += piece
        return cls(tuple(tokens), tuple(images))

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The positions where blocks end, as for requests."""
        return tuple(sorted({place for s in self.images for place in (s.start, s.end)} - {0}))


def fake_picture(seed: int, size: tuple[int, int]) -> bytes:
    """The beginning of a PNG, which is all that the fake model reads, and pixels."""
    pixels = np.random.default_rng(seed).bytes(64)
    return b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + struct.pack(">II", *size) + pixels
