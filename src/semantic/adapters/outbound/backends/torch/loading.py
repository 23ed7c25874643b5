"""Loads a Hugging Face model for the torch backend, or says why it cannot be run.

Device, number format and thread count are chosen here: by measurement where that is possible.
"""

import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from semantic.adapters.outbound.backends.torch import cpu
from semantic.adapters.outbound.backends.torch.attention import ATTENTION_NAME, packed_attention
from semantic.adapters.outbound.backends.torch.cpu import Weights
from semantic.adapters.outbound.backends.torch.decoding import Decoder, is_plain
from semantic.adapters.outbound.backends.torch.grouped import (
    has_kleidi,
    is_grouped,
    load_grouped,
    quantise_linears,
    read_tensors,
)
from semantic.adapters.outbound.backends.torch.native import Library, NativeBuild
from semantic.adapters.outbound.backends.torch.plain import read_plain
from semantic.adapters.outbound.backends.torch.shares import Share, load_share
from semantic.domain.errors import InvalidRequestError
from semantic.domain.spec import Compute, LayerKind, ModelCacheSpec

DType = Literal["auto", "float32", "bfloat16", "float16"]
WeightsOption = Literal["auto"] | Weights
Device = Literal["auto", "cpu", "cuda"]

_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_FAR_SLOWER = 4  # a format that takes so many times as long is not measured further


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """How a model is run.

    Attributes:
        dtype: Of weights and attention state; auto takes the faster one on this device.
        device: auto takes CUDA where there is one.
        weights: auto keeps weights that a file has in groups of 4 or 8 bits, on a CPU with kernels
            for them and unless a dtype is asked for; full expands them. Fewer bits make few rows
            faster and less exact; a CPU in bfloat16 or with ARM's kernels only.
        num_threads: 0 takes OMP_NUM_THREADS, or as many as the process may use.
        share: Which part of the model this process holds; None is all of it.
        native: The library of decode steps, where one is wanted; an ARM CPU in float32 only.
        pinned_bytes: On CUDA, state travels through so much pinned host memory; 0 is none.
    """

    dtype: DType = "auto"
    device: Device = "auto"
    weights: WeightsOption = "auto"
    num_threads: int = 0
    share: Share | None = None
    native: NativeBuild | None = None
    pinned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What was chosen for a model.

    Attributes:
        is_kept: The weights stay in groups as the file has them.
        weights: What weights that are not in groups are quantised to.
        reason: Why this dtype.
        share: Which part of the model is held; None is all of it.
        library: Of decode steps.
    """

    device: torch.device
    dtype: torch.dtype
    is_kept: bool
    weights: Weights
    reason: str
    share: Share | None = None
    library: Library | None = None

    @property
    def number_format(self) -> str:
        """Names how numbers are kept: state of one format is never used with another."""
        name, weights = str(self.dtype).removeprefix("torch."), self.weights
        if self.is_kept:
            return f"{name}.grouped"
        return name if weights == "full" else f"{name}.{weights}"

    @property
    def is_packable(self) -> bool:
        """Whether linears are packed for bfloat16."""
        is_fit = self.device.type == "cpu" and self.dtype == torch.bfloat16 and cpu.has_bfloat16()
        return is_fit and self.share is None

    @property
    def has_arm_kernels(self) -> bool:
        """Whether linears may be those of ARM's kernels."""
        return self.device.type == "cpu" and self.dtype == torch.float32 and has_kleidi()


def make_plan(directory: Path, options: TorchOptions) -> Plan:
    """Choose device, number format, weights and kernels for a model.

    Raises:
        InvalidRequestError: this machine has not what is asked for.
    """
    plan = _make_plan(directory, options)
    is_whole = plan.device.type == "cpu" and plan.share is None
    is_native = is_whole and plan.dtype == torch.float32
    library = options.native.library() if is_native and options.native else None
    return replace(plan, library=library)


