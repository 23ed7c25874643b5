"""Weights that stay quantised on the torch backend: kernels, loading, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from semantic.adapters.outbound.backends.mlx import runtime
from semantic.adapters.outbound.backends.torch import cpu
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.grouped import (
    BITS,
    GroupedEmbedding,
    GroupedLinear,
    GroupedWeight,
)
from semantic.adapters.outbound.backends.torch.loading import TorchOptions, Weights
from semantic.adapters.outbound.backends.torch.native.library import Library
from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild
from semantic.adapters.outbound.backends.torch.reading import load_grouped, take_weights
from semantic.domain.errors import InvalidRequestError
from tests.contract.conftest import require_mlx
from tests.contract.driver import begin, check_batch, prompt
from tests.contract.models import EXPERTS, SIZES, spec_of, write_weights

pytestmark = pytest.mark.contract

WIDE = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
CONFIGS = {
    "llama tied": LlamaConfig(**WIDE, tie_word_embeddings=True),
    "qwen2 with biases": Qwen2Config(**WIDE, tie_word_embeddings=False),
    "gemma3": Gemma3TextConfig(**WIDE, sliding_window=8, query_pre_attn_scalar=16),
    "qwen3-moe": Qwen3MoeConfig(**WIDE, **{**EXPERTS, "moe_intermediate_size": 32}),
}


def write_grouped(directory: Path, config: object, bits: dict[str, int]) -> Path:
    """A tiny model as mlx-lm writes quantised ones; linears not named have four bits."""
    write_weights(directory, config)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _with_stacked_experts(load_file(directory / "model.safetensors")).items():
        if tensor.ndim < 2:
            tensors[name] = tensor.bfloat16()
            continue
        owner = name.removesuffix(".weight")
        rows = tensor.flatten(0, -2)
        weight = GroupedWeight.quantised(rows, bits.get(owner.split(".")[-1], 4))
        assert weight.biases is not None
        shape = (*tensor.shape[:-1], -1)
        tensors[name] = weight.packed.view(torch.uint32).view(shape)
        tensors[f"{owner}.scales"] = weight.scales.bfloat16().view(shape)
        tensors[f"{owner}.biases"] = weight.biases.bfloat16().view(shape)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    path = directory / "config.json"
    quantization = {"group_size": 32, "bits": 4}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization": quantization}))
    return directory


def _with_stacked_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as mlx-lm names them: one tensor for all of a layer."""
    renamed: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        before, is_expert, after = name.partition(".experts.")
        if is_expert:
            number, _, part = after.partition(".")
            of_part = experts.setdefault(f"{before}.switch_mlp.{part}", [])
            assert len(of_part) == int(number)
            of_part.append(tensor)
        else:
            renamed[name] = tensor
    return renamed | {name: torch.stack(each) for name, each in experts.items()}


# -- one linear -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
def test_a_quantised_matrix_is_near_the_original(bits: int) -> None:
    weight = torch.randn(5, 96)
    grouped = GroupedWeight.quantised(weight, bits)
    step = (weight.view(5, 3, 32).amax(2) - weight.view(5, 3, 32).amin(2)) / (2**bits - 1)
    off = (grouped.expanded() - weight).abs().view(5, 3, 32).amax(2)
    assert (off <= step / 2 + 1e-5).all()
    rows = torch.tensor([[3, 0]])
    assert torch.equal(grouped.expanded(rows), grouped.expanded()[rows])
    assert grouped.packed.numel() == 5 * 96 * bits // 8


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [32, 64])
def test_mlxs_quantisation_is_read(bits: int, group: int) -> None:
    """MLX packs the integers, and expands them for comparison."""
    require_mlx()
    mx = runtime.import_library("mlx.core")
    random = mx.random.normal((6, 192), key=mx.random.key(3))
    arrays = mx.quantize(random, group_size=group, bits=bits)
    expected = mx.dequantize(*arrays, group_size=group, bits=bits)
    names = ("up.weight", "up.scales", "up.biases")
    tensors = {name: torch.from_numpy(np.array(a)) for name, a in zip(names, arrays, strict=True)}
    [weight] = take_weights(tensors, "up", 192)
    assert (weight.bits, weight.group) == (bits, group)
    np.testing.assert_allclose(weight.expanded(), np.array(expected), atol=1e-6)


@pytest.mark.parametrize("bits", BITS)
def test_a_row_has_the_same_result_beside_others(library: Library, bits: int) -> None:
    linear = GroupedLinear(GroupedWeight.quantised(torch.randn(96, 64), bits), torch.randn(96))
    linear.pack(library)
    rows = torch.randn(200, 64)
    together = linear(rows)
    for start, end in ((0, 1), (1, 2), (3, 5), (5, 14), (100, 200)):
        assert torch.equal(linear(rows[start:end]), together[start:end])


