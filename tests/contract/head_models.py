"""Tiny models with a head for draft tokens (MTP), as their publishers' files have them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from tests.contract.mlx_models import mlx_config
from tests.contract.models import BLOCK_TOKENS, SIZES, TinyModel, spec_of, write_weights

ATTENDING_HEADS = ("glm4-moe", "deepseek-v3")
RECURRENT_HEADS = ("qwen3-next", "qwen3.5", "qwen3.5-moe")
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


_QWEN_EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_NESTED = {"qwen3.5": "qwen3_5", "qwen3.5-moe": "qwen3_5_moe"}


def _config(family: str) -> Any:
    if family == "glm4-moe":
        return Glm4MoeConfig(**SIZES, **_EXPERTS, use_qk_norm=True)
    if family == "qwen3.5":
        return Qwen3_5TextConfig(**{**SIZES, "num_hidden_layers": 4}, **_LINEAR)
    if family == "qwen3.5-moe":
        sizes = {**SIZES, "num_hidden_layers": 4}
        return Qwen3_5MoeTextConfig(**sizes, **_LINEAR, **_QWEN_EXPERTS)
    return mlx_config(family)


def fuse_experts(weights: dict[str, torch.Tensor], owner: str) -> None:
    """Replace experts that are stored one by one by two tensors, as some files have them."""
    gates, ups, downs = (
        torch.stack([weights.pop(f"{owner}{n}.{part}_proj.weight") for n in range(4)])
        for part in ("gate", "up", "down")
    )
    weights |= {f"{owner}gate_up_proj": torch.cat([gates, ups], dim=1), f"{owner}down_proj": downs}


def write_head_model(directory: Path, family: str, share: float, **sizes: int) -> TinyModel:
    """Write a model and its head, made up.

    Args:
        share: How much layers add to the embedding of a token. The head passes embeddings on, so
            that it mostly agrees with the model if its layers add little, and always if nothing.
        sizes: In place of those of the family's config.
    """
    config = _config(family)
    for name, number in sizes.items():
        setattr(config, name, number)
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
    if (
        family == "qwen3.5-moe"
    ):  # as published; mlx-lm reads the model's own experts in no other way
        for number in range(count):
            fuse_experts(weights, f"model.layers.{number}.mlp.experts.")
    save_file(weights, file, {"format": "pt"})
    values = json.loads(written.read_text())
    values |= {"num_hidden_layers": count, "rope_scaling": values.get("rope_scaling")}
    if family in _NESTED:
        values = {"model_type": _NESTED[family], "text_config": values}
    written.write_text(json.dumps(values))
    return TinyModel(directory, spec_of(directory, BLOCK_TOKENS))
