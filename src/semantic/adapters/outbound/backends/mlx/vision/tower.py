"""Computes the features of images, and gives them to a language model of mlx-lm."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from semantic.adapters.outbound.backends.images import (
    FeatureCache,
    ImageFeatures,
    grid_positions,
    runs,
)
from semantic.adapters.outbound.backends.mlx.caches import Array, leaves
from semantic.adapters.outbound.backends.mlx.vision.qwen import QwenTower
from semantic.adapters.outbound.backends.mlx.vision.siglip import SiglipTower
from semantic.adapters.outbound.vision.processors import VisionSettings
from semantic.domain.images.spans import ImageSpan, PreparedImage, spans_within


@dataclass(frozen=True, slots=True)
class ChunkImages:
    """The images in a chunk.

    Attributes:
        rows: Indices in the chunk of their tokens.
        blocks: Ranges of rows that attend to each other in both directions.
        positions: For M-RoPE, ``[3, tokens]``; None if positions equal indices.
    """

    rows: list[int]
    pieces: Sequence[ImageFeatures[Array]]
    blocks: tuple[tuple[int, int], ...] = ()
    positions: NDArray[np.int64] | None = None


class MlxTower(FeatureCache[Array]):
    """A model's vision tower and connector."""

    def __init__(
        self, settings: VisionSettings, tower: SiglipTower | QwenTower, dtype: Any
    ) -> None:
        super().__init__(settings)
        self._tower, self._dtype = tower, dtype

    def chunk_images(self, spans: Sequence[ImageSpan], start: int, end: int) -> ChunkImages | None:
        """Return the images at the positions ``[start, end)``; None if there are none.

        Raises:
            InvalidRequestError: an image was prepared for another model.
        """
        rows, pieces = self.find(spans_within(spans, start, end), start, end)
        if not rows:
            return None
        blocks = runs(rows) if self.is_bidirectional else ()
        positions = grid_positions(spans, start, end) if self.has_grid else None
        return ChunkImages(rows, pieces, blocks, positions)

    def compute(self, pixels: NDArray[np.float32], image: PreparedImage) -> ImageFeatures[Array]:
        values = mx.array(pixels).astype(self._dtype)
        if isinstance(self._tower, QwenTower):
            found = ImageFeatures(*self._tower.features(values, image.grid))
        else:
            found = ImageFeatures(self._tower.features(values))
        mx.eval(found.embeddings, *found.deep)
        return found


def lag(spans: Sequence[ImageSpan], position: int) -> int:
    """Return how far the position of a token lags behind its index, after its images."""
    before = [span for span in spans if span.end <= position]
    return sum(span.end - span.start - max(span.image.grid) for span in before)


@dataclass(slots=True)
class _Pass:
    """What the parts of the language model need in the pass that is being built."""

    angles: tuple[Array, Array] | None = None
    lags: Any = 0
    rows: Array | None = None
    deep: tuple[Array, ...] = ()


class GridRope:
    """M-RoPE in place of the RoPE of a layer."""

    def __init__(self, rope: Any, axes: NDArray[np.int64], current: _Pass) -> None:
        self._rope, self._axes, self._current = rope, axes, current

    def angles(self, positions: NDArray[np.int64]) -> tuple[Array, Array]:
        """Return cosines and sines of positions, ``[3, tokens]``."""
        dims = self._rope.dims
        frequencies = float(self._rope.base) ** -(np.arange(0, dims, 2) / dims)
        angles = mx.array((positions[self._axes].T * frequencies).astype(np.float32))
        return mx.cos(angles), mx.sin(angles)

    def __call__(self, heads: Array, offset: Any = 0) -> Array:
        if self._current.angles is None:
            return self._rope(heads, offset=offset - self._current.lags)
        cos, sin = (each.astype(heads.dtype) for each in self._current.angles)
        first, second = mx.split(heads, 2, axis=-1)
        return mx.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


@dataclass(slots=True)
class LanguageInputs:
    """Runs a language model with features in place of embeddings.

    Attributes:
        body: The module of the model with its embeddings and layers.
        scale: The model multiplies its inputs by this, which features already include.
    """

    body: Any
    scale: float = 1.0
    ropes: list[GridRope] = field(default_factory=list)
    _current: _Pass = field(default_factory=_Pass)

    def use_grid(self, axes: NDArray[np.int64]) -> None:
        """Prepare a model whose positions follow the grid of images; mutates the model."""
        for number, layer in enumerate(self.body.layers):
            layer.self_attn.rope = GridRope(layer.self_attn.rope, axes, self._current)
            self.ropes.append(layer.self_attn.rope)
            _add_deep(layer, number, self._current)

    def set_lags(self, lags: Sequence[int]) -> None:
        """Set how far the rows of the next pass lag behind their indices."""
        self._current.lags = mx.array([*lags]) if any(lags) else 0

    def run(
        self, run: Callable[..., Array], ids: Array, caches: list[Any], images: ChunkImages
    ) -> Array:
        """Run a chunk with images, ``[1, tokens]``; the ids of features do not matter."""
        embeddings = self.body.embed_tokens(ids)
        rows = mx.array(images.rows)
        features = mx.concatenate([piece.embeddings for piece in images.pieces])
        embeddings[0, rows] = (features / self.scale).astype(embeddings.dtype)
        current = self._current
        if images.positions is not None:
            current.angles = self.ropes[0].angles(images.positions)
        deep = zip(*(piece.deep for piece in images.pieces), strict=True)
        current.rows, current.deep = rows, tuple(mx.concatenate(layer) for layer in deep)
        if images.blocks:
            for leaf in leaves(caches):
                leaf.make_mask = partial(_masked, leaf.make_mask, images.blocks)
        try:
            return run(ids, cache=caches, input_embeddings=embeddings)
        finally:
            current.angles, current.rows, current.deep = None, None, ()


def _add_deep(layer: Any, number: int, current: _Pass) -> None:
    kind = type(layer)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = kind.__call__(self, *args, **kwargs)
        if number < len(current.deep):
            hidden = hidden.at[:, current.rows].add(current.deep[number].astype(hidden.dtype))
        return hidden

    layer.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def _masked(
    make_mask: Callable[..., Array],
    blocks: Sequence[tuple[int, int]],
    num_tokens: int,
    **options: Any,
) -> Array:
    """Return a cache's mask that also shows the tokens of each block to each other."""
    mask = make_mask(num_tokens, **{**options, "return_array": True})
    first = mask.shape[-1] - num_tokens
    for start, end in blocks:
        ahead = mx.triu(mx.ones((end - start, end - start))) > 0
        columns = slice(first + start, first + end)
        mask[..., start:end, columns] = mask[..., start:end, columns] | ahead
    return mask
