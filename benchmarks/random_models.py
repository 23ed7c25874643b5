"""Models of a known shape with random weights, as directories that any backend can load.

Their text is meaningless, but their speed is realistic. The tokenizer is another model's.
"""

import json
import math
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_SHARD_BYTES = 2 * 2**30
_PATTERN = 2**24 + 1  # random numbers that are used over and over, each tensor from another place
_SCALE = 0.02
# Of models that are sure: what layers add to a token, and what the head is given.
_ADDED = ("o_proj.weight", "down_proj.weight")
_FAINT = 2.0**-12
_CALM = 0.15

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49_152,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        **_LLAMA,
        "torch_dtype": "float32",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "llama-1b": {
        **_LLAMA,
        "torch_dtype": "bfloat16",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "llama-8b": {
        **_LLAMA,
        "torch_dtype": "bfloat16",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "gemma3-12b": {
        **_LLAMA,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "torch_dtype": "bfloat16",
        "hidden_size": 3840,
        "num_hidden_layers": 48,
        "intermediate_size": 15_360,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
}


def make_model(shape: str, directory: Path, tokenizer: Path, *, is_sure: bool = False) -> Path:
    """Write a model of a shape unless it exists; returns its directory.

    Args:
        shape: A key of `SHAPES`.
        is_sure: Whether the model strongly prefers one next token: its layers add little, and its
            head determines the token. Otherwise rounding decides, and an additional row in a step
            changes the text.
    """
    model = directory / (f"{shape}-sure" if is_sure else shape)
    if (model / "model.safetensors.index.json").exists():
        return model
    model.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER_FILES:
        shutil.copy(tokenizer / name, model / name)
    config = SHAPES[shape]
    (model / "config.json").write_text(json.dumps(config, indent=1))
    _write_weights(model, config, is_sure=is_sure)
    return model


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    is_gemma = config["model_type"].startswith("gemma")
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if is_gemma else []
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}"
        for name in norms:
            yield f"{place}.{name}.weight", (hidden,)
        if is_gemma:
            yield f"{place}.self_attn.q_norm.weight", (dim,)
            yield f"{place}.self_attn.k_norm.weight", (dim,)
        yield f"{place}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{place}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{place}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{place}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{place}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{place}.mlp.up_proj.weight", (inner, hidden)
        yield f"{place}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _write_weights(model: Path, config: dict[str, Any], *, is_sure: bool) -> None:
    is_wide = config["torch_dtype"] == "float32"
    numbers = _Numbers(config["hidden_size"], is_wide=is_wide, is_sure=is_sure)
    size = 4 if is_wide else 2
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    room = _SHARD_BYTES
    for name, shape in _tensors(config):
        if room <= 0:
            shards.append([])
            room = _SHARD_BYTES
        shards[-1].append((name, shape))
        room -= math.prod(shape) * size
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(model / file, tensors, numbers)
        weight_map.update({name: file for name, _ in tensors})
    index = {"metadata": {}, "weight_map": weight_map}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


class _Numbers:
    def __init__(self, hidden: int, *, is_wide: bool, is_sure: bool) -> None:
        pattern = np.random.default_rng(0).standard_normal(_PATTERN, np.float32) * _SCALE
        ones = np.ones(hidden, np.float32)
        self.is_wide = is_wide
        self._hidden, self._is_sure = hidden, is_sure
        self._random, self._ones = (_bits(array, is_wide=is_wide) for array in (pattern, ones))
        faint, calm = (pattern * _FAINT, ones * np.float32(_CALM)) if is_sure else (pattern, ones)
        self._faint, self._calm = (_bits(array, is_wide=is_wide) for array in (faint, calm))

    def of(self, name: str, shape: tuple[int, ...], place: int) -> tuple[Any, int]:
        """Return a tensor's numbers, and where it begins among them."""
        if len(shape) == 1:
            return (self._calm if name == "model.norm.weight" else self._ones), 0
        if self._is_sure and name == "model.embed_tokens.weight":
            return self._random, 0
        if self._is_sure and name == "lm_head.weight":  # a row later: each token's is the next one
            return self._random, _PATTERN - self._hidden
        numbers = self._faint if name.endswith(_ADDED) else self._random
        return numbers, place * 12_345 % _PATTERN


def _write_shard(path: Path, tensors: list[tuple[str, tuple[int, ...]]], made: _Numbers) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    code, size, offset = ("F32", 4, 0) if made.is_wide else ("BF16", 2, 0)
    for name, shape in tensors:
        end = offset + math.prod(shape) * size
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for place, (name, shape) in enumerate(tensors):
            left = math.prod(shape)
            numbers, start = made.of(name, shape, place)
            while left:
                piece = numbers[start : start + left]
                file.write(memoryview(piece).cast("B"))
                left, start = left - len(piece), 0


def _bits(numbers: Any, *, is_wide: bool) -> Any:
    """Return numbers as written: float32, or the upper half of its bits."""
    return numbers if is_wide else (numbers.view(np.uint32) >> 16).astype(np.uint16)
