"""Converts the library's caches to plain arrays whose first axis is the sequence, and back.

Every leaf cache of the library becomes a `Part`: keys and values of all tokens (FULL), those of the
last tokens in a ring with position p at ``p % window`` (WINDOW), or recurrent arrays (STATE). Their
shapes, read from caches that hold a few tokens, are the model's geometry. Arrays of several
sequences can be placed side by side. For a prefill, the library's caches are built from a
sequence's arrays and converted back afterwards.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from semantic.adapters.outbound.backends.mlx.runtime import import_library
from semantic.domain.spec import LayerKind, LayerSpec

Array: TypeAlias = Any  # mx.array; MLX ships no types
Arrays: TypeAlias = list[list[Array]]  # by part, then keys and values or state arrays

library = import_library("mlx_lm.models.cache")

# The library's caches of keys and values, and the attribute that limits the number of tokens.
_WINDOWS = {
    library.KVCache: "",
    library.RotatingKVCache: "max_size",
    library.ChunkedKVCache: "chunk_size",
}
_STEP = 256
_TIME = 2  # the axis of tokens in keys and values


class MlxArrays:
    """`Arrays` of MLX."""

    def from_host(self, values: NDArray[np.int64]) -> Array:
        return mx.array(values.astype(np.int32))

    def zeros(self, shape: Sequence[int], like: Array) -> Array:
        return mx.zeros(shape, like.dtype)

    def concatenate(self, arrays: Sequence[Array], axis: int) -> Array:
        return mx.concatenate([*arrays], axis)

    def copied(self, array: Array) -> Array:
        return mx.take(array, mx.arange(array.shape[-2]), axis=-2)

    def start(self, arrays: Sequence[Array]) -> None:
        mx.async_eval(*arrays)


MLX_ARRAYS: Final = MlxArrays()


class UnsupportedCacheError(Exception):
    """The model keeps something that cannot be saved and restored; the text is for its user."""


@dataclass(frozen=True, slots=True)
class Part:
    """The arrays of one leaf cache; none if the model does not use it.

    Attributes:
        shapes: Of one sequence's arrays; for keys and values without the token axis.
        slots: STATE: the index of each array in the library's cache.
    """

    kind: LayerKind
    window: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    slots: tuple[int, ...] = ()

    @property
    def layer(self) -> LayerSpec:
        if self.kind is LayerKind.STATE:
            return LayerSpec(self.kind, state_elements=sum(map(math.prod, self.shapes)))
        (heads, key_dim), (_, value_dim) = self.shapes
        return LayerSpec(self.kind, heads, key_dim, value_dim, self.window)

    def size(self, capacity: int) -> int:
        """Return how many tokens the arrays hold in a sequence of this capacity."""
        return min(self.window, capacity) if self.kind is LayerKind.WINDOW else capacity

    def nbytes(self, capacity: int) -> int:
        room = 1 if self.kind is LayerKind.STATE else self.size(capacity)
        return sum(
            room * dtype.size * math.prod(shape)
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
        """Read the parts from caches that hold one sequence's tokens.

        Raises:
            UnsupportedCacheError: a cache cannot be saved and restored.
        """
        self._make_caches = make_caches
        self._nbytes: dict[int, int] = {}
        self.parts = tuple(_part_of(leaf) for leaf in leaves(caches))
        self.not_full = [*self.of_kind(LayerKind.WINDOW), *self.of_kind(LayerKind.STATE)]
        if len({part.window for part in self.parts if part.window}) > 1:
            raise UnsupportedCacheError("its layers have sliding windows of different lengths")
        self._sections = {kind: self._grouped(kind) for kind in LayerKind}

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The geometry, first layer to last."""
        return tuple(part.layer for part in self.parts if part.shapes)

    def sections(self, kind: LayerKind) -> list[list[int]]:
        """Return the places of one kind of parts, in lists of parts with the same shapes."""
        return self._sections[kind]

    def _grouped(self, kind: LayerKind) -> list[list[int]]:
        by_form: dict[object, list[int]] = {}
        for place in self.of_kind(kind):
            part = self.parts[place]
            if part.shapes:
                by_form.setdefault((part.shapes, part.dtypes), []).append(place)
        return list(by_form.values())

    def release(self) -> None:
        """Drop the reference to the model; no caches can be created afterwards."""
        self._make_caches = list

    def of_kind(self, kind: LayerKind) -> list[int]:
        return [place for place, part in enumerate(self.parts) if part.kind is kind]

    def nbytes(self, capacity: int) -> int:
        if capacity not in self._nbytes:  # called for every sequence in every step
            self._nbytes[capacity] = sum(part.nbytes(capacity) for part in self.parts)
        return self._nbytes[capacity]

    @property
    def state_nbytes(self) -> int:
        """Size of one sequence's recurrent arrays."""
        return sum(self.parts[place].nbytes(0) for place in self.of_kind(LayerKind.STATE))

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
                leaf.offset, num_held = length, leaf.keys.shape[_TIME]
                if isinstance(leaf, library.ChunkedKVCache):
                    leaf.start_position = length - num_held
                else:
                    leaf._idx = num_held
            elif length:
                for slot, array in zip(part.slots, given, strict=True):
                    leaf.cache[slot] = array
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
                ordered = _in_order(leaf)
                size = part.size(capacity)
                rings = [roll(array, length, part.window, size) for array in ordered]
                arrays.append([mx.contiguous(ring) for ring in rings])
            else:
                arrays.append([mx.contiguous(leaf.cache[slot]) for slot in part.slots])
        return arrays


