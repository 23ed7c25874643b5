"""Heads for draft tokens (MTP) in quantised files: those of mlx-lm's layout, and GGUF files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from semantic.adapters.outbound.backends.mtp.names import find_head, why_no_head
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.grouped import GroupedWeight
from semantic.adapters.outbound.backends.torch.loading import TorchOptions
from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild
from semantic.adapters.outbound.models.gguf.importing import import_gguf
from tests.contract.conftest import make_mlx, require_mlx
from tests.contract.driver import GREEDY, begin, prompt, step
from tests.contract.gguf_models import rewrite, unpack
from tests.contract.head_models import write_head_model
from tests.contract.models import TinyModel, spec_of
from tests.contract.test_draft_heads import RARELY, make_rig
from tests.contract.test_draft_models import SEEDED, make_job
from tests.contract.test_gguf_architectures import TOO_SMALL_FOR_MLX

pytestmark = pytest.mark.contract

Load = Callable[[bool], Any]


def on_torch(directory: Path, native: NativeBuild | None = None) -> Load:
    spec = spec_of(directory, 8)

    def load(has_head: bool) -> Any:
        options = TorchOptions(num_threads=1, native=native, has_head=has_head)
        if native is None:
            options = replace(options, dtype="float32")
        return TorchBackend(directory, spec, options)

    return load


def on_mlx(directory: Path) -> Load:
    require_mlx()
    model = TinyModel(directory, spec_of(directory, 8))
    return lambda has_head: make_mlx(model, has_head=has_head)


def drafts(backend: Any) -> list[tuple[int, ...]]:
    assert backend.head is not None
    found = []
    for size in (2, 30):
        run = begin(backend, size, [token % 60 for token in prompt(size)], GREEDY)
        run.take(run.chunk(), *step(backend, run.chunk()))
        found += backend.head.draft([run.chunk()], 4)
        backend.close_sequence(run.seq)
    return found


def check_replies(load: Load) -> None:
    """Replies with the head are those without it."""
    rig = make_rig(load(True), [300] * 16, max_idle=4)
    prompts = [[token % 60 for token in prompt(30, seed)] for seed in (1, 2)]
    jobs = [make_job(f"{n}", tokens, SEEDED, 16) for n, tokens in enumerate(prompts)]
    rig.serve(*jobs)
    backend = load(False)
    for job in jobs:
        run = begin(backend, 1, job.tokens, SEEDED)
        assert list(rig.reply_state(job.id).tokens) == run.finish(16)
        backend.close_sequence(run.seq)
    asked = [rig.finished(job.id).usage for job in jobs]
    assert any(u.accepted_by_source or u.rejected_prediction_tokens for u in asked)


# -- mlx-lm's layout -------------------------------------------------------------------------------


def convert(directory: Path, *, is_head_quantised: bool) -> None:
    """Quantise a model as mlx-lm does, with the head or all but the head."""
    path, written = directory / "model.safetensors", directory / "config.json"
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        is_head, owner = name.startswith("mtp."), name.removesuffix(".weight")
        if is_head and not is_head_quantised:
            tensors[name] = tensor
        elif name.endswith("conv1d.weight"):
            tensors[name] = tensor.transpose(1, 2).contiguous()
        elif "norm" in name.split(".")[-2] and "linear_attn" not in name:
            tensors[name] = tensor + 1
        elif tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            weight = GroupedWeight.quantised(tensor, 8)
            assert weight.biases is not None
            tensors[name] = weight.packed.view(torch.uint32)
            tensors |= {f"{owner}.scales": weight.scales, f"{owner}.biases": weight.biases}
        else:
            tensors[name] = tensor
    save_file(tensors, path, {"format": "pt"})
    config = json.loads(written.read_text())
    config |= {"quantization": {"group_size": 32, "bits": 8}}
    written.write_text(json.dumps(config))


@pytest.mark.parametrize("is_head_quantised", [True, False], ids=["quantised", "as published"])
def test_a_head_in_a_quantised_file_is_read(
    tmp_path: Path, native: NativeBuild, *, is_head_quantised: bool
) -> None:
    """By both backends, expanded and with the native library's kernels: with the same drafts."""
    write_head_model(tmp_path, "qwen3.5", RARELY, hidden_size=64)
    convert(tmp_path, is_head_quantised=is_head_quantised)
    loads = [on_torch(tmp_path), on_torch(tmp_path, native), on_mlx(tmp_path)]
    found = [drafts(load(True)) for load in loads]
    assert all(len(tokens) == 4 for tokens in found[0])
    assert found[0] == found[1] == found[2]
    for load in loads:
        check_replies(load)


