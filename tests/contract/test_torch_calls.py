"""Models whose modules are called directly against the same models called by the library."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from semantic.adapters.outbound.backends.torch.calls import shorten_calls
from tests.contract.driver import prompt
from tests.contract.models import FAMILIES, TinyModel

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_the_very_same(
    tiny_model: Callable[[str], TinyModel], family: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family).directory).eval()
    tokens = torch.tensor([prompt(40)])
    with torch.inference_mode():
        expected = model(tokens).logits
        shorten_calls(model)
        assert torch.equal(model(tokens).logits, expected)


def test_a_child_replaced_later_is_the_one_called() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    shorten_calls(model)
    model[0] = nn.Identity()
    assert list(model.children()) == [model[0]]
    assert torch.equal(model(torch.ones(2)), torch.ones(2))


def test_a_forward_set_on_a_module_is_the_one_called() -> None:
    model = nn.Identity()
    shorten_calls(model)
    model.forward = torch.neg  # type: ignore[method-assign]
    assert torch.equal(model(torch.ones(2)), -torch.ones(2))
