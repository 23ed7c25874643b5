"""Tiny models with a head for draft tokens (MTP), as their publishers' files have them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig

from tests.contract.mlx_models import mlx_config
from tests.contract.models import BLOCK_TOKENS, SIZES, TinyModel, spec_of, write_weights

HEAD_FAMILIES = ("glm4-moe", "deepseek-v3")
_EXPERTS: Mapping[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


def _config(family: str) -> Any:
    if family == "glm4-moe":
        return Glm4MoeConfig(**SIZES, **_EXPERTS, use_qk_norm=True)
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
    count = config.num_hidden_layers
    config.num_hidden_layers = count + 1
    write_weights(directory, config)
    file, written = directory / "model.safetensors", directory / "config.json"
    weights = load_file(file)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] *= share
    # A projection that passes on the embedding, and norms that scale by one.
    layer, size = f"model.layers.{count}.", config.hidden_size
    pair = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    norms = ("enorm", "hnorm", "shared_head.norm")
    weights |= {f"{layer}{name}.weight": torch.ones(size) for name in norms}
    save_file({**weights, f"{layer}eh_proj.weight": pair}, file, {"format": "pt"})
    values = json.loads(written.read_text())
    values |= {"num_hidden_layers": count, "rope_scaling": values.get("rope_scaling")}
    written.write_text(json.dumps(values))
    return TinyModel(directory, spec_of(directory, BLOCK_TOKENS))
