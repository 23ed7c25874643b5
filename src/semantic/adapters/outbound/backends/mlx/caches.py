"""Converts the library's caches to plain arrays whose first axis is the sequence, and back.

Every leaf cache of the library becomes a `Part`: keys and values of all tokens (FULL), those of the
last tokens in a ring with position p at ``p % window`` (WINDOW), or recurrent arrays (STATE).
Arrays of several sequences can be placed side by side. For a prefill, the library's caches are
built from a sequence's arrays and converted back afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.runtime import import_library
from semantic.domain.spec import LayerKind, LayerSpec

Array: TypeAlias = Any  # mx.array; MLX ships no types
Arrays: TypeAlias = list[list[Array]]  # by part, then keys and values or state arrays

library = import_library("mlx_lm.models.cache")

_STEP = 256
_TIME = 2  # the axis of tokens in keys and values


@dataclass(frozen=True, slots=True)
class Part:
    """The arrays of one leaf cache.

    Attributes:
        shapes: Of one sequence's arrays; for keys and values without the token axis.
    """

    kind: LayerKind
    window: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]

    def size(self, capacity: int) -> int:
        """Return how many tokens the arrays hold in a sequence of this capacity."""
        return min(self.window, capacity) if self.kind is LayerKind.WINDOW else capacity

    def nbytes(self, capacity: int) -> int:
        room = 1 if self.kind is LayerKind.STATE else self.size(capacity)
        return sum(
            room * dtype.size * _product(shape)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    def zeros(self, capacity: int) -> list[Array]:
        shapes = self.shapes
        if self.kind is not LayerKind.STATE:
            shapes = tuple((heads, self.size(capacity), dim) for heads, dim in shapes)
        return [
            mx.zeros((1, *shape), dtype) for shape, dtype in zip(shapes, self.dtypes, strict=True)
        ]


class CacheLayout:
    """All parts of a model, and how the library nests them."""

    def __init__(self, make_caches: Callable[[], list[Any]], caches: Sequence[Any]) -> None:
        """Read the parts from caches that hold one sequence's tokens."""
        self._make_caches = make_caches
        self._nbytes: dict[int, int] = {}
        self.parts = tuple(_part_of(leaf) for leaf in leaves(caches))
        self.not_full = [*self.of_kind(LayerKind.WINDOW), *self.of_kind(LayerKind.STATE)]

    def release(self) -> None:
        """Drop the reference to the model; no caches can be created afterwards."""
        self._make_caches = list

    def of_kind(self, kind: LayerKind) -> list[int]:
        return [place for place, part in enumerate(self.parts) if part.kind is kind]

    def nbytes(self, capacity: int) -> int:
        if capacity not in self._nbytes:  # called for every sequence in every step
            self._nbytes[capacity] = sum(part.nbytes(capacity) for part in self.parts)
        return self._nbytes[capacity]

    def zeros(self, capacity: int) -> Arrays:
        return [part.zeros(capacity) for part in self.parts]

    def fit(self, arrays: Arrays, capacity: int) -> Arrays:
        """Change the capacity of one sequence's arrays; rings that have wrapped do not change."""
        return [
            given if part.kind is LayerKind.STATE else [fit(a, part.size(capacity)) for a in given]
            for part, given in zip(self.parts, arrays, strict=True)
        ]

    def thaw(self, arrays: Arrays | None, length: int, capacity: int) -> list[Any]:
        """Create library caches that hold one sequence; they take ownership of the arrays."""
        caches = self._make_caches()
        full = arrays or self.zeros(capacity)
        for part, leaf, given in zip(self.parts, leaves(caches), full, strict=True):
            if part.kind is LayerKind.FULL:
                leaf.keys, leaf.values = given
                leaf.offset = length
            elif length and part.kind is LayerKind.WINDOW:
                leaf.keys, leaf.values = (unroll(array, length, part.window) for array in given)
                leaf.offset, leaf._idx = length, leaf.keys.shape[_TIME]
            elif length:
                leaf.cache = list(given)
        return caches

    def freeze(self, caches: Sequence[Any], length: int, capacity: int) -> Arrays:
        arrays: Arrays = []
        for part, leaf in zip(self.parts, leaves(caches), strict=True):
            if part.kind is LayerKind.FULL:
                held = [fit(array, capacity) for array in (leaf.keys, leaf.values)]
                # If one write covered the whole array, it keeps the model's layout, not contiguous.
                is_whole = leaf.offset == capacity
                arrays.append([mx.contiguous(array) for array in held] if is_whole else held)
            elif part.kind is LayerKind.WINDOW:
                ordered = (leaf._temporal_order(array) for array in (leaf.keys, leaf.values))
                size = part.size(capacity)
                rings = [roll(array, length, part.window, size) for array in ordered]
                arrays.append([mx.contiguous(ring) for ring in rings])
            else:
                arrays.append([mx.contiguous(array) for array in leaf.cache])
        return arrays


