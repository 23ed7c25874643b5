"""Sequences of the torch backend: their tokens, and buffers for their keys and values.

A pair of buffers holds the layers of one shape, as ``[layers, heads, capacity, dim]``: keys, and
values. Most models have one pair.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from semantic.adapters.outbound import host_memory
from semantic.adapters.outbound.backends.drafting import Checkpoint
from semantic.adapters.outbound.backends.mtp.state import HeadState
from semantic.domain.spec import LayerKind, LayerSpec
from semantic.ports.backend import Chunk

BufferPair: TypeAlias = tuple[torch.Tensor, torch.Tensor]

_GROWTH = 256  # a sequence's buffers grow by this many tokens
_LARGE_BYTES = 2 * 2**20  # larger buffers get separate (huge) pages


class TorchArrays:
    """`Arrays` of PyTorch."""

    def from_host(self, values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values)

    def zeros(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(tuple(shape))

    def concatenate(self, arrays: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
        return torch.cat(tuple(arrays), dim=axis)

    def copied(self, array: torch.Tensor) -> torch.Tensor:
        return array.clone()

    def start(self, arrays: Sequence[torch.Tensor]) -> None:
        """Do nothing: they are computed."""


TORCH_ARRAYS: Final = TorchArrays()


class KVLayout:
    """Which pair of buffers, and which row of it, holds the keys and values of each KV layer."""

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        self._layers = [layer for layer in layers if layer.kind is not LayerKind.STATE]
        by_shape: dict[tuple[int, int, int], list[int]] = {}
        for index, layer in enumerate(self._layers):
            shape = (layer.num_kv_heads, layer.key_dim, layer.value_dim)
            by_shape.setdefault(shape, []).append(index)
        self.shapes = tuple(by_shape)
        self._members = tuple(by_shape.values())

    @property
    def elements_per_token(self) -> int:
        layers = self._layers
        return sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)

    @property
    def order(self) -> tuple[int, ...]:
        """For each KV layer, its place among the rows of all pairs."""
        flat = [index for members in self._members for index in members]
        return tuple(flat.index(index) for index in range(len(flat)))

    def rows(self, kind: LayerKind) -> Iterator[tuple[int, slice | list[int]]]:
        """Yield each pair that holds layers of a kind, and their rows in it.

        All rows are a slice, which needs no gathering.
        """
        for pair, members in enumerate(self._members):
            rows = [r for r, index in enumerate(members) if self._layers[index].kind is kind]
            if rows:
                yield pair, slice(None) if len(rows) == len(members) else rows

    def num_rows(self, pair: int, rows: slice | list[int]) -> int:
        return len(self._members[pair]) if isinstance(rows, slice) else len(rows)

    def allocate(self, num_tokens: int, dtype: torch.dtype) -> list[BufferPair]:
        """Allocate uninitialised buffers with room for some tokens."""
        capacity = capacity_for(num_tokens)
        return [
            (
                _allocate((len(members), heads, capacity, key_dim), dtype),
                _allocate((len(members), heads, capacity, value_dim), dtype),
            )
            for members, (heads, key_dim, value_dim) in zip(self._members, self.shapes, strict=True)
        ]


def capacity_for(num_tokens: int) -> int:
    """Round a number of tokens up to the size that buffers have."""
    return -(-num_tokens // _GROWTH) * _GROWTH


def _allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate uninitialised memory, in huge pages where Linux provides them.

    Page faults of small pages take longer than copying a restored sequence into the memory.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _LARGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(host_memory.plain_pages(num_bytes), dtype=dtype).view(shape)


@dataclass(slots=True)
class TorchSequence:
    """A sequence's tokens, and their keys and values.

    Attributes:
        cache: The library's cache object, which holds recurrent states; None if there are none yet,
            or if the model does not need it.
        has_state: Whether recurrent layers hold the state at `length`.
        ahead: See `DraftedSequence`, like `checkpoint`.
    """

    known: list[int]
    length: int = 0
    window_start: int = 0
    last_sampled: int | None = None
    buffers: list[BufferPair] = field(default_factory=list)
    cache: Any = None
    has_state: bool = True
    ahead: HeadState = field(default_factory=lambda: HeadState(TORCH_ARRAYS))
    checkpoint: Checkpoint | None = None

    @property
    def capacity(self) -> int:
        return self.buffers[0][0].shape[2] if self.buffers else 0

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for pair in self.buffers for t in pair)

    def copy_buffers(self, source: "TorchSequence", num_tokens: int) -> None:
        """Copy another sequence's first tokens; the buffers must have room."""
        if num_tokens:
            for own, others in zip(self.buffers, source.buffers, strict=True):
                for target, given in zip(own, others, strict=True):
                    target[:, :, :num_tokens] = given[:, :, :num_tokens]


@dataclass(frozen=True, slots=True)
class ChunkFeatures:
    """The features of images in a chunk.

    Attributes:
        rows: Indices of their tokens in the chunk.
        embeddings: Their embeddings, ``[features, hidden]``.
        deep: What the first layers add to them (DeepStack); empty for most models.
        blocks: Ranges of rows that attend to each other in both directions.
    """

    rows: torch.Tensor
    embeddings: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class ChunkSpan:
    """A chunk's tokens and their place in the packed row.

    Attributes:
        features: Of the images in the chunk; None if it has none.
        positions: For M-RoPE, ``[3, tokens]``; None if positions equal indices.
        hidden: The last hidden states, ``[tokens, hidden]``, if the model has a head for drafts.
        end: The sequence's length after the step.
        keys: Each layer's keys up to `end`, including room for the chunk's; `values` likewise.
            `make_views` sets these and the following attributes.
        new_keys: The chunk's part of `keys`; `new_values` likewise.
    """

    chunk: Chunk
    sequence: TorchSequence
    tokens: tuple[int, ...]
    offset: int
    features: ChunkFeatures | None = None
    positions: NDArray[np.int64] | None = None
    hidden: torch.Tensor | None = None
    end: int = field(init=False)
    place: slice = field(init=False)
    keys: Sequence[torch.Tensor] = field(init=False)
    values: Sequence[torch.Tensor] = field(init=False)
    new_keys: Sequence[torch.Tensor] = field(init=False)
    new_values: Sequence[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.sequence.length + len(self.tokens)
        self.place = slice(self.offset, self.offset + len(self.tokens))

    def make_views(self, order: Sequence[int] | None = None) -> None:
        """Create views of the buffers, which must have room for the chunk.

        Args:
            order: For each layer, the place of its row among those of all buffers; None if the
                rows are in the order of the layers.
        """
        # All layers' views at once: creating them one by one takes as long as attention itself.
        start, end = self.sequence.length, self.end
        views: list[list[torch.Tensor]] = [[], [], [], []]
        for keys, values in self.sequence.buffers:
            held = (keys[:, None, :, :end], values[:, None, :, :end])
            added = (view[:, :, :, start:] for view in held)
            for rows, view in zip(views, (*held, *added), strict=True):
                rows.extend(view.unbind())
        if order is not None:
            views = [[rows[place] for place in order] for rows in views]
        self.keys, self.values, self.new_keys, self.new_values = views
