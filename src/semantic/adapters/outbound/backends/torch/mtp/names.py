"""Finds a model's head for draft tokens (multi-token prediction, MTP) in its files."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open


@dataclass(frozen=True, slots=True)
class HeadNames:
    """Names of a head's weights in a model's files, other than those of its decoder layer.

    Attributes:
        projection: Of a token's normed embedding and a normed hidden state, in this order.
    """

    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str


_FAMILIES = ("deepseek_v3", "glm4_moe")  # the head is the layer after the last one


def find_head(directory: Path, config: Mapping[str, Any]) -> HeadNames | None:
    """Return the names of the weights of a model's head; None if it has none that can be read."""
    is_quantised = config.get("quantization") or config.get("quantization_config")
    if config.get("model_type") not in _FAMILIES or is_quantised:
        return None
    layer, held = f"model.layers.{config.get('num_hidden_layers')}.", set[str]()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            held.update(file.keys())
    names = HeadNames(
        *(f"{layer}{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
    )
    needed = {*astuple(names), f"{layer}input_layernorm.weight"}
    return names if needed <= held else None