@pytest.mark.parametrize("kind", [*BITS, "mxfp4"])
def test_an_embedding_reads_the_rows_of_a_packed_head(library: Library, kind: int | str) -> None:
    if kind == "mxfp4":
        packed, exponents = torch.randint(256, (50, 48)), torch.randint(110, 130, (50, 3))
        weight = GroupedWeight(packed.to(torch.uint8), exponents.to(torch.uint8), None, 96)
    else:
        weight = GroupedWeight.quantised(torch.randn(50, 96), int(kind))
        assert weight.biases is not None
        weight.scales, weight.biases = weight.scales.half(), weight.biases.half()
    ids = torch.tensor([[3, 49, 0, 17]])
    model = nn.ModuleDict(
        {"embedding": GroupedEmbedding(weight, torch.float32), "head": GroupedLinear(weight, None)}
    )
    expected = model["embedding"](ids)
    cpu.pack_grouped(model, library)
    assert not hasattr(model["embedding"], "grouped")
    assert torch.equal(model["embedding"](ids), expected)
    with pytest.raises(IndexError):
        model["embedding"](torch.tensor([50]))


def test_linears_of_different_bits_are_not_joined() -> None:
    linears = [
        GroupedLinear(GroupedWeight.quantised(torch.randn(8, 64), bits), None) for bits in (4, 8)
    ]
    assert not cpu._can_join(linears)
    assert cpu._can_join([linears[0], linears[0]])


# -- whole models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_full_weights_are_the_files_expanded(config: object, tmp_path: Path) -> None:
    """The same as the library computes with a file that was never quantised."""
    directory = write_grouped(tmp_path / "packed", config, {"down_proj": 8, "embed_tokens": 8})
    model = load_grouped(directory, torch.float32, is_kept=False).eval()
    model.save_pretrained(tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", attn_implementation="sdpa")
    tokens = torch.tensor([prompt(20)])
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits, plain.eval()(tokens).logits)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_kept_model_computes_nearly_the_same_and_alike_in_a_batch(
    native: NativeBuild, library: Library, config: object, tmp_path: Path
) -> None:
    directory = write_grouped(tmp_path, config, {"down_proj": 8, "embed_tokens": 8, "lm_head": 8})
    kept = load_grouped(directory, torch.float32, is_kept=True).eval()
    cpu.pack_grouped(kept, library)
    full = load_grouped(directory, torch.float32, is_kept=False).eval()
    tokens = torch.tensor([prompt(20)])
    with torch.inference_mode():
        expected, found = full(tokens).logits, kept(tokens).logits
    assert ((found - expected).norm() / expected.norm()).item() < 1e-3
    backend = TorchBackend(directory, spec_of(directory), TorchOptions(native=native))
    assert backend.traits.kv_abi.endswith(".grouped")
    check_batch(backend, [prompt(12 + n, seed=n) for n in range(3)])


def test_asking_for_a_dtype_or_for_full_weights_expands_them(tmp_path: Path) -> None:
    directory = write_grouped(tmp_path, CONFIGS["llama tied"], {})
    for options in (TorchOptions("float32"), TorchOptions("float32", weights="full")):
        backend = TorchBackend(directory, spec_of(directory), options)
        assert backend.traits.kv_abi in ("torch.v1.float32", "torch.v1.bfloat16")
        assert len(begin(backend, 0, prompt(12)).finish(4)) == 4


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_full_models_are_quantised_if_asked(
    native: NativeBuild, weights: Weights, tmp_path: Path
) -> None:
    write_weights(tmp_path, LlamaConfig(**WIDE))
    options = TorchOptions("float32", weights=weights, native=native)
    backend = TorchBackend(tmp_path, spec_of(tmp_path), options)
    assert backend.traits.kv_abi == f"torch.v1.float32.{weights}"
    assert len(begin(backend, 0, prompt(12)).finish(4)) == 4


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model.norm.weight": None}, "model.norm.weight"),
        ({"model.extra.weight": torch.ones(2)}, "model.extra.weight"),
        ({"model.layers.0.mlp.up_proj.biases": None}, "quantisation of .*up_proj"),
        ({"model.layers.0.mlp.up_proj.weight": torch.ones(96, 4, dtype=torch.uint32)}, "2 bits"),
    ],
    ids=["missing", "unknown", "no biases", "two bits"],
)
def test_weights_that_do_not_fit_are_refused(
    change: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    directory = write_grouped(tmp_path, CONFIGS["llama tied"], {})
    file = directory / "model.safetensors"
    tensors = {**load_file(file), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, file, {"format": "pt"})
    with pytest.raises(InvalidRequestError, match=message):
        TorchBackend(directory, spec_of(directory))


def test_modules_that_are_not_quantised_stay(tmp_path: Path) -> None:
    """As a file may have some linears in full."""
    directory = write_grouped(tmp_path, CONFIGS["llama tied"], {})
    file, name = directory / "model.safetensors", "model.layers.0.self_attn.o_proj"
    tensors = load_file(file)
    for end in ("weight", "scales", "biases"):
        del tensors[f"{name}.{end}"]
    weight = torch.randn(64, 64)
    save_file({**tensors, f"{name}.weight": weight}, file, {"format": "pt"})
    model = load_grouped(directory, torch.float32, is_kept=True)
    linear = model.get_submodule(name)
    assert type(linear) is nn.Linear
    assert torch.equal(linear.weight, weight)
