"""Loads a Hugging Face model for the torch backend, or explains why the backend cannot run it.

Chooses number format and thread count; measures where possible.
"""

import json
import math
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import structlog
import torch
from torch.nn import functional

from semantic.adapters.outbound.backends.mtp.names import find_head
from semantic.adapters.outbound.backends.mtp.torch_head import TorchHead
from semantic.adapters.outbound.backends.torch import cpu
from semantic.adapters.outbound.backends.torch.decoding import Decoder, can_decode
from semantic.adapters.outbound.backends.torch.experts import separate_experts
from semantic.adapters.outbound.backends.torch.forward import (
    LIBRARY_ERRORS,
    Forward,
    PackedForward,
    UnsupportedModelError,
    bypass_hooks,
    choose_forward,
    run_one_token,
)
from semantic.adapters.outbound.backends.torch.grouped import quantise_linears
from semantic.adapters.outbound.backends.torch.kv.geometry import (
    StateArray,
    UnknownCacheError,
    context_limits,
)
from semantic.adapters.outbound.backends.torch.native.library import Library
from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild
from semantic.adapters.outbound.backends.torch.plain import PlainModel, read_plain
from semantic.adapters.outbound.backends.torch.reading import (
    is_grouped,
    load_grouped,
    read_full,
    read_head,
    read_tensors,
)
from semantic.adapters.outbound.backends.torch.shares import Share, load_share
from semantic.adapters.outbound.backends.torch.vision.halves import (
    ReadingOptions,
    SeeingModel,
    read_seeing_model,
)
from semantic.adapters.outbound.backends.torch.vision.tower import VisionTower
from semantic.adapters.outbound.vision.processors import read_vision_settings
from semantic.domain.errors import InvalidRequestError
from semantic.domain.spec import Compute, ComputeHint, ModelCacheSpec

DType = Literal["auto", "float32", "bfloat16", "float16"]
Weights = Literal["full", "int8", "int4"]
WeightsOption = Literal["auto"] | Weights

_FAR_SLOWER = 4  # a format slower by this factor is not measured further
_MUCH_SLOWER = 2  # a format slower by this factor is not chosen, even if stored KV cache has it

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """How to run a model.

    Attributes:
        dtype: Of weights and KV cache; auto selects the fastest on this CPU.
        weights: auto keeps weights grouped if the file has them in groups of integers, the native
            library is there and no dtype is requested; full expands them. int8 and int4 make a
            model faster and less exact; they need float32 and the native library.
        num_threads: 0 means OMP_NUM_THREADS, or all cores that the process may use.
        share: Which part of the model this process holds; None means all of it.
        native: The library of linears and decode steps, for float32; None disables it.
        hint: What earlier starts chose and stored, for dtype auto.
        has_head: Load the model's head for draft tokens too, if it has one.
    """

    dtype: DType = "auto"
    weights: WeightsOption = "auto"
    num_threads: int = 0
    share: Share | None = None
    native: NativeBuild | None = None
    hint: ComputeHint = field(default_factory=ComputeHint)
    has_head: bool = False


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """The choices for a model.

    Attributes:
        is_kept: Weights stay grouped as in the file.
        weights: Format that ungrouped weights are quantised to.
        slow: Why it runs without the C library; empty if it has it.
    """

    dtype: torch.dtype
    is_kept: bool
    weights: Weights
    reason: str
    share: Share | None = None
    library: Library | None = None
    slow: str = ""
    has_head: bool = False

    @property
    def number_format(self) -> str:
        """Identifies the number format: KV cache of one format is never used with another."""
        name, weights = str(self.dtype).removeprefix("torch."), self.weights
        if self.is_kept:
            return f"{name}.grouped"
        return name if weights == "full" else f"{name}.{weights}"

    @property
    def is_packable(self) -> bool:
        is_fit = self.dtype == torch.bfloat16 and cpu.has_bfloat16()
        return is_fit and self.share is None


