"""Reads the layers of a model from its ``config.json``, as far as that tells them.

A model family is data: a reader for each of its layer types, a rule that yields the types if the
config does not list them, and the defaults that published configs omit. Other model types are read
by the attributes that nearly all models share. Where these are missing or would be misleading, the
layers are unknown until a backend has loaded the model and reads them from the library's caches.

This module does not deal with bytes, blocks or backends; `semantic.domain.spec` computes sizes.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

from semantic.domain.errors import InvalidRequestError

_FULL = "full_attention"
_SLIDING = "sliding_attention"
_LINEAR = "linear_attention"
_HYBRID = "hybrid"
_MAMBA = "mamba"


class LayerKind(enum.Enum):
    """Which part of a layer's KV cache is needed to continue a sequence."""

    FULL = "full"  # every token's keys and values
    WINDOW = "window"  # those of the last `window` tokens before a boundary
    STATE = "state"  # a recurrent state, valid at the one boundary where it was taken

    __hash__ = (
        object.__hash__
    )  # `Enum.__hash__` is slow, being written in Python, and block keys are hashed often


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The KV cache of one layer.

    Attributes:
        kind: Decides which of the numbers below are set; the others are 0.
        num_kv_heads: FULL and WINDOW.
        key_dim: Per head.
        value_dim: Per head; 0 in caches of keys alone, such as the index of MiniMax M3.
        window: WINDOW: number of tokens needed before a boundary.
        state_elements: STATE: numbers kept per sequence, independent of its length.

    Raises:
        ValueError: A number that the kind needs is not positive, or another one is not 0.
    """

    kind: LayerKind
    num_kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int = 0
    state_elements: int = 0

    def __post_init__(self) -> None:
        has_kv = self.kind is not LayerKind.STATE
        for name, value, is_used, minimum in (
            ("num_kv_heads", self.num_kv_heads, has_kv, 1),
            ("key_dim", self.key_dim, has_kv, 1),
            ("value_dim", self.value_dim, has_kv, 0),
            ("window", self.window, self.kind is LayerKind.WINDOW, 1),
            ("state_elements", self.state_elements, not has_kv, 1),
        ):
            if is_used and value < minimum:
                raise ValueError(
                    f"{name} of a {self.kind.value} layer must be at least {minimum}, got {value}"
                )
            if not is_used and value != 0:
                raise ValueError(f"{name} of a {self.kind.value} layer must be 0, got {value}")

    def elements(self, num_tokens: int) -> int:
        """Return how many numbers the layer keeps for a sequence of `num_tokens` tokens."""
        num_kept = min(num_tokens, self.window or num_tokens)
        return self.state_elements + num_kept * self.num_kv_heads * (self.key_dim + self.value_dim)


class UnknownLayersError(Exception):
    """A config does not tell the layers of its model."""


_TEXT_PARTS = ("text_config", "language_config", "llm_config")  # of multimodal configs
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    "hidden_size": ("n_embd", "d_model", "dim", "model_dim"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("n_head_kv", "n_kv_heads", "num_kv_heads"),
    "max_position_embeddings": (
        "n_positions",
        "n_ctx",
        "max_seq_len",
        "max_seq_length",
        "max_sequence_length",
        "max_context_length",
        "seq_length",
        "model_max_length",
    ),
    "vocab_size": ("padded_vocab_size", "n_vocab"),
}


@dataclass(frozen=True, slots=True)
class ConfigAttributes:
    """The language model's part of a ``config.json``, with its family's defaults.

    Every method raises InvalidRequestError, which names the attribute, if a value is invalid. An
    explicit null overrides a default, as it does when models are built. Attributes may have the
    older names of `_OTHER_NAMES`.
    """

    model_type: str
    values: Mapping[str, object]

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        """Read a config, descending into the text part of a multimodal one."""
        model_type = config.get("model_type")
        part = next((part for part in _TEXT_PARTS if config.get(part) is not None), "")
        inner = config.get(part)
        if isinstance(inner, Mapping):
            return cls.from_config({**inner, "model_type": inner.get("model_type") or model_type})
        if not isinstance(model_type, str) or not model_type:
            raise InvalidRequestError("the model's config has no model_type", param="model")
        older = {
            name: config[other]
            for name, others in _OTHER_NAMES.items()
            for other in others[::-1]
            if config.get(other) is not None
        }
        attributes = cls(model_type, {**_family(model_type).defaults, **older, **config})
        if inner is not None:
            raise attributes.refusal(f"{part} must be an object")
        return attributes

    def is_set(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, *, minimum: int = 1) -> int:
        """Return a number.

        Raises:
            UnknownLayersError: it is missing, or differs by layer.
        """
        value = self.values.get(name)
        if value is None or isinstance(value, list):
            raise UnknownLayersError
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.refusal(f"{name} must be an integer of at least {minimum}, got {value!r}")
        return value

    def integer_or(self, name: str, default: int) -> int:
        """Return a number, or the default if the config has none."""
        return self.integer(name) if self.is_set(name) else default

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.values[name] if self.is_set(name) else default
        if not isinstance(value, bool):
            raise self.refusal(f"{name} must be true or false, got {value!r}")
        return value

    def layer_types(self) -> list[str] | None:
        listed = self.values.get("layer_types")
        if listed is None:
            return None
        if not isinstance(listed, list | tuple):
            raise self.refusal(f"layer_types must be a list, got {listed!r}")
        if len(listed) != self.integer("num_hidden_layers"):
            raise UnknownLayersError
        return [str(entry) for entry in listed]

    def refusal(self, reason: str) -> InvalidRequestError:
        return InvalidRequestError(f"model type {self.model_type!r}: {reason}", param="model")


def read_layers(attributes: ConfigAttributes) -> tuple[LayerSpec, ...]:
    """Read a model's layers, first to last; ``layer_types`` overrides the family's rule.

    A layer that keeps two kinds of state yields two entries. The result is empty if the config does
    not tell the layers.

    Raises:
        InvalidRequestError: An attribute is invalid.
    """
    try:
        return _read_layers(attributes)
    except UnknownLayersError:
        return ()


def _read_layers(attributes: ConfigAttributes) -> tuple[LayerSpec, ...]:
    family = _family(attributes.model_type)
    if family is _FALLBACK and _is_unlike_others(attributes):
        raise UnknownLayersError
    types = attributes.layer_types()
    if types is None:
        num_layers = attributes.integer("num_hidden_layers")
        types = [family.rule(attributes, index) for index in range(num_layers)]
    types = [part for layer_type in types for part in family.parts.get(layer_type, (layer_type,))]
    if not family.readers.keys() >= set(types):
        raise UnknownLayersError
    by_type = {layer_type: family.readers[layer_type](attributes) for layer_type in set(types)}
    return tuple(by_type[layer_type] for layer_type in types)


def _head_dim(attributes: ConfigAttributes) -> int:
    if attributes.is_set("head_dim"):
        return attributes.integer("head_dim")
    hidden_size = attributes.integer("hidden_size")
    num_heads = attributes.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise UnknownLayersError
    return hidden_size // num_heads


def _kv_heads(attributes: ConfigAttributes) -> int:
    is_grouped = attributes.is_set("num_key_value_heads")
    return attributes.integer("num_key_value_heads" if is_grouped else "num_attention_heads")


def _full(attributes: ConfigAttributes) -> LayerSpec:
    dim = _head_dim(attributes)
    return LayerSpec(LayerKind.FULL, _kv_heads(attributes), dim, dim)


def _window(attributes: ConfigAttributes) -> LayerSpec:
    dim, window = _head_dim(attributes), attributes.integer("sliding_window")
    return LayerSpec(LayerKind.WINDOW, _kv_heads(attributes), dim, dim, window)


def _expanded_mla(attributes: ConfigAttributes) -> LayerSpec:
    return LayerSpec(
        LayerKind.FULL,
        num_kv_heads=attributes.integer("num_attention_heads"),
        key_dim=attributes.integer("qk_nope_head_dim") + attributes.integer("qk_rope_head_dim"),
        value_dim=attributes.integer("v_head_dim"),
    )


def _latent_mla(attributes: ConfigAttributes) -> LayerSpec:
    return LayerSpec(
        LayerKind.FULL,
        num_kv_heads=1,
        key_dim=attributes.integer("kv_lora_rank"),
        value_dim=attributes.integer("qk_rope_head_dim"),
    )


def _gated_delta(attributes: ConfigAttributes) -> LayerSpec:
    key_dim = attributes.integer("linear_key_head_dim")
    value_dim = attributes.integer("linear_value_head_dim")
    num_value_heads = attributes.integer("linear_num_value_heads")
    channels = 2 * attributes.integer("linear_num_key_heads") * key_dim
    channels += num_value_heads * value_dim
    convolution = (attributes.integer("linear_conv_kernel_dim") - 1) * channels
    recurrent = num_value_heads * key_dim * value_dim
    return LayerSpec(LayerKind.STATE, state_elements=convolution + recurrent)


def _mamba(attributes: ConfigAttributes) -> LayerSpec:
    num_heads, state = attributes.integer("mamba_n_heads"), attributes.integer("mamba_d_state")
    if attributes.is_set("mamba_d_ssm"):
        width = attributes.integer("mamba_d_ssm")
    else:
        width = attributes.integer("mamba_expand") * attributes.integer("hidden_size")
    channels = width + 2 * attributes.integer("mamba_n_groups") * state
    convolution = (attributes.integer("mamba_d_conv") - 1) * channels
    recurrent = num_heads * (width // num_heads) * state
    return LayerSpec(LayerKind.STATE, state_elements=convolution + recurrent)


def _everywhere(layer_type: str) -> Callable[[ConfigAttributes, int], str]:
    return lambda _attributes, _index: layer_type


def _sliding_if_set(attributes: ConfigAttributes, _index: int) -> str:
    return _SLIDING if attributes.is_set("sliding_window") else _FULL


def _sliding_if_used(attributes: ConfigAttributes, index: int) -> str:
    is_used = attributes.flag("use_sliding_window", default=False)
    if not is_used or index < attributes.integer("max_window_layers", minimum=0):
        return _FULL
    return _sliding_if_set(attributes, index)


def _sliding_by_pattern(attributes: ConfigAttributes, index: int) -> str:
    if isinstance(attributes.values.get("sliding_window_pattern"), str):  # such as "LLLG"
        raise UnknownLayersError
    return _SLIDING if (index + 1) % attributes.integer("sliding_window_pattern") else _FULL


def _linear_by_interval(attributes: ConfigAttributes, index: int) -> str:
    return _LINEAR if (index + 1) % attributes.integer("full_attention_interval") else _FULL


def _sliding_by_what_is_set(attributes: ConfigAttributes, index: int) -> str:
    if not attributes.is_set("sliding_window"):
        return _FULL
    if attributes.is_set("use_sliding_window"):
        return _sliding_if_used(attributes, index)
    if attributes.is_set("sliding_window_pattern"):
        return _sliding_by_pattern(attributes, index)
    return _SLIDING


# Prefixes of config keys in models with a recurrent state or an unusual shape of keys and values:
# the attributes that most models share would misdescribe them.
_RECURRENT = ("mamba", "ssm_", "rwkv", "recurrent", "hybrid", "state_size", "lru_", "conv_L_cache")
_LINEAR_LAYERS = ("linear_attn", "linear_attention", "linear_num", "linear_conv", "attn_type_list")
_BLOCK_LISTS = ("block_types", "block_configs", "layers_block_type")
_LATENT_OR_SHARED = ("kv_lora_rank", "num_kv_shared", "global_head_dim", "attention_chunk_size")
_OTHER_HEADS = ("multi_query", "attn_config")
_UNLIKE_OTHERS = _RECURRENT + _LINEAR_LAYERS + _BLOCK_LISTS + _LATENT_OR_SHARED + _OTHER_HEADS
_RECURRENT_TYPES = ("mamba", "rwkv", "recurrent", "hybrid", "linear")


def _is_unlike_others(attributes: ConfigAttributes) -> bool:
    return any(word in attributes.model_type for word in _RECURRENT_TYPES) or any(
        key.startswith(_UNLIKE_OTHERS) and bool(value) for key, value in attributes.values.items()
    )


@dataclass(frozen=True, slots=True)
class _Family:
    """How to read the layers of one architecture.

    Attributes:
        parts: For layer types that keep several kinds of state, the type of each.
    """

    rule: Callable[[ConfigAttributes, int], str]
    readers: Mapping[str, Callable[[ConfigAttributes], LayerSpec]] = field(
        default_factory=lambda: {_FULL: _full, _SLIDING: _window}
    )
    defaults: Mapping[str, object] = field(default_factory=dict)
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


# Only Gemma 3 needs its whole geometry here, because its nested configs omit default values.
_GEMMA3 = _Family(
    _sliding_by_pattern,
    defaults={
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    },
)
_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(_everywhere(_FULL)),
    "mistral": _Family(_sliding_if_set, defaults={"num_key_value_heads": 8}),
    "qwen2": _Family(_sliding_if_used),
    "qwen3": _Family(_sliding_if_used, defaults={"head_dim": 128}),
    "qwen3_moe": _Family(_sliding_if_used, defaults={"num_key_value_heads": 4}),
    "gemma2": _Family(
        _sliding_by_pattern,
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
        },
    ),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gpt_oss": _Family(
        _sliding_by_pattern,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
        },
    ),
    "deepseek_v2": _Family(_everywhere(_FULL), {_FULL: _expanded_mla}),
    "deepseek_v3": _Family(_everywhere(_FULL), {_FULL: _latent_mla}),
    "qwen3_next": _Family(
        _linear_by_interval,
        {_FULL: _full, _LINEAR: _gated_delta},
        {"num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4},
    ),
    "falcon_h1": _Family(
        _everywhere(_HYBRID),
        {_FULL: _full, _MAMBA: _mamba},
        {"mamba_d_conv": 4, "mamba_d_state": 256, "mamba_n_groups": 1, "mamba_expand": 2},
        parts={_HYBRID: (_MAMBA, _FULL)},
    ),
}
_FALLBACK = _Family(_sliding_by_what_is_set)


def _family(model_type: str) -> _Family:
    return _FAMILIES.get(model_type, _FALLBACK)
