"""Lets the library's cache objects work on the buffers of a sequence.

A model that cannot run packed runs each sequence alone, with a cache of the library. The layers of
this cache write keys and values into the sequence's buffers, so that saving, restoring and forking
are the same for all models; recurrent states stay in the library's layers.
"""

from collections.abc import Sequence
from functools import cache as cached
from typing import Any

import torch

from semantic.adapters.outbound.backends.torch.kv.geometry import Geometry
from semantic.adapters.outbound.backends.torch.kv.sequences import ChunkSpan, TorchSequence

# What the library's recurrent layers note beside their arrays.
_STATE_NOTES = (
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)


def new_library_cache(model: Any) -> Any:
    """Create the cache that `generate` would use."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config.get_text_config(decoder=True))


class SequenceCaches:
    """Creates the library's caches for sequences, and copies their recurrent states.

    Args:
        filled: A cache of the library after a few tokens.
    """

    def __init__(self, model: Any, geometry: Geometry, filled: Any) -> None:
        self._model, self._states = model, geometry.states
        self._slots: dict[int, list[int]] = {}
        for slot, (layer, _) in enumerate(geometry.slots):
            self._slots.setdefault(layer, []).append(slot)
        self._notes = {
            layer: {name: dict(getattr(filled.layers[layer], name)) for name in _STATE_NOTES}
            for layer in {array.layer for array in geometry.states}
        }

    def begin(self, span: ChunkSpan) -> Any:
        """Return the cache of a span's sequence, ready for the span's tokens."""
        cache = span.sequence.cache
        if cache is None:
            cache = span.sequence.cache = self._new()
        for layer in self._slots:
            cache.layers[layer].span = span
            cache.layers[layer].cumulative_length = span.sequence.length
        return cache

    def release(self, sequence: TorchSequence) -> None:
        """Let the cache of a sequence forget the span, which refers to the sequence."""
        for layer in self._slots if sequence.cache is not None else ():
            sequence.cache.layers[layer].forget()

    def states(self, sequence: TorchSequence) -> list[torch.Tensor]:
        """Return the recurrent arrays, without the axis of sequences."""
        layers = sequence.cache.layers
        return [getattr(layers[a.layer], a.name)[a.index][0] for a in self._states]

    def set_states(self, sequence: TorchSequence, arrays: Sequence[torch.Tensor]) -> None:
        """Set the recurrent arrays, which the sequence then owns."""
        sequence.cache = self._new()
        for state, array in zip(self._states, arrays, strict=True):
            layer = sequence.cache.layers[state.layer]
            layer.device, layer.dtype = array.device, array.dtype
            for name, values in self._notes[state.layer].items():
                getattr(layer, name).update(values)
            getattr(layer, state.name)[state.index] = array[None]

    def _new(self) -> Any:
        cache = new_library_cache(self._model)
        for index, slots in self._slots.items():
            layer = cache.layers[index]
            layer.__class__ = _buffered(type(layer))  # type: ignore[arg-type]  # hashable
            layer.slot, *indexer = slots
            if indexer:
                layer.indexer_slot = indexer[0]
        return cache


class _Buffered:
    """The methods that replace where a layer of the library's cache keeps keys and values.

    Attributes:
        slot: The layer's index among the views of the span.
        cumulative_length: Tokens seen, also those of the current step.
    """

    span: ChunkSpan
    slot: int
    indexer_slot: int
    cumulative_length: int
    keys: torch.Tensor | None
    values: torch.Tensor | None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        span, slot = self.span, self.slot
        span.new_keys[slot].copy_(key_states)
        span.new_values[slot].copy_(value_states)
        self.cumulative_length = span.end
        keys, values = span.keys[slot], span.values[slot]
        window = getattr(self, "sliding_window", 0)
        if window and (first := span.sequence.length + 1 - window) > 0:
            keys, values = keys[:, :, first:], values[:, :, first:]
        self.keys, self.values = keys, values  # some models read them later
        return keys, values

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        self.span.new_keys[self.indexer_slot].copy_(indexer_key_states[:, None])
        return self.span.keys[self.indexer_slot][:, 0]

    def forget(self) -> None:
        self.keys = self.values = None
        vars(self).pop("span", None)

    def get_seq_length(self) -> int:
        return self.cumulative_length


@cached
def _buffered(kind: type[Any]) -> type[Any]:
    # Python changes the class of an object only to one whose first base is the object's class.
    methods = {name: value for name, value in vars(_Buffered).items() if callable(value)}
    return type(kind.__name__, (kind,), methods)
