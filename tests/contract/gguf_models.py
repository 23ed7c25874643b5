"""Small models of every architecture that a GGUF file may have, one for each file in `FILES`.

llama.cpp's own converter made the files (see `convert_gguf_models.py`). `build` makes the models
that it converted: their weights depend only on their names, so the files need not contain them in
another form.
"""

import lzma
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoConfig

FILES = Path(__file__).parents[1] / "golden" / "gguf"

_BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}


def _rope(theta: float = 10000.0, kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "class": "LlamaForCausalLM",
        "model_type": "llama",
        "config": {
            "intermediate_size": 64,
            **_rope(500000.0),
        },
    },
    "llama3": {
        "class": "LlamaForCausalLM",
        "model_type": "llama",
        "config": {
            "intermediate_size": 64,
            **_rope(
                500000.0,
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
        },
    },
    "mixtral": {
        "class": "MixtralForCausalLM",
        "model_type": "mixtral",
        "config": {
            "intermediate_size": 64,
            **_rope(1000000.0),
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    },
    "qwen2": {
        "class": "Qwen2ForCausalLM",
        "model_type": "qwen2",
        "config": {
            "intermediate_size": 64,
            **_rope(1000000.0, "yarn", factor=4.0, original_max_position_embeddings=128),
        },
    },
    "qwen3": {
        "class": "Qwen3ForCausalLM",
        "model_type": "qwen3",
        "config": {
            "intermediate_size": 64,
            **_rope(1000000.0, "yarn", factor=4.0, original_max_position_embeddings=128),
            "head_dim": 16,
        },
    },
    "qwen3moe": {
        "class": "Qwen3MoeForCausalLM",
        "model_type": "qwen3_moe",
        "config": {
            "intermediate_size": 64,
            **_rope(1000000.0),
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "num_experts": 4,
            "norm_topk_prob": True,
        },
    },
    "qwen2moe": {
        "class": "Qwen2MoeForCausalLM",
        "model_type": "qwen2_moe",
        "config": {
            "intermediate_size": 64,
            **_rope(1000000.0),
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 2,
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
        },
    },
    "qwen3next": {
        "class": "Qwen3NextForCausalLM",
        "model_type": "qwen3_next",
        "config": {
            "intermediate_size": 64,
            "head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
            **_rope(1000000.0, partial_rotary_factor=0.25),
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 2,
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        "no_mtp": True,
    },
    "qwen35": {
        "class": "Qwen3_5ForCausalLM",
        "model_type": "qwen3_5_text",
        "config": {
            "intermediate_size": 64,
            "head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
            **_rope(1000000.0, partial_rotary_factor=0.25),
        },
        "no_mtp": True,
    },
    "qwen35moe": {
        "class": "Qwen3_5MoeForCausalLM",
        "model_type": "qwen3_5_moe_text",
        "config": {
            "head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
            **_rope(1000000.0, partial_rotary_factor=0.25),
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 2,
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
        },
        "no_mtp": True,
    },
    "gemma2": {
        "class": "Gemma2ForCausalLM",
        "model_type": "gemma2",
        "config": {
            "tie_word_embeddings": True,
            "intermediate_size": 64,
            **_rope(10000.0),
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 32,
        },
    },
    "gemma3": {
        "class": "Gemma3ForCausalLM",
        "model_type": "gemma3_text",
        "config": {
            "num_hidden_layers": 6,
            "tie_word_embeddings": True,
            "intermediate_size": 64,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
        },
    },
    "gemma3n": {
        "class": "Gemma3nForCausalLM",
        "model_type": "gemma3n_text",
        "config": {
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
            "intermediate_size": 64,
            "head_dim": 16,
            "sliding_window": 8,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 32,
            "num_kv_shared_layers": 0,
            "laurel_rank": 32,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
            "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        },
    },
    "gemma4": {
        "class": "Gemma4ForCausalLM",
        "model_type": "gemma4_text",
        "config": {
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
            "intermediate_size": 64,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 8,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 32,
            "num_kv_shared_layers": 2,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 30.0,
        },
    },
    "gemma4-moe": {
        "class": "Gemma4ForCausalLM",
        "model_type": "gemma4_text",
        "config": {
            "tie_word_embeddings": True,
            "intermediate_size": 64,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 8,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"],
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "final_logit_softcapping": 30.0,
        },
    },
    "deepseek2": {
        "class": "DeepseekV3ForCausalLM",
        "model_type": "deepseek_v3",
        "config": {
            "num_key_value_heads": 4,
            "intermediate_size": 64,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_group": 2,
            "topk_group": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            **_rope(
                10000.0,
                "yarn",
                factor=4.0,
                original_max_position_embeddings=128,
                beta_fast=32,
                beta_slow=1,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
        },
        "patch": {"scoring_func": "sigmoid"},
    },
    "glm4-moe-lite": {
        "class": "Glm4MoeLiteForCausalLM",
        "model_type": "glm4_moe_lite",
        "config": {
            "num_key_value_heads": 4,
            "intermediate_size": 64,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 2,
            **_rope(1000000.0),
            "mlp_layer_types": ["dense", "sparse"],
        },
        "patch": {"scoring_func": "sigmoid", "first_k_dense_replace": 1},
    },
    "mistral3": {
        "class": "Ministral3ForCausalLM",
        "model_type": "ministral3",
        "config": {
            "intermediate_size": 64,
            "head_dim": 16,
            **_rope(
                1000000.0,
                "yarn",
                factor=4.0,
                original_max_position_embeddings=128,
                beta_fast=32.0,
                beta_slow=1.0,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.1,
            ),
        },
    },
    "phi3": {
        "class": "Phi3ForCausalLM",
        "model_type": "phi3",
        "config": {
            "intermediate_size": 64,
            **_rope(10000.0),
            "original_max_position_embeddings": 512,
        },
    },
    "phi3-longrope": {
        "class": "Phi3ForCausalLM",
        "model_type": "phi3",
        "config": {
            "intermediate_size": 64,
            "original_max_position_embeddings": 128,
            **_rope(
                10000.0,
                "longrope",
                long_factor=[1.0, 2.0, 3.0, 4.0],
                short_factor=[1.0, 1.25, 1.5, 1.75],
                original_max_position_embeddings=128,
            ),
        },
    },
    "glm4moe": {
        "class": "Glm4MoeForCausalLM",
        "model_type": "glm4_moe",
        "config": {
            "intermediate_size": 64,
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "first_k_dense_replace": 1,
            **_rope(1000000.0, partial_rotary_factor=0.5),
        },
        "no_mtp": True,
    },
    "minimax-m2": {
        "class": "MiniMaxM2ForCausalLM",
        "model_type": "minimax_m2",
        "config": {
            "intermediate_size": 64,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            **_rope(5000000.0, partial_rotary_factor=0.5),
        },
        "patch": {"rotary_dim": 8, "scoring_func": "sigmoid"},
    },
    "nemotron_h_moe": {
        "class": "NemotronHForCausalLM",
        "model_type": "nemotron_h",
        "config": {
            "num_hidden_layers": 3,
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "intermediate_size": 32,
            "layers_block_type": ["mamba", "moe", "attention"],
            "ssm_state_size": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
        },
    },
    "nemotron_h": {
        "class": "NemotronHForCausalLM",
        "model_type": "nemotron_h",
        "config": {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "intermediate_size": 64,
            "layers_block_type": ["mamba", "mlp", "attention"],
            "ssm_state_size": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
        },
        "patch": {"hybrid_override_pattern": "M-*"},
        "drop": (
            "layers_block_type",
            "layer_types",
            "n_routed_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "n_shared_experts",
        ),
    },
    "lfm2": {
        "class": "Lfm2ForCausalLM",
        "model_type": "lfm2",
        "config": {
            "tie_word_embeddings": True,
            "intermediate_size": 64,
            **_rope(1000000.0),
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
        },
    },
    "lfm2moe": {
        "class": "Lfm2MoeForCausalLM",
        "model_type": "lfm2_moe",
        "config": {
            "tie_word_embeddings": True,
            "intermediate_size": 64,
            **_rope(1000000.0),
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 2,
            "layer_types": ["conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 4,
        },
    },
    "granite": {
        "class": "GraniteForCausalLM",
        "model_type": "granite",
        "config": {
            "intermediate_size": 64,
            **_rope(10000.0),
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.25,
            "attention_multiplier": 0.125,
        },
    },
    "granitehybrid": {
        "class": "GraniteMoeHybridForCausalLM",
        "model_type": "granitemoehybrid",
        "config": {
            "intermediate_size": 32,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.25,
            "attention_multiplier": 0.125,
            "position_embedding_type": "nope",
        },
        "patch": {"layer_types": ["mamba", "attention"]},
    },
    "granitehybrid-dense": {
        "class": "GraniteMoeHybridForCausalLM",
        "model_type": "granitemoehybrid",
        "config": {
            "intermediate_size": 64,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.25,
            "attention_multiplier": 0.125,
            "position_embedding_type": "nope",
        },
        "patch": {"layer_types": ["mamba", "attention"]},
    },
    "smollm3": {
        "class": "SmolLM3ForCausalLM",
        "model_type": "smollm3",
        "config": {
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
            "intermediate_size": 64,
            **_rope(5000000.0),
        },
    },
    "seed_oss": {
        "class": "SeedOssForCausalLM",
        "model_type": "seed_oss",
        "config": {
            "intermediate_size": 64,
            **_rope(10000000.0),
            "head_dim": 16,
        },
    },
    "ernie4_5": {
        "class": "Ernie4_5ForCausalLM",
        "model_type": "ernie4_5",
        "config": {
            "tie_word_embeddings": True,
            "intermediate_size": 64,
            **_rope(500000.0),
            "head_dim": 16,
        },
    },
    "ernie4_5-moe": {
        "class": "Ernie4_5_MoeForCausalLM",
        "model_type": "ernie4_5_moe",
        "config": {
            "tie_word_embeddings": True,
            "intermediate_size": 64,
            **_rope(500000.0),
            "moe_intermediate_size": 32,
            "moe_k": 2,
            "moe_num_experts": 4,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
        },
    },
    "hunyuan-dense": {
        "class": "HunYuanDenseV1ForCausalLM",
        "model_type": "hunyuan_v1_dense",
        "config": {
            "intermediate_size": 64,
            **_rope(10000.0),
            "head_dim": 16,
        },
    },
    "hunyuan-moe": {
        "class": "HunYuanMoEV1ForCausalLM",
        "model_type": "hunyuan_v1_moe",
        "config": {
            "intermediate_size": 64,
            **_rope(10000.0),
            "head_dim": 8,
            "num_experts": 4,
            "moe_topk": [2, 2],
        },
        "patch": {"moe_intermediate_size": [64, 64], "num_shared_expert": [1, 1]},
    },
    "falcon-h1": {
        "class": "FalconH1ForCausalLM",
        "model_type": "falcon_h1",
        "config": {
            "intermediate_size": 64,
            **_rope(100000000000.0),
            "head_dim": 8,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.5,
            "mlp_multipliers": [0.5, 0.25],
            "key_multiplier": 0.5,
            "attention_in_multiplier": 0.5,
            "attention_out_multiplier": 0.5,
            "ssm_multipliers": [0.5, 0.25, 0.5, 0.25, 0.5],
            "ssm_in_multiplier": 0.5,
            "ssm_out_multiplier": 0.25,
        },
    },
    "olmo2": {
        "class": "Olmo2ForCausalLM",
        "model_type": "olmo2",
        "config": {
            "intermediate_size": 64,
            **_rope(500000.0),
        },
    },
    "olmo3": {
        "class": "Olmo3ForCausalLM",
        "model_type": "olmo3",
        "config": {
            "intermediate_size": 64,
            **_rope(500000.0),
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    },
    "exaone4": {
        "class": "Exaone4ForCausalLM",
        "model_type": "exaone4",
        "config": {
            "num_hidden_layers": 4,
            "intermediate_size": 64,
            **_rope(1000000.0),
            "sliding_window": 8,
            "sliding_window_pattern": 4,
        },
    },
    "command-r": {
        "class": "CohereForCausalLM",
        "model_type": "cohere",
        "config": {
            "tie_word_embeddings": True,
            "intermediate_size": 64,
            **_rope(10000.0),
            "use_qk_norm": False,
        },
    },
    "cohere2": {
        "class": "Cohere2ForCausalLM",
        "model_type": "cohere2",
        "config": {
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
            "intermediate_size": 64,
            **_rope(10000.0),
            "rotary_pct": 1.0,
            "sliding_window": 8,
        },
    },
    "deepseek2-v2": {
        "class": "DeepseekV2ForCausalLM",
        "model_type": "deepseek_v2",
        "config": {
            "num_key_value_heads": 4,
            "intermediate_size": 64,
            "kv_lora_rank": 32,
            "q_lora_rank": None,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            **_rope(
                10000.0,
                "yarn",
                factor=4.0,
                original_max_position_embeddings=128,
                beta_fast=32,
                beta_slow=1,
                mscale=0.707,
                mscale_all_dim=0.707,
            ),
        },
        "patch": {"scoring_func": "softmax"},
    },
    "glm4": {
        "class": "Glm4ForCausalLM",
        "model_type": "glm4",
        "config": {
            "intermediate_size": 64,
            "head_dim": 16,
            **_rope(10000.0, partial_rotary_factor=0.5),
        },
    },
    "gemma": {
        "class": "GemmaForCausalLM",
        "model_type": "gemma",
        "config": {
            "tie_word_embeddings": True,
            "intermediate_size": 64,
            **_rope(10000.0),
            "head_dim": 16,
        },
    },
    "olmoe": {
        "class": "OlmoeForCausalLM",
        "model_type": "olmoe",
        "config": {
            "intermediate_size": 64,
            **_rope(10000.0),
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    },
    "granitemoe": {
        "class": "GraniteMoeForCausalLM",
        "model_type": "granitemoe",
        "config": {
            "intermediate_size": 32,
            **_rope(10000.0),
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.25,
            "attention_multiplier": 0.125,
        },
    },
}


def build(name: str) -> Any:
    """Build a model with weights that depend on their names; the converter read the same."""
    model_class = getattr(transformers, MODELS[name]["class"])
    config = AutoConfig.for_model(MODELS[name]["model_type"], **_BASE | MODELS[name]["config"])
    model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        stored = model.state_dict().keys()
        for key, weight in (*model.named_parameters(), *model.named_buffers()):
            if key in stored and weight.is_floating_point():
                weight.copy_(torch.from_numpy(_weights(key, tuple(weight.shape))))
    return model.eval()


def _weights(name: str, shape: tuple[int, ...]) -> Any:
    # A period of a prime number: no two rows are equal, and the files compress well.
    period = np.random.default_rng(zlib.crc32(name.encode())).integers(-16, 17, 251) / 64
    return np.resize(period, shape).astype(np.float32)


def unpack(name: str, folder: Path) -> Path:
    """Write a model's GGUF file, and return its path."""
    path = folder / f"{name}.gguf"
    path.write_bytes(lzma.decompress((FILES / f"{name}.gguf.xz").read_bytes()))
    return path


def rewrite(source: Path, target: Path, kind: gguf.GGMLQuantizationType, *, is_kept: bool) -> Path:
    """Quantise the large matrices of a file, and keep them so or store what they stand for."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        is_large = values.ndim > 1 and tensor.tensor_type == gguf.GGMLQuantizationType.BF16
        if not is_large or values.shape[-1] % 32:
            writer.add_tensor(tensor.name, values)
            continue
        stored = gguf.quantize(values, kind)
        if is_kept:
            writer.add_tensor(tensor.name, stored, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, gguf.dequantize(stored, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