def make_plan(directory: Path, options: TorchOptions) -> TorchPlan:
    """Choose number format, weights and kernels for a model.

    Raises:
        InvalidRequestError: this machine does not support the options.
    """
    if options.share is not None:
        return _plan_of_share(directory, options)
    native = options.native
    library = native.library() if native else None
    weights: Weights = "full" if options.weights == "auto" else options.weights
    is_keepable = options.weights == options.dtype == "auto" and _is_grouped(directory)
    is_quantised = is_keepable or weights != "full"
    if library is not None and is_quantised and options.dtype == "auto":
        reason = "the native kernels for quantised weights use it"
        plan = TorchPlan(torch.float32, is_keepable, weights, reason, library=library)
        return replace(plan, has_head=options.has_head)
    dtype, reason = choose_dtype(options.dtype, options.hint)
    plan = TorchPlan(dtype, False, weights, reason, has_head=options.has_head)
    if dtype == torch.float32 and native is not None:
        plan = replace(plan, library=library, slow=native.reason)
    if weights != "full" and plan.library is None:
        why = f" ({native.reason})" if native is not None and native.reason else ""
        raise InvalidRequestError(
            f"weights {weights} require float32 (omit --dtype) and the native library{why}",
            param="weights",
        )
    return plan


def _plan_of_share(directory: Path, options: TorchOptions) -> TorchPlan:
    if options.weights not in ("auto", "full") or _is_grouped(directory):
        raise InvalidRequestError(
            "the torch backend shards unquantised models only; use the original model, without "
            "--weights int8 or int4",
            param="shards",
        )
    dtype, reason = choose_dtype(options.dtype, options.hint)
    return TorchPlan(dtype, False, "full", reason, options.share)


def _is_grouped(directory: Path) -> bool:
    return is_grouped(_config(directory))


def _config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
    return config


def choose_dtype(dtype: DType, hint: ComputeHint | None = None) -> tuple[torch.dtype, str]:
    """Resolve the number format; also returns the reason.

    auto keeps the choice of an earlier start. Without one, it measures, and prefers the
    format of the stored KV cache.
    """
    if dtype != "auto":
        return getattr(torch, dtype), "requested"
    hint, formats = hint or ComputeHint(), {"bfloat16": torch.bfloat16, "float32": torch.float32}
    known = hint.known
    if known is not None and known.device == "cpu" and known.dtype in formats:
        return formats[known.dtype], known.reason
    seconds = _measure(tuple(formats.values()))
    by_name = {name: seconds[found] for name, found in formats.items()}
    name, reason = pick_dtype(by_name, hint.stored_dtypes)
    return formats[name], reason


def pick_dtype(seconds: Mapping[str, float], stored_dtypes: Sequence[str]) -> tuple[str, str]:
    """Pick the fastest number format, or that of the stored KV cache unless it is much slower.

    Args:
        seconds: Time that the same work takes in each format.
        stored_dtypes: Formats of the stored KV cache, the preferred one first.

    Returns:
        The format's name, and the reason.
    """
    fastest = min(seconds, key=seconds.__getitem__)
    near = [dtype for dtype in seconds if seconds[dtype] < _MUCH_SLOWER * seconds[fastest]]
    chosen = next((dtype for dtype in stored_dtypes if dtype in near), fastest)
    ratios = [
        f"{seconds[dtype] / seconds[chosen]:.1f} times as fast as {dtype}"
        for dtype in seconds
        if dtype != chosen
    ]
    measured = f"measured {' and '.join(ratios)}"
    return (
        chosen,
        measured if chosen == fastest else f"the stored KV cache has this format; {measured}",
    )


def choose_threads(num_threads: int) -> int:
    """Resolve the thread count: OMP_NUM_THREADS, or all cores of the process.

    Two threads decode 1.5 times as fast as one, and idle ones sleep, so they do not slow down the
    HTTP side.
    """
    if num_threads:
        return num_threads
    if (asked := os.environ.get("OMP_NUM_THREADS", "")).isdigit() and int(asked):
        return int(asked)
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe(plan: TorchPlan) -> Compute:
    """Describe how a model loaded by this plan is computed."""
    weights = plan.weights
    kernels = "oneDNN with packed weights" if plan.is_packable else "PyTorch"
    if plan.library is not None:
        kernels = f"native, {plan.library.variant}"
    if plan.is_kept:
        kernels = f"{kernels}, weights quantised as in the file"
    elif weights != "full":
        kernels = f"{kernels}, {weights}"
    num_threads = torch.get_num_threads()
    dtype = str(plan.dtype).removeprefix("torch.")
    slow = f"without native kernels decoding is several times slower: {plan.slow}"
    return Compute("cpu", dtype, num_threads, kernels, plan.reason, slow if plan.slow else "")


