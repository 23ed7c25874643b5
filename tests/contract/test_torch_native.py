"""Decode steps in C: the same numbers as the model's own code, or not used."""

import json
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from transformers import (
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.grouped import (
    BITS,
    GroupedLinear,
    GroupedWeight,
)
from semantic.adapters.outbound.backends.torch.kv.sequences import (
    ChunkSpan,
    KVLayout,
    TorchSequence,
)
from semantic.adapters.outbound.backends.torch.loading import (
    TorchOptions,
    Weights,
    load_model,
    make_plan,
)
from semantic.adapters.outbound.backends.torch.native.library import (
    Library,
    LibraryMismatchError,
)
from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild
from semantic.adapters.outbound.backends.torch.plain import PlainModel, read_plain
from semantic.adapters.outbound.backends.torch.reading import read_tensors
from semantic.domain.errors import InvalidRequestError
from semantic.domain.spec import ModelCacheSpec
from semantic.ports.backend import Chunk, SequenceId
from tests.contract.driver import advance, begin, check_batch, prompt, save
from tests.contract.models import EXPERTS, FAMILIES, SIZES, GetModel, spec_of, write_weights
from tests.contract.test_torch_grouped import WIDE, write_grouped

pytestmark = pytest.mark.contract

SUPPORTED = {"llama", "qwen2", "qwen3", "mistral", "gemma3", "qwen3-moe", "gpt-oss"}


# -- one linear -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 70])
@pytest.mark.parametrize("num_outputs", [48, 50])
def test_a_linear_multiplies(library: Library, num_outputs: int, num_rows: int, bits: int) -> None:
    """Weights whose bias is not the middle of their integers, and an activation far off."""
    weight = GroupedWeight.quantised(torch.randn(num_outputs, 96) + 0.5, bits)
    weight.scales = weight.scales.bfloat16()
    bias = torch.randn(num_outputs)
    linear = GroupedLinear(weight, bias)
    x = torch.randn(num_rows, 96)
    x[:, 7] *= 50
    expected = x @ weight.expanded().t() + bias
    linear.pack(library)
    found = linear(x)
    assert ((found - expected).norm() / expected.norm()).item() < 5e-4
    assert torch.equal(linear(x[:1]), found[:1])
    assert torch.equal(linear(torch.zeros(1, 96))[0], bias)


# -- whole models ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("family", FAMILIES)
def test_supported_models_are_run_in_one_call(
    native: NativeBuild, tiny_model: GetModel, family: str
) -> None:
    model = tiny_model(family)
    backend = TorchBackend(model.directory, model.spec, TorchOptions("float32", native=native))
    assert (backend._decoder is not None) == (family in SUPPORTED)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**WIDE, tie_word_embeddings=True),
        Qwen2Config(**WIDE),
        Qwen3Config(**WIDE),
        Gemma3TextConfig(**WIDE, sliding_window=8, query_pre_attn_scalar=16),
        Qwen3MoeConfig(**WIDE, **{**EXPERTS, "moe_intermediate_size": 32, "norm_topk_prob": False}),
    ],
    ids=["llama", "qwen2", "qwen3", "gemma3", "qwen3-moe"],
)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.usefixtures("library")
def test_quantised_models_answer_as_without_it_and_alike_in_a_batch(
    native: NativeBuild, config: object, num_threads: int, tmp_path: Path
) -> None:
    bits = dict.fromkeys(("v_proj", "gate", "embed_tokens", "lm_head"), 8)
    bits |= {"k_proj": 5, "o_proj": 5, "up_proj": 5, "down_proj": 6}
    directory = write_grouped(tmp_path, config, bits)
    replies, decoders = [], []
    for build in (None, native):
        options = TorchOptions(num_threads=num_threads, native=build)
        backend = TorchBackend(directory, spec_of(directory), options)
        replies.append(check_batch(backend, [prompt(150 + n, seed=n) for n in range(3)]))
        decoders.append(backend._decoder)
    assert decoders[1] is not None
    assert replies[0] == replies[1]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("family", sorted(SUPPORTED))
