"""The vision towers of Qwen 2.5 VL and Qwen 3 VL."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from numpy.typing import NDArray

from semantic.adapters.outbound.backends.mlx.caches import Array
from semantic.adapters.outbound.backends.mlx.vision.layers import (
    Weights,
    attend,
    layer_norm,
    linear,
    patch_embeddings,
    rms_norm,
)

_EPS = 1e-6
_BASE = 10_000.0
_COMMON: Mapping[str, Any] = {
    "num_heads": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "patch_size": 14,
}
_QWEN3: Mapping[str, Any] = {**_COMMON, "depth": 27, "deepstack_visual_indexes": (8, 16, 24)}
_QWEN2: Mapping[str, Any] = {
    **_COMMON,
    "depth": 32,
    "window_size": 112,
    "fullatt_block_indexes": (7, 15, 23, 31),
}


class QwenTower(ABC):
    """Computes the features of one image of any size."""

    def __init__(self, config: Mapping[str, Any], weights: Weights) -> None:
        self.settings = {**self.defaults(), **config["vision_config"]}
        self.weights, self.group = weights, int(self.settings["spatial_merge_size"])

    @staticmethod
    @abstractmethod
    def defaults() -> Mapping[str, Any]:
        """Return the settings that a config may omit."""

    @abstractmethod
    def features(self, pixels: Array, grid: tuple[int, ...]) -> tuple[Array, tuple[Array, ...]]:
        """Return features of ``[patches, 3, height, width]``, and those for further layers.

        Args:
            pixels: The patches, group by group.
            grid: Frames, rows and columns of groups.
        """

    def embedded(self, pixels: Array) -> Array:
        """Embed patches; all frames that the tower reads together are the image."""
        frames = mx.repeat(pixels[:, :, None], self.settings["temporal_patch_size"], axis=2)
        return patch_embeddings(self.weights, "patch_embed.proj", frames.reshape(len(pixels), -1))

    def attended(
        self, name: str, x: Array, angles: tuple[Array, Array], lengths: Sequence[int] = ()
    ) -> Array:
        """Attend among all patches, or among runs of them."""
        hidden, num_heads = x.shape[1], self.settings["num_heads"]
        qkv = linear(self.weights, f"{name}.qkv", x)
        query, key = (
            _rotated(qkv[:, part * hidden : (part + 1) * hidden], angles, num_heads)
            for part in (0, 1)
        )
        attended = attend(query, key, qkv[:, 2 * hidden :], num_heads, lengths)
        return linear(self.weights, f"{name}.proj", attended)

    def angles(
        self, rows: NDArray[np.int64], columns: NDArray[np.int64], hidden: int
    ) -> tuple[Array, Array]:
        """Return cosines and sines: half of the frequencies turn by row, half by column."""
        half = hidden // self.settings["num_heads"] // 2
        frequencies = 1.0 / _BASE ** (np.arange(0, half, 2) / half)
        angles = np.concatenate([np.outer(places, frequencies) for places in (rows, columns)], 1)
        both = mx.array(np.concatenate((angles, angles), axis=1)[:, None].astype(np.float32))
        return mx.cos(both), mx.sin(both)

    def joined(self, x: Array) -> Array:
        """Return each group of patches as one row."""
        return x.reshape(-1, x.shape[1] * self.group**2)


class Qwen3Tower(QwenTower):
    """The tower of Qwen 3 VL, whose middle layers also give features (DeepStack)."""

    @staticmethod
    def defaults() -> Mapping[str, Any]:
        return _QWEN3

    def features(self, pixels: Array, grid: tuple[int, ...]) -> tuple[Array, tuple[Array, ...]]:
        weights, indexes = self.weights, list(self.settings["deepstack_visual_indexes"])
        rows, columns = _coordinates(grid, self.group)
        x = self.embedded(pixels)
        x = x + self._learned_positions(rows, columns).astype(x.dtype)
        angles = self.angles(rows, columns, x.shape[1])
        deep = []
        for layer in range(self.settings["depth"]):
            name = f"blocks.{layer}"
            normed = layer_norm(weights, f"{name}.norm1", x, _EPS)
            x = x + self.attended(f"{name}.attn", normed, angles)
            normed = layer_norm(weights, f"{name}.norm2", x, _EPS)
            inner = nn.gelu_approx(linear(weights, f"{name}.mlp.linear_fc1", normed))
            x = x + linear(weights, f"{name}.mlp.linear_fc2", inner)
            if layer in indexes:
                merger = f"deepstack_merger_list.{indexes.index(layer)}"
                normed = layer_norm(weights, f"{merger}.norm", self.joined(x), _EPS)
                deep.append(self._merged(merger, normed))
        normed = layer_norm(weights, "merger.norm", x, _EPS)
        return self._merged("merger", self.joined(normed)), tuple(deep)

    def _merged(self, name: str, x: Array) -> Array:
        inner = nn.gelu(linear(self.weights, f"{name}.linear_fc1", x))
        return linear(self.weights, f"{name}.linear_fc2", inner)

    def _learned_positions(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Array:
        """Interpolate the learned grid of positions at the patches, corners on corners."""
        learned = self.weights["pos_embed.weight"]
        side = round(len(learned) ** 0.5)
        total = mx.zeros((1, learned.shape[1]))
        for down, row_share in _neighbours(rows, side):
            for across, column_share in _neighbours(columns, side):
                share = mx.array((row_share * column_share).astype(np.float32))[:, None]
                total = total + learned[mx.array(down * side + across)] * share
        return total


class Qwen2Tower(QwenTower):
    """The tower of Qwen 2.5 VL, most of whose layers attend within windows."""

    @staticmethod
    def defaults() -> Mapping[str, Any]:
        return _QWEN2

    def features(self, pixels: Array, grid: tuple[int, ...]) -> tuple[Array, tuple[Array, ...]]:
        weights = self.weights
        rows, columns = _coordinates(grid, self.group)
        size = (
            self.settings["window_size"] // self.settings["patch_size"] // self.group * self.group
        )
        windows = (rows // size) * (len(rows) + 1) + columns // size
        order = np.argsort(windows, kind="stable")  # window by window
        lengths = np.unique(windows, return_counts=True)[1].tolist()
        x = self.embedded(pixels)[mx.array(order)]
        angles = self.angles(rows[order], columns[order], x.shape[1])
        for layer in range(self.settings["depth"]):
            name = f"blocks.{layer}"
            is_full = layer in self.settings["fullatt_block_indexes"]
            normed = rms_norm(weights, f"{name}.norm1", x, _EPS)
            x = x + self.attended(f"{name}.attn", normed, angles, () if is_full else lengths)
            normed = rms_norm(weights, f"{name}.norm2", x, _EPS)
            gate = nn.silu(linear(weights, f"{name}.mlp.gate_proj", normed))
            inner = gate * linear(weights, f"{name}.mlp.up_proj", normed)
            x = x + linear(weights, f"{name}.mlp.down_proj", inner)
        joined = self.joined(rms_norm(weights, "merger.ln_q", x, _EPS))
        inner = nn.gelu(linear(weights, "merger.mlp.0", joined))
        merged = linear(weights, "merger.mlp.2", inner)
        groups = order[:: self.group**2] // self.group**2
        return merged[mx.array(np.argsort(groups))], ()


def _neighbours(
    places: NDArray[np.int64], side: int
) -> tuple[tuple[NDArray[np.int64], NDArray[np.float64]], ...]:
    """Return the learned places on both sides of each patch, with their shares."""
    exact = places * ((side - 1) / max(int(places.max()), 1))
    below = np.floor(exact).astype(np.int64)
    share = exact - below
    return (below, 1 - share), (np.minimum(below + 1, side - 1), share)


def _coordinates(grid: tuple[int, ...], group: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return row and column of each patch, group by group."""
    _, rows, columns = grid
    places = np.arange(rows * columns * group**2)
    inside, number = places % group**2, places // group**2
    return (number // columns) * group + inside // group, number % columns * group + inside % group


def _rotated(x: Array, angles: tuple[Array, Array], num_heads: int) -> Array:
    heads = x.reshape(x.shape[0], num_heads, -1).astype(mx.float32)
    first, second = mx.split(heads, 2, axis=-1)
    turned = heads * angles[0] + mx.concatenate((-second, first), axis=-1) * angles[1]
    return turned.reshape(x.shape).astype(x.dtype)
