"""Tiny models for the MLX backend: those of torch, as mlx-lm expects them, and some more."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    Qwen3NextConfig,
)

from tests.contract.models import FAMILIES, SIZES, TinyModel, family_config, write_model

ALL_FAMILIES = (*FAMILIES, "deepseek-v2", "deepseek-v3", "qwen3-next", "falcon-h1")
# One of each way to keep state and to batch: the others differ in arithmetic alone.
MLX_FAMILIES = ("llama", "gemma3", "gpt-oss", "deepseek-v3", "qwen3-next", "falcon-h1")
# Rings and recurrent states cannot be cut back; torch keeps every token of a window layer.
CUT_WHERE_SAVED = {"gemma3", "gpt-oss", "qwen3-next", "falcon-h1"}

_LATENT = {
    **{name: size for name, size in SIZES.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def mlx_config(name: str) -> Any:
    """The config of an architecture that must work."""
    match name:
        case "gemma2":  # mlx-lm knows it with tied embeddings only
            config = family_config(name).to_dict()
            return Gemma2Config(**{**config, "tie_word_embeddings": True})
        case "deepseek-v2":  # mlx-lm knows it with YaRN only
            return DeepseekV2Config(
                **_LATENT, q_lora_rank=None, topk_method="greedy", rope_parameters=_YARN
            )
        case "deepseek-v3":
            return DeepseekV3Config(**_LATENT, q_lora_rank=16)
        case "qwen3-next":
            return Qwen3NextConfig(
                **{**SIZES, "num_hidden_layers": 4},
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=16,
            )
        case "falcon-h1":
            return FalconH1Config(
                **SIZES,
                mamba_d_ssm=32,
                mamba_n_heads=4,
                mamba_d_head=8,
                mamba_d_state=8,
                mamba_n_groups=1,
                mamba_expand=1,
            )
    return family_config(name)


def write_mlx_model(directory: Path, name: str) -> TinyModel:
    """Write a model as a hub that mlx-lm reads from would hold it."""
    model = write_model(directory, mlx_config(name))
    if name == "gpt-oss":
        _split_experts(directory / "model.safetensors")
    if name == "qwen3-moe":
        _name_experts(directory / "config.json")
    if name == "qwen3-next":
        _sharpen(directory / "model.safetensors")
    if name == "qwen3-moe":  # transformers writes `num_local_experts`; published files differ
        path = directory / "config.json"
        config = json.loads(path.read_text("utf-8"))
        path.write_text(json.dumps({**config, "num_experts": config["num_local_experts"]}))
    return model


def _name_experts(file: Path) -> None:
    """Published Qwen3 models have `num_experts`; transformers writes another name."""
    config = json.loads(file.read_text())
    file.write_text(json.dumps({"num_experts": config["num_local_experts"], **config}))


def _sharpen(file: Path) -> None:
    """Make the one layer that attends matter among those that do not."""
    weights = load_file(file)
    for name in weights:
        if name.endswith("k_norm.weight"):
            weights[name] = weights[name] + 3
        if name.endswith("self_attn.o_proj.weight"):
            weights[name] = weights[name] * 3
    save_file(weights, file, {"format": "pt"})


def _split_experts(file: Path) -> None:
    """GPT-OSS is published in MXFP4; unquantised, mlx-lm reads its own layout only."""
    weights = load_file(file)
    for name in [name for name in weights if ".experts." in name]:
        weight = weights.pop(name)
        stem, _, kind = name.rpartition(".")
        suffix = "bias" if kind.endswith("_bias") else "weight"
        if suffix == "weight":
            weight = weight.transpose(1, 2)
        if kind.startswith("down_proj"):
            weights[f"{stem}.down_proj.{suffix}"] = weight.contiguous()
            continue
        weights[f"{stem}.gate_proj.{suffix}"] = weight[:, ::2].contiguous()
        weights[f"{stem}.up_proj.{suffix}"] = weight[:, 1::2].contiguous()
    save_file({name: w.to(torch.float32) for name, w in weights.items()}, file, {"format": "pt"})
