"""The faster modules against the library's own, on tiny models and on single layers."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from semantic.adapters.outbound.backends.torch import linear as torch_linear
from semantic.adapters.outbound.backends.torch.linear import PackedLinear, Weights
from tests.contract.driver import prompt
from tests.contract.models import FAMILIES, TinyModel
from tests.number_formats import needs_bfloat16

pytestmark = [pytest.mark.contract, needs_bfloat16]


def load(model: TinyModel) -> Any:
    return AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.bfloat16).eval()


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_the_same_to_bfloat16s_rounding(
    tiny_model: Callable[[str], TinyModel], family: str
) -> None:
    original, faster = load(tiny_model(family)), load(tiny_model(family))
    torch_linear.speed_up(faster)
    names = {type(module).__name__ for module in faster.modules()}
    assert "PackedLinear" in names
    assert "Linear" not in names
    expected, got = logits(original, prompt(40)), logits(faster, prompt(40))
    assert functional.cosine_similarity(got, expected, dim=-1).min() > 0.995


def test_llama_is_fused_throughout(tiny_model: Callable[[str], TinyModel]) -> None:
    faster = load(tiny_model("llama"))
    torch_linear.speed_up(faster)
    kinds = [type(module).__name__ for module in faster.modules()]
    num_layers = 2
    assert kinds.count("GatedMLP") == num_layers
    assert kinds.count("_MergedPart") == 3 * num_layers


@pytest.mark.parametrize("weights", get_args(Weights))
@pytest.mark.parametrize("num_rows", [1, 4, 5, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_linear_multiplies(weights: Weights, num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(num_rows)
    linear = nn.Linear(64, 48, bias=has_bias, dtype=torch.bfloat16)
    bias = linear.bias if has_bias else None
    packed, full = (PackedLinear(linear.weight, bias, bits) for bits in (weights, "full"))
    x = torch.randn(1, num_rows, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected, got, unquantised = linear(x).float(), packed(x).float(), full(x).float()
    error = (got - expected).norm() / expected.norm()
    is_quantised = weights != "full" and num_rows <= 4
    limit = {"full": 0.01, "int8": 0.02, "int4": 0.15}[weights if is_quantised else "full"]
    assert error < limit
    assert torch.equal(got, unquantised) != is_quantised


@pytest.mark.parametrize("num_outputs,num_inputs,limit", [(20, 64, 0.02), (48, 40, 0.01)])
def test_shapes_the_kernels_cannot_take_use_more_bits(
    num_outputs: int, num_inputs: int, limit: float
) -> None:
    """Rows that are no multiple of 16 go to 8 bits, columns that are none of 32 to 16."""
    weight = torch.randn(num_outputs, num_inputs, dtype=torch.bfloat16)
    x = torch.randn(2, num_inputs, dtype=torch.bfloat16)
    expected = functional.linear(x, weight).float()
    got = PackedLinear(weight, None, "int4")(x).float()
    assert (got - expected).norm() / expected.norm() < limit


def test_a_merged_linear_keeps_nothing_of_the_last_step(
    tiny_model: Callable[[str], TinyModel],
) -> None:
    faster = load(tiny_model("qwen2"))
    torch_linear.speed_up(faster)
    attention = faster.model.layers[0].self_attn
    first, second = (torch.randn(1, 3, 32, dtype=torch.bfloat16) for _ in range(2))
    with torch.inference_mode():
        together = [attention.q_proj(first), attention.k_proj(first), attention.v_proj(first)]
        out_of_order = attention.k_proj(second), attention.v_proj(first)
    assert torch.equal(out_of_order[1], together[2])
    assert not torch.equal(out_of_order[0], together[1])