def test_prompts_in_chunks_have_the_state_of_the_models_own_code(
    native: NativeBuild, tiny_model: GetModel, family: str
) -> None:
    """Beside a sequence that decodes; chunks of one token up to several tiles of attention."""
    model, states = tiny_model(family), []
    for build in (None, native):
        backend = TorchBackend(model.directory, model.spec, TorchOptions("float32", native=build))
        beside, run = begin(backend, 1, prompt(9, seed=1)), begin(backend, 0, prompt(301))
        beside.finish(1)
        for size in (130, 1, 5, 100, 3, 61):
            advance([beside, run], [None, size])
        parts = [*save(backend, run.seq, 0, 300), *save(backend, beside.seq, 0, 15)]
        states.append([np.frombuffer(b.data, np.float32) for part in parts for b in part.buffers])
    for found, expected in zip(*states, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("family", sorted(SUPPORTED))
def test_rows_have_the_same_logits_whichever_others_are_wanted(
    native: NativeBuild, tiny_model: GetModel, family: str
) -> None:
    """The last layer is computed for these rows alone: a tile of attention, single rows, none."""
    model = tiny_model(family)
    backend = TorchBackend(model.directory, model.spec, TorchOptions("float32", native=native))

    def logits(last: list[int]) -> Any:
        spans, offset = [], 0
        for num_tokens in (60, 4):
            tokens = tuple(prompt(num_tokens))
            buffers = KVLayout(model.spec.layers).allocate(num_tokens, torch.float32)
            sequence = TorchSequence(list(tokens), buffers=buffers)
            spans.append(ChunkSpan(Chunk(SequenceId(0), 0, tokens), sequence, tokens, offset))
            offset += num_tokens
        assert backend._decoder is not None
        return backend._decoder.step(spans, last)

    known = logits([*range(64)])
    assert not np.allclose(known[59], known[63], atol=1e-3)
    for last in ([59, 63], [0, *range(20, 50), 62], []):
        np.testing.assert_allclose(logits(last), known[last], atol=2e-4)


@pytest.mark.parametrize("variant", ["avx2", "dotprod"])
def test_attention_inputs_may_have_different_numbers_of_bits(
    native_directory: Path, variant: str, tmp_path: Path
) -> None:
    """AVX2 reads activations for 8-bit weights in another form than for 4-bit weights."""
    build = NativeBuild(native_directory, variant)
    try:
        build.library()
    except InvalidRequestError as error:
        pytest.skip(str(error))
    directory = write_grouped(tmp_path, LlamaConfig(**WIDE), {"k_proj": 8})
    backend = TorchBackend(directory, spec_of(directory), TorchOptions(native=build))
    assert backend._decoder is not None
    check_batch(backend, [prompt(20 + n, seed=n) for n in range(2)])


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_experts_are_quantised_if_asked(
    native: NativeBuild, tiny_model: GetModel, family: str, weights: Weights
) -> None:
    """More rows than are sorted by expert at once."""
    model = tiny_model(family)
    options = TorchOptions("float32", weights=weights, native=native)
    backend = TorchBackend(model.directory, model.spec, options)
    assert backend._decoder is not None
    check_batch(backend, [prompt(300), prompt(290, seed=1)])


@pytest.mark.usefixtures("library")
def test_a_model_that_computes_otherwise_is_run_by_its_own_code(
    native: NativeBuild, tmp_path: Path
) -> None:
    """Granite has Llama's parts, and multiplies what they give."""
    write_weights(tmp_path, GraniteConfig(**SIZES, residual_multiplier=0.5))
    with structlog.testing.capture_logs() as logs:
        options = TorchOptions("float32", native=native)
        backend = TorchBackend(tmp_path, spec_of(tmp_path), options)
    assert [line["log_level"] for line in logs] == ["warning"]
    expected = TorchBackend(tmp_path, spec_of(tmp_path), TorchOptions("float32"))
    replies = [begin(b, 0, prompt(30)).finish(6) for b in (backend, expected)]
    assert replies[0] == replies[1]


# -- without the library --------------------------------------------------------------------------


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**WIDE, attention_bias=True, rope_parameters=LLAMA3),
        Qwen2Config(**WIDE, tie_word_embeddings=True),
        Qwen3Config(**WIDE),
        MistralConfig(**WIDE, sliding_window=16),
    ],
    ids=["llama3", "qwen2", "qwen3", "mistral"],
)
def test_models_built_from_files_equal_the_librarys(
    native: NativeBuild, config: object, tmp_path: Path
) -> None:
    """Logits of a whole prompt, by either code."""
    write_weights(tmp_path, config)
    spec, models = spec_of(tmp_path), []
    plan = make_plan(tmp_path, TorchOptions("float32", native=native))
    for library in (plan.library, None):
        model = load_model(tmp_path, spec, replace(plan, library=library)).model
        models.append(model)
    assert [isinstance(model, PlainModel) for model in models] == [True, False]
    tokens = tuple(prompt(50))
    found, expected = (_logits(model, spec, tokens) for model in models)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def _logits(model: Any, spec: ModelCacheSpec, tokens: tuple[int, ...]) -> torch.Tensor:
    """Of all tokens of a prompt, by the model's own code."""
    layer, sequence = spec.layers[0], TorchSequence(list(tokens))
    size = (spec.num_layers, layer.num_kv_heads, len(tokens), layer.key_dim)
    sequence.buffers = [(torch.empty(size), torch.empty(size))]
    span = ChunkSpan(Chunk(SequenceId(0), 0, tokens), sequence, tokens, 0)
    span.make_views()
    places = torch.arange(len(tokens))
    inputs = {"input_ids": torch.tensor([tokens]), "position_ids": places[None], "spans": [span]}
    with torch.inference_mode():
        logits: torch.Tensor = model(**inputs, use_cache=False, logits_to_keep=places).logits
    return logits


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        {"hidden_act": "gelu"},
        {"rms_norm_eps": None},
        {"model_type": "granite"},
        {"tie_word_embeddings": True},  # though the file has a head
        {"intermediate_size": 44},
    ],
    ids=["rope", "activation", "missing", "family", "head", "size"],
)
def test_models_that_are_not_supported_are_read_by_the_library(
    change: dict[str, object], tiny_model: GetModel
) -> None:
    model = tiny_model("llama")
    config = json.loads((model.directory / "config.json").read_text())
    tensors = dict(read_tensors(model.directory))
    for given, is_read in ((config, True), ({**config, **change}, False)):
        plain = read_plain(given, model.spec, tensors, torch.float32, is_kept=False)
        assert (plain is not None) == is_read


