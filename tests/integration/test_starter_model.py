import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from semantic.adapters.outbound.backends.torch.reading import load_grouped
from semantic.adapters.outbound.models.gguf.importing import starter_gguf

pytestmark = pytest.mark.integration

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<empty_output>"]


@pytest.fixture(scope="session")
def tokenizer(starter_model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(starter_model_dir)


@pytest.fixture(scope="session")
def model(starter_model_dir: Path) -> Iterator[Any]:
    loaded = load_grouped(starter_model_dir, torch.float32, is_kept=False)
    with torch.inference_mode():
        yield loaded.eval()


def test_the_directory_holds_what_a_downloaded_one_holds(starter_model_dir: Path) -> None:
    assert {path.name for path in starter_model_dir.iterdir()} == {
        ".imported",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_transformers_reads_the_configuration_as_it_was_trained(starter_model_dir: Path) -> None:
    config = AutoConfig.from_pretrained(starter_model_dir)
    assert config.rope_parameters == {"rope_theta": 100000.0, "rope_type": "default"}
    assert (config.num_hidden_layers, config.hidden_size) == (30, 576)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-5, 8192)
    assert config.dtype == torch.bfloat16
    assert config.tie_word_embeddings


def test_weights_are_those_of_the_file_and_take_no_more_room(
    model: Any, starter_model_dir: Path
) -> None:
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(starter_gguf()).tensors}
    weights = {
        "token_embd.weight": model.get_input_embeddings().weight,
        "blk.7.ffn_down.weight": model.model.layers[7].mlp.down_proj.weight,
    }
    for name, found in weights.items():
        expected = gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
        # A scale has eight significant bits.
        np.testing.assert_allclose(found.numpy(), expected, atol=np.abs(expected).max() / 2**7)
    size = (starter_model_dir / "model.safetensors").stat().st_size
    assert size < 1.01 * starter_gguf().stat().st_size


def test_every_id_decodes_and_every_special_token_is_one_id(
    starter_model_dir: Path, tokenizer: Any
) -> None:
    assert len(tokenizer) == 49152
    for token in SPECIAL_TOKENS:
        (token_id,) = tokenizer.encode(token)
        assert tokenizer.decode([token_id]) == token
        assert tokenizer.decode([token_id], skip_special_tokens=True) == ""
    ids = json.loads((starter_model_dir / "generation_config.json").read_text())
    assert ids.items() >= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}.items()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_digits_are_single_tokens_and_words_whole_ones(tokenizer: Any) -> None:
    assert tokenizer.tokenize("Hello world 2024") == ["Hello", "Ġworld", "Ġ", "2", "0", "2", "4"]
