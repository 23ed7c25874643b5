"""Loads a model with mlx-lm for the MLX backend, or explains why the backend cannot run it.

Translates newer config formats for mlx-lm, and makes sure that the library's caches match the
model's KV cache geometry.
"""

import contextlib
import functools
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.caches import leaves, library
from semantic.adapters.outbound.backends.mlx.cuda import device as cuda
from semantic.adapters.outbound.backends.mlx.cuda import kernels, prompts, tuning
from semantic.adapters.outbound.backends.mlx.cuda.transfer import Transfer
from semantic.adapters.outbound.backends.mlx.cuda.weights import WeightReader
from semantic.adapters.outbound.backends.mlx.device_limits import (
    DeviceRoom,
    device_room,
    has_lost_device,
    is_out_of_memory,
    limit_while_loading,
)
from semantic.adapters.outbound.backends.mlx.runtime import import_library
from semantic.adapters.outbound.backends.mlx.vision.loading import (
    library_options,
    prepare_language_model,
    read_tower,
)
from semantic.adapters.outbound.backends.mlx.vision.tower import LanguageInputs, MlxTower
from semantic.adapters.outbound.backends.mtp.mlx_head import HeadWeights, MlxHead
from semantic.adapters.outbound.backends.mtp.names import find_head
from semantic.adapters.outbound.backends.pinned import PinnedMemory, shared_memory
from semantic.adapters.outbound.vision.processors import read_vision_settings
from semantic.domain.errors import InvalidRequestError
from semantic.domain.spec import Compute, LayerKind, ModelCacheSpec

_LOG = logging.getLogger(__name__)

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]

# What mlx-lm raises if it cannot build a model from a config, read its weights, or run it. The file
# of a type exits if a package that it needs is missing.
LIBRARY_ERRORS = (Exception, SystemExit)
_CRASHES_ON_CPU = ("phi3small",)  # MLX's block-sparse product ends the process there
_EXPERTS = 8  # that a token passes, usually
SMALLER = "Use a smaller model, or one with fewer bits."
_ADVICE = "Use --backend torch, another version of mlx-lm, or another model."


@dataclass(frozen=True, slots=True)
class MlxOptions:
    """How to run a model.

    Attributes:
        dtype: Of weights that are not quantised, and of the KV cache; auto keeps the model's
            own on a GPU and selects float32 on a CPU, where other formats are slow.
        device: auto selects the GPU if there is one.
        weights: auto keeps quantised weights on a GPU; on a CPU, where their kernels are slow, and
            with full they are expanded.
        pinned_bytes: On CUDA, size of the pinned host memory for copies of weights and KV cache;
            0 disables it.
        device_bytes: Limit of the device's memory; 0 is all of a GPU's, and no limit on a CPU.
        kv_bytes: Limit of the KV cache by the settings; 0 is none.
        group: The distributed group of processes that share the model; None loads all of it here.
        has_head: Load the model's head for draft tokens too, if it has one.
    """

    dtype: DType = "auto"
    device: Device = "auto"
    weights: Literal["auto", "full"] = "auto"
    pinned_bytes: int = 0
    device_bytes: int = 0
    kv_bytes: int = 0
    group: Any = None
    has_head: bool = False


@dataclass(frozen=True, slots=True)
class MlxModel:
    """A loaded model, its KV cache geometry, a factory of its caches, and why its dtype.

    Attributes:
        is_expanded: Its weights were quantised in the file and have been expanded.
        memory: Pinned host memory for its KV cache, if any.
        tower: Computes features of images, if the model takes them; `inputs` gives it these.
        room: What there was for it on the device.
        kv_bytes: See `MlxOptions`.
        head: Drafts tokens, if the model has one and it was asked for.
        slow: Why it runs slower than it could; empty if it does not.
    """

    model: Any
    spec: ModelCacheSpec
    make_caches: Callable[[], list[Any]]
    reason: str = ""
    is_expanded: bool = False
    memory: PinnedMemory | None = None
    tower: MlxTower | None = None
    inputs: LanguageInputs | None = None
    room: DeviceRoom = field(default_factory=functools.partial(device_room, 0))
    kv_bytes: int = 0
    head: MlxHead | None = None
    slow: str = ""

    @property
    def num_bytes(self) -> int:
        """Size of the weights."""
        return sum(_sizes_by_dtype(self.model).values())