def _make_plan(directory: Path, options: TorchOptions) -> Plan:
    device = choose_device(options.device)
    if options.share is not None:
        return _plan_of_share(directory, options, device)
    weights: Weights = "full" if options.weights == "auto" else options.weights
    is_keepable = options.weights == options.dtype == "auto" and _is_grouped(directory)
    if is_keepable and device.type == "cpu" and has_kleidi():
        reason = "this CPU's kernels for quantised weights take it"
        return Plan(device, torch.float32, True, weights, reason)
    dtype, reason = choose_dtype(options.dtype, device)
    plan = Plan(device, dtype, False, weights, reason)
    if weights != "full" and not plan.is_packable and not plan.has_arm_kernels:
        raise InvalidRequestError(
            f"weights {weights} need a CPU that computes in bfloat16 (--dtype bfloat16), "
            "or an ARM CPU in float32",
            param="weights",
        )
    return replace(plan, is_kept=is_keepable and plan.is_packable)


def _plan_of_share(directory: Path, options: TorchOptions, device: torch.device) -> Plan:
    if options.weights not in ("auto", "full") or _is_grouped(directory):
        raise InvalidRequestError(
            "the torch backend shards models whose weights are in full only; "
            "take the model as its makers published it, without --weights int8 or int4",
            param="shards",
        )
    dtype, reason = choose_dtype(options.dtype, device)
    return Plan(device, dtype, False, "full", reason, options.share)


def _is_grouped(directory: Path) -> bool:
    return is_grouped(_config(directory))


def _config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
    return config


def choose_device(device: Device) -> torch.device:
    """Resolve the device.

    Raises:
        InvalidRequestError: CUDA is asked for and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise InvalidRequestError("device cuda: PyTorch finds no CUDA device here", param="device")
    return torch.device("cuda" if has_cuda and device != "cpu" else "cpu")


def choose_dtype(dtype: DType, device: torch.device) -> tuple[torch.dtype, str]:
    """Resolve the number format, and say why it was chosen."""
    if dtype != "auto":
        return getattr(torch, dtype), "it was asked for"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported():
            return torch.bfloat16, "this GPU computes in it"
        return torch.float16, "this GPU has no bfloat16"
    return _fastest_dtype(torch.bfloat16, torch.float32)


def choose_threads(num_threads: int) -> int:
    """Resolve the thread count.

    What OMP_NUM_THREADS says, or all of the process's cores: two threads decode 1.5 times as fast
    as one, and since idle ones sleep they cost the HTTP side nothing.
    """
    if num_threads:
        return num_threads
    if (asked := os.environ.get("OMP_NUM_THREADS", "")).isdigit() and int(asked):
        return int(asked)
    if hasattr(os, "sched_getaffinity"):  # macOS has not
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe(plan: Plan) -> Compute:
    """Say how a model that was loaded so is computed."""
    device, weights = plan.device.type, plan.weights
    kernels = "oneDNN with packed weights" if plan.is_packable else "PyTorch"
    if plan.library is not None:
        kernels = "our own"
    elif plan.has_arm_kernels and (plan.is_kept or weights != "full"):
        kernels = "KleidiAI"
    if plan.is_kept:
        kernels = f"{kernels}, weights quantised as in the file"
    elif weights != "full":
        kernels = f"{kernels}, {weights}{'' if plan.has_arm_kernels else ' for few rows'}"
    num_threads = torch.get_num_threads() if device == "cpu" else 0
    dtype = str(plan.dtype).removeprefix("torch.")
    return Compute(device, dtype, num_threads, kernels, plan.reason)


def load_model(directory: Path, spec: ModelCacheSpec, plan: Plan) -> tuple[Any, Decoder | None]:
    """Load a model with our attention in it, and what runs it in one call where it can be.

    Raises:
        InvalidRequestError: this backend cannot run the model.
    """
    if any(layer.kind is LayerKind.STATE for layer in spec.layers):
        raise InvalidRequestError(
            f"{spec.model_type} has recurrent layers, which the torch backend cannot run; "
            "use --backend mlx.",
            param="model",
        )
    model = _read_plain(directory, spec, plan) or _read_by_library(directory, plan)
    if reason := _why_not(model):
        raise refusal(spec, reason)
    model.to(plan.device).eval()
    decoder = _prepare_for_cpu(model, spec, plan) if plan.device.type == "cpu" else None
    shorten_calls(model)
    return model, decoder


def _read_plain(directory: Path, spec: ModelCacheSpec, plan: Plan) -> Any:
    """The model without the library's code, where decode steps in C are likely to run it."""
    if plan.library is None:
        return None
    tensors = dict(read_tensors(directory))
    return read_plain(_config(directory), spec, tensors, plan.dtype, is_kept=plan.is_kept)


