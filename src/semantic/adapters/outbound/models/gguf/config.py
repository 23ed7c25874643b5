"""Builds the content of ``config.json`` from a GGUF file's metadata."""

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

from semantic.adapters.outbound.models.gguf.header import GgufFile, decimal
from semantic.adapters.outbound.models.gguf.layers import Architecture
from semantic.adapters.outbound.models.gguf.rope import read_rope, rotated_share
from semantic.adapters.outbound.models.gguf.weights import GROUP, group_bits, is_grouped

Config = dict[str, Any]

_KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length?",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv?",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon?",
}
_FLOATS = ("epsilon", "scale", "softcapping")
_BOOLS = ("expert_weights_norm",)
_PER_LAYER = ("feed_forward_length", "attention.head_count_kv")
_FULL, _WINDOW = "full_attention", "sliding_attention"


def num_layers(file: GgufFile) -> int:
    """Number of layers, without those that only predict further tokens."""
    return file.get_here("block_count", int) - (file.find_here("nextn_predict_layers", int) or 0)


def read_config(file: GgufFile, architecture: Architecture) -> Config:
    """Build the config, apart from special tokens.

    The values of a text model that is part of a larger one are at the top level; `nested` puts them
    where they belong.
    """
    output = "output.weight" in file.tensors
    config: Config = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": int(file.tensors["token_embd.weight"].shape[-1]),
        "num_hidden_layers": num_layers(file),
        "hidden_act": "silu",
        "tie_word_embeddings": not output,
        **architecture.constants,
    }
    for key, source in (_KEYS | dict(architecture.keys)).items():
        value = _value(file, source)
        if value is not None or not source.endswith("?"):
            config[key] = value
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    _add_head_dim(file, config)
    config |= read_rope(file, architecture, config)
    if add := _ADDITIONS.get(architecture.model_type):
        config |= add(file, config)
    return config


def nested(config: Config, architecture: Architecture) -> Config:
    """Move the text model's values into ``text_config``, if the architecture has one."""
    if not architecture.is_nested:
        return config
    outside = ("architectures", "dtype", "torch_dtype", "tie_word_embeddings", "quantization")
    text = config | {"model_type": f"{architecture.model_type}_text"}
    return {
        "model_type": architecture.model_type,
        **{key: config[key] for key in outside if key in config},
        "text_config": {key: text[key] for key in text if key not in outside[:1]},
    }


def quantisation(file: GgufFile, *, is_for_mlx: bool) -> Config:
    """The config's entry about quantised tensors.

    The entry also tells the torch backend to expect mlx-lm's layout, which experts and a few others
    have, so they need it even if no tensor is quantised.
    """
    grouped = [group_bits(tensor) for tensor in file.tensors.values() if is_grouped(tensor)]
    if not grouped and not is_for_mlx:
        return {}
    # Individual linears may have other bits; loaders infer them from the shapes.
    return {"quantization": {"group_size": GROUP, "bits": min(grouped, default=4)}}


def _value(file: GgufFile, source: str) -> Any:
    """Read a number. In lists of one number for each layer, 0 stands for layers without it."""
    key = source.removesuffix("?")
    given = file.fields.get(f"{file.architecture}.{key}")
    if key in _PER_LAYER and isinstance(given, list):
        numbers = sorted(set(file.get_here(key, list)) - {0})
        if len(numbers) > 1 and file.architecture != "gemma4":
            raise file.refusal(f"{file.architecture}.{key} differs between layers")
        return numbers[-1] if numbers else 0
    if key.endswith(_BOOLS):
        return file.find_here(key, bool) if source != key else file.get_here(key, bool)
    if key.endswith(_FLOATS):
        number = file.find_here(key, float) if source != key else file.get_here(key, float)
        return None if number is None else decimal(number)
    return file.find_here(key, int) if source != key else file.get_here(key, int)


def _add_head_dim(file: GgufFile, config: Config) -> None:
    given = file.find_here("attention.key_length", int)
    width = config["hidden_size"] // max(config["num_attention_heads"], 1)
    config.setdefault("head_dim", given or width)


# -- what single architectures need besides their keys --------------------------------------------


def _layer_types(file: GgufFile) -> list[str]:
    windows = file.get_here("attention.sliding_window_pattern", list)
    return [_WINDOW if is_window else _FULL for is_window in windows]


def _has_bias(file: GgufFile, _config: Config) -> Config:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors}


