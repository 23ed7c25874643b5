"""How the torch backend chooses device, number format and threads, and what it refuses."""

import os
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.forward import bypass_hooks
from semantic.adapters.outbound.backends.torch.loading import (
    DType,
    TorchOptions,
    WeightsOption,
    choose_dtype,
    choose_threads,
    make_plan,
    pick_dtype,
)
from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild
from semantic.domain.errors import InvalidRequestError
from semantic.domain.spec import Compute, ComputeHint
from tests.contract.driver import prompt
from tests.contract.models import FAMILIES, GetModel
from tests.number_formats import HAS_BFLOAT16

pytestmark = pytest.mark.contract


def test_the_dtype_is_measured_unless_given() -> None:
    assert choose_dtype("float32") == (torch.float32, "requested")
    dtype, reason = choose_dtype("auto")
    assert dtype is torch.float32 or HAS_BFLOAT16
    assert "times as fast as" in reason


def test_a_measured_dtype_is_kept_for_the_same_device() -> None:
    for dtype in ("bfloat16", "float32"):
        known = Compute("cpu", dtype, 1, "PyTorch", "measured before")
        chosen = choose_dtype("auto", ComputeHint(known))
        assert chosen == (getattr(torch, dtype), "measured before")
        assert choose_dtype("float16", ComputeHint(known))[0] is torch.float16
    for device, dtype in (("cuda", "bfloat16"), ("cpu", "float16"), ("cpu", "nonsense")):
        known = Compute(device, dtype, 0, "PyTorch", "measured before")
        assert "measured before" not in choose_dtype("auto", ComputeHint(known))[1]


@pytest.mark.parametrize(
    "seconds, stored, chosen, reason",
    [
        ((1.0, 1.2), (), "bfloat16", "measured 1.2 times as fast as float32"),
        ((1.0, 1.2), ("bfloat16",), "bfloat16", "measured 1.2 times as fast as float32"),
        (
            (1.0, 1.25),
            ("float32", "bfloat16"),
            "float32",
            "the stored KV cache has this format; measured 0.8 times as fast as bfloat16",
        ),
        ((1.0, 1.2), ("float16",), "bfloat16", "measured 1.2 times as fast as float32"),
        ((90.0, 1.0), ("bfloat16",), "float32", "measured 90.0 times as fast as bfloat16"),
    ],
)
def test_the_dtype_of_stored_state_is_preferred_unless_it_is_much_slower(
    seconds: tuple[float, float], stored: tuple[str, ...], chosen: str, reason: str
) -> None:
    measured = dict(zip(("bfloat16", "float32"), seconds, strict=True))
    assert pick_dtype(measured, stored) == (chosen, reason)


def test_a_backend_reports_how_it_computes(tiny_model: GetModel) -> None:
    model = tiny_model("llama")
    backend = TorchBackend(model.directory, model.spec, TorchOptions("float32", num_threads=1))
    assert backend.traits.compute == Compute("cpu", "float32", 1, "PyTorch", "requested")


def test_threads_are_the_process_own_cores_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert choose_threads(3) == 3
    assert choose_threads(0) == 5
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert choose_threads(0) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_quantised_weights_need_float32_and_the_native_library(
    tiny_model: GetModel, native: NativeBuild, dtype: DType
) -> None:
    model = tiny_model("llama")
    for options in (TorchOptions(dtype, native=native), TorchOptions("float32")):
        with pytest.raises(InvalidRequestError, match="omit --dtype"):
            TorchBackend(model.directory, model.spec, replace(options, weights="int8"))


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_quantised_weights_run_in_the_native_library_unless_a_dtype_is_given(
    tiny_model: GetModel, native: NativeBuild, weights: WeightsOption
) -> None:
    if native.library() is None:
        pytest.skip(native.reason)
    directory = tiny_model("llama").directory
    plan = make_plan(directory, TorchOptions(weights=weights, native=native))
    assert (plan.dtype, plan.library) == (torch.float32, native.library())
    assert plan.reason == "the native kernels for quantised weights use it"


# -- calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_whose_modules_are_called_directly_computes_the_same(
    tiny_model: GetModel, family: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family).directory).eval()
    tokens = torch.tensor([prompt(40)])
    with torch.inference_mode():
        expected = model(tokens).logits
        bypass_hooks(model)
        assert torch.equal(model(tokens).logits, expected)


def test_a_child_replaced_later_is_the_one_called() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    bypass_hooks(model)
    model[0] = nn.Identity()
    assert list(model.children()) == [model[0]]
    assert torch.equal(model(torch.ones(2)), torch.ones(2))


def test_a_forward_set_on_a_module_is_the_one_called() -> None:
    model = nn.Identity()
    bypass_hooks(model)
    model.forward = torch.neg  # type: ignore[method-assign]
    assert torch.equal(model(torch.ones(2)), -torch.ones(2))