def _read_by_library(directory: Path, plan: Plan) -> Any:
    from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    model_type = _config(directory).get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise InvalidRequestError(
            f"the torch backend cannot run {directory.name}: the installed transformers does not "
            f"know its model_type {model_type!r}. Take another model, --backend mlx, or a version "
            "of transformers that knows it.",
            param="model",
        )
    if not sys.stderr.isatty():
        disable_progress_bar()
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    if plan.share is not None:
        return load_share(directory, plan.dtype, ATTENTION_NAME, plan.share)
    if _is_grouped(directory):
        return load_grouped(directory, plan.dtype, ATTENTION_NAME, is_kept=plan.is_kept)
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=plan.dtype, attn_implementation=ATTENTION_NAME, local_files_only=True
    )


def _prepare_for_cpu(model: Any, spec: ModelCacheSpec, plan: Plan) -> Decoder | None:
    if plan.weights != "full" and plan.has_arm_kernels:
        quantise_linears(model, bits=4 if plan.weights == "int4" else 8)
    if plan.dtype == torch.bfloat16:
        cpu.round_less(model)
    if plan.library is not None and is_plain(model):
        cpu.pack_grouped(model, plan.library, is_merged=False)
        return Decoder(model, spec, plan.library)
    cpu.pack_grouped(model, plan.library)
    if plan.is_packable:
        cpu.speed_up(model, plan.weights)
    return None


def refusal(spec: ModelCacheSpec, reason: str) -> InvalidRequestError:
    """The error that says why a model cannot be run here."""
    return InvalidRequestError(
        f"the torch backend cannot run {spec.model_type}: {reason}", param="model"
    )


def _why_not(model: Any) -> str | None:
    """What of a model would make its results wrong, if anything."""
    if getattr(model, "_is_stateful", False):
        return "it keeps state outside attention; use --backend mlx"
    others = set(getattr(model.config, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        return f"it has layers of type {', '.join(sorted(others))}"
    if _rope_types(model.config) & _LENGTH_DEPENDENT_ROPE:
        return "its rotary embedding depends on the longest sequence of a step"
    return None


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [entry for entry in parameters.values() if isinstance(entry, dict)]
    return {str(entry.get("rope_type")) for entry in (parameters, *per_layer_type)}


def shorten_calls(model: nn.Module) -> None:
    """Give each module a class whose call is its `forward`, without the machinery for hooks.

    With one row an operation takes microseconds, and calling its module takes as long: a decode
    step makes several hundred of these calls. What is computed stays the library's.
    """
    for module in model.modules():
        # Found here, children are not searched for among parameters and buffers first.
        vars(module).update(module.named_children())
        module.__class__ = _direct(type(module))  # type: ignore[arg-type]  # a class is hashable


class _Direct:
    """Calls `forward` and nothing else."""

    forward: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


@cache
def _direct(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_Direct, kind), {"__module__": kind.__module__})


def _fastest_dtype(*dtypes: torch.dtype) -> tuple[torch.dtype, str]:
    """The fastest of some formats and how much faster it is.

    Measured in turns, on one thread and by the best, so that a busy machine is fair to all. A CPU
    that lacks a format emulates it, up to two hundred times slower and with a warning: two quick
    tries are enough to see that.
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
    fastest = min(close, key=best.__getitem__)
    ratios = [
        f"{best[dtype] / best[fastest]:.1f} times as fast as {str(dtype).removeprefix('torch.')}"
        for dtype in dtypes
        if dtype != fastest
    ]
    return fastest, f"measured {' and '.join(ratios)}"


def _best_seconds(
    dtypes: Sequence[torch.dtype], num_rows: int, num_rounds: int
) -> dict[torch.dtype, float]:
    """How long a multiplication takes in each: one row as in decoding, many as in prefill."""
    weights = {dtype: torch.ones(2048, 1024, dtype=dtype) for dtype in dtypes}
    best = dict.fromkeys(dtypes, math.inf)
    for _ in range(num_rounds):
        for dtype, weight in weights.items():
            rows = torch.ones(num_rows, 1024, dtype=dtype)
            started = time.perf_counter()
            functional.linear(rows, weight)
            best[dtype] = min(best[dtype], time.perf_counter() - started)
    return best