@dataclass(frozen=True, slots=True)
class TorchModel:
    """A loaded model.

    Attributes:
        spec: The geometry of its KV cache, as the library keeps it.
        states: Its recurrent arrays.
        decoder: Runs steps in the C library, if that can run the model.
        tower: Computes features of images, if the model takes them.
        head: Drafts tokens, if the model has one and it was asked for.
    """

    model: Any
    spec: ModelCacheSpec
    forward: Forward
    states: tuple[StateArray, ...] = ()
    decoder: Decoder | None = None
    tower: VisionTower | None = None
    head: TorchHead | None = None


def load_model(directory: Path, spec: ModelCacheSpec, plan: TorchPlan) -> TorchModel:
    """Load a model, and choose how its steps run.

    Args:
        spec: As far as the config tells it.

    Raises:
        InvalidRequestError: this backend cannot run the model.
    """
    if plan.dtype == torch.bfloat16 and not cpu.has_bfloat16():
        # PyTorch would print its C++ stack once, and use another kernel.
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    seeing = _read_seeing(directory, spec, plan)
    model = seeing.model if seeing else _read_plain(directory, spec, plan)
    is_plain, head = isinstance(model, PlainModel), None
    if model is None:
        model, head = _read_by_library(directory, spec, plan)
    model.eval()
    is_decodable = _prepare_for_cpu(model, plan)
    if is_plain:
        spec = seeing.spec if seeing else spec
        loaded = TorchModel(model, spec, PackedForward(model))
    else:
        loaded = _with_forward(model, spec, plan)
    if head is not None:
        if plan.library is not None:
            cpu.pack_grouped(head, plan.library)
        loaded.forward.keeps_hidden = True
        loaded = replace(loaded, head=head)
    if isinstance(loaded.forward, PackedForward):
        loaded = replace(loaded, tower=seeing.tower if seeing else None)
        if plan.dtype == torch.bfloat16:
            _improve_bfloat16(loaded, plan)
        bypass_hooks(model)
        if is_decodable and plan.library is not None:
            return replace(loaded, decoder=Decoder(model, loaded.spec, plan.library))
    return loaded


def _improve_bfloat16(loaded: TorchModel, plan: TorchPlan) -> None:
    """Replace modules by more exact and faster ones, whose results depend on the number of rows."""
    cpu.reduce_rounding(loaded.model)
    if plan.is_packable:
        cpu.speed_up(loaded.model)
    try:
        run_one_token(loaded.forward, loaded.spec.layers, plan.dtype)
    except LIBRARY_ERRORS as error:
        _log.warning("the model fails with faster modules", exc_info=True)
        raise InvalidRequestError(
            f"the torch backend cannot run {loaded.spec.model_type} in bfloat16 on a CPU: its code "
            "needs the original modules. Use --dtype float32.",
            param="dtype",
        ) from error


def _with_forward(model: Any, spec: ModelCacheSpec, plan: TorchPlan) -> TorchModel:
    try:
        chosen = choose_forward(model, plan.dtype)
    except (UnsupportedModelError, UnknownCacheError) as error:
        raise refusal(spec, str(error)) from error
    except LIBRARY_ERRORS as error:
        _log.warning("transformers fails to run the model", exc_info=True)
        reason = f"transformers fails to run it ({type(error).__name__}; the log has the details)"
        raise refusal(spec, reason) from error
    if plan.share is not None and not isinstance(chosen.forward, PackedForward):
        raise InvalidRequestError(
            f"{spec.model_type} cannot be split into shards: it runs each sequence alone. "
            "Run it without shards.",
            param="shards",
        )
    spec = spec.completed(chosen.geometry.layers, chosen.vocab_size)
    is_packed = isinstance(chosen.forward, PackedForward)
    config = model.config.get_text_config()
    for limit, reason in context_limits(config, chosen.geometry, is_packed=is_packed):
        if limit < spec.max_context:
            _log.warning("context limited", num_tokens=limit, reason=reason)
            spec = replace(spec, max_context=limit)
    return TorchModel(model, spec, chosen.forward, chosen.geometry.states)


def _read_seeing(directory: Path, spec: ModelCacheSpec, plan: TorchPlan) -> SeeingModel | None:
    settings = read_vision_settings(directory, _config(directory))
    if settings is None or plan.share is not None:
        return None
    is_plain = plan.library is not None
    options = ReadingOptions(plan.dtype, plan.is_kept, is_plain)
    try:
        return read_seeing_model(directory, spec, settings, options)
    except (OSError, *LIBRARY_ERRORS) as error:
        raise _load_failure(spec, error) from error


