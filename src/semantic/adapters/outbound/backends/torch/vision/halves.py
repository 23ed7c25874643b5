"""Divides a model that sees into its language model and its vision tower.

The language model runs like a model without images: in the C library where that can run it, with
quantised weights if the file has them. The tower stays in full numbers.
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn

from semantic.adapters.outbound.backends.torch.plain import read_plain
from semantic.adapters.outbound.backends.torch.reading import (
    fill_model,
    read_tensors,
    take_weights,
)
from semantic.adapters.outbound.backends.torch.vision.tower import VisionTower
from semantic.adapters.outbound.vision.processors import VisionSettings
from semantic.domain.errors import InvalidRequestError
from semantic.domain.spec import ModelCacheSpec

_LANGUAGE = re.compile(r"(?:model\.)?(?:text_model|language_model)\.(?:model\.)?")
# Files of mlx-vlm call Qwen's tower `vision_tower`; older files have SigLIP's model in a module.
_TOWER = re.compile(r"(?:model\.)?(vision_model|visual|vision_tower)\.(?:vision_model\.)?")
_CONNECTOR = re.compile(r"(?:model\.)?(connector|multi_modal_projector)\.")
_LANGUAGE_PARTS = ("text_model", "language_model")

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SeeingModel:
    """A model that takes images.

    Attributes:
        model: Its language model: a `PlainModel`, or one of transformers.
        spec: The geometry of the language model, completed by the defaults of its config.
    """

    model: Any
    spec: ModelCacheSpec
    tower: VisionTower


@dataclass(frozen=True, slots=True)
class ReadingOptions:
    """How to read a model.

    Attributes:
        is_kept: Grouped weights of the language model stay grouped.
        is_plain: Whether the language model should be one that the C library can run.
    """

    dtype: torch.dtype
    is_kept: bool
    is_plain: bool


def read_seeing_model(
    directory: Path, spec: ModelCacheSpec, settings: VisionSettings, options: ReadingOptions
) -> SeeingModel | None:
    """Read a model and its tower; None if its language model cannot take images here.

    Raises:
        InvalidRequestError: the weights do not match the config.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # written by mlx-vlm; transformers does not support it
    language, tower = divide_tensors(dict(read_tensors(directory)))
    text = config.get_text_config()
    text.tie_word_embeddings = config.tie_word_embeddings or "lm_head.weight" not in language
    if text.tie_word_embeddings:
        language = {name: each for name, each in language.items() if "lm_head." not in name}
    if not spec.is_known:
        spec = ModelCacheSpec.from_config(text.to_dict(), block_tokens=spec.block_tokens)
    model = _read_language_model(text, spec, language, options)
    if model is None:
        _log.warning(
            "the model takes no images: the torch backend cannot divide its language model",
            model_type=text.model_type,
        )
        return None
    base = _read_tower(config, tower, options.dtype).eval()
    return SeeingModel(model, spec, VisionTower(base, settings))


def divide_tensors(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Divide a file's tensors into those of the language model and of the rest.

    The language model's get the names that they have in a model without images.
    """
    language: dict[str, torch.Tensor] = {}
    tower: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if found := _TOWER.match(name) or _CONNECTOR.match(name):
            tower[f"{found[1]}.{name[found.end() :]}"] = tensor
        elif found := _LANGUAGE.match(name):
            rest = name[found.end() :]
            language[rest if rest.startswith("lm_head.") else f"model.{rest}"] = tensor
        else:
            language[name] = tensor
    return language, tower


def _read_language_model(
    config: Any, spec: ModelCacheSpec, tensors: dict[str, torch.Tensor], options: ReadingOptions
) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    is_in_library = type(config) in AutoModelForCausalLM._model_mapping
    if options.is_plain or not is_in_library:
        dtype, is_kept = options.dtype, options.is_kept
        plain = read_plain(config.to_dict(), spec, tensors, dtype, is_kept=is_kept)
        if plain is not None:
            return plain
    if not is_in_library:
        return None
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=options.dtype)
    fill_model(model, tensors, options.dtype, is_kept=options.is_kept)
    return model


def _read_tower(config: Any, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """Build the model of transformers with an empty language model, and load the rest."""
    from transformers import AutoModel
    from transformers.initialization import no_init_weights

    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
    if getattr(text, "layer_types", None):
        text.layer_types = []
    with no_init_weights():
        model: Any = AutoModel.from_config(config, dtype=dtype)
    for name in _LANGUAGE_PARTS:
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model, "visual"):
        tensors = {re.sub("^vision_tower", "visual", name): each for name, each in tensors.items()}
    _load(model, tensors)
    return model


def _load(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    for name, module in model.named_modules():
        if f"{name}.scales" in tensors and isinstance(module, nn.Linear | nn.Embedding):
            [weight] = take_weights(tensors, name, module.weight.shape[1])
            tensors[f"{name}.weight"] = weight.expanded()
    for name, expected in model.state_dict().items():
        if (given := tensors.get(name)) is not None and given.shape != expected.shape:
            tensors[name] = given.movedim(-1, 1)  # mlx-vlm has the channels of kernels last
    try:
        missing = model.load_state_dict(tensors, strict=False).missing_keys
    except RuntimeError as error:
        raise InvalidRequestError(
            f"the weights of the model's vision tower do not match its config.json: {error}",
            param="model",
        ) from error
    if missing:
        raise InvalidRequestError(
            f"the model's files have no weights for {missing[0]}; download the model again.",
            param="model",
        )
