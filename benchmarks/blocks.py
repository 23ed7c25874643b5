"""Blocks of known models without their weights: geometries, payloads, parts of random numbers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from benchmarks.report import seconds
from semantic.domain.blocks import BlockNamespace, BlockPart, block_name, pack_tokens
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.backend import HostBuffer, KVPayload

BLOCK_TOKENS = 256


@dataclass(frozen=True)
class Geometry:
    """The layers of one kind of a model, in bfloat16."""

    name: str
    num_layers: int
    num_heads: int
    dim: int

    def shape(self, num_tokens: int = BLOCK_TOKENS) -> tuple[int, ...]:
        return (self.num_layers, self.num_heads, num_tokens, self.dim)


STARTER = Geometry("SmolLM2-135M", 30, 3, 64)
GEMMA_FULL = Geometry("Gemma 3 12B, full layers", 8, 8, 256)
GEMMA_WINDOW = Geometry("Gemma 3 12B, window layers", 40, 8, 256)


_SHARED = {"vocab_size": 131_072, "max_position_embeddings": 131_072}
# As the models' config.json files have them.
CONFIGS: dict[str, dict[str, object]] = {
    "Gemma 3 12B": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 48,
        "hidden_size": 3840,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
    "Llama 3.1 8B": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Qwen 2.5 7B": {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "use_sliding_window": False,
    },
    "GPT-OSS-20B": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
}


def spec_of(model: str, *, scale: int = 1) -> ModelCacheSpec:
    """Return a known model's geometry; `scale` divides the head size, and so all bytes."""
    spec = ModelCacheSpec.from_config({**_SHARED, **CONFIGS[model]})
    layers = tuple(
        replace(layer, key_dim=layer.key_dim // scale, value_dim=layer.value_dim // scale)
        for layer in spec.layers
    )
    return replace(spec, layers=layers)


@cache
def _numbers(shape: tuple[int, ...], seed: int) -> memoryview:
    """Return normally distributed numbers, truncated to bfloat16."""
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
    bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    return bits.reshape(-1).view(np.uint8).data


def make_payload(geometry: Geometry, index: int) -> KVPayload:
    """Create the payload of the block with this index; few have numbers of their own."""
    shape, seeds = geometry.shape(), (index % 2, index % 2 + 2)
    buffers = tuple(
        HostBuffer(name, shape, "bfloat16", _numbers(shape, seed))
        for name, seed in zip(("keys", "values"), seeds, strict=True)
    )
    start = index * BLOCK_TOKENS
    return KVPayload("bench", LayerKind.FULL, start, start + BLOCK_TOKENS, buffers)


def make_part(index: int, salt: int = 0) -> BlockPart:
    """Create a distinct block for each index and salt; positions are those of the payload."""
    root = BlockNamespace("bench", "raw").root()
    tokens = [salt, *range(index, index + BLOCK_TOKENS - 1)]
    name, start = block_name(root, tokens), index * BLOCK_TOKENS
    return BlockPart(root, name, root, LayerKind.FULL, start, pack_tokens(tokens))


def gigabytes(num_bytes: int, call: Callable[[], object]) -> float:
    """Return GB per second."""
    return num_bytes / seconds(call) / 1e9
