"""EXP-001: the KV cache of a token by a model's config, and by mlx-lm."""

from typing import Any

from benchmarks.blocks import CONFIGS, spec_of
from experiments.common import Experiment, Findings
from semantic.adapters.outbound.backends.mlx import runtime
from semantic.domain.spec import LayerKind, ModelCacheSpec

# What mlx-lm wants beside the geometry; of no importance to it.
_MORE = {
    "vocab_size": 1024,
    "intermediate_size": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}


def library_layers(config: dict[str, object]) -> list[tuple[str, int, int]]:
    """Return the cache kind, KV heads and head size of each layer, as mlx-lm creates them."""
    runtime.prepare()
    name = str(config["model_type"])
    module = runtime.import_library(f"mlx_lm.models.{name}")
    model: Any = module.Model(
        module.ModelArgs.from_dict({**_MORE, **config})
    )  # nothing is computed
    caches = runtime.import_library("mlx_lm.models.cache").make_prompt_cache(model)
    found = []
    for layer, cache in zip(model.layers, caches, strict=True):
        keys = layer.self_attn.k_proj.weight.shape[0]
        heads = int(str(config["num_key_value_heads"]))
        found.append((type(cache).__name__, heads, keys // heads))
    return found


def expected_layers(spec: ModelCacheSpec) -> list[tuple[str, int, int]]:
    """Return the same from this project's geometry."""
    names = {LayerKind.FULL: "KVCache", LayerKind.WINDOW: "RotatingKVCache"}
    return [(names[layer.kind], layer.num_kv_heads, layer.key_dim) for layer in spec.layers]


def geometry(found: Findings) -> None:
    """Compare both for the four models of the plan."""
    for name, config in CONFIGS.items():
        spec = spec_of(name)
        layers = library_layers(config)
        num_full = sum(layer.kind is LayerKind.FULL for layer in spec.layers)
        text = (
            f"{spec.num_layers} layers ({num_full} full, {spec.num_window} window), "
            f"{spec.layers[0].num_kv_heads} KV heads of {spec.layers[0].key_dim}, "
            f"{spec.bytes_per_context(1)} bytes a token"
        )
        found.check(name, text, is_passed=layers == expected_layers(spec))
    found.skip("weights of mlx-community", "they are tens of GB and a hub away; configs suffice")


EXPERIMENTS = (
    Experiment(
        id="EXP-001",
        question="Do a model's config and mlx-lm agree on what the KV cache holds per token?",
        method="read the geometry of four models from their configs, build each with mlx-lm "
        "(nothing is computed), and compare kinds of layers, KV heads and head sizes",
        criterion="all agree; Gemma 3 12B has 8 KV heads",
        adapted="the geometry comes from `config.json`, before weights are loaded, and not from "
        "`model.args`; configs replace 4 downloads",
        answer=geometry,
    ),
)
