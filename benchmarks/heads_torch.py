"""A model of Qwen3.5's architecture with random weights and a head for draft tokens, on torch."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.initialization import no_init_weights

from benchmarks.head_steps import SCALE, SHAPES, head_config
from semantic.adapters.config.sources import load_settings
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.loading import TorchOptions
from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild
from semantic.domain.spec import ModelCacheSpec
from semantic.ports.backend import ModelBackendPort


@contextlib.contextmanager
def open_head(shape: str) -> Iterator[ModelBackendPort]:
    """Write the model, and load it as the server does."""
    with no_init_weights():
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPES[shape])).bfloat16()
    weights = dict(model.state_dict())
    for name, weight in weights.items():
        if weight.ndim == 1:
            weight.fill_(-4.0 if name.endswith("A_log") else 0.0)
        else:
            weight.normal_(std=SCALE)
    last, size = f"model.layers.{len(model.model.layers) - 1}.", model.config.hidden_size
    own = {name.replace(last, "mtp.layers.0."): w for name, w in weights.items() if last in name}
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    own |= {f"mtp.{name}.weight": torch.zeros(size, dtype=torch.bfloat16) for name in norms}
    own["mtp.fc.weight"] = torch.randn(size, 2 * size).bfloat16() * SCALE
    with tempfile.TemporaryDirectory() as temporary:
        directory, config = Path(temporary), head_config(shape)
        (directory / "config.json").write_text(json.dumps(config))
        save_file(weights, directory / "model-1.safetensors", {"format": "pt"})
        save_file({n: w.clone() for n, w in own.items()}, directory / "model-2.safetensors")
        files = dict.fromkeys(weights, "model-1.safetensors")
        files |= dict.fromkeys(own, "model-2.safetensors")
        index = {"metadata": {}, "weight_map": files}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        del model, weights, own
        native = NativeBuild(load_settings().home_dir / "native")
        options = TorchOptions(native=native, has_head=True)
        backend = TorchBackend(directory, ModelCacheSpec.from_config(config), options)
    yield backend
    backend.shutdown()