def choose_device(device: Device) -> None:
    """Set MLX's default device.

    Raises:
        InvalidRequestError: CUDA is requested but not available.
    """
    has_cuda = mx.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise InvalidRequestError(
            "device cuda: MLX finds no CUDA device on this machine", param="device"
        )
    has_gpu = has_cuda or mx.metal.is_available()
    mx.set_default_device(mx.gpu if has_gpu and device != "cpu" else mx.cpu)


def load(directory: Path, spec: ModelCacheSpec, options: MlxOptions) -> MlxModel:
    """Load a model's weights on this thread.

    Raises:
        InvalidRequestError: this backend cannot run the model.
    """
    choose_device(options.device)
    config = json.loads((directory / "config.json").read_text("utf-8"))
    utils = import_library("mlx_lm.utils")
    if config.get("model_type") in _CRASHES_ON_CPU and _is_on_cpu():
        raise refusal(spec, "MLX cannot compute its sparse attention on a CPU")
    try:
        room = device_room(options.device_bytes)
        limit_while_loading(room)
        is_pinning = options.pinned_bytes and cuda.is_in_use() and kernels.can_compile()
        memory = shared_memory(options.pinned_bytes) if is_pinning else None
        names = find_head(directory, config, "mlx")
        weights = None if names is None else HeadWeights(names)
        ways = (
            library_options(config) if weights is None else {"get_model_classes": weights.classes}
        )
        with _fast_reading(memory):
            overrides = config_overrides(config, spec)
            model, _ = utils.load_model(directory, lazy=True, model_config=overrides, **ways)
        if weights is not None and options.has_head and options.group is None:
            _add_head(model, weights)
        is_expanded = "quantization" in config and _is_expanded(options.weights)
        if is_expanded:
            if options.dtype == "float32" or _is_on_cpu():
                model.set_dtype(mx.float32)  # expanded weights get the format of the scales
            model = utils.dequantize_model(model)
        if options.group is not None:
            if not hasattr(model, "shard"):
                raise refusal(spec, "mlx-lm cannot split it into shards")
            model.shard(options.group)  # keeps only this process's share; no weights are read yet
        reason = _convert(model, options.dtype)
        mx.async_eval(model.parameters())
        seeing = _read_tower(directory, config, model) if options.group is None else None
        slow = tuning.tune(model, room.total)
        mx.eval(model.parameters())
        model.eval()
        layer = next((layer for layer in spec.layers if layer.kind is LayerKind.FULL), None)
        if layer is not None and cuda.is_in_use():
            # Now, as joined weights would be put between the arrays of these plans.
            prompts.plan(model, layer.num_kv_heads, layer.key_dim, spec.max_context)
        spec, make_caches = _agree(model, spec)
    except InvalidRequestError:
        raise
    except LIBRARY_ERRORS as error:
        raise library_refusal(spec, error, config.get("model_type")) from error
    tower, inputs = seeing or (None, None)
    limits = room, options.kv_bytes
    head = MlxHead(model, model.mtp) if "mtp" in model else None
    return MlxModel(
        model, spec, make_caches, reason, is_expanded, memory, tower, inputs, *limits, head, slow
    )


def _add_head(model: Any, weights: HeadWeights) -> None:
    try:
        model.mtp = weights.build(model)
    except (ValueError, KeyError, TypeError, AttributeError):
        _LOG.warning("failed to read the MTP head; serving without it", exc_info=True)


def _read_tower(
    directory: Path, config: Mapping[str, Any], model: Any
) -> tuple[MlxTower, LanguageInputs] | None:
    settings = read_vision_settings(directory, config)
    if settings is None:
        return None
    sizes = _sizes_by_dtype(model)
    floats = [dtype for dtype in sizes if mx.issubdtype(dtype, mx.floating)]
    tower = read_tower(directory, config, settings, max(floats, key=lambda dtype: sizes[dtype]))
    return tower, prepare_language_model(model, config, tower)


