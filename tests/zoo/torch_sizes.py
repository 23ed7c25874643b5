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
        *("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"),
        *("mamba_d_head", "mamba_head_dim"),
        *("mamba_n_heads", "mamba_num_heads", "mamba_d_state", "state_size", "ssm_state_size"),
        *("chunk_size", "mamba_chunk_size", "query_pre_attn_scalar", "patch_size"),
        *("hidden_size_per_layer_input", "expert_hidden_size"),
    ),
    NUM_LAYERS: (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
        *("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"),
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        *("linear_num_value_heads", "linear_num_heads", "qk_rope_head_dim"),
        *("rotary_dim", "laurel_rank"),
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

_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
_SECTIONS: Mapping[str, Any] = {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}
_EYES: Mapping[str, Any] = {"depth": 2, "num_heads": 4, "out_hidden_size": 32}
_INDEXER: Mapping[str, Any] = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "hc_lowrank": 8,
}

BY_TYPE: Mapping[str, Mapping[str, Any]] = {
    "blenderbot": {"encoder_layers": NUM_LAYERS},  # transformers takes them for the decoder's
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 12},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "bailing_hybrid": {"head_dim": 8, "n_group": 1, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "emu3": {
        "vocabulary_map": {"<image>": 120},
        "vq_config": {
            "codebook_size": 32,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "attn_resolutions": [],
            "num_attention_heads": 1,
        },
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "glm4v": {"vision_config": _EYES, "text_config": _SECTIONS},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "ministral": {"head_dim": 8},
    "mllama": {
        "text_config": {"cross_attention_layers": [1, 3]},
        "vision_config": {
            "attention_heads": 4,
            "num_hidden_layers": 2,
            "num_global_layers": 2,
            "intermediate_layers_indices": [1],
            "vision_output_dim": 64,
        },
    },
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "qwen2_5_vl": {"vision_config": _EYES, "text_config": _SECTIONS},
    "qwen2_vl": {"vision_config": {**_EYES, "embed_dim": 32}, "text_config": _SECTIONS},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": {"lru_width": 32},
    "reformer": {
        "attn_layers": ["local", "lsh"] * 2,
        "attention_head_size": 8,
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [16, 32],
        "feed_forward_size": 48,
        "hash_seed": 1,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
    },
    "xlm": {"emb_dim": 32, "causal": True},
    "xlstm": {"hidden_size": 128},  # the library rounds widths of heads up to 64 in one place
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}

_DRAFTER = "it is a draft model, which continues the hidden states of another model"
_AUDIO = "it generates the codes of audio, several in each step"
UNBUILDABLE: Mapping[str, str] = {
    "blt": "the library itself cannot generate: its config has no number of layers",
    "gemma3n": "its part for images needs the package timm; `gemma3n_text` is compared",
    "gemma4_assistant": _DRAFTER,
    "gemma4_unified_assistant": _DRAFTER,
    "musicgen": _AUDIO,
    "musicgen_melody": _AUDIO,
    "prophetnet": "the library itself cannot generate with a cache: it rejects its own positions",
}

# Its language model alone has a type that the library does not load.
WHOLE = ("mllama",)
MULTIMODAL = (
    *("aria", "glm4v", "idefics3", "internvl", "kimi_k25", "lfm2_vl", "llava", "mistral3"),
    *("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
)
