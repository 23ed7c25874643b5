"""Builds Llama-like models from their files without transformers.

Importing the transformers modelling code takes three seconds, most of the start time. This module
implements the same forward pass for the families that the C decode steps support, with the
parameter names of their files. If a file contains anything else or lacks anything, `read_plain`
returns None and transformers loads the model.
"""

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from semantic.adapters.outbound.backends.images import rope_axes
from semantic.adapters.outbound.backends.torch.attention import packed_attention
from semantic.adapters.outbound.backends.torch.grouped import (
    AnyLinear,
    FixedLinear,
    GroupedEmbedding,
    GroupedLinear,
    GroupedWeight,
)
from semantic.adapters.outbound.backends.torch.kv.sequences import ChunkSpan
from semantic.adapters.outbound.backends.torch.reading import take_weights
from semantic.adapters.outbound.backends.torch.vision.merging import DeepFeatures
from semantic.domain.spec import ModelCacheSpec

_FAMILIES = {"llama", "mistral", "qwen2", "qwen3", "qwen2_5_vl_text", "qwen3_vl_text"}
_HEAD_NORMS = {"qwen3", "qwen3_vl_text"}
_GRID_ROPE = {"qwen2_5_vl_text", "qwen3_vl_text"}
_NEEDED = {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"}
_NEEDED |= {"rms_norm_eps", "tie_word_embeddings", "vocab_size"}
_ROPE = {"default", "llama3"}


def read_plain(
    config: Mapping[str, Any],
    spec: ModelCacheSpec,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    *,
    is_kept: bool,
) -> "PlainModel | None":
    """Build a model; None if its files do not match a supported family.

    Args:
        spec: Gives the window of each layer.
        dtype: Of all weights that are not grouped.
        is_kept: Keep grouped weights grouped; otherwise expand them.

    Raises:
        InvalidRequestError: the weights are quantised in an unsupported way.
    """
    is_known = config.get("model_type") in _FAMILIES and config.get("hidden_act") == "silu"
    if not is_known or any(config.get(name) is None for name in _NEEDED):
        return None
    rope = _rope(config)
    if rope is None:
        return None
    parts = _Parts(tensors, dtype, is_kept=is_kept)
    try:
        model = PlainModel(config, spec, rope, parts)
    except KeyError:
        return None
    return None if parts.left else model


def _rope(config: Mapping[str, Any]) -> dict[str, Any] | None:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {"rope_theta": config.get("rope_theta"), "partial_rotary_factor": 1.0, **given}
    rope["rope_type"] = given.get("rope_type", given.get("type", "default"))
    is_whole = rope["partial_rotary_factor"] == 1 == config.get("partial_rotary_factor", 1)
    is_known = rope["rope_type"] in _ROPE and rope["rope_theta"] is not None
    if (model_type := config["model_type"]) in _GRID_ROPE:
        rope["axes"] = torch.from_numpy(rope_axes(model_type, rope.get("mrope_section")))
    return rope if is_whole and is_known else None


class _Parts:
    """The tensors of the files, taken one by one as modules; a KeyError means a mismatch.

    Attributes:
        left: Tensors that no module has taken yet.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, *, is_kept: bool
    ) -> None:
        self.left, self._dtype, self._is_kept = dict(tensors), dtype, is_kept

    def linear(self, name: str, num_rows: int, num_columns: int) -> AnyLinear:
        has_bias = f"{name}.bias" in self.left
        bias = self._take(f"{name}.bias", num_rows) if has_bias else None
        weight = self._matrix(name, num_rows, num_columns)
        if isinstance(weight, GroupedWeight):
            return GroupedLinear(weight, bias)
        return FixedLinear(weight, bias)

    def embedding(self, name: str, num_rows: int, num_columns: int) -> nn.Module:
        weight = self._matrix(name, num_rows, num_columns)
        if isinstance(weight, GroupedWeight):
            return GroupedEmbedding(weight, self._dtype)
        return nn.Embedding(num_rows, num_columns, _weight=weight, _freeze=True)

    def norm(self, name: str, size: int, eps: float) -> "PlainRMSNorm":
        return PlainRMSNorm(self._take(f"{name}.weight", size), eps)

    def _matrix(self, name: str, num_rows: int, num_columns: int) -> torch.Tensor | GroupedWeight:
        if f"{name}.scales" not in self.left:
            return self._take(f"{name}.weight", num_rows, num_columns)
        [weight] = take_weights(self.left, name, num_columns)
        if len(weight.scales) != num_rows:
            raise KeyError(name)
        return weight if self._is_kept else weight.expanded().to(self._dtype)

    def _take(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self.left.pop(name)
        if tensor.shape != shape:
            raise KeyError(name)
        return tensor.to(self._dtype, copy=True)  # else it stays mapped to the file


# -- modules, by the names that files have ---------------------------------------------------------


class PlainRMSNorm(nn.Module):
    """RMS norm."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


class _Rotary(nn.Module):
    def __init__(self, rope: Mapping[str, Any], dim: int) -> None:
        super().__init__()
        steps = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        frequencies = 1.0 / (rope["rope_theta"] ** steps)
        if rope["rope_type"] == "llama3":
            frequencies = _scale_llama3(frequencies, rope)
        self.frequencies = nn.Buffer(frequencies, persistent=False)
        self.axes = nn.Buffer(rope.get("axes", torch.zeros(0)), persistent=False)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take positions ``[1, tokens]``, or for M-RoPE also ``[3, 1, tokens]``."""
        if positions.ndim == 3:
            positions = positions[self.axes].permute(1, 2, 0)
        else:
            positions = positions[..., None]
        angles = positions.float() * self.frequencies
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


def _scale_llama3(frequencies: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Scale the frequencies as Llama 3.1 does: divide low ones, and blend those in between."""
    length, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    rotations = length * frequencies / (2 * math.pi)  # within the original length
    share = ((rotations - low) / (high - low)).clamp(0, 1)
    scaled: torch.Tensor = (1 - share) * frequencies / factor + share * frequencies
    return scaled


class _Attention(nn.Module):
    def __init__(self, parts: _Parts, name: str, config: SimpleNamespace, layer: int) -> None:
        super().__init__()
        self.layer_idx, self.head_dim = layer, config.head_dim
        self.scaling, self.window = config.head_dim**-0.5, config.windows[layer]
        hidden, eps = config.hidden_size, config.rms_norm_eps
        width = config.num_attention_heads * config.head_dim
        width_of_keys = config.num_key_value_heads * config.head_dim
        self.q_proj = parts.linear(f"{name}.q_proj", width, hidden)
        self.k_proj = parts.linear(f"{name}.k_proj", width_of_keys, hidden)
        self.v_proj = parts.linear(f"{name}.v_proj", width_of_keys, hidden)
        self.o_proj = parts.linear(f"{name}.o_proj", hidden, width)
        if config.model_type in _HEAD_NORMS:
            self.q_norm = parts.norm(f"{name}.q_norm", config.head_dim, eps)
            self.k_norm = parts.norm(f"{name}.k_norm", config.head_dim, eps)

    def forward(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], spans: Sequence[ChunkSpan]
    ) -> torch.Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        query, key = self.q_proj(x).view(shape), self.k_proj(x).view(shape)
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (apply_rope(rows.transpose(1, 2), *angles) for rows in (query, key))
        value = self.v_proj(x).view(shape).transpose(1, 2)
        options = {"scaling": self.scaling, "sliding_window": self.window}
        attended, _ = packed_attention(self, query, key, value, None, spans=spans, **options)
        result: torch.Tensor = self.o_proj(attended.reshape(*x.shape[:-1], -1))
        return result