def _in_order(leaf: Any) -> Sequence[Array]:
    if isinstance(leaf, library.ChunkedKVCache):
        return leaf.keys_and_values()  # type: ignore[no-any-return]
    return [leaf._temporal_order(array) for array in (leaf.keys, leaf.values)]


def probe(model: Any, make_caches: Callable[[], list[Any]]) -> tuple[CacheLayout, Array]:
    """Run two tokens through the model; returns its layout, and the logits after the second.

    Raises:
        UnsupportedCacheError: it keeps something that cannot be saved and restored.
    """
    caches = make_caches()
    logits = model(mx.zeros((1, 2), mx.int32), cache=caches)[:, -1]
    layout = CacheLayout(make_caches, caches)
    if layout.of_kind(LayerKind.STATE):
        model(mx.zeros((1, 2), mx.int32), cache=caches)
        if CacheLayout(make_caches, caches).parts != layout.parts:
            raise UnsupportedCacheError("its recurrent state grows with the sequence")
    return layout, logits


def has_index(cache: Any) -> bool:
    """Whether a layer keeps, beside keys and values, an index that selects tokens."""
    kept = cache.caches if isinstance(cache, library.CacheList) else ()
    return sum(hasattr(leaf, "offset") for leaf in kept) > 1


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


def _part_of(leaf: Any) -> Part:
    if isinstance(leaf, library.ArraysCache):
        used = [(slot, array) for slot, array in enumerate(leaf.cache) if array is not None]
        shapes = tuple(tuple(array.shape[1:]) for _, array in used)
        dtypes = tuple(array.dtype for _, array in used)
        return Part(LayerKind.STATE, 0, shapes, dtypes, tuple(slot for slot, _ in used))
    if type(leaf) not in _WINDOWS or getattr(leaf, "keep", False):
        raise UnsupportedCacheError(
            f"mlx-lm keeps a {type(leaf).__name__} for it, which cannot be saved and restored"
        )
    if leaf.keys is None:
        return Part(LayerKind.STATE, 0, (), ())
    name = _WINDOWS[type(leaf)]
    window = int(getattr(leaf, name)) if name else 0
    arrays = [leaf.keys, leaf.values]
    return Part(
        LayerKind.WINDOW if window else LayerKind.FULL,
        window,
        tuple((array.shape[1], array.shape[3]) for array in arrays),
        tuple(array.dtype for array in arrays),
    )


def fit(array: Array, size: int) -> Array:
    """Pad or cut keys or values to this many tokens."""
    missing = size - array.shape[_TIME]
    if missing > 0:
        return mx.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)])
    return array if missing == 0 else mx.contiguous(array[:, :, :size])
