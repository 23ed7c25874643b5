"""Reads how a GGUF file's model scales RoPE: linearly, by YaRN, LongRoPE or Llama 3's factors."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from semantic.adapters.outbound.models.gguf.header import GgufFile, decimal
from semantic.adapters.outbound.models.gguf.layers import Architecture
from semantic.adapters.outbound.models.gguf.weights import read_floats

FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = frozenset({FREQUENCIES, LONG, SHORT})

_LOW, _HIGH, _CONTEXT = 1.0, 4.0, 8192  # Llama 3's
# llama.cpp gives these dimensions a factor so large that they do not rotate.
_UNROTATED = 1e20

Config = dict[str, Any]


def read_rope(file: GgufFile, architecture: Architecture, config: Config) -> Config:
    """Return the config values about RoPE; rejects scalings that are not supported."""
    theta = decimal(file.find_here("rope.freq_base", float) or 10000.0)
    found: Config = {"rope_theta": theta}
    head_dim = config["head_dim"]
    rope_dim = file.find_here("rope.dimension_count", int) or head_dim
    if architecture.is_partial and rope_dim != head_dim:
        found["partial_rotary_factor"] = rope_dim / max(head_dim, 1)
    elif rope_dim != head_dim and not _has_own_rope(architecture):
        raise file.refusal(
            f"RoPE over only {rope_dim} of a head's {head_dim} dimensions is not supported"
        )
    scaling = _scaling(file, architecture, theta, rope_dim)
    if scaling and architecture.model_type == "ministral3":
        return {"rope_parameters": scaling | {"rope_theta": theta}}
    return found | ({"rope_scaling": scaling} if scaling else {})


def rotated_share(file: GgufFile) -> float:
    """The share of each head that Gemma 4 rotates in layers without a window."""
    if FREQUENCIES not in file.tensors:
        return 1.0
    factors = read_floats(file.tensors[FREQUENCIES])
    return float((factors < _UNROTATED).mean())


def _has_own_rope(architecture: Architecture) -> bool:
    """Whether RoPE covers a part of a head that has a name of its own, or no head at all."""
    own = ("deepseek_v2", "deepseek_v3", "gemma4_text", "nemotron_h", "granitemoehybrid")
    return architecture.model_type in own


def _scaling(
    file: GgufFile, architecture: Architecture, theta: float, rope_dim: int
) -> Config | None:
    kind = file.find_here("rope.scaling.type", str) or "none"
    if kind == "linear":
        return {"rope_type": "linear", "factor": file.get_here("rope.scaling.factor", float)}
    if kind == "yarn":
        return _yarn(file, architecture)
    if LONG in file.tensors:
        return _longrope(file)
    if kind != "none":
        raise file.refusal(f"RoPE scaling {kind!r} is not supported")
    if FREQUENCIES not in file.tensors or architecture.model_type == "gemma4_text":
        return None
    return _llama3(file, theta, rope_dim)


def _yarn(file: GgufFile, architecture: Architecture) -> Config:
    def number(name: str) -> float | None:
        value = file.find_here(f"rope.scaling.{name}", float)
        return None if value is None else decimal(value)

    scaling: Config = {
        "rope_type": "yarn",
        "factor": file.get_here("rope.scaling.factor", float),
        "original_max_position_embeddings": file.get_here(
            "rope.scaling.original_context_length", int
        ),
        "beta_fast": number("yarn_beta_fast") or 32.0,
        "beta_slow": number("yarn_beta_slow") or 1.0,
    }
    if (attention := number("yarn_attn_factor")) is not None:
        scaling["attention_factor"] = attention
    if (multiplier := number("yarn_log_multiplier")) is not None:
        # For DeepSeek's models, llama.cpp stores a tenth of the number.
        tenths = 10 if file.architecture == "deepseek2" else 1
        mscale = round(tenths * multiplier, 6)
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    if (temperature := file.find_here("attention.temperature_scale", float)) is not None:
        scaling["llama_4_scaling_beta"] = decimal(temperature)
    if architecture.model_type == "gpt_oss":
        scaling["truncate"] = False  # as the model was trained
    return scaling


def _longrope(file: GgufFile) -> Config:
    if SHORT not in file.tensors:
        raise file.refusal(f"tensor {SHORT} is missing")
    long, short = (read_floats(file.tensors[name]) for name in (LONG, SHORT))
    return {
        "type": "longrope",
        "rope_type": "longrope",
        "long_factor": [decimal(factor) for factor in long],
        "short_factor": [decimal(factor) for factor in short],
    }


def _llama3(file: GgufFile, theta: float, rope_dim: int) -> Config:
    factors = read_floats(file.tensors[FREQUENCIES])
    factor = float(factors.max(initial=1.0))
    # GGUF stores only the resulting factors: accept them if Llama 3's formula gives the same.
    expected = _llama3_factors(theta, rope_dim, factor)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise file.refusal("its RoPE factors are not supported; only those of Llama 3 are")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _CONTEXT,
    }


def _llama3_factors(theta: float, rope_dim: int, factor: float) -> npt.NDArray[np.float64]:
    exponents = np.arange(0, rope_dim, 2) / max(rope_dim, 1)
    rotations = _CONTEXT / (2 * math.pi * theta**exponents)
    smooth = np.clip((rotations - _LOW) / (_HIGH - _LOW), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))
