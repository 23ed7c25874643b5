"""Quantised files on MLX: read without conversion, and kept quantised on a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig

from benchmarks.gpt_oss_file import TOKENS, write_gpt_oss
from semantic.adapters.outbound.backends.mlx import runtime
from semantic.adapters.outbound.backends.torch.reading import load_grouped
from semantic.adapters.outbound.models.gguf.importing import import_gguf
from tests.contract.conftest import make_mlx, require_mlx
from tests.contract.driver import check_batch, prompt
from tests.contract.models import TinyModel, spec_of
from tests.contract.test_gpt_oss_gguf import SIZES
from tests.contract.test_torch_grouped import WIDE, write_grouped

pytestmark = pytest.mark.contract

TEXT = [token % 96 for token in prompt(40)]


@pytest.fixture(autouse=True)
def _mlx() -> None:
    require_mlx()


def relative(found: Any, expected: torch.Tensor) -> float:
    """How far logits are off, against their own size."""
    both = torch.tensor(found.tolist()), expected.float()
    return float((both[0] - both[1]).norm() / both[1].norm())


def write(kind: str, folder: Path) -> tuple[TinyModel, torch.Tensor]:
    """A model, and what PyTorch computes with its weights in full."""
    if kind == "gpt-oss":
        # With a factor of 1, as mlx-lm rounds the bounds of YaRN's ramp and the library does not.
        model = write_gpt_oss(folder / "tiny.gguf", SIZES, Kind.MXFP4, Kind.Q8_0, 1.0)
        directory = import_gguf(folder / "tiny.gguf", folder / "model")
    else:
        # A GPU's narrower matrices are dequantised: `expand_narrow`.
        sizes = {**WIDE, "intermediate_size": 128}
        config = LlamaConfig(**sizes, tie_word_embeddings=True)
        directory = write_grouped(folder, config, {"up_proj": 5, "down_proj": 6, "embed_tokens": 8})
        model = load_grouped(directory, torch.float32, is_kept=False).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([TEXT])).logits[0]
    return TinyModel(directory, spec_of(directory, block_tokens=8)), logits


@pytest.mark.parametrize("kind", ["llama", "gpt-oss"])
def test_a_quantised_file_is_computed_as_it_is_and_in_full(kind: str, tmp_path: Path) -> None:
    """By the library's kernels for quantised weights, and as our backend loads it."""
    mx, utils = (runtime.import_library(name) for name in ("mlx.core", "mlx_lm.utils"))
    loading = runtime.import_library("semantic.adapters.outbound.backends.mlx.loading")
    model, expected = write(kind, tmp_path)
    loading.choose_device("auto")
    config = json.loads((model.directory / "config.json").read_text())
    overrides = loading.config_overrides(config, model.spec)
    kept, _ = utils.load_model(model.directory, model_config=overrides)
    kept.set_dtype(mx.float32)  # what is packed stays so
    assert relative(kept(mx.array([TEXT]))[0], expected) < 0.03
    full = loading.load(model.directory, model.spec, loading.MlxOptions("float32", weights="full"))
    assert relative(full.model(mx.array([TEXT]))[0], expected) < 0.03
    ours = loading.load(model.directory, model.spec, loading.MlxOptions())
    is_gpu = mx.default_device() != mx.Device(mx.cpu)  # a CPU's kernels for them are slow
    assert ours.is_expanded != is_gpu
    mlp = ours.model.model.layers[0].mlp
    linear = mlp.experts.up_proj if kind == "gpt-oss" else mlp.down_proj
    assert (linear.weight.dtype == mx.uint32) == is_gpu


def test_a_batch_gives_what_each_gives_alone(tmp_path: Path) -> None:
    model, _ = write("gpt-oss", tmp_path)
    backend = make_mlx(model)
    texts = [[token % len(TOKENS) for token in prompt(12 + n, seed=n)] for n in range(3)]
    check_batch(backend, texts)
    backend.shutdown()


def test_float16_beside_bfloat16_becomes_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would compute the product of a float16 scale and a bfloat16 activation in float32."""
    mx, nn = (runtime.import_library(name) for name in ("mlx.core", "mlx.nn"))
    loading = runtime.import_library("semantic.adapters.outbound.backends.mlx.loading")
    monkeypatch.setattr(loading, "_is_on_cpu", lambda: False)
    model = nn.Sequential(nn.QuantizedLinear(64, 32, group_size=32, bits=6), nn.RMSNorm(32))
    model.layers[0].set_dtype(mx.float16)
    model.layers[1].set_dtype(mx.bfloat16)
    assert "mix of float16 and bfloat16" in loading._convert(model, "auto")
    linear, norm = model.layers
    assert {linear.scales.dtype, linear.biases.dtype, norm.weight.dtype} == {mx.bfloat16}
    assert linear.weight.dtype == mx.uint32
