"""GGUF files of every architecture: imported, they compute what the original models compute."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from semantic.adapters.outbound.backends.mlx import runtime
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.loading import TorchOptions
from semantic.adapters.outbound.backends.torch.reading import load_grouped
from semantic.adapters.outbound.models.gguf.architectures import ARCHITECTURES
from semantic.adapters.outbound.models.gguf.header import open_gguf
from semantic.adapters.outbound.models.gguf.importing import import_gguf
from tests.contract.conftest import require_mlx
from tests.contract.driver import check_batch, prompt
from tests.contract.gguf_models import FILES, MODELS, build, rewrite, unpack
from tests.contract.models import spec_of

pytestmark = pytest.mark.contract

Logits = npt.NDArray[np.float32]

TEXT = torch.tensor([[5, 9, 33, 12, 60, 7, 3, 21, 44, 18, 2, 50, 31, 8, 27, 40]])
NOT_ON_TORCH = {"gemma3n": "transformers needs another library for the whole model"}
NOT_ON_MLX = {
    "hunyuan-moe": "mlx-lm does not know the type",
    "ernie4_5-moe": "mlx-lm leaves out the bias that chooses experts",
}
TOO_SMALL_FOR_MLX = ("deepseek2",)  # mlx-lm quantises the keys of its heads, here of 16 numbers
RESTORED = (  # their tensors are split, joined or reordered
    "deepseek2",
    "falcon-h1",
    "gemma4-moe",
    "granitehybrid",
    "granitehybrid-dense",
    "lfm2moe",
    "llama",
    "nemotron_h_moe",
    "qwen35moe",
    "qwen3next",
)


def torch_logits(model: Any) -> Logits:
    with torch.inference_mode():
        return np.asarray(model(TEXT).logits[0].float())


def imported_logits(directory: Path) -> Logits:
    return torch_logits(load_grouped(directory, torch.float32, is_kept=False).eval())


def mlx_logits(directory: Path) -> Logits:
    mx, utils, trees = (
        runtime.import_library(name) for name in ("mlx.core", "mlx_lm.utils", "mlx.utils")
    )
    model, _ = utils.load_model(directory)
    full = trees.tree_map(
        lambda array: array.astype(mx.float32) if array.dtype == mx.bfloat16 else array,
        model.parameters(),
    )
    model.update(full)
    logits: Logits = np.array(model(mx.array(TEXT.numpy())).astype(mx.float32))[0]
    return logits


def assert_near(found: Logits, expected: Logits, share: float) -> None:
    np.testing.assert_allclose(found, expected, atol=share * float(np.abs(expected).max()), rtol=0)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_an_import_computes_what_the_original_computes(name: str, tmp_path: Path) -> None:
    directory = import_gguf(unpack(name, tmp_path), tmp_path / "model")
    expected = torch_logits(build(name))
    if name not in NOT_ON_TORCH:
        assert_near(imported_logits(directory), expected, 1e-6)
    if name not in NOT_ON_MLX:
        require_mlx()
        assert_near(mlx_logits(directory), expected, 1e-3)


@pytest.mark.parametrize("name", RESTORED)
def test_quantised_tensors_are_restored_as_those_in_full(name: str, tmp_path: Path) -> None:
    """The same numbers once as Q8_0 and once in full; only scales are rounded."""
    source = unpack(name, tmp_path)
    kept, full = (
        import_gguf(
            rewrite(source, tmp_path / f"{is_kept}.gguf", Kind.Q8_0, is_kept=is_kept),
            tmp_path / f"{is_kept}",
        )
        for is_kept in (True, False)
    )
    assert any(name.endswith(".scales") for name in _names(kept))
    found = imported_logits(kept)
    assert_near(found, imported_logits(full), 0.02)
    if name not in TOO_SMALL_FOR_MLX:
        require_mlx()
        assert_near(mlx_logits(kept), found, 0.01)


@pytest.mark.parametrize("name", ["falcon-h1", "gemma4", "granitehybrid-dense", "qwen35"])
def test_the_torch_backend_runs_an_import_that_is_not_quantised(name: str, tmp_path: Path) -> None:
    directory = import_gguf(unpack(name, tmp_path), tmp_path / "model")
    backend = TorchBackend(directory, spec_of(directory, block_tokens=8), TorchOptions())
    check_batch(backend, [[token % 60 for token in prompt(10 + n, seed=n)] for n in range(2)])


def _names(directory: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(directory / "model.safetensors", "np") as file:
        return list(file.keys())


def test_there_is_a_file_of_every_architecture_but_those_that_share_one(tmp_path: Path) -> None:
    assert {path.name.removesuffix(".gguf.xz") for path in FILES.iterdir()} == MODELS.keys()
    found = {open_gguf(unpack(name, tmp_path)).architecture for name in MODELS}
    others = {"gpt-oss", "nemotron_h", "qwen3vl", "qwen3vlmoe"}
    assert set(ARCHITECTURES) - others <= found


def test_the_documentation_lists_every_architecture() -> None:
    page = (Path(__file__).parents[2] / "docs" / "model-onboarding.md").read_text("utf-8")
    section = page.partition("## 4. GGUF")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([\w.-]+)`", section)) >= set(ARCHITECTURES)