def leaves(caches: Sequence[Any]) -> list[Any]:
    """Flatten the library's nested cache lists."""
    flat: list[Any] = []
    for cache in caches:
        flat += cache.caches if isinstance(cache, library.CacheList) else [cache]
    return flat


def capacity_for(length: int) -> int:
    """Return the capacity for this length; sizes are a quarter apart, so that many are equal."""
    capacity = _STEP
    while capacity < length:
        capacity = max(capacity + _STEP, capacity * 5 // 4 // _STEP * _STEP)
    return capacity


def concatenate_rows(arrays: list[Array]) -> Array:
    """Concatenate along the first axis."""
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)


def unroll(array: Array, length: int, window: int) -> Array:
    """Return a ring's last tokens in order."""
    if length <= array.shape[_TIME]:
        return array[:, :, :length]
    return mx.roll(array, -(length % window), axis=_TIME)


def roll(ordered: Array, length: int, window: int, size: int) -> Array:
    """Return a ring of `size` tokens with the last ones of `ordered`, which ends at `length`."""
    if length <= size:
        return fit(ordered[:, :, -length:] if length else ordered, size)
    return mx.roll(ordered[:, :, -window:], length % window, axis=_TIME)


def geometry_mismatch(parts: Sequence[Part], layers: Sequence[LayerSpec]) -> str | None:
    """Describe how the library's caches differ from the config's geometry; None if they match."""
    if len(parts) != len(layers):
        return f"mlx-lm creates {len(parts)} caches; the config describes {len(layers)} layers"
    for place, (part, layer) in enumerate(zip(parts, layers, strict=True)):
        if part.kind is not layer.kind or part.window != layer.window:
            return f"mlx-lm's cache of layer {place} is of another kind than the config describes"
        if part.kind is LayerKind.STATE:
            is_alike = sum(map(_product, part.shapes)) == layer.state_elements
        else:
            heads = layer.num_kv_heads
            is_alike = part.shapes == ((heads, layer.key_dim), (heads, layer.value_dim))
        if not is_alike:
            return f"the cache shape {part.shapes} of layer {place} does not match the config"
    kinds = {part.kind for part in parts}
    if any(
        len({(p.shapes, p.dtypes, p.window) for p in parts if p.kind is kind}) > 1 for kind in kinds
    ):
        return "its layers have caches of different shapes"
    return None


def _part_of(leaf: Any) -> Part:
    if isinstance(leaf, library.ArraysCache):
        arrays = list(leaf.cache)
        kind, window = LayerKind.STATE, 0
        shapes = tuple(tuple(array.shape[1:]) for array in arrays)
    elif type(leaf) in (library.KVCache, library.RotatingKVCache) and not getattr(leaf, "keep", 0):
        arrays = [leaf.keys, leaf.values]
        window = getattr(leaf, "max_size", 0)
        kind = LayerKind.WINDOW if window else LayerKind.FULL
        shapes = tuple((array.shape[1], array.shape[3]) for array in arrays)
    else:
        raise ValueError(f"its cache type {type(leaf).__name__} cannot be saved and restored")
    return Part(kind, window, shapes, tuple(array.dtype for array in arrays))


def fit(array: Array, size: int) -> Array:
    """Pad or cut keys or values to this many tokens."""
    missing = size - array.shape[_TIME]
    if missing > 0:
        return mx.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)])
    return array if missing == 0 else mx.contiguous(array[:, :, :size])


def _product(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
