"""How the fake model sees images, without decoding them.

A feature is a hash of the image's pixels, so KV cache of another image shows as a wrong token. As
in models with M-RoPE, an image of many features takes fewer positions, so every later token depends
on the sizes of all images before it.
"""

import enum
import hashlib
from collections.abc import Sequence

from semantic.domain.images.spans import (
    ImageSpan,
    PixelBuffer,
    PreparedImage,
    image_digest,
    image_ids,
)

_PNG = b"\x89PNG\r\n\x1a\n"
_ROW = ord("\n")  # stands between the rows of an image
_TILE = 32  # pixels on each side of a feature
_MIN_SIDE, _MAX_SIDE = 3, 8  # features
_SHIFT = 2**20


class VisionKind(enum.Enum):
    """Whether the positions of an image attend to those after them."""

    CAUSAL = enum.auto()
    BIDIRECTIONAL = enum.auto()


class FakeVision:
    """`VisionPort` of the fake model: the file's bytes are the pixels."""

    fingerprint = "fake-vision.v1"

    def __init__(self, marker_id: int) -> None:
        self.marker_id = marker_id

    def prepare(self, data: bytes) -> PreparedImage:
        width, height = _size(data)
        rows, columns = (min(max(n // _TILE, _MIN_SIDE), _MAX_SIDE) for n in (height, width))
        pixels = (PixelBuffer("pixels", (len(data),), "u8", data),)
        grid = (1, rows, columns)
        digest = image_digest(self.fingerprint, pixels, grid)
        ids = image_ids(digest, rows * columns)
        lines = [(*ids[i : i + columns], _ROW) for i in range(0, len(ids), columns)]
        tokens = tuple(token for line in lines for token in line)
        return PreparedImage(digest, tokens, pixels, grid, width, height)


def _size(data: bytes) -> tuple[int, int]:
    """Read width and height of a PNG; 0 for other files."""
    if not data.startswith(_PNG) or len(data) < 24:
        return 0, 0
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def embedded(tokens: Sequence[int], start: int, images: Sequence[ImageSpan]) -> Sequence[int]:
    """Return the fake model's input at the positions from `start` on."""
    if not images:
        return tokens
    inputs, shift, end = list(tokens), 0, start + len(tokens)
    places = iter(images)
    span = next(places, None)
    for position in range(start, end):
        while span is not None and span.end <= position:
            shift += span.end - span.start - max(span.image.grid)
            span = next(places, None)
        inputs[position - start] += shift * _SHIFT
    for span in images:
        for feature in span.features_in(start, end):
            inputs[span.feature_positions[feature] - start] = _feature(span.image, feature)
    return inputs


def _feature(image: PreparedImage, index: int) -> int:
    whole = hashlib.sha256(index.to_bytes(4, "little"))
    for buffer in image.pixels:
        whole.update(buffer.data)
    return int.from_bytes(whole.digest()[:4], "little")