@pytest.mark.usefixtures("library")
def test_a_plain_model_is_loaded_without_the_librarys_code(
    native: NativeBuild, tiny_model: GetModel
) -> None:
    """It takes longer to import than all else takes together."""
    code = """
import json, sys
from pathlib import Path
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.loading import TorchOptions
from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild
from semantic.domain.spec import ModelCacheSpec

directory = Path(sys.argv[1])
spec = ModelCacheSpec.from_config(json.loads((directory / "config.json").read_text()))
options = TorchOptions("float32", native=NativeBuild(Path(sys.argv[2])))
assert TorchBackend(directory, spec, options)._decoder is not None
print([name for name in ("transformers", "sympy", "torch._dynamo") if name in sys.modules])
"""
    places = [str(tiny_model("llama").directory), str(native.directory)]
    command = [sys.executable, "-c", code, *places]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - ours
    assert done.stdout.strip() == "[]"


# -- building -------------------------------------------------------------------------------------


def test_without_a_compiler_there_is_none_and_the_reason_is_given(
    monkeypatch: pytest.MonkeyPatch, tiny_model: GetModel, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    build = NativeBuild(tmp_path / "native", prebuilt=tmp_path)
    assert build.library() is None
    assert "no C compiler (no-such-compiler): install gcc, clang, or" in build.reason
    model = tiny_model("llama")
    backend = TorchBackend(model.directory, model.spec, TorchOptions("float32", native=build))
    assert backend.traits.compute is not None
    assert backend.traits.compute.kernels == "PyTorch"
    assert build.reason in backend.traits.compute.slow


def test_a_compiler_that_fails_counts_as_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", "false")
    build = NativeBuild(tmp_path / "native", prebuilt=tmp_path)
    assert build.library() is None
    assert "false" in build.reason


def test_a_library_can_be_switched_off(tmp_path: Path) -> None:
    build = NativeBuild(tmp_path / "native", "off")
    assert build.library() is None
    assert "off" in build.reason
    assert not (tmp_path / "native").exists()


def test_a_variant_of_another_machine_is_refused(tmp_path: Path) -> None:
    foreign = "avx2" if platform.machine() in ("aarch64", "arm64") else "dotprod"
    with pytest.raises(InvalidRequestError, match=f"native {foreign}: there is no variant for"):
        NativeBuild(tmp_path / "native", foreign).library()


def test_an_unknown_variant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"must be auto, off, avx512vnni, .* or scalar; got 'sse2'"
    ):
        NativeBuild(tmp_path / "native", "sse2")


@pytest.mark.usefixtures("library")
def test_what_was_built_is_kept(native: NativeBuild) -> None:
    files = {path: path.stat().st_mtime_ns for path in native.directory.iterdir()}
    assert NativeBuild(native.directory).library() is not None
    assert {path: path.stat().st_mtime_ns for path in native.directory.iterdir()} == files


@pytest.mark.usefixtures("library")
def test_a_prebuilt_library_needs_no_compiler(
    native: NativeBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert native.library() is not None
    for path in native.directory.glob("*.so"):
        (tmp_path / path.name.partition("-")[2]).symlink_to(path)  # without the compiler's name
    monkeypatch.setenv("CC", "no-such-compiler")
    assert NativeBuild(tmp_path / "native", prebuilt=tmp_path).library() is not None


def test_a_library_of_another_version_is_refused(tmp_path: Path) -> None:
    """Its structures have other sizes."""
    source = tmp_path / "other.c"
    source.write_text(
        "int semantic_supported(void) { return 1; }\n"
        "unsigned long long semantic_abi(void) { return 7; }\n"
    )
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    path = tmp_path / "other.so"
    command = [compiler, "-shared", "-fPIC", "-o", str(path), str(source)]
    subprocess.run(command, check=True)  # noqa: S603 - our own
    with pytest.raises(LibraryMismatchError, match="another version"):
        Library(path, "avx2")
