"""Finds a model's head for draft tokens (multi-token prediction, MTP) in its files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from safetensors import safe_open

Library: TypeAlias = Literal["torch", "mlx"]


@dataclass(frozen=True, slots=True)
class HeadNames:
    """Names of a head's weights in a model's files.

    Attributes:
        prefix: What all of them begin with.
        layer: What the names of its decoder layer begin with.
        others: Its norms of embeddings and of hidden states, the projection of both in this order,
            and its last norm.
        norm_offset: What its norms add to their weights.
    """

    prefix: str
    layer: str
    others: tuple[str, ...]
    norm_offset: float = 0.0


_FAMILIES: Mapping[Library, tuple[str, ...]] = {
    "torch": ("deepseek_v3", "glm4_moe"),
    "mlx": ("deepseek_v3", "glm4_moe", "qwen3_5", "qwen3_next"),
}


def find_head(directory: Path, config: Mapping[str, Any], library: Library) -> HeadNames | None:
    """Return the names of the weights of a model's head; None if it has none that can be read."""
    is_quantised = config.get("quantization") or config.get("quantization_config")
    if config.get("model_type") not in _FAMILIES[library] or is_quantised:
        return None
    names, held = _names(config), set[str]()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            held.update(file.keys())
    needed = {*names.others, f"{names.layer}input_layernorm.weight"}
    return names if needed <= held else None


def _names(config: Mapping[str, Any]) -> HeadNames:
    if config["model_type"] in ("qwen3_5", "qwen3_next"):
        own = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        others = tuple(f"mtp.{name}.weight" for name in own)
        return HeadNames("mtp.", "mtp.layers.0.", others, norm_offset=1.0)
    # The head is the layer after the last one.
    layer = f"model.layers.{config.get('num_hidden_layers')}."
    own = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    return HeadNames(layer, layer, tuple(f"{layer}{name}.weight" for name in own))
