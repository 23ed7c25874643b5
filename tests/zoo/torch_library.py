"""Tiny models of every causal language model type that the installed transformers has.

A config is the type's default with the sizes of `torch_sizes.py`. A type that a later version adds
is therefore found and tried without a change here.
"""

import functools
import importlib.metadata
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.loading import TorchOptions
from semantic.adapters.outbound.backends.torch.reading import auto_class
from semantic.domain.spec import ModelCacheSpec
from semantic.ports.backend import ModelBackendPort
from tests.zoo.checks import NUM_REPLY
from tests.zoo.torch_sizes import (
    BY_TYPE,
    LATENT,
    MULTIMODAL,
    NUM_LAYERS,
    SIZES,
    UNBUILDABLE,
    WHOLE,
)

_SEED = 5
_SCALE = 0.25  # of weights: every token of the context moves the logits well beyond rounding
_MOST_WEIGHTS = 20_000_000
_FIRST_ID = 100  # special tokens, which no prompt contains, start here
_SLOW_DECAY = -4.0


class TorchZoo:
    """transformers; a `ZooLibrary`."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        warnings.simplefilter("ignore")

    @property
    def title(self) -> str:
        return f"transformers {importlib.metadata.version('transformers')}"

    @property
    def unbuildable(self) -> Mapping[str, str]:
        return UNBUILDABLE

    def types(self) -> Sequence[str]:
        return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MULTIMODAL})

    def write_model(self, model_type: str, directory: Path) -> "TorchZooModel":
        config = _small(CONFIG_MAPPING[model_type], BY_TYPE.get(model_type, {}))
        auto = AutoModelForMultimodalLM if model_type in WHOLE else auto_class(config)
        with torch.device("meta"):
            empty = auto.from_config(config)
        if (num_weights := sum(p.numel() for p in empty.parameters())) > _MOST_WEIGHTS:
            raise ValueError(f"{num_weights} weights are not tiny: name sizes in torch_sizes.py")
        torch.manual_seed(_SEED)
        model = auto.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("A_log"):
                    parameter.fill_(_SLOW_DECAY)
                elif parameter.ndim > 1 and "conv" not in name:
                    parameter.normal_(std=_SCALE)
        model.save_pretrained(directory)
        written = TorchZooModel(directory)
        written.reply([1, 2, 3])  # raises if the library itself cannot generate
        return written


@dataclass(frozen=True)
class TorchZooModel:
    """A tiny model for transformers; a `ZooModel`."""

    directory: Path

    @functools.cached_property
    def library_model(self) -> Any:
        config = AutoConfig.from_pretrained(self.directory)
        model = auto_class(config).from_pretrained(self.directory, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None
        model.generation_config.forced_eos_token_id = None
        return model

    def open_backend(self) -> ModelBackendPort:
        config = json.loads((self.directory / "config.json").read_text())
        spec = ModelCacheSpec.from_config(config, block_tokens=8)
        options = TorchOptions("float32", num_threads=1)
        return TorchBackend(self.directory, spec, options)

    def library_reply(self, tokens: Sequence[int], _backend: ModelBackendPort) -> list[int]:
        return self.reply(tokens)

    def reply(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens of `generate`."""
        given = torch.tensor([[*tokens]])
        output = self.library_model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=NUM_REPLY,
            do_sample=False,
            pad_token_id=0,
        )
        reply: list[int] = output[0, len(tokens) :].tolist()
        return reply


def _small(config_class: Any, own: Mapping[str, Any]) -> Any:
    default = config_class()
    given = {name: value for name, value in vars(default).items() if value is not None}
    small = {name: size for name, size in SIZES.items() if name in given}
    if "kv_lora_rank" in given:
        small |= {name: size for name, size in LATENT.items() if name in given}
    ids = sorted(name for name in given if name.endswith(("_token_id", "_token_index")))
    small |= {name: _FIRST_ID + number for number, name in enumerate(ids)}
    if given.get("layer_types"):
        # Every type of layer occurs, in the order of the large model.
        found = list(dict.fromkeys(given["layer_types"]))
        small["layer_types"] = [found[index % len(found)] for index in range(NUM_LAYERS)]
    parts = {
        name: _small(type(given[name]), own.get(name, {})).to_dict()
        for name in getattr(config_class, "sub_configs", {})
        if name in given
    }
    return config_class(**{**small, **own, **parts})
