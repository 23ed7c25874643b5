"""Tiny models of every type that the installed mlx-lm has.

A config is made from the fields of the type's own `ModelArgs`, filled with the sizes of
`mlx_sizes.py`. A type that a later mlx-lm adds is therefore found and tried without a change here.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import json
import pkgutil
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from semantic.adapters.outbound.backends.mlx import runtime
from semantic.domain.spec import ModelCacheSpec
from semantic.ports.backend import ModelBackendPort
from tests.zoo.checks import NUM_REPLY
from tests.zoo.mlx_sizes import BY_TYPE, INNER_TYPES, SIZES, UNBUILDABLE

_SEED = 5
_SCALE = 0.3  # of weights: every token of the context moves the logits well beyond float32's error
_MOST_WEIGHTS = 2_000_000
_TEXT = "text_config"
_MARK = "class ModelArgs("  # of files that define a type; others are shared parts


class MlxZoo:
    """mlx-lm; a `ZooLibrary`."""

    def __init__(self) -> None:
        runtime.prepare(num_threads=1)
        import mlx.core as mx

        mx.disable_compile()  # which runs a C++ compiler for every new kernel
        mx.set_default_device(mx.cpu)
        self._utils = importlib.import_module("mlx_lm.utils")

    @property
    def title(self) -> str:
        return f"mlx-lm {importlib.metadata.version('mlx-lm')}"

    @property
    def unbuildable(self) -> Mapping[str, str]:
        return UNBUILDABLE

    def types(self) -> Sequence[str]:
        models = importlib.import_module("mlx_lm.models")
        files = [module.name for module in pkgutil.iter_modules(models.__path__)]
        folder = Path(models.__path__[0])
        own = [name for name in files if _MARK in (folder / f"{name}.py").read_text("utf-8")]
        return sorted({*own, *self._utils.MODEL_REMAPPING}, key=str.lower)

    def write_model(self, model_type: str, directory: Path) -> "MlxZooModel":
        import mlx.core as mx
        from mlx.utils import tree_flatten, tree_map_with_path

        try:
            config = self.config(model_type)
        except SystemExit:  # a package that the type needs is missing: the backend must refuse it
            config = {**SIZES, "model_type": model_type}
            mx.save_safetensors(str(directory / "model.safetensors"), {"none": mx.zeros(1)})
            (directory / "config.json").write_text(json.dumps(config))
            return MlxZooModel(directory, config)
        model_class, args_class = self._utils._get_classes(config)
        mx.random.seed(_SEED)
        model = model_class(args_class.from_dict(json.loads(json.dumps(config))))
        num_weights = sum(weight.size for _, weight in tree_flatten(model.parameters()))
        if num_weights > _MOST_WEIGHTS:
            raise ValueError(f"{num_weights} weights are not tiny: name the fields in mlx_sizes.py")
        model.update(tree_map_with_path(_weight, model.parameters()))
        weights = dict(tree_flatten(model.parameters()))
        mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
        (directory / "config.json").write_text(json.dumps(config))
        return MlxZooModel(directory, config)

    def config(self, model_type: str) -> dict[str, Any]:
        """Return a small config of a type."""
        module = _module(self._utils.MODEL_REMAPPING.get(model_type, model_type))
        config = _filled(module.ModelArgs, model_type)
        if _TEXT in config:
            inner = INNER_TYPES.get(module.__name__.rpartition(".")[2])
            if inner is None:
                config[_TEXT] = _filled(_text_args(module), model_type)
            else:
                whole = self.config(inner)
                config[_TEXT] = {"model_type": inner, **whole.get(_TEXT, whole)}
            config[_TEXT].update(BY_TYPE.get(model_type, {}).get(_TEXT, {}))
        return {**config, "model_type": model_type}


@dataclasses.dataclass(frozen=True)
class MlxZooModel:
    """A tiny model for mlx-lm; a `ZooModel`."""

    directory: Path
    config: Mapping[str, Any]

    @functools.cached_property
    def library_model(self) -> Any:
        return importlib.import_module("mlx_lm.utils").load_model(self.directory)[0]

    def open_backend(self) -> ModelBackendPort:
        from semantic.adapters.outbound.backends.mlx.backend import MlxBackend
        from semantic.adapters.outbound.backends.mlx.loading import MlxOptions

        spec = ModelCacheSpec.from_config(self.config, block_tokens=8)
        return MlxBackend.from_directory(self.directory, spec, MlxOptions(dtype="float32"))

    def library_reply(self, tokens: Sequence[int], backend: ModelBackendPort) -> list[int]:
        import mlx.core as mx

        library = importlib.import_module("mlx_lm.models.cache")
        generate = importlib.import_module("mlx_lm.generate")
        model = self.library_model
        caches = library.make_prompt_cache(model)
        layers = backend.spec.layers
        if backend.spec.num_window == len(layers) and all(
            type(cache) is library.KVCache for cache in caches
        ):
            # mlx-lm ignores the windows of the config; with these caches it applies them.
            caches = [library.RotatingKVCache(layer.window) for layer in layers]
        steps = generate.generate_step(
            mx.array(tokens), model, max_tokens=NUM_REPLY, prompt_cache=caches
        )
        return [int(token) for token, _ in steps]


def _module(name: str) -> types.ModuleType:
    return importlib.import_module(f"mlx_lm.models.{name}")


def _text_args(module: types.ModuleType) -> Any:
    classes = (value for name, value in vars(module).items() if name.startswith("Text"))
    return next(value for value in classes if dataclasses.is_dataclass(value))


def _filled(args: Any, model_type: str) -> dict[str, Any]:
    """Return values for the fields of a config class."""
    own = BY_TYPE.get(model_type, {})
    values: dict[str, Any] = {}
    for field in dataclasses.fields(args):
        if field.name in own:
            values[field.name] = own[field.name]
        elif field.name == _TEXT:
            values[field.name] = {}
        elif field.name in SIZES:
            values[field.name] = SIZES[field.name]
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            values[field.name] = _guess(field.type)
    return {**values, **{name: value for name, value in own.items() if name != _TEXT}}


def _guess(kind: Any) -> Any:
    """A value for a field without a default, of which nothing is known but its type."""
    name = str(kind)
    if type(None) in typing.get_args(kind):
        return None
    guesses = {"int": 2, "float": 1.0, "bool": False, "str": "silu", "dict": {}, "list": []}
    plain = getattr(kind, "__name__", name).lower()
    return guesses.get(plain)


def _weight(_path: str, weight: Any) -> Any:
    """Random weights for matrices; vectors keep what the library sets."""
    import mlx.core as mx

    if weight.ndim < 2 or not mx.issubdtype(weight.dtype, mx.floating):
        return weight.astype(mx.float32) if mx.issubdtype(weight.dtype, mx.floating) else weight
    return mx.random.normal(weight.shape) * _SCALE
