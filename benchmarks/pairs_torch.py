"""The starter, and a large model that contains it, so that they agree by construction.

The large model computes what the starter does: its weights are the starter's, padded with zeros.
Additional neurons in its last layer add random numbers, whose size decides how often both models
choose the same token. Text and acceptance are real, and so is the cost of both models.
"""

import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.bench_drafts import Pair
from benchmarks.starter import TEXT, library_model, starter_directory
from semantic.adapters.config.sources import load_settings
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.loading import TorchOptions
from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.domain.spec import ModelCacheSpec

NUM_PROMPT = 64
# Size of the noise with which the models agree so often, in percent.
NOISE = {100: 0.0, 95: 1.0, 80: 18.0, 60: 26.0}

# SmolLM2's own shapes, with as many layers as the starter has, if it has more.
WIDE_SHAPES: dict[str, dict[str, int]] = {
    "smollm2-360m": {
        "hidden_size": 960,
        "num_hidden_layers": 32,
        "intermediate_size": 2560,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
    },
    "smollm2-1.7b": {
        "hidden_size": 2048,
        "num_hidden_layers": 30,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
}
_COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_NUM_NOISY = 256  # neurons of the last layer that add noise


@contextlib.contextmanager
def open_pair(shape: str, agree: int) -> Iterator[Pair]:
    """Load both models as the server does, the large one with weights of eight bits."""
    source = starter_directory()
    native = NativeBuild(load_settings().home_dir / "native")

    def load(directory: Path, options: TorchOptions) -> TorchBackend:
        spec = ModelCacheSpec.from_config(json.loads((directory / "config.json").read_text()))
        return TorchBackend(directory, spec, options)

    draft = load(source, TorchOptions(native=native))
    with tempfile.TemporaryDirectory() as temporary:
        wide = Path(temporary) / shape
        write_wide_model(library_model(source), source, wide, shape, NOISE[agree])
        served = load(wide, TorchOptions(native=native, weights="int8"))
    tokenizer = HFTokenizer(source)
    tokens = tokenizer.encode(TEXT)[:NUM_PROMPT]
    yield Pair(served, draft, tokenizer, lambda number: [*tokenizer.encode(f"{number}: "), *tokens])
    draft.shutdown()
    served.shutdown()


def write_wide_model(small: Any, source: Path, target: Path, shape: str, noise: float) -> None:
    """Write a model of a shape that contains a small Llama.

    Args:
        small: The small model, as transformers loads it.
        source: Its directory.
        noise: Size of the random numbers that the last layer adds; 0 for none.
    """
    target.mkdir(parents=True)
    old, new = small.config.to_dict(), WIDE_SHAPES[shape]
    config = {**json.loads((source / "config.json").read_text()), **new}
    # The mean of squares is over more numbers, of which the additional ones are zero.
    config["rms_norm_eps"] = old["rms_norm_eps"] * old["hidden_size"] / new["hidden_size"]
    config |= {"torch_dtype": "bfloat16", "head_dim": 64, "tie_word_embeddings": True}
    config.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(config))
    for name in _COPIED:
        if (source / name).exists():
            shutil.copy(source / name, target / name)
    weights = small.state_dict()
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(_shards(weights, old, new, noise)):
        file = f"model-{number:05}.safetensors"
        save_file({name: _bfloat16(tensor) for name, tensor in tensors.items()}, target / file)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


def _bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16).contiguous()


def _shards(
    weights: dict[str, torch.Tensor], old: dict[str, Any], new: dict[str, int], noise: float
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of the embedding, of each layer, and of the last norm."""
    hidden, inner = new["hidden_size"], new["intermediate_size"]
    calm = math.sqrt(old["hidden_size"] / hidden)

    def norm(name: str) -> torch.Tensor:
        return _padded(calm * weights[name].float(), hidden)

    embedding = weights["model.embed_tokens.weight"].float()
    yield {"model.embed_tokens.weight": _padded(embedding, embedding.shape[0], hidden)}
    last = max(old["num_hidden_layers"], new["num_hidden_layers"]) - 1
    for number in range(last + 1):
        place = f"model.layers.{number}"
        is_there = number < old["num_hidden_layers"]
        made = _layer(weights, place if is_there else "model.layers.0", old, new)
        if not is_there:  # such a layer adds nothing
            made["self_attn.o_proj.weight"] *= 0
            made["mlp.down_proj.weight"] *= 0
        if number == last:
            _add_noise(made, old, inner, noise)
        named = place if is_there else "model.layers.0"
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{name}.weight"] = norm(f"{named}.{name}.weight")
        yield {f"{place}.{name}": tensor for name, tensor in made.items()}
    yield {"model.norm.weight": norm("model.norm.weight")}


def _layer(
    weights: dict[str, torch.Tensor], place: str, old: dict[str, Any], new: dict[str, int]
) -> dict[str, torch.Tensor]:
    hidden, inner, dim = new["hidden_size"], new["intermediate_size"], 64
    num_queries, num_keys = old["num_attention_heads"], old["num_key_value_heads"]
    per_key = new["num_attention_heads"] // new["num_key_value_heads"]

    def of(name: str) -> torch.Tensor:
        return weights[f"{place}.{name}.weight"].float()

    def keys(name: str) -> torch.Tensor:
        """Keys or values; repeated where fewer queries share them than in the small model."""
        repeats = num_queries // num_keys // per_key
        each = of(name).view(num_keys, dim, -1).repeat_interleave(repeats, dim=0)
        return _padded(each.flatten(0, 1), new["num_key_value_heads"] * dim, hidden)

    queries = new["num_attention_heads"] * dim
    return {
        "self_attn.q_proj.weight": _padded(of("self_attn.q_proj"), queries, hidden),
        "self_attn.k_proj.weight": keys("self_attn.k_proj"),
        "self_attn.v_proj.weight": keys("self_attn.v_proj"),
        "self_attn.o_proj.weight": _padded(of("self_attn.o_proj"), hidden, queries),
        "mlp.gate_proj.weight": _padded(of("mlp.gate_proj"), inner, hidden),
        "mlp.up_proj.weight": _padded(of("mlp.up_proj"), inner, hidden),
        "mlp.down_proj.weight": _padded(of("mlp.down_proj"), hidden, inner),
    }


def _add_noise(
    layer: dict[str, torch.Tensor], old: dict[str, Any], inner: int, noise: float
) -> None:
    """Let the last neurons add random functions of the small model's numbers."""
    random = torch.Generator().manual_seed(0)
    hidden, first = old["hidden_size"], inner - _NUM_NOISY
    scale = 1 / math.sqrt(hidden)
    for name in ("gate", "up"):
        drawn = torch.randn(_NUM_NOISY, hidden, generator=random) * scale
        layer[f"mlp.{name}_proj.weight"][first:, :hidden] = drawn
    drawn = torch.randn(hidden, _NUM_NOISY, generator=random)
    layer["mlp.down_proj.weight"][:hidden, first:] = drawn * noise


def _padded(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    made = torch.zeros(shape)
    made[tuple(slice(size) for size in tensor.shape)] = tensor
    return made
