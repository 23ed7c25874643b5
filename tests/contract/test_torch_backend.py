"""The torch backend alone: it computes the logits of the library, or refuses the model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxConfig,
    OPTConfig,
    RecurrentGemmaConfig,
    ViTConfig,
)

from semantic.adapters.outbound.backends.fake import FakeBackend, fake_spec
from semantic.adapters.outbound.backends.torch.attention import packed_attention
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.loading import TorchOptions
from semantic.domain.errors import BackendError, CacheCorruptionError, InvalidRequestError
from semantic.domain.spec import LayerKind, LayerSpec, ModelCacheSpec
from semantic.ports.backend import ModelBackendPort
from tests.contract.driver import begin, check_logprobs, check_scores, prompt, restored, step
from tests.contract.models import (
    FAMILIES,
    SIZES,
    GetModel,
    TinyModel,
    library_logprobs,
    write_model,
)
from tests.number_formats import HAS_BFLOAT16

pytestmark = pytest.mark.contract


def _float32(model: TinyModel) -> TorchBackend:
    return TorchBackend(model.directory, model.spec, TorchOptions(dtype="float32"))


# -- the same numbers ---------------------------------------------------------------------------


REFERENCES = [(family, "eager") for family in FAMILIES]
REFERENCES += [(family, "sdpa") for family in FAMILIES if family not in ("gemma2", "gpt-oss")]


@pytest.mark.parametrize("family,implementation", REFERENCES)
def test_logits_are_the_librarys(tiny_model: GetModel, family: str, implementation: str) -> None:
    tokens, model = prompt(60), tiny_model(family)
    backend, expected = _float32(model), library_logprobs(model, tokens, implementation)
    check_logprobs(backend, tokens, expected, 1e-4)
    check_scores(backend, tokens, expected, 1e-4)


def test_state_in_the_format_a_server_chooses_is_restored_exactly(tiny_model: GetModel) -> None:
    model = tiny_model("llama")
    backend = TorchBackend(model.directory, model.spec)
    assert backend.traits.compute is not None
    assert backend.traits.kv_abi == f"torch.v1.{backend.traits.compute.dtype}"
    straight, run = begin(backend, 0, prompt(12)), begin(backend, 1, prompt(12))
    run.finish(3)
    assert restored(run, seq=2).finish() == straight.finish()


# -- payloads of others -------------------------------------------------------------------------


def _is_loaded(source: ModelBackendPort, target: ModelBackendPort) -> bool:
    given, taker = begin(source, 0, prompt(20)), begin(target, 1, prompt(20))
    parts = given.seal(8, 16)
    try:
        taker.load(parts)
    except CacheCorruptionError:
        return False
    finally:
        source.close_sequence(given.seq)
        target.close_sequence(taker.seq)
    return True


def test_payloads_of_another_geometry_are_refused(tiny_model: GetModel, tmp_path: Path) -> None:
    backend = _float32(tiny_model("llama"))
    assert _is_loaded(backend, backend)
    fewer_heads = LlamaConfig(**{**SIZES, "num_key_value_heads": 1})
    more_layers = LlamaConfig(**{**SIZES, "num_hidden_layers": 3})
    as_many_bytes = LlamaConfig(**{**SIZES, "num_key_value_heads": 4, "head_dim": 4})
    for name, config in (("1", fewer_heads), ("2", more_layers), ("3", as_many_bytes)):
        other = _float32(write_model(tmp_path / name, config))
        assert not _is_loaded(other, backend)
        assert not _is_loaded(backend, other)


def test_payloads_of_another_dtype_or_backend_are_refused(tiny_model: GetModel) -> None:
    model = tiny_model("llama")
    backend = _float32(model)
    other = TorchOptions("bfloat16" if HAS_BFLOAT16 else "float16")
    assert not _is_loaded(TorchBackend(model.directory, model.spec, other), backend)
    assert not _is_loaded(FakeBackend(fake_spec()), backend)
    assert not _is_loaded(backend, FakeBackend(fake_spec()))


def test_payloads_of_fakes_with_other_layers_are_refused() -> None:
    full, window = fake_spec(), fake_spec(window=12)
    assert _is_loaded(FakeBackend(window), FakeBackend(window))
    assert not _is_loaded(FakeBackend(full), FakeBackend(window))
    assert not _is_loaded(FakeBackend(full), FakeBackend(fake_spec(has_state=True)))
    assert not _is_loaded(FakeBackend(fake_spec(window=5)), FakeBackend(window))


# -- geometry, and models it cannot run ----------------------------------------------------------


def test_the_geometry_is_that_of_the_librarys_cache(tiny_model: GetModel) -> None:
    model = tiny_model("gemma3")
    for layers in ((), (LayerSpec(LayerKind.STATE, state_elements=4),)):
        backend = _float32(replace(model, spec=replace(model.spec, layers=layers)))
        assert backend.spec == model.spec
        # KV cache of another geometry than the config's has an ABI of its own.
        assert backend.traits.kv_abi != _float32(model).traits.kv_abi


@pytest.mark.parametrize("option", ["indices", "position_bias"])
def test_attention_it_does_not_compute_is_refused(option: str) -> None:
    tensor = torch.zeros(1, 1, 1, 8)
    with pytest.raises(BackendError, match=option):
        packed_attention(None, tensor, tensor, tensor, None, spans=[], **{option: tensor})
    with pytest.raises(BackendError, match="a mask"):
        packed_attention(None, tensor, tensor, tensor, tensor, spans=[])


def test_a_model_with_chunked_attention_runs_each_sequence_alone(tmp_path: Path) -> None:
    config = Llama4TextConfig(
        **SIZES,
        attention_chunk_size=12,
        intermediate_size_mlp=48,
        num_local_experts=2,
        layer_types=["chunked_attention", "full_attention"],
    )
    model = write_model(tmp_path, config)
    backend, tokens = _float32(model), prompt(60)
    assert backend.traits.max_draft == 0
    check_logprobs(backend, tokens, library_logprobs(model, tokens), 1e-4)


def test_a_cache_that_cannot_be_restored_is_refused(tmp_path: Path) -> None:
    config = MiniMaxConfig(**SIZES, num_local_experts=2, block_size=8)
    with pytest.raises(InvalidRequestError, match=r"cache interface.*--backend mlx"):
        _float32(write_model(tmp_path, config))


def test_a_model_that_keeps_state_in_its_modules_is_refused(tmp_path: Path) -> None:
    config = RecurrentGemmaConfig(**{**SIZES, "num_hidden_layers": 3}, lru_width=32)
    with pytest.raises(InvalidRequestError, match="layer 0 keeps its state outside the cache"):
        _float32(write_model(tmp_path, config))


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    config = BertConfig(**SIZES)
    with pytest.raises(InvalidRequestError, match="it is not causal"):
        _float32(write_model(tmp_path, config))


def test_a_type_that_does_not_generate_text_is_refused(tmp_path: Path) -> None:
    ViTConfig(hidden_size=32).save_pretrained(tmp_path)
    spec = ModelCacheSpec("vit", (), vocab_size=0, max_context=512)
    with pytest.raises(InvalidRequestError, match="causal language model"):
        TorchBackend(tmp_path, spec)


def test_errors_of_the_library_are_not_shown(tmp_path: Path) -> None:
    model = write_model(tmp_path, LlamaConfig(**SIZES))
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "hidden_act": "no such"}))
    with pytest.raises(InvalidRequestError, match=r"fails to load it \(KeyError; the log"):
        _float32(model)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_the_context_ends_where_the_rotary_embedding_would_change(
    tmp_path: Path, rope_type: str
) -> None:
    scaling = {
        "rope_type": rope_type,
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        **({"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if "long" in rope_type else {}),
    }
    model = write_model(tmp_path, LlamaConfig(**SIZES, rope_parameters=scaling))
    backend, tokens = _float32(model), prompt(60)
    assert backend.spec.max_context == 64 < model.spec.max_context
    check_logprobs(backend, tokens, library_logprobs(model, tokens), 1e-4)


# -- a step that fails --------------------------------------------------------------------------


def test_a_failed_step_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    """A prompt longer than the learned positions fails on the device.

    It runs on the CPU: on a GPU, the failed assertion would make CUDA unusable for the process.
    """
    config = OPTConfig(
        vocab_size=96,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        max_position_embeddings=16,
    )
    model = write_model(tmp_path, config)
    options = TorchOptions(dtype="float32")
    backend = TorchBackend(model.directory, model.spec, options)
    expected = begin(backend, 0, prompt(9)).finish(4)
    run, too_long = begin(backend, 1, prompt(9)), begin(backend, 2, prompt(30))
    run.compute(4)
    with pytest.raises(BackendError, match="device failed"):
        step(backend, run.chunk(), too_long.chunk())
    assert run.finish(4) == expected
