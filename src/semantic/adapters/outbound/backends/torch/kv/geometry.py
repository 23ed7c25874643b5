"""Reads from the library's own cache which arrays each layer keeps.

The cache that `generate` would use is filled by a few tokens; its layer objects then tell kinds,
shapes and dtypes. This covers every model type whose cache consists of the layer classes of
transformers: attention over all tokens or a window, latent or expanded, with an indexer, and
recurrent or convolutional states.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from semantic.domain.spec import LayerKind, LayerSpec

StateName: TypeAlias = Literal["conv_states", "recurrent_states"]

# Other classes keep arrays that this backend does not know.
_KV_CLASSES = (
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "DynamicIndexedLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)
_CLASSES = (*_KV_CLASSES, "LinearAttentionLayer")
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_STATE_NAMES: tuple[StateName, ...] = ("conv_states", "recurrent_states")


class UnknownCacheError(Exception):
    """The library's cache cannot be saved and restored; the message says why."""


@dataclass(frozen=True, slots=True)
class StateArray:
    """One recurrent array of a layer.

    Attributes:
        shape: Without the axis of sequences.
    """

    layer: int
    name: StateName
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the library keeps for a sequence.

    Attributes:
        layers: As in a `ModelCacheSpec`; a layer with several arrays has several entries.
        slots: The KV entries among `layers`: the cache layer of each, and whether it is an indexer.
        states: The recurrent arrays, in the order of the layers.
    """

    layers: tuple[LayerSpec, ...]
    slots: tuple[tuple[int, bool], ...]
    states: tuple[StateArray, ...]

    @property
    def is_plain(self) -> bool:
        """Whether every layer keeps exactly one pair of keys and values."""
        return not self.states and self.slots == tuple((i, False) for i in range(len(self.layers)))


def read_geometry(
    cache: Any, num_tokens: int, dtype: torch.dtype, idle: Collection[int] = ()
) -> Geometry:
    """Read what a cache of the library keeps after its first tokens.

    Args:
        dtype: Of keys and values.
        idle: Layers that do nothing without images.

    Raises:
        UnknownCacheError: it has layers of an unknown class, or arrays of an unknown form.
    """
    layers: list[LayerSpec] = []
    slots: list[tuple[int, bool]] = []
    states: list[StateArray] = []
    unused: list[int] = []
    for index, layer in enumerate(getattr(cache, "layers", ())):
        if type(layer).__name__ not in _CLASSES:
            raise UnknownCacheError(
                f"its cache has layers of the class {type(layer).__name__}, which cannot be saved "
                "and restored"
            )
        arrays = list(_states(index, layer))
        states += arrays
        if arrays:
            elements = sum(math.prod(array.shape) for array in arrays)
            layers.append(LayerSpec(LayerKind.STATE, state_elements=elements))
        entries = list(_kv_entries(layer, num_tokens, dtype))
        if index not in idle and not (entries or arrays) and type(layer).__name__ in _KV_CLASSES:
            unused.append(index)
        elif entries and unused:  # those after the last used one do not exist in the model
            raise UnknownCacheError(f"layer {unused[0]} keeps its state outside the cache")
        layers += [entry for _, entry in entries]
        slots += [(index, is_indexer) for is_indexer, _ in entries]
    if not layers:
        raise UnknownCacheError("it does not use the cache interface of transformers")
    return Geometry(tuple(layers), tuple(slots), tuple(states))


def _states(index: int, layer: Any) -> Iterator[StateArray]:
    for name in _STATE_NAMES:
        for number, array in getattr(layer, name, {}).items():
            if array is not None:
                yield StateArray(index, name, number, tuple(array.shape[1:]), array.dtype)


def _kv_entries(
    layer: Any, num_tokens: int, dtype: torch.dtype
) -> Iterator[tuple[bool, LayerSpec]]:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:  # such as a layer of experts
        return
    window = getattr(layer, "sliding_window", 0)
    num_kept = min(num_tokens, window - 1) if window > 1 else num_tokens
    shapes = [tuple(array.shape) for array in (keys, values)]
    if any(len(shape) != 4 or shape[2] != num_kept for shape in shapes):
        raise UnknownCacheError(f"its cache has keys and values of the shapes {shapes}")
    if keys.dtype != dtype or values.dtype != dtype:
        raise UnknownCacheError(f"its keys and values are not in {dtype}")
    kind = LayerKind.WINDOW if window else LayerKind.FULL
    yield False, LayerSpec(kind, keys.shape[1], keys.shape[3], values.shape[3], window)
    indexer = getattr(layer, "indexer_keys", None)
    if getattr(layer, "indexer_position_ids", None) is not None:
        raise UnknownCacheError("its cache keeps positions, which cannot be saved and restored")
    if indexer is not None:
        yield True, LayerSpec(LayerKind.FULL, 1, indexer.shape[2])


def context_limits(
    config: Any, geometry: Geometry, *, is_packed: bool
) -> Iterator[tuple[int, str]]:
    """Yield lengths beyond which results depend on how a prompt is divided, with the reasons.

    Args:
        is_packed: Whether windows are checked, and applied by this backend.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    entries = [parameters, *(entry for entry in parameters.values() if isinstance(entry, dict))]
    if any(entry.get("rope_type") in _LENGTH_DEPENDENT_ROPE for entry in entries):
        name = "original_max_position_embeddings"
        stated = [entry.get(name) for entry in entries] + [getattr(config, name, None)]
        lengths = [length for length in stated if length] or [config.max_position_embeddings]
        yield int(min(lengths)), "beyond it, the rotary embedding of all tokens changes"
    windows = [layer.window for layer in geometry.layers if layer.window]
    # Models that list no layer types may ignore the window in whole prompts, such as Moshi.
    if windows and not is_packed and not getattr(config, "layer_types", None):
        yield min(windows), "beyond it, transformers applies the window to some tokens only"
