"""Finds a model's head for draft tokens (multi-token prediction, MTP) in its files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open


@dataclass(frozen=True, slots=True)
class HeadNames:
    """Names of a head's weights in a model's files.

    Attributes:
        layer: What the names of its decoder layer begin with.
        projection: Of a token's normed embedding and a normed hidden state, in this order.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str

    @property
    def others(self) -> tuple[str, str, str, str]:
        """The names outside the decoder layer."""
        return self.embedding_norm, self.hidden_norm, self.projection, self.final_norm


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
    others = (f"{layer}{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
    names = HeadNames(layer, *others)
    needed = {*names.others, f"{layer}input_layernorm.weight"}
    return names if needed <= held else None
