"""Tiny models with a head for draft tokens (MTP), as their publishers' files have them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Qwen3_5TextConfig

from tests.contract.mlx_models import mlx_config
from tests.contract.models import BLOCK_TOKENS, SIZES, TinyModel, spec_of, write_weights

HEAD_FAMILIES = ("glm4-moe", "deepseek-v3")  # on both backends
RECURRENT_HEADS = ("qwen3-next", "qwen3.5")  # on MLX
_EXPERTS: Mapping[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LINEAR: Mapping[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def _config(family: str) -> Any:
    if family == "glm4-moe":
        return Glm4MoeConfig(**SIZES, **_EXPERTS, use_qk_norm=True)
    if family == "qwen3.5":
        return Qwen3_5TextConfig(**{**SIZES, "num_hidden_layers": 4}, **_LINEAR)
    return mlx_config(family)


def write_head_model(
    directory: Path, family: str, share: float, vocab_size: int = SIZES["vocab_size"]
) -> TinyModel:
    """Write a model and its head, made up.

    Args:
        share: How much layers add to the embedding of a token. The head passes embeddings on, so
            that it mostly agrees with the model if its layers add little, and always if nothing.
    """
    config = _config(family)
    config.vocab_size = vocab_size
    count, size = config.num_hidden_layers, config.hidden_size
    is_recurrent = family in RECURRENT_HEADS
    config.num_hidden_layers = count + (not is_recurrent)
    write_weights(directory, config)
    file, written = directory / "model.safetensors", directory / "config.json"
    weights = load_file(file)
    for name in weights:
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            weights[name] *= share
    # A projection that passes on the embedding, and norms that scale by one.
    pair = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    if is_recurrent:  # the head's layer is like the last one, which attends
        last = f"model.layers.{count - 1}."
        layer = {n.removeprefix(last): w for n, w in weights.items() if n.startswith(last)}
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        weights |= {f"mtp.layers.0.{name}": weight.clone() for name, weight in layer.items()}
        weights |= {f"mtp.{name}.weight": torch.zeros(size) for name in norms}
        weights["mtp.fc.weight"] = pair
    else:
        norms = ("enorm", "hnorm", "shared_head.norm")
        weights |= {f"model.layers.{count}.{name}.weight": torch.ones(size) for name in norms}
        weights[f"model.layers.{count}.eh_proj.weight"] = pair
    save_file(weights, file, {"format": "pt"})
    values = json.loads(written.read_text())
    values |= {"num_hidden_layers": count, "rope_scaling": values.get("rope_scaling")}
    if family == "qwen3.5":
        values = {"model_type": "qwen3_5", "text_config": values}
    written.write_text(json.dumps(values))
    return TinyModel(directory, spec_of(directory, BLOCK_TOKENS))