def _delta(file: GgufFile, config: Config) -> Config:
    found = {
        "linear_value_head_dim": file.get_here("ssm.inner_size", int)
        // max(config["linear_num_value_heads"], 1),
        "attention_bias": False,
        "layer_types": [
            "linear_attention" if f"blk.{i}.ssm_a" in file.tensors else _FULL
            for i in range(config["num_hidden_layers"])
        ],
    }
    # GGUF may state a default here that differs from the layers.
    attention = [i for i, kind in enumerate(found["layer_types"]) if kind == _FULL]
    return found | ({"full_attention_interval": attention[0] + 1} if attention else {})


def _qwen35(file: GgufFile, config: Config) -> Config:
    sections = file.find_here("rope.dimension_sections", list) or []
    rope = {
        "rope_type": "default",
        "rope_theta": config.pop("rope_theta"),
        "partial_rotary_factor": config.pop("partial_rotary_factor", 1.0),
        "mrope_section": [section for section in sections if section],
        "mrope_interleaved": True,
    }
    return _delta(file, config) | {"rope_parameters": rope}


def _gemma(file: GgufFile, config: Config) -> Config:
    # The largest model of each generation scales queries differently; GGUF omits the number.
    largest = {"gemma2": 46, "gemma3_text": 62}[config["model_type"]]
    is_largest = config["num_hidden_layers"] == largest
    width = config["hidden_size"] // config["num_attention_heads"]
    found: Config = {"query_pre_attn_scalar": width if is_largest else config["head_dim"]}
    if config["model_type"] == "gemma3_text":
        local = file.find_here("rope.freq_base_swa", float) or 10000.0
        found |= {"sliding_window_pattern": 6, "rope_local_base_freq": decimal(local)}
    return found


def _gemma3n(file: GgufFile, _config: Config) -> Config:
    # llama.cpp stores the quantile of the normal distribution, and -inf for a share of 0.
    scales = file.fields.get("gemma3n.activation_sparsity_scale")
    if not isinstance(scales, list):
        raise file.refusal("metadata key gemma3n.activation_sparsity_scale is missing")
    shares = [round(NormalDist().cdf(scale), 4) if scale > -1e9 else 0.0 for scale in scales]
    vocabulary = int(file.tensors["per_layer_token_embd.weight"].shape[-1])
    return {
        "activation_sparsity_pattern": shares,
        "layer_types": _layer_types(file),
        "laurel_rank": int(file.tensors["blk.0.laurel_l.weight"].shape[-1]),
        "vocab_size_per_layer_input": vocabulary,
        "rope_local_base_freq": decimal(file.get_here("rope.freq_base_swa", float)),
    }


def _gemma4(file: GgufFile, config: Config) -> Config:
    kinds = _layer_types(file)
    shared = config["num_kv_shared_layers"]
    kv_heads = file.per_layer("attention.head_count_kv")
    widths = file.per_layer("feed_forward_length")
    full = [heads for heads, kind in zip(kv_heads, kinds, strict=False) if kind == _FULL]
    windowed = [heads for heads, kind in zip(kv_heads, kinds, strict=False) if kind == _WINDOW]
    first = kinds.index(_FULL) if _FULL in kinds else 0
    own = "per_layer_token_embd.weight"
    return {
        "layer_types": kinds,
        "num_key_value_heads": (windowed or full)[0],
        "num_global_key_value_heads": full[0] if windowed and full and full != windowed else None,
        "attention_k_eq_v": f"blk.{first}.attn_v.weight" not in file.tensors,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": shared > 0 and widths[-1] == 2 * widths[0],
        "enable_moe_block": "num_experts" in config,
        "vocab_size_per_layer_input": (
            int(file.tensors[own].shape[-1]) if own in file.tensors else config["vocab_size"]
        ),
        "rope_parameters": {
            _FULL: {
                "rope_type": "proportional",
                "rope_theta": config.pop("rope_theta"),
                "partial_rotary_factor": rotated_share(file),
            },
            _WINDOW: {
                "rope_type": "default",
                "rope_theta": decimal(file.get_here("rope.freq_base_swa", float)),
            },
        },
    }


def _latent(file: GgufFile, config: Config) -> Config:
    key = file.find_here("attention.key_length_mla", int)
    value = file.find_here("attention.value_length_mla", int)
    if key is None or value is None:  # files without the split of kv_b_proj
        key = file.get_here("attention.key_length", int)
        value = file.get_here("attention.value_length", int)
    config.setdefault("q_lora_rank", None)
    return {
        "qk_nope_head_dim": key - config["qk_rope_head_dim"],
        "v_head_dim": value,
        "head_dim": config["qk_rope_head_dim"],
        "num_key_value_heads": config["num_attention_heads"],
        "attention_bias": False,
    }


