"""Models that round less against the library's in bfloat16: how far each is from float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from semantic.adapters.outbound.backends.torch.rounding import (
    RefinedHead,
    RMSNorm,
    replace_norms,
    round_less,
)
from tests.contract.driver import prompt
from tests.contract.models import FAMILIES, SIZES, TinyModel, write_weights
from tests.number_formats import needs_bfloat16

pytestmark = [pytest.mark.contract, needs_bfloat16]

WIDENED = {"llama", "qwen2", "qwen3", "mistral", "gpt-oss"}


def load(directory: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return result


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
    tiny_model: Callable[[str], TinyModel], family: str
) -> None:
    model = load(tiny_model(family).directory)
    round_less(model)
    expected = torch.float32 if family in WIDENED else torch.bfloat16
    assert inputs_of_last_norm(model) == [expected]


def test_many_layers_are_closer_to_float32_than_the_librarys(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_hidden_layers": 24, "initializer_range": 0.1}
    write_weights(tmp_path, LlamaConfig(**sizes))
    library, ours = load(tmp_path), load(tmp_path)
    round_less(ours)
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
    round_less(model)
    assert isinstance(model.lm_head, RefinedHead) == is_tied


# -- norms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 40])
def test_a_norm_rounds_once(tiny_model: Callable[[str], TinyModel], num_rows: int) -> None:
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


def test_norms_of_llama_are_replaced(tiny_model: Callable[[str], TinyModel]) -> None:
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
