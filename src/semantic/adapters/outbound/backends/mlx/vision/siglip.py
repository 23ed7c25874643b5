"""The SigLIP tower of Idefics3, SmolVLM and Gemma 3, and their connectors."""

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx import nn

from semantic.adapters.outbound.backends.mlx.caches import Array
from semantic.adapters.outbound.backends.mlx.vision.layers import (
    Weights,
    attend,
    layer_norm,
    linear,
    patch_embeddings,
)

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {  # of configs that do not state them
    "gemma3": {"num_hidden_layers": 12, "num_attention_heads": 12, "patch_size": 16},
    "idefics3": {"num_hidden_layers": 12, "num_attention_heads": 16, "patch_size": 32},
    "smolvlm": {"num_hidden_layers": 12, "num_attention_heads": 16, "patch_size": 32},
}


class SiglipTower:
    """Computes the features of one square image or tile."""

    def __init__(self, config: Mapping[str, Any], weights: Weights) -> None:
        self._weights, self._is_gemma = weights, config["model_type"] == "gemma3"
        vision = {**_DEFAULTS[config["model_type"]], **config["vision_config"]}
        self._num_layers, self._num_heads = (
            vision["num_hidden_layers"],
            vision["num_attention_heads"],
        )
        self._patch, self._eps = vision["patch_size"], vision.get("layer_norm_eps", 1e-6)
        self._scale = config.get("scale_factor", 2)
        self._num_features = config.get("mm_tokens_per_image", 256)

    def features(self, pixels: Array) -> Array:
        """Return features of ``[1, 3, height, width]``, as ``[features, hidden]``."""
        weights, eps = self._weights, self._eps
        x = patch_embeddings(weights, "embeddings.patch_embedding", _patches(pixels, self._patch))
        places = weights["embeddings.position_embedding.weight"]
        if len(places) != len(x):
            raise ValueError(f"the tower has {len(places)} positions, the image {len(x)} patches")
        x = x + places
        for layer in range(self._num_layers):
            name = f"encoder.layers.{layer}"
            normed = layer_norm(weights, f"{name}.layer_norm1", x, eps)
            parts = [linear(weights, f"{name}.self_attn.{part}_proj", normed) for part in "qkv"]
            attended = attend(parts[0], parts[1], parts[2], self._num_heads)
            x = x + linear(weights, f"{name}.self_attn.out_proj", attended)
            normed = layer_norm(weights, f"{name}.layer_norm2", x, eps)
            inner = nn.gelu_approx(linear(weights, f"{name}.mlp.fc1", normed))
            x = x + linear(weights, f"{name}.mlp.fc2", inner)
        x = layer_norm(weights, "post_layernorm", x, eps)
        return self._pooled(x) if self._is_gemma else self._shuffled(x)

    def _shuffled(self, x: Array) -> Array:
        """Join squares of neighbouring patches to one feature (Idefics3)."""
        side, scale = _side(x), self._scale
        squares = x.reshape(side // scale, scale, side // scale, scale, -1).transpose(0, 2, 1, 3, 4)
        joined = squares.reshape((side // scale) ** 2, -1)
        return linear(self._weights, "connector.modality_projection.proj", joined)

    def _pooled(self, x: Array) -> Array:
        """Average squares of neighbouring patches (Gemma 3)."""
        side, kept = _side(x), round(self._num_features**0.5)
        size = side // kept
        squares = x.reshape(side, side, -1)[: kept * size, : kept * size]
        pooled = squares.reshape(kept, size, kept, size, -1).mean(axis=(1, 3)).reshape(kept**2, -1)
        weight = 1 + self._weights["connector.mm_soft_emb_norm.weight"]
        normed = mx.fast.rms_norm(pooled, weight, self._eps)
        return normed @ self._weights["connector.mm_input_projection_weight"]


def _patches(pixels: Array, size: int) -> Array:
    """Cut an image into patches, row by row, each as in a kernel: colour, height, width."""
    _, colours, height, width = pixels.shape
    cut = pixels.reshape(colours, height // size, size, width // size, size)
    return cut.transpose(1, 3, 0, 2, 4).reshape(-1, colours * size * size)


def _side(x: Array) -> int:
    return math.isqrt(x.shape[0])
