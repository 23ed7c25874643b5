"""Modules for CPUs compared with the library's: the same results, and less rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

from semantic.adapters.outbound.backends.torch.cpu import (
    PackedLinear,
    RefinedHead,
    RMSNorm,
    reduce_rounding,
    replace_norms,
    speed_up,
)
from tests.contract.driver import prompt
from tests.contract.models import FAMILIES, SIZES, GetModel, write_weights
from tests.number_formats import needs_bfloat16

pytestmark = [pytest.mark.contract, needs_bfloat16]


WIDENED = {"llama", "qwen2", "qwen3", "mistral", "qwen3-moe", "gpt-oss"}


def load(directory: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_the_same_to_bfloat16s_rounding(tiny_model: GetModel, family: str) -> None:
    original, faster = load(tiny_model(family).directory), load(tiny_model(family).directory)
    speed_up(faster)
    names = {type(module).__name__ for module in faster.modules()}
    assert "PackedLinear" in names
    assert "Linear" not in names
    expected, got = logits(original, prompt(40)), logits(faster, prompt(40))
    assert functional.cosine_similarity(got, expected, dim=-1).min() > 0.995


def test_llama_is_fused_throughout(tiny_model: GetModel) -> None:
    faster = load(tiny_model("llama").directory)
    speed_up(faster)
    kinds = [type(module).__name__ for module in faster.modules()]
    num_layers = 2
    assert kinds.count("GatedMLP") == num_layers
    assert kinds.count("_MergedPart") == 3 * num_layers


@pytest.mark.parametrize("num_rows", [1, 4, 5, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_linear_multiplies(num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(num_rows)
    linear = nn.Linear(64, 48, bias=has_bias, dtype=torch.bfloat16)
    packed = PackedLinear(linear.weight, linear.bias if has_bias else None)
    x = torch.randn(1, num_rows, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected, got = linear(x).float(), packed(x).float()
    assert (got - expected).norm() / expected.norm() < 0.01


def test_a_merged_linear_keeps_nothing_of_the_last_step(
    tiny_model: GetModel,
) -> None:
    faster = load(tiny_model("qwen2").directory)
    speed_up(faster)
    attention = faster.model.layers[0].self_attn
    first, second = (torch.randn(1, 3, 32, dtype=torch.bfloat16) for _ in range(2))
    with torch.inference_mode():
        together = [attention.q_proj(first), attention.k_proj(first), attention.v_proj(first)]
        out_of_order = attention.k_proj(second), attention.v_proj(first)
    assert torch.equal(out_of_order[1], together[2])
    assert not torch.equal(out_of_order[0], together[1])


# -- less rounding ---------------------------------------------------------------------------


def exact(rounded: Any, directory: Path) -> Any:
    """The same weights, in bfloat16 too, and all else in float32."""
    model = load(directory, torch.float32)
    model.load_state_dict({name: value.float() for name, value in rounded.state_dict().items()})
    return model


def inputs_of_last_norm(model: Any) -> list[torch.dtype]:
    seen: list[torch.dtype] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    logits(model, prompt(3))
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_the_residual_stream_is_float32_where_only_our_norms_read_it(
    tiny_model: GetModel, family: str
) -> None:
    model = load(tiny_model(family).directory)
    reduce_rounding(model)
    expected = torch.float32 if family in WIDENED else torch.bfloat16
    assert inputs_of_last_norm(model) == [expected]


def test_many_layers_are_closer_to_float32_than_the_librarys(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_hidden_layers": 24, "initializer_range": 0.1}
    write_weights(tmp_path, LlamaConfig(**sizes))
    library, ours = load(tmp_path), load(tmp_path)
    reduce_rounding(ours)
    tokens = prompt(200)
    expected = logits(exact(library, tmp_path), tokens)
    theirs, less = (float((logits(m, tokens) - expected).norm()) for m in (library, ours))
    assert less < 0.7 * theirs


# -- the head -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [20, 100, 4096, 4100])
def test_the_highest_logits_are_those_of_float32(num_tokens: int) -> None:
    """With few tokens all of them are; many, in stripes or not, are searched."""
    torch.manual_seed(num_tokens)
    linear = nn.Linear(64, num_tokens, bias=False, dtype=torch.bfloat16)
    x = torch.randn(2, 3, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = x.float() @ linear.weight.float().T
        got, rounded = RefinedHead(linear)(x), linear(x).float()
    highest = rounded.topk(16).indices  # of equal ones, either may be the 32nd
    refined = got.gather(-1, highest)
    torch.testing.assert_close(refined, expected.gather(-1, highest), rtol=1e-5, atol=1e-5)
    assert (got != rounded).sum(-1).max() <= 32


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_is_refined_where_the_embedding_keeps_its_weights(
    tmp_path: Path, is_tied: bool
) -> None:
    write_weights(tmp_path, LlamaConfig(**SIZES, tie_word_embeddings=is_tied))
    model = load(tmp_path)
    reduce_rounding(model)
    assert isinstance(model.lm_head, RefinedHead) == is_tied


# -- norms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 40])
def test_a_norm_rounds_once(tiny_model: GetModel, num_rows: int) -> None:
    torch.manual_seed(num_rows)
    norm = load(tiny_model("llama").directory).model.norm
    with torch.inference_mode():
        norm.weight.normal_()
        wide = 5 * torch.randn(num_rows, norm.weight.shape[0])
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        expected = (wide * scale * norm.weight.float()).bfloat16()
        got = RMSNorm(norm.weight, norm.variance_epsilon)(wide)
    assert (got != expected).float().mean() < 0.02
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=0)


def test_norms_of_llama_are_replaced(tiny_model: GetModel) -> None:
    model = load(tiny_model("llama").directory)
    replace_norms(model)
    kinds = [type(module).__name__ for module in model.modules()]
    assert kinds.count("RMSNorm") == 2 * 2 + 1
    assert "LlamaRMSNorm" not in kinds


class OddRMSNorm(nn.Module):
    """Named like an RMS norm, with the attributes of one, and something else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_a_norm_that_computes_something_else_stays() -> None:
    model = nn.Sequential(OddRMSNorm())
    replace_norms(model)
    assert isinstance(model[0], OddRMSNorm)
