"""Finds a model's head for draft tokens (multi-token prediction, MTP) in its files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from safetensors import safe_open

Library: TypeAlias = Literal["torch", "mlx"]

_APPENDED: Final = ("deepseek_v3", "glm4_moe")  # the head is the layer after the last one
_SEPARATE: Final = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
_PREFIXES: Final = ("mtp.", "language_model.mtp.")  # of these, as published and by converters
_FILES: Mapping[Library, str] = {"torch": "*.safetensors", "mlx": "model*.safetensors"}


@dataclass(frozen=True, slots=True)
class HeadNames:
    """Names of a head's weights in a model's files.

    Attributes:
        prefix: What all of them begin with.
        layer: What the names of its decoder layer begin with.
        others: Its norms of embeddings and of hidden states, the projection of both in this order,
            and its last norm.
        norm_offset: What its norms add to their weights.
        is_converted: Whether a conversion to mlx-lm's layout has already added it to them.
    """

    prefix: str
    layer: str
    others: tuple[str, ...]
    norm_offset: float = 0.0
    is_converted: bool = False

    @property
    def repeated(self) -> tuple[str, ...]:
        """What names begin with that are no part of the decoder layer, although named like it."""
        if self.prefix != self.layer:
            return ()
        own = ("embed_tokens", "shared_head", "enorm", "hnorm", "eh_proj")
        return tuple(f"{self.layer}{name}." for name in own)


def why_no_head(config: Mapping[str, Any]) -> str:
    """Say why `find_head` finds none; empty if models of this type are published without one."""
    if config.get("model_type") not in (*_APPENDED, *_SEPARATE):
        return ""
    if _is_foreign(config):
        return "its MTP head is quantised in a format that is not supported"
    return "its files have no MTP head; many conversions leave it out"


def find_head(directory: Path, config: Mapping[str, Any], library: Library) -> HeadNames | None:
    """Return the names of the weights of a model's head; None if it has none that can be read."""
    if config.get("model_type") not in (*_APPENDED, *_SEPARATE) or _is_foreign(config):
        return None
    held = dict[str, tuple[int, ...]]()
    for path in directory.glob(_FILES[library]):
        with safe_open(path, framework="numpy") as file:
            held |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    for names in _possible(config, held):
        if {*names.others, f"{names.layer}input_layernorm.weight"} <= held.keys():
            return names
    return None


def _is_foreign(config: Mapping[str, Any]) -> bool:
    """Whether a model is quantised in another way than mlx-lm's."""
    return "quantization_config" in config and "quantization" not in config


def _possible(config: Mapping[str, Any], held: Mapping[str, tuple[int, ...]]) -> list[HeadNames]:
    if config["model_type"] in _APPENDED:
        layer = f"model.layers.{config.get('num_hidden_layers')}."
        own = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        return [HeadNames(layer, layer, tuple(f"{layer}{name}.weight" for name in own))]
    own = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    return [
        HeadNames(
            prefix,
            f"{prefix}layers.0.",
            tuple(f"{prefix}{name}.weight" for name in own),
            norm_offset=1.0,
            is_converted=_is_converted(prefix, held),
        )
        for prefix in _PREFIXES
    ]


def _is_converted(prefix: str, held: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a head has mlx-lm's layout; a file in this layout may keep the head as published."""
    kernels = [shape for name, shape in held.items() if name.endswith("conv1d.weight")]
    own = [name for name in held if name.startswith(prefix)]
    has_marks = any(name.endswith(".scales") or ".switch_mlp." in name for name in own)
    is_mlx = any(shape[-1] == 1 for shape in kernels)
    return is_mlx and (has_marks or prefix != _PREFIXES[0])
