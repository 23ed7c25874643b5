"""Images in sequences: what all backends derive from their spans, and the features they keep."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from semantic.adapters.outbound.vision.families import BIDIRECTIONAL, IN_GRIDS, TILED
from semantic.adapters.outbound.vision.pixels import from_buffer
from semantic.adapters.outbound.vision.processors import VisionSettings
from semantic.domain.errors import InvalidRequestError
from semantic.domain.images.spans import ImageSpan, PreparedImage

_OTHER_MODEL = "the image was prepared for another model"
_MAX_BYTES = 256 * 2**20  # of features that are kept


class FeatureArray(Protocol):
    """An array of any library."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    def __len__(self) -> int:
        """Return the number of its rows."""

    def __getitem__(self, rows: Any, /) -> Self:
        """Return some of its rows."""


ArrayT = TypeVar("ArrayT", bound=FeatureArray)


@dataclass(frozen=True, slots=True)
class ImageFeatures(Generic[ArrayT]):
    """The features of an image or of a part of it.

    Attributes:
        embeddings: Inputs of the language model, ``[features, hidden]``.
        deep: What its first layers add to them (DeepStack); empty for most models.
    """

    embeddings: ArrayT
    deep: tuple[ArrayT, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.embeddings, *self.deep))

    def cut(self, first: int, last: int) -> "ImageFeatures[ArrayT]":
        """Return some of the features."""
        deep = tuple(layer[first:last] for layer in self.deep)
        return ImageFeatures(self.embeddings[first:last], deep)


class FeatureCache(ABC, Generic[ArrayT]):
    """Computes features of images and keeps them, so that no image is computed twice in a row.

    Tiles are computed one by one, when a chunk needs them: a step's time then depends on the chunk
    and not on the image, and its results do not depend on the sizes of chunks.

    Attributes:
        settings: How the model's images are prepared.
        is_bidirectional: Whether an image's positions attend to each other in both directions.
        has_grid: Whether positions follow the grid of an image (M-RoPE).
    """

    def __init__(self, settings: VisionSettings, max_bytes: int = _MAX_BYTES) -> None:
        """Keep nothing yet; `max_bytes` bounds the features that are kept, except the newest."""
        self.settings = settings
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._kept: OrderedDict[tuple[str, bytes, int], ImageFeatures[ArrayT]] = OrderedDict()
        kind = settings.model_type
        self._is_tiled = kind in TILED
        self.is_bidirectional, self.has_grid = kind in BIDIRECTIONAL, kind in IN_GRIDS

    @property
    def nbytes(self) -> int:
        """Size of the features that are kept."""
        return self._num_bytes

    def find(
        self, spans: Sequence[ImageSpan], start: int, end: int
    ) -> tuple[list[int], list[ImageFeatures[ArrayT]]]:
        """Return the features at the positions ``[start, end)``, and these positions from `start`.

        Raises:
            InvalidRequestError: an image was prepared for another model.
        """
        rows: list[int] = []
        pieces: list[ImageFeatures[ArrayT]] = []
        for span in spans:
            wanted = span.features_in(start, end)
            places = span.feature_positions[wanted.start : wanted.stop]
            rows += [place - start for place in places]
            pieces += self._pieces(span.image, wanted)
        return rows, pieces

    @abstractmethod
    def compute(self, pixels: NDArray[np.float32], image: PreparedImage) -> ImageFeatures[ArrayT]:
        """Run the vision tower over an image, or one of its tiles; its arrays are computed."""

    def _pieces(self, image: PreparedImage, wanted: range) -> list[ImageFeatures[ArrayT]]:
        num_tiles = image.pixels[0].shape[0] if self._is_tiled else 1
        size, rest = divmod(image.num_features, num_tiles)
        if rest or not size:
            raise InvalidRequestError(_OTHER_MODEL)
        pieces = []
        for tile in range(wanted.start // size, -(-wanted.stop // size)):
            found = self._tile(image, tile)
            if len(found.embeddings) != size:
                raise InvalidRequestError(_OTHER_MODEL)
            first = tile * size
            pieces.append(found.cut(max(wanted.start - first, 0), min(wanted.stop - first, size)))
        return pieces

    def _tile(self, image: PreparedImage, tile: int) -> ImageFeatures[ArrayT]:
        key = (image.tenant, image.digest, tile)
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        pixels = from_buffer(image.pixels[0])
        if self._is_tiled:
            pixels = pixels[tile : tile + 1]
        axis = self.settings.processor.colour_axis
        found = self.compute(self.settings.scale.apply(pixels, colour_axis=axis), image)
        self._kept[key] = found
        self._num_bytes += found.nbytes
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.nbytes
        return found


def grid_positions(spans: Sequence[ImageSpan], start: int, end: int) -> NDArray[np.int64]:
    """Return the positions of ``[start, end)`` for M-RoPE: frame, row and column, ``[3, tokens]``.

    The features of an image have the coordinates of its grid, counted from the position of its
    first feature. The text after it continues after the largest coordinate, so its position is less
    than its index.

    Args:
        spans: The sequence's images in ascending order; those after `end` may be missing.
        start: An index in the sequence; `end` likewise.
    """
    positions = np.broadcast_to(np.arange(start, end, dtype=np.int64), (3, end - start)).copy()
    skipped = 0  # how far positions lag behind indices
    for span in spans:
        if span.start >= end:
            break
        _, rows, columns = span.image.grid
        inside = np.arange(max(start, span.start), min(end, span.end))
        place = inside - span.start
        grid = np.stack((place // (rows * columns), place // columns % rows, place % columns))
        positions[:, inside - start] = span.start - skipped + grid
        skip = span.end - span.start - max(span.image.grid)
        positions[:, max(span.end - start, 0) :] -= skip
        skipped += skip
    return positions


def runs(rows: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the ranges of consecutive rows, of which there is at least one."""
    starts = [i for i, row in enumerate(rows) if i == 0 or row != rows[i - 1] + 1]
    ends = [*starts[1:], len(rows)]
    return tuple((rows[a], rows[b - 1] + 1) for a, b in zip(starts, ends, strict=True))


def rope_axes(model_type: str, sections: Sequence[int] | None = None) -> NDArray[np.int64]:
    """Return which coordinate each frequency uses in M-RoPE: 0 frame, 1 row, 2 column.

    Args:
        model_type: Of the whole model, or of its text part.
        sections: How many frequencies use each; None is the model's default.
    """
    is_interleaved = model_type.startswith("qwen3")
    frame, row, column = sections or ((24, 20, 20) if is_interleaved else (16, 24, 24))
    if not is_interleaved:
        return np.repeat(np.arange(3), (frame, row, column))
    axes = np.zeros(frame + row + column, np.int64)
    axes[1 : 3 * row : 3] = 1
    axes[2 : 3 * column : 3] = 2
    return axes