def test_a_quantised_file_without_a_head_says_so(tmp_path: Path) -> None:
    write_head_model(tmp_path, "qwen3.5", RARELY, hidden_size=64)
    convert(tmp_path, is_head_quantised=True)
    path = tmp_path / "model.safetensors"
    kept = {name: w for name, w in load_file(path).items() if not name.startswith("mtp.")}
    save_file(kept, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    assert find_head(tmp_path, config, "torch") is None
    assert "no MTP head" in why_no_head(config)
    assert on_torch(tmp_path)(True).head is None
    assert "format" in why_no_head({"model_type": "deepseek_v3", "quantization_config": {}})
    assert not why_no_head({"model_type": "llama"})


# -- GGUF ------------------------------------------------------------------------------------------


def add_head(source: Path, target: Path) -> Path:
    """Append a block with a head, whose layer is a copy of the last one."""
    reader = gguf.GGUFReader(source)
    name = str(reader.fields["general.architecture"].contents())
    count = int(reader.fields[f"{name}.block_count"].contents())
    writer = gguf.GGUFWriter(target, name)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = field.contents()
        if field.name == f"{name}.block_count":
            value = count + 1
        sub_type = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=sub_type)
    writer.add_uint32(f"{name}.nextn_predict_layers", 1)
    size = int(reader.fields[f"{name}.embedding_length"].contents())
    for tensor in reader.tensors:
        names = [tensor.name]
        if tensor.name.startswith(f"blk.{count - 1}."):
            names.append(tensor.name.replace(f"blk.{count - 1}.", f"blk.{count}.", 1))
        for each in names:
            writer.add_tensor(each, tensor.data, raw_dtype=tensor.tensor_type)
    random = np.random.default_rng(3)
    pair = random.normal(size=(size, 2 * size)).astype(np.float32) / size
    writer.add_tensor(f"blk.{count}.nextn.eh_proj.weight", pair)
    for norm in ("enorm", "hnorm", "shared_head_norm"):
        ones = np.ones(size, np.float32)
        writer.add_tensor(f"blk.{count}.nextn.{norm}.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize("name", ["deepseek2", "glm4moe", "qwen35", "qwen35moe", "qwen3next"])
@pytest.mark.parametrize("is_kept", [True, False], ids=["Q8_0", "in full"])
def test_the_head_of_a_gguf_file_is_imported(tmp_path: Path, name: str, *, is_kept: bool) -> None:
    source = rewrite(unpack(name, tmp_path), tmp_path / "q8.gguf", Kind.Q8_0, is_kept=is_kept)
    directory = import_gguf(add_head(source, tmp_path / "head.gguf"), tmp_path / "model")
    backend = on_torch(directory)(True)
    head, last = backend._head, backend._model.base_model.layers[-1]
    own, expected = head.layer.state_dict(), last.state_dict()
    assert own.keys() == expected.keys()
    assert all((own[key] == expected[key]).all() for key in own)
    for norm in (head.embedding_norm, head.hidden_norm, head.norm):
        assert norm.weight.unique().tolist() == [0.0 if "qwen" in name else 1.0]
    found = drafts(backend)
    assert all(len(tokens) == 4 for tokens in found)
    if not (is_kept and name in TOO_SMALL_FOR_MLX):
        assert drafts(on_mlx(directory)(True)) == found
    check_replies(on_torch(directory))