def _load_failure(spec: ModelCacheSpec, error: Exception) -> InvalidRequestError:
    _log.warning("transformers fails to load the model", exc_info=True)
    reason = f"transformers fails to load it ({type(error).__name__}; the log has the details)"
    return refusal(spec, reason)


def _read_plain(directory: Path, spec: ModelCacheSpec, plan: TorchPlan) -> Any:
    if plan.library is None or not spec.is_known:
        return None
    tensors = dict(read_tensors(directory))
    return read_plain(_config(directory), spec, tensors, plan.dtype, is_kept=plan.is_kept)


def _read_by_library(
    directory: Path, spec: ModelCacheSpec, plan: TorchPlan
) -> tuple[Any, TorchHead | None]:
    from transformers import CONFIG_MAPPING
    from transformers.utils.logging import disable_progress_bar

    model_type = _config(directory).get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise InvalidRequestError(
            f"the torch backend cannot run {directory.name}: the installed transformers does not "
            f"support model_type {model_type!r}. Use another model, --backend mlx, or a newer "
            "version of transformers.",
            param="model",
        )
    if not sys.stderr.isatty():
        disable_progress_bar()
    try:
        if plan.share is not None:
            return load_share(directory, plan.dtype, plan.share), None
        names, dtype = find_head(directory, _config(directory), "torch"), plan.dtype
        if _is_grouped(directory):
            model = load_grouped(directory, dtype, is_kept=plan.is_kept, names=names)
        else:
            model = read_full(directory, dtype)
    except (OSError, *LIBRARY_ERRORS) as error:
        raise _load_failure(spec, error) from error
    if names is None or not plan.has_head:
        return model, None
    try:
        return model, read_head(model, directory, names, dtype, is_kept=plan.is_kept)
    except (OSError, InvalidRequestError, *LIBRARY_ERRORS):
        _log.warning("failed to read the MTP head; serving without it", exc_info=True)
        return model, None


def _prepare_for_cpu(model: Any, plan: TorchPlan) -> bool:
    """Use the C library's linears; returns whether it can run whole steps."""
    if plan.library is None:
        return False
    separate_experts(model)
    if plan.weights != "full":
        quantise_linears(model, bits=4 if plan.weights == "int4" else 8)
    is_decodable = can_decode(model)
    cpu.pack_grouped(model, plan.library, is_merged=not is_decodable)
    return is_decodable


def refusal(spec: ModelCacheSpec, reason: str) -> InvalidRequestError:
    """Build the error for a model that this backend cannot run."""
    return InvalidRequestError(
        f"the torch backend cannot run {spec.model_type}: {reason}. Use --backend mlx or another "
        "model.",
        param="model",
    )


def _measure(dtypes: Sequence[torch.dtype]) -> dict[torch.dtype, float]:
    """Measure the same work in each format, in seconds.

    Alternates the formats on one thread and takes the best times, so that other load affects all
    equally. A CPU that lacks a format emulates it, up to two hundred times slower and with a
    warning; two quick tries are enough to detect that.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            best = _best_seconds(dtypes, num_rows=1, num_rounds=2)
            close = [dtype for dtype in dtypes if best[dtype] < _FAR_SLOWER * min(best.values())]
            if len(close) > 1:
                few = _best_seconds(close, num_rows=1, num_rounds=10)
                many = _best_seconds(close, num_rows=64, num_rounds=10)
                best |= {dtype: few[dtype] + many[dtype] for dtype in close}
    finally:
        torch.set_num_threads(num_threads)
    return best


def _best_seconds(
    dtypes: Sequence[torch.dtype], num_rows: int, num_rounds: int
) -> dict[torch.dtype, float]:
    """Time a multiplication in each format: one row as in decoding, many as in prefill."""
    weights = {dtype: torch.ones(2048, 1024, dtype=dtype) for dtype in dtypes}
    best = dict.fromkeys(dtypes, math.inf)
    for _ in range(num_rounds):
        for dtype, weight in weights.items():
            rows = torch.ones(num_rows, 1024, dtype=dtype)
            started = time.perf_counter()
            functional.linear(rows, weight)
            best[dtype] = min(best[dtype], time.perf_counter() - started)
    return best
