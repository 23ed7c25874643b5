"""Reads vision towers from a model's files, and language models that mlx-lm has by themselves."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound.backends.images import rope_axes
from semantic.adapters.outbound.backends.mlx.caches import Array
from semantic.adapters.outbound.backends.mlx.runtime import import_library
from semantic.adapters.outbound.backends.mlx.vision.qwen import Qwen2Tower, Qwen3Tower
from semantic.adapters.outbound.backends.mlx.vision.siglip import SiglipTower
from semantic.adapters.outbound.backends.mlx.vision.tower import LanguageInputs, MlxTower
from semantic.adapters.outbound.vision.families import TILED
from semantic.adapters.outbound.vision.processors import VisionSettings

_TOWERS: Mapping[str, Any] = {
    "idefics3": SiglipTower,
    "smolvlm": SiglipTower,
    "gemma3": SiglipTower,
    "qwen2_5_vl": Qwen2Tower,
    "qwen3_vl": Qwen3Tower,
}
_TOWER = re.compile(r"(?:model\.)?(?:vision_model|visual|vision_tower)\.(?:vision_model\.)?")
_CONNECTOR = re.compile(r"(?:model\.)?(?:connector|multi_modal_projector)\.")
_GROUPED = (".scales", ".biases")
_COLOURS = 3
_LANGUAGE = re.compile(r"(?:model\.)?(?:text_model|language_model)\.(?:model\.)?")


def library_options(config: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return options of mlx-lm's loader for a model type that it does not have as a whole."""
    return {"get_model_classes": _llama_classes} if config.get("model_type") in TILED else {}


def _llama_classes(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return classes of a model with a Llama model inside, by the names of other models' parts."""
    is_tied = bool(config.get("tie_word_embeddings"))
    llama, outer = (import_library(f"mlx_lm.models.{name}") for name in ("llama", "qwen3_vl"))

    class LlamaInside(outer.Model):  # type: ignore[misc,name-defined]
        def __init__(self, args: Any) -> None:
            super(outer.Model, self).__init__()
            self.args, self.model_type = args, args.model_type
            text = {"rms_norm_eps": 1e-5, **args.text_config, "tie_word_embeddings": is_tied}
            self.language_model = llama.Model(llama.ModelArgs.from_dict(text))

        def sanitize(self, weights: Mapping[str, Array]) -> dict[str, Array]:
            found = {}
            for name, weight in weights.items():
                if _TOWER.match(name) or _CONNECTOR.match(name):
                    continue
                rest = _LANGUAGE.sub("", name)
                is_head = rest.startswith("lm_head.")
                if not is_head or not is_tied:
                    found[f"language_model.{'' if is_head else 'model.'}{rest}"] = weight
            return found

    return LlamaInside, outer.ModelArgs


def prepare_language_model(
    model: Any, config: Mapping[str, Any], tower: MlxTower
) -> LanguageInputs:
    """Let a language model take features; changes its positions if they follow images."""
    body = next(module for module in model.modules() if "layers" in module and module is not model)
    text = config.get("text_config") or config
    # Gemma multiplies embeddings, but not features, by a factor that mlx-lm rounds.
    is_scaled = tower.settings.model_type == "gemma3"
    factor = mx.array(body.args.hidden_size**0.5, mx.bfloat16).item() if is_scaled else 1.0
    inputs = LanguageInputs(body, float(factor))
    if tower.has_grid:
        rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
        inputs.use_grid(rope_axes(tower.settings.model_type, rope.get("mrope_section")))
    return inputs


def read_tower(
    directory: Path, config: Mapping[str, Any], settings: VisionSettings, dtype: Any
) -> MlxTower:
    """Read the tower and connector of a model."""
    kind = _TOWERS[settings.model_type]
    weights: dict[str, Array] = {}
    for path in sorted(directory.glob("model*.safetensors")):
        for name, weight in mx.load(str(path)).items():
            if found := _TOWER.match(name):
                weights[name[found.end() :]] = weight
            elif found := _CONNECTOR.match(name):
                weights[f"connector.{name[found.end() :]}"] = weight
    groups = config.get("quantization") or {}
    made = {
        name: _plain(name, weights, groups).astype(dtype)
        for name in weights
        if not name.endswith(_GROUPED)
    }
    mx.eval(list(made.values()))
    return MlxTower(settings, kind(config, made), dtype)


def _plain(name: str, weights: Mapping[str, Array], groups: Mapping[str, Any]) -> Array:
    """Return a weight in full numbers, and a kernel with its colours before height and width."""
    weight, layer = weights[name], name.removesuffix(".weight")
    if name.endswith(".weight") and (scales := weights.get(f"{layer}.scales")) is not None:
        size, bits = groups["group_size"], groups["bits"]
        return mx.dequantize(weight, scales, weights.get(f"{layer}.biases"), size, bits)
    is_kernel = weight.ndim > 3
    return mx.moveaxis(weight, -1, 1) if is_kernel and weight.shape[1] != _COLOURS else weight