def apply_rope(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to query or key heads, ``[1, heads, tokens, dim]``."""
    first, second = rows.chunk(2, dim=-1)
    return rows * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


class _GatedMLP(nn.Module):
    def __init__(self, parts: _Parts, name: str, config: SimpleNamespace) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = parts.linear(f"{name}.gate_proj", inner, hidden)
        self.up_proj = parts.linear(f"{name}.up_proj", inner, hidden)
        self.down_proj = parts.linear(f"{name}.down_proj", hidden, inner)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return result


class _Layer(nn.Module):
    def __init__(self, parts: _Parts, name: str, config: SimpleNamespace, layer: int) -> None:
        super().__init__()
        size = (config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = parts.norm(f"{name}.input_layernorm", *size)
        self.post_attention_layernorm = parts.norm(f"{name}.post_attention_layernorm", *size)
        self.self_attn = _Attention(parts, f"{name}.self_attn", config, layer)
        self.mlp = _GatedMLP(parts, f"{name}.mlp", config)

    def forward(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], spans: Sequence[ChunkSpan]
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, spans)
        result: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class _Base(nn.Module):
    def __init__(self, parts: _Parts, config: SimpleNamespace, rope: Mapping[str, Any]) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.embed_tokens = parts.embedding("model.embed_tokens", config.vocab_size, hidden)
        self.layers = nn.ModuleList(
            _Layer(parts, f"model.layers.{layer}", config, layer)
            for layer in range(len(config.windows))
        )
        self.norm = parts.norm("model.norm", hidden, config.rms_norm_eps)
        self.rotary_emb = _Rotary(rope, config.head_dim)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        position_ids: torch.Tensor,
        spans: Sequence[ChunkSpan],
        inputs_embeds: torch.Tensor | None = None,
        deep: DeepFeatures | None = None,
        use_cache: bool = False,
    ) -> SimpleNamespace:
        del use_cache  # the spans hold the KV cache
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        angles = self.rotary_emb(x, position_ids)
        for index, layer in enumerate(self.layers):
            x = layer(x, angles, spans)
            if deep is not None and index < len(deep.added):
                x[0].index_add_(0, deep.places, deep.added[index].to(x.dtype))
        return SimpleNamespace(last_hidden_state=self.norm(x))


class PlainModel(nn.Module):
    """A model with the call interface of the transformers models."""

    def __init__(
        self,
        config: Mapping[str, Any],
        spec: ModelCacheSpec,
        rope: Mapping[str, Any],
        parts: _Parts,
    ) -> None:
        """Build the model from its parts.

        Raises:
            KeyError: a part is missing or has another size.
        """
        super().__init__()
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        windows = [layer.window for layer in spec.layers]
        self.config = SimpleNamespace(**{**config, "head_dim": dim, "windows": windows})
        self.model = _Base(parts, self.config, rope)
        self.lm_head: AnyLinear
        embedding = self.model.embed_tokens
        if not config["tie_word_embeddings"]:
            size = (config["vocab_size"], config["hidden_size"])
            self.lm_head = parts.linear("lm_head", *size)
        elif isinstance(embedding, GroupedEmbedding):
            self.lm_head = GroupedLinear(embedding.grouped, None)
        else:
            self.lm_head = FixedLinear(cast("nn.Embedding", embedding).weight, None)

    @property
    def base_model(self) -> nn.Module:
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, *, logits_to_keep: torch.Tensor, **inputs: Any) -> SimpleNamespace:
        hidden = self.model(**inputs).last_hidden_state
        return SimpleNamespace(logits=self.lm_head(hidden[:, logits_to_keep]))