def _fast_reading(memory: PinnedMemory | None) -> contextlib.AbstractContextManager[None]:
    if memory is None:
        return contextlib.nullcontext()
    return WeightReader(memory, Transfer(memory)).in_use()


def refusal(spec: ModelCacheSpec, reason: str, advice: str = _ADVICE) -> InvalidRequestError:
    """Build the error for a model that this backend cannot run."""
    return InvalidRequestError(
        f"the mlx backend cannot run {spec.model_type}: {reason}. {advice}", param="model"
    )


def library_refusal(
    spec: ModelCacheSpec, error: BaseException, model_type: object = None
) -> InvalidRequestError:
    """Build that error from what mlx-lm raised, whose own words go to the log."""
    text = str(error)
    _LOG.warning("mlx-lm on %s: %s: %s", spec.model_type, type(error).__name__, text)
    if has_lost_device(error) or is_out_of_memory(error):
        return device_refusal(spec, error)
    if "No Metal back-end" in text:
        return refusal(spec, "mlx-lm computes it with Metal, which only Apple's GPUs have")
    if isinstance(error, SystemExit):
        return refusal(spec, "mlx-lm needs a package for it that is not installed")
    if text.startswith("Model type "):
        return refusal(spec, f"the installed mlx-lm does not support model_type {model_type!r}")
    if missing := re.search(r"missing \d+ required positional arguments?: (.*)", text):
        names = ", ".join(re.findall(r"'(\w+)'", missing[1]))
        return refusal(spec, f"its config.json lacks {names}")
    if re.match(r"(Missing|Received) \d+ parameters", text) or "shape" in text.lower():
        return refusal(spec, "its weights do not match its config.json")
    if isinstance(error, OSError):
        return refusal(spec, "its weights cannot be read")
    return refusal(spec, "mlx-lm cannot build or run it; the log has the details")


def device_refusal(spec: ModelCacheSpec, error: BaseException) -> InvalidRequestError:
    """Build that error for a device that has failed or is full."""
    if has_lost_device(error):
        return refusal(spec, "the GPU has failed", "Restart the server.")
    return refusal(spec, "the device has too little free memory for it", SMALLER)


def config_overrides(config: Mapping[str, Any], spec: ModelCacheSpec) -> dict[str, Any]:
    """Return config values that mlx-lm needs and that transformers 5 nests or omits."""
    if isinstance(inner := config.get("text_config"), Mapping):
        outer = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
        text = {**outer, **inner, **config_overrides(inner, spec)}
        # mlx-lm's Gemma 3 takes the size of the vocabulary from the outer config.
        size = {"vocab_size": text["vocab_size"]} if "vocab_size" in text else {}
        return {**size, "text_config": text}
    overrides = _rope(config.get("rope_parameters") or {})
    kinds = [layer.kind for layer in spec.layers]
    if {LayerKind.WINDOW, LayerKind.FULL} <= set(kinds):
        overrides["sliding_window_pattern"] = kinds.index(LayerKind.FULL) + 1
    return {name: value for name, value in overrides.items() if config.get(name) is None}


def _rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    full = parameters.get("full_attention", parameters)
    sliding = parameters.get("sliding_attention", {})
    values = {
        "rope_theta": full.get("rope_theta"),
        "rope_local_base_freq": sliding.get("rope_theta"),
        "partial_rotary_factor": full.get("partial_rotary_factor"),
        "rope_scaling": None if full.get("rope_type", "default") == "default" else dict(full),
    }
    return {name: value for name, value in values.items() if value is not None}


