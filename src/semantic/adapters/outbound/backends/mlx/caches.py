"""What a model's library caches hold, as plain arrays whose first axis is the sequence.

Every leaf cache of the library becomes a `Part`: keys and values of all tokens (FULL), those of the
last tokens in a ring where position p lies at ``p % window`` (WINDOW), or recurrent arrays (STATE).
Arrays of several sequences can be put side by side; the library's own caches are made from a
sequence's arrays for a prefill and taken apart again after it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.runtime import import_library
from semantic.domain.spec import LayerKind, LayerSpec

Array: TypeAlias = Any  # mx.array; the library ships no types
Arrays: TypeAlias = list[list[Array]]  # by part, then keys and values or state arrays

library = import_library("mlx_lm.models.cache")

_STEP = 256
_TIME = 2  # the axis of tokens in keys and values


@dataclass(frozen=True, slots=True)
class Part:
    """A leaf cache's arrays.

    Attributes:
        shapes: Of one sequence's arrays; keys and values without the axis of tokens.
    """

    kind: LayerKind
    window: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]

    def size(self, capacity: int) -> int:
        """Tokens the arrays have room for in a sequence of this capacity."""
        return min(self.window, capacity) if self.kind is LayerKind.WINDOW else capacity

    def nbytes(self, capacity: int) -> int:
        """Bytes of one sequence's arrays."""
        room = 1 if self.kind is LayerKind.STATE else self.size(capacity)
        return sum(
            room * dtype.size * _product(shape)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    def zeros(self, capacity: int) -> list[Array]:
        """One sequence's arrays with nothing in them."""
        shapes = self.shapes
        if self.kind is not LayerKind.STATE:
            shapes = tuple((heads, self.size(capacity), dim) for heads, dim in shapes)
        return [
            mx.zeros((1, *shape), dtype) for shape, dtype in zip(shapes, self.dtypes, strict=True)
        ]


class Layout:
    """All parts of a model, and how the library nests them."""

    def __init__(self, make_caches: Callable[[], list[Any]], caches: Sequence[Any]) -> None:
        """Read the parts from caches that hold one sequence's tokens."""
        self._make_caches = make_caches
        self._nbytes: dict[int, int] = {}
        self.parts = tuple(_part_of(leaf) for leaf in leaves(caches))
        self.not_full = [*self.of_kind(LayerKind.WINDOW), *self.of_kind(LayerKind.STATE)]

    def release(self) -> None:
        """Let go of the model; no cache can be made from now on."""
        self._make_caches = list

    def of_kind(self, kind: LayerKind) -> list[int]:
        """Places of the parts of a kind."""
        return [place for place, part in enumerate(self.parts) if part.kind is kind]

    def nbytes(self, capacity: int) -> int:
        """Bytes of one sequence."""
        if capacity not in self._nbytes:  # asked for every sequence in every step
            self._nbytes[capacity] = sum(part.nbytes(capacity) for part in self.parts)
        return self._nbytes[capacity]

    def zeros(self, capacity: int) -> Arrays:
        """A sequence with nothing in it."""
        return [part.zeros(capacity) for part in self.parts]

    def fit(self, arrays: Arrays, capacity: int) -> Arrays:
        """Give one sequence's arrays another capacity; rings that have wrapped stay as they are."""
        return [
            given if part.kind is LayerKind.STATE else [fit(a, part.size(capacity)) for a in given]
            for part, given in zip(self.parts, arrays, strict=True)
        ]

    def thaw(self, arrays: Arrays | None, length: int, capacity: int) -> list[Any]:
        """Library caches that hold one sequence; they take the arrays over."""
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
        """The arrays of one sequence, from library caches."""
        arrays: Arrays = []
        for part, leaf in zip(self.parts, leaves(caches), strict=True):
            if part.kind is LayerKind.FULL:
                held = [fit(array, capacity) for array in (leaf.keys, leaf.values)]
                # What is written at once over all there was is as the model made it, not in order.
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
    """The library's caches without the lists some layers keep them in."""
    flat: list[Any] = []
    for cache in caches:
        flat += cache.caches if isinstance(cache, library.CacheList) else [cache]
    return flat


def capacity_for(length: int) -> int:
    """The room a sequence of this length is given: sizes a quarter apart, so like ones match."""
    capacity = _STEP
    while capacity < length:
        capacity = max(capacity + _STEP, capacity * 5 // 4 // _STEP * _STEP)
    return capacity


def concatenate_rows(arrays: list[Array]) -> Array:
    """Rows below each other."""
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)


def unroll(array: Array, length: int, window: int) -> Array:
    """A ring's last tokens in order."""
    if length <= array.shape[_TIME]:
        return array[:, :, :length]
    return mx.roll(array, -(length % window), axis=_TIME)


def roll(ordered: Array, length: int, window: int, size: int) -> Array:
    """The ring of `size` tokens that holds the last ones of `ordered`, which ends at `length`."""
    if length <= size:
        return fit(ordered[:, :, -length:] if length else ordered, size)
    return mx.roll(ordered[:, :, -window:], length % window, axis=_TIME)


def geometry_mismatch(parts: Sequence[Part], layers: Sequence[LayerSpec]) -> str | None:
    """How the library's caches differ from the geometry read from the config, if they do."""
    if len(parts) != len(layers):
        return f"mlx-lm keeps {len(parts)} caches, not {len(layers)}"
    for place, (part, layer) in enumerate(zip(parts, layers, strict=True)):
        if part.kind is not layer.kind or part.window != layer.window:
            return f"mlx-lm keeps another kind of cache for layer {place}"
        if part.kind is LayerKind.STATE:
            is_alike = sum(map(_product, part.shapes)) == layer.state_elements
        else:
            heads = layer.num_kv_heads
            is_alike = part.shapes == ((heads, layer.key_dim), (heads, layer.value_dim))
        if not is_alike:
            return f"layer {place} keeps {part.shapes}, not what its config says"
    kinds = {part.kind for part in parts}
    if any(
        len({(p.shapes, p.dtypes, p.window) for p in parts if p.kind is kind}) > 1 for kind in kinds
    ):
        return "its layers keep state of different shapes"
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
        raise ValueError(f"it keeps a {type(leaf).__name__}, which cannot be saved and restored")
    return Part(kind, window, shapes, tuple(array.dtype for array in arrays))


def fit(array: Array, size: int) -> Array:
    """Keys or values with room for so many tokens."""
    missing = size - array.shape[_TIME]
    if missing > 0:
        return mx.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)])
    return array if missing == 0 else mx.contiguous(array[:, :, :size])


def _product(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
