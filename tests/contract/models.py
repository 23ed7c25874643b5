"""Tiny models with random weights, one for each architecture the torch backend must run.

Their weights are large enough that every token of the context moves the logits well beyond
float32's error: a wrong key or value shows as a wrong token.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from semantic.domain.spec import DEFAULT_BLOCK_TOKENS, ModelCacheSpec

BLOCK_TOKENS = 8
WINDOW = 12
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "qwen3-moe", "gpt-oss")
# These run each sequence alone, or keep several shapes of keys and values.
OTHER_FAMILIES = ("gemma4", "qwen3-next")
CUT_WHERE_SAVED = {"qwen3-next"}

SIZES: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

EXPERTS: Mapping[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A directory as the hub would hold it, and the geometry read from its config."""

    directory: Path
    spec: ModelCacheSpec


_CONFIGS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "gemma2": (
        Gemma2Config,
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 5.0,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-moe": (Qwen3MoeConfig, EXPERTS),
    "gpt-oss": (
        GptOssConfig,
        {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 8,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4": (
        Gemma4TextConfig,
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-next": (
        Qwen3NextConfig,
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
}


def family_config(name: str) -> Any:
    """The config of an architecture that must work."""
    config_class, extra = _CONFIGS[name]
    return config_class(**{**SIZES, **extra})


GetModel: TypeAlias = Callable[[str], TinyModel]


def spec_of(directory: Path, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> ModelCacheSpec:
    """The geometry that a model's config says."""
    config = json.loads((directory / "config.json").read_text())
    return ModelCacheSpec.from_config(config, block_tokens=block_tokens)


def write_weights(directory: Path, config: Any) -> None:
    """Make a model's weights up and write it."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # so small that recurrent layers forget slowly
            torch.nn.init.constant_(parameter, -4.0)
    model.save_pretrained(directory)


def write_model(directory: Path, config: Any) -> TinyModel:
    """Write a model and read its geometry back."""
    write_weights(directory, config)
    return TinyModel(directory, spec_of(directory, BLOCK_TOKENS))


def library_logprobs(
    model: TinyModel, tokens: list[int], implementation: str = "eager"
) -> torch.Tensor:
    """The log-probabilities after each token, by Hugging Face's own code."""
    library: Any = AutoModelForCausalLM.from_pretrained(
        model.directory, dtype=torch.float32, attn_implementation=implementation
    )
    with torch.inference_mode():
        logits: torch.Tensor = library.eval()(torch.tensor([tokens])).logits[0]
    return logits.log_softmax(-1)