def describe(dtype: str, reason: str, slow: str = "") -> Compute:
    """Describe how a loaded model is computed."""
    if _is_on_cpu():
        threads = os.environ.get("OPENBLAS_NUM_THREADS", "")
        num_threads = int(threads) if threads.isdigit() else os.cpu_count() or 1
        return Compute("cpu", dtype, num_threads, "MLX", reason, slow)
    device = "cuda" if cuda.is_in_use() else "metal"
    kernels = "MLX and custom" if cuda.is_available() else "MLX"
    return Compute(device, dtype, 0, kernels, reason, slow)


def _convert(model: Any, dtype: DType) -> str:
    """Convert weights that are not quantised to one number format; returns the reason."""
    if dtype != "auto":
        model.set_dtype(getattr(mx, dtype))
        return "requested"
    if _is_on_cpu():
        model.set_dtype(mx.float32)
        return "other formats are slow in MLX on a CPU"
    sizes = _sizes_by_dtype(model)
    if max(sizes, key=lambda dtype: sizes[dtype]) == mx.float32:
        model.set_dtype(mx.bfloat16)
        return "the model's float32 is wider than needed on a GPU"
    if {mx.float16, mx.bfloat16} <= sizes.keys():  # as in imports of GGUF files
        model.set_dtype(mx.bfloat16)
        return "the model's mix of float16 and bfloat16 would be computed in float32"
    return "the model's own"


def _is_on_cpu() -> bool:
    return bool(mx.default_device() == mx.Device(mx.cpu))


def _is_expanded(weights: Literal["auto", "full"]) -> bool:
    return weights == "full" or _is_on_cpu()


def _sizes_by_dtype(model: Any) -> dict[Any, int]:
    flatten = import_library("mlx.utils").tree_flatten
    sizes: dict[Any, int] = {}
    for _, weight in flatten(model.parameters()):
        sizes[weight.dtype] = sizes.get(weight.dtype, 0) + weight.nbytes
    return sizes


def outputs_of_layer(model: Any, spec: ModelCacheSpec) -> int:
    """Estimate the bytes that the matrices of a layer return for a token, in 16 bits."""
    flatten = import_library("mlx.utils").tree_flatten
    weights = [array for name, array in flatten(model.parameters()) if name.endswith("weight")]
    rows = sum(w.shape[0] for w in weights if w.ndim == 2)
    rows += sum(w.shape[1] * _EXPERTS for w in weights if w.ndim == 3)
    return int(2 * rows) // max(1, len(spec.layers))


def _applies_windows(model: Any) -> bool:
    """Whether the model asks its caches for masks with a window."""
    asked: list[int | None] = []

    class Spy(library.KVCache):  # type: ignore[misc]
        def make_mask(self, *args: Any, **kwargs: Any) -> Any:
            asked.append(kwargs.get("window_size"))
            return super().make_mask(*args, **kwargs)

    model(mx.zeros((1, 2), mx.int32), cache=[Spy() for _ in library.make_prompt_cache(model)])
    return any(asked)


def _agree(model: Any, spec: ModelCacheSpec) -> tuple[ModelCacheSpec, Callable[[], list[Any]]]:
    """Follow the config where it sets sliding windows that mlx-lm ignores, as transformers does.

    With a window in every layer, rotating caches implement it. If only some layers have one,
    replies are those of transformers up to the shortest window, and contexts are limited to that.
    """

    def make_caches() -> list[Any]:
        return list(library.make_prompt_cache(model))

    windows = [layer.window for layer in spec.layers]
    kinds = [type(leaf) for leaf in leaves(make_caches())]
    if not any(windows) or kinds != [library.KVCache] * len(windows) or _applies_windows(model):
        return spec, make_caches
    if all(windows):
        return spec, lambda: [library.RotatingKVCache(window) for window in windows]
    max_context = min(spec.max_context, *(window for window in windows if window))
    _LOG.warning(
        "mlx-lm ignores the sliding windows of %s; limiting contexts to %d tokens, "
        "up to which replies are the same",
        spec.model_type,
        max_context,
    )
    layers = tuple(replace(layer, kind=LayerKind.FULL, window=0) for layer in spec.layers)
    return replace(spec, layers=layers, max_context=max_context), make_caches
