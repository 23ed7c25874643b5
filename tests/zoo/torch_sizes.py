"""Small sizes for the configs of transformers, and what single types need beside them.

A type takes every entry of `SIZES` whose name its config has.
"""

from collections.abc import Mapping
from typing import Any

NUM_LAYERS = 4
_BY_NAME: Mapping[int, tuple[str, ...]] = {
    128: ("vocab_size", "vocab_size_per_layer_input"),
    32: ("hidden_size", "n_embd", "d_model", "dim_model", "word_embed_proj_dim", "embedding_size"),
    48: ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "intermediate_size_mlp"),
    512: ("max_position_embeddings", "n_positions", "max_seq_len", "decoder_start_token_id"),
    12: ("sliding_window", "attention_chunk_size", "qk_head_dim"),
    24: (
        *("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"),
        *("shared_intermediate_size", "moe_shared_expert_intermediate_size"),
    ),
    # With few index heads, many scores are 0, and the choice among equal ones is arbitrary.
    16: ("kv_lora_rank", "q_lora_rank", "global_head_dim", "image_size", "index_n_heads"),
    8: (
        *("head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim", "index_topk"),
        *("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim"),
        *("mamba_n_heads", "mamba_num_heads", "mamba_d_state", "state_size", "ssm_state_size"),
        *("chunk_size", "mamba_chunk_size", "query_pre_attn_scalar", "patch_size"),
        *("hidden_size_per_layer_input", "expert_hidden_size"),
    ),
    NUM_LAYERS: (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
        *("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"),
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        *("linear_num_value_heads", "qk_rope_head_dim", "rotary_dim", "laurel_rank"),
        *("mamba_dt_rank", "time_step_rank"),
    ),
    2: (
        *("num_key_value_heads", "num_experts_per_tok", "moe_k", "moe_topk", "max_window_layers"),
        *("linear_num_key_heads", "num_kv_shared_layers", "num_experts_per_token"),
    ),
    1: ("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers", "mamba_n_groups"),
}
SIZES: Mapping[str, Any] = {
    **{name: size for size, names in _BY_NAME.items() for name in names},
    "initializer_range": 0.3,
    "is_decoder": True,
}

# Latent attention expands to as many key heads as there are query heads.
LATENT: Mapping[str, Any] = {"num_key_value_heads": 4, "head_dim": 4}

BY_TYPE: Mapping[str, Mapping[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 12},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "bailing_hybrid": {"head_dim": 8},
    "bamba": {"attn_layer_indices": [1, 3]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "recurrent_gemma": {"lru_width": 32},
}

MULTIMODAL = (
    *("aria", "glm4v", "idefics3", "internvl", "kimi_k25", "lfm2_vl", "llava", "mistral3"),
    *("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
)