def _glm4_moe(file: GgufFile, config: Config) -> Config:
    return _has_bias(file, config) | {"use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}


def _nemotron(file: GgufFile, config: Config) -> Config:
    def kind(layer: int) -> str:
        names = {"ssm_a": "mamba", "attn_q.weight": "attention", "ffn_up.weight": "mlp"}
        found = (kind for end, kind in names.items() if f"blk.{layer}.{end}" in file.tensors)
        return next(found, "moe")

    kinds = [kind(layer) for layer in range(config["num_hidden_layers"])]
    inner = file.get_here("ssm.inner_size", int)
    epsilon = file.find_here("attention.layer_norm_rms_epsilon", float)
    found: Config = {
        "layers_block_type": kinds,
        "hybrid_override_pattern": "".join(
            {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}[kind] for kind in kinds
        ),
        "mamba_head_dim": inner // max(config["mamba_num_heads"], 1),
    }
    if "mlp" in kinds:
        first = file.tensors[f"blk.{kinds.index('mlp')}.ffn_up.weight"]
        found["intermediate_size"] = int(first.shape[-1])
    return found | ({} if epsilon is None else {"layer_norm_epsilon": decimal(epsilon)})


def _lfm2(file: GgufFile, _config: Config) -> Config:
    kinds = [_FULL if heads else "conv" for heads in file.per_layer("attention.head_count_kv")]
    attention = [i for i, kind in enumerate(kinds) if kind == _FULL]
    return {"layer_types": kinds, "full_attn_idxs": attention}


def _granite_hybrid(file: GgufFile, config: Config) -> Config:
    inner = file.get_here("ssm.inner_size", int)
    return {
        "layer_types": [
            "mamba" if f"blk.{i}.ssm_a" in file.tensors else "attention"
            for i in range(config["num_hidden_layers"])
        ],
        "mamba_d_head": inner // max(config["mamba_n_heads"], 1),
        "mamba_expand": inner // max(config["hidden_size"], 1),
    }


def _falcon_h1(file: GgufFile, config: Config) -> Config:
    return {
        "mamba_d_head": config["mamba_d_ssm"] // max(config["mamba_n_heads"], 1),
        "mamba_expand": config["mamba_d_ssm"] // max(config["hidden_size"], 1) or 1,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors,
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in file.tensors,
    }


def _ernie_moe(_file: GgufFile, config: Config) -> Config:
    return {"moe_layer_end_index": config["num_hidden_layers"] - 1}


def _olmo3(file: GgufFile, _config: Config) -> Config:
    return {"layer_types": _layer_types(file), "attention_bias": False}


def _exaone4(file: GgufFile, config: Config) -> Config:
    if not config["sliding_window"]:
        return {"layer_types": [_FULL] * config["num_hidden_layers"]}
    kinds = _layer_types(file)
    period = kinds.index(_FULL) + 1 if _FULL in kinds else len(kinds)
    return {"layer_types": kinds, "sliding_window_pattern": "L" * (period - 1) + "G"}


def _cohere(file: GgufFile, _config: Config) -> Config:
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors, "attention_bias": False}


def _phi3(file: GgufFile, config: Config) -> Config:
    window = file.find_here("attention.sliding_window", int)
    length = config["max_position_embeddings"]
    return {
        "sliding_window": window or None,
        "original_max_position_embeddings": config.get("original_max_position_embeddings", length),
    }


_ADDITIONS: dict[str, Callable[[GgufFile, Config], Config]] = {
    "llama": _has_bias,
    "seed_oss": _has_bias,
    "qwen3_next": _delta,
    "qwen3_5": _qwen35,
    "qwen3_5_moe": _qwen35,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "gemma3n": _gemma3n,
    "gemma4_text": _gemma4,
    "deepseek_v2": _latent,
    "deepseek_v3": _latent,
    "glm4": _has_bias,
    "glm4_moe": _glm4_moe,
    "nemotron_h": _nemotron,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "granitemoehybrid": _granite_hybrid,
    "falcon_h1": _falcon_h1,
    "ernie4_5_moe": _ernie_moe,
    "olmo3": _olmo3,
    "exaone4": _exaone4,
    "cohere": _cohere,
    "phi3": _phi3,
}
