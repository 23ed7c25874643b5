"""Types of GGUF's tensors: what their import changes in a model's logits."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.loading import TorchOptions
from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild
from semantic.adapters.outbound.backends.torch.reading import load_grouped
from semantic.adapters.outbound.models.gguf.weights import read_tensor
from tests.contract.driver import check_batch, prompt
from tests.contract.models import SIZES, spec_of, write_weights
from tests.gguf_blocks import encode_q6_k

pytestmark = pytest.mark.contract

Floats = npt.NDArray[np.float32]
WIDE = {**SIZES, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
ENCODERS: dict[Kind, Callable[[Floats], npt.NDArray[Any]]] = {
    **{kind: partial(gguf.quantize, qtype=kind) for kind in (Kind.Q4_0, Kind.Q5_1, Kind.Q8_0)},
    Kind.Q6_K: encode_q6_k,
}
# How much the import changes logits, relative to the change that the type itself made before.
BOUNDS = {Kind.Q4_0: 1e-6, Kind.Q5_1: 1e-6, Kind.Q8_0: 1e-6, Kind.Q6_K: 0.8}


def write_as_imported(directory: Path, kind: Kind) -> list[torch.Tensor]:
    """A model whose matrices have one type.

    Returns the logits of the library's models: of the original weights, and of the type's.
    """
    write_weights(directory, LlamaConfig(**WIDE, tie_word_embeddings=True))
    exact: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    logits = [logits_of(exact)]
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(directory / "model.safetensors").items():
        if weight.ndim == 1:
            tensors[name] = weight
            continue
        data = ENCODERS[kind](weight.numpy())
        shape = np.array(weight.shape[::-1], np.uint64)
        stored = gguf.ReaderTensor("t", kind, shape, weight.numel(), data.nbytes, 0, data, None)
        for part, array in read_tensor(stored).items():
            tensors[name.replace("weight", part)] = torch.from_numpy(array)
        exact.get_parameter(name).data = torch.from_numpy(gguf.dequantize(data, kind))
    exact.tie_weights()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    quantization = {"group_size": 32, "bits": 4}
    (directory / "config.json").write_text(json.dumps({**config, "quantization": quantization}))
    return [*logits, logits_of(exact)]


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt(40)])).logits
    return logits


@pytest.mark.parametrize("kind", ENCODERS, ids=lambda kind: kind.name)
def test_logits_stay_within_the_bound_of_the_type(kind: Kind, tmp_path: Path) -> None:
    original, expected = write_as_imported(tmp_path, kind)
    found = logits_of(load_grouped(tmp_path, torch.float32, is_kept=False).eval())
    ratio = float((found - expected).norm() / (expected - original).norm())
    assert ratio < BOUNDS[kind]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("kind", [Kind.Q5_1, Kind.Q6_K], ids=lambda kind: kind.name)
def test_a_batch_gives_what_each_gives_alone(
    native: NativeBuild, kind: Kind, tmp_path: Path
) -> None:
    write_as_imported(tmp_path, kind)
    backend = TorchBackend(tmp_path, spec_of(tmp_path), TorchOptions(native=native))
    assert backend._decoder is not None
    check_batch(backend, [prompt(20 + n, seed=n) for n in range(3)])


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("kind", ENCODERS, ids=lambda kind: kind.name)
def test_weights_take_no_more_memory_than_on_disk(
    native: NativeBuild, kind: Kind, tmp_path: Path
) -> None:
    """All of them packed for the library, and the tied embedding without a copy of its own."""
    write_as_imported(tmp_path, kind)
    backend = TorchBackend(tmp_path, spec_of(tmp_path), TorchOptions(native=native))
    library = native.library()
    assert library is not None
    linears = [m for m in backend._model.modules() if type(m).__name__ == "GroupedLinear"]
    in_memory = sum(
        library.packed_size(matrix.rows, matrix.columns, matrix.kind)
        for matrix in (linear.native_matrix() for linear in linears)
    )
    on_disk = sum(
        tensor.nbytes
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
        if "norm" not in name
    )
    assert in_memory == on_disk
    assert not hasattr(backend._model.base_model.embed_tokens, "grouped")
