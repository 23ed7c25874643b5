"""Reads sizes, configuration and vocabulary from a GGUF file's metadata.

All metadata keys are read here. Values that have no counterpart in Hugging Face's files, or that
may not be computed the same way, are rejected by name. `weights` converts the weights.
"""

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
import numpy.typing as npt

from semantic.adapters.outbound.models.gguf.vocabulary import GgufVocabulary
from semantic.adapters.outbound.models.gguf.weights import (
    GROUP,
    group_bits,
    is_grouped,
    read_floats,
)
from semantic.domain.errors import InvalidRequestError, ModelNotFoundError

_MAX_INT = 2**31 - 1
_MERGES = "tokenizer.ggml.merges"
OUTPUT, Q_BIAS, ROPE_FACTORS = "output.weight", "blk.0.attn_q.bias", "rope_freqs.weight"
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
# GPT-OSS ends a reply with any of these; GGUF names only the first.
_HARMONY_ENDS = ("<|return|>", "<|call|>", "<|endoftext|>")
_ATTENTION = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
)
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_EXPERTS = (
    "mlp.experts.gate_proj",
    "mlp.experts.up_proj",
    "mlp.experts.down_proj",
    "mlp.router",
)
_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_MLP_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")

_T = TypeVar("_T", int, float, str, bool, list[Any])


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one GGUF architecture differs from the others."""

    name: str
    hf_class: str
    is_permuted: bool = False
    biases: str = ""
    mlp: tuple[str, ...] = _MLP
    extra: tuple[str, ...] = ()

    @property
    def gguf_arch(self) -> gguf.MODEL_ARCH:
        return gguf.MODEL_ARCH[self.name.upper().replace("-", "_")]

    @property
    def model_type(self) -> str:
        return {"gemma3": "gemma3_text", "gpt-oss": "gpt_oss"}.get(self.name, self.name)

    @property
    def is_gemma(self) -> bool:
        """Whether norm weights are stored with 1 added, and the config has Gemma's own keys."""
        return self.name.startswith("gemma")

    def layer_parts(self, tensors: Container[str]) -> list[str]:
        biases = self.biases
        if self.name == "llama" and Q_BIAS in tensors:
            biases = "qkvo"
        parts = [f"{part}.weight" for part in (*_ATTENTION, *self.mlp, *self.extra)]
        parts += [f"self_attn.{part}_proj.bias" for part in biases]
        return parts + ([f"{part}.bias" for part in self.mlp] if self.mlp is _EXPERTS else [])


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("llama", "LlamaForCausalLM", is_permuted=True),  # also Mistral and SmolLM
        Architecture("qwen2", "Qwen2ForCausalLM", biases="qkv"),
        Architecture("qwen3", "Qwen3ForCausalLM", extra=_QK_NORMS),
        Architecture("gemma2", "Gemma2ForCausalLM", extra=_MLP_NORMS),
        Architecture("gemma3", "Gemma3ForCausalLM", extra=(*_QK_NORMS, *_MLP_NORMS)),
        Architecture(
            "gpt-oss",
            "GptOssForCausalLM",
            biases="qkvo",
            mlp=_EXPERTS,
            extra=("self_attn.sinks",),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An opened file: metadata as Python values, tensors by their GGUF names."""

    path: Path
    fields: Mapping[str, object]
    tensors: Mapping[str, gguf.ReaderTensor]

    def find(self, key: str, kind: type[_T]) -> _T | None:
        """Return a metadata value, or None if it is missing; rejects invalid values.

        Invalid are: another type, NaN or infinity (also in a list), and integers that are negative
        or above 2^31 - 1, such as 2^32 - 1, which stands for -1.
        """
        value = self.fields.get(key)
        if value is None:
            return None
        if type(value) is not kind:
            raise self.refusal(f"{key} is {type(value).__name__}; expected {kind.__name__}")
        if (problem := _number_problem(value)) is not None:
            raise self.refusal(f"{key} {problem}")
        return value

    def get(self, key: str, kind: type[_T]) -> _T:
        value = self.find(key, kind)
        if value is None:
            raise self.refusal(f"metadata key {key} is missing")
        return value

    def refusal(self, why: str) -> InvalidRequestError:
        return InvalidRequestError(f"cannot import {self.path}: {why}.", param="model")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that weights, configuration and tokenizer depend on."""

    architecture: Architecture
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    max_length: int
    rope_theta: float


def _number_problem(value: object) -> str | None:
    for number in value if isinstance(value, list) else (value,):
        if isinstance(number, float) and not math.isfinite(number):
            return f"is or contains {number}; expected finite numbers"
    if isinstance(value, int) and not 0 <= value <= _MAX_INT:
        return f"is {value}; expected a number from 0 to {_MAX_INT}"
    return None


def open_gguf(path: Path) -> GgufFile:
    """Open a file; tensors stay on disk until they are read.

    Raises:
        ModelNotFoundError: The file does not exist.
        InvalidRequestError: The file is damaged, or not a GGUF file.
    """
    try:
        reader = gguf.GGUFReader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"model file {path} does not exist.") from error
    except OSError as error:
        why = f"cannot read {path}: {error.strerror}."
        raise InvalidRequestError(why, param="model") from error
    # The reader validates little; the exception depends on where the damage is.
    except (ValueError, LookupError, TypeError, ArithmeticError, MemoryError) as error:
        why = f"{path} is not a GGUF file, or it is damaged or incomplete ({error})."
        raise InvalidRequestError(why, param="model") from error
    file = GgufFile(path, fields, {tensor.name: tensor for tensor in reader.tensors})
    if reader.byte_order != "I":
        raise file.refusal("its byte order differs from this machine's")
    return file


def read_shape(file: GgufFile) -> Shape:
    """Read a model's sizes; rejects unknown architectures."""
    name = file.get("general.architecture", str)
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise file.refusal(f"architecture {name!r} is not supported; supported are {known}")
    num_heads = file.get(f"{name}.attention.head_count", int)
    hidden_size = file.get(f"{name}.embedding_length", int)
    head_dim = file.find(f"{name}.attention.key_length", int) or hidden_size // max(num_heads, 1)
    rope_dim = file.find(f"{name}.rope.dimension_count", int) or head_dim
    if rope_dim != head_dim:
        raise file.refusal(
            f"RoPE over only {rope_dim} of a head's {head_dim} dimensions is not supported"
        )
    return Shape(
        architecture=ARCHITECTURES[name],
        num_layers=file.get(f"{name}.block_count", int),
        num_heads=num_heads,
        num_kv_heads=file.find(f"{name}.attention.head_count_kv", int) or num_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        max_length=file.get(f"{name}.context_length", int),
        rope_theta=file.find(f"{name}.rope.freq_base", float) or 10000.0,
    )


def read_config(file: GgufFile, shape: Shape) -> dict[str, object]:
    """Build the content of ``config.json``, apart from special tokens."""
    name = shape.architecture.name
    config: dict[str, object] = {
        "architectures": [shape.architecture.hf_class],
        "model_type": shape.architecture.model_type,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": int(file.tensors["token_embd.weight"].shape[-1]),
        "hidden_size": shape.hidden_size,
        "intermediate_size": file.get(f"{name}.feed_forward_length", int),
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_length,
        "rms_norm_eps": _decimal(file.get(f"{name}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _decimal(shape.rope_theta),
        "tie_word_embeddings": OUTPUT not in file.tensors,
    }
    if name == "llama":
        config |= {"attention_bias": Q_BIAS in file.tensors, "mlp_bias": False}
    if shape.architecture.is_gemma:
        config |= _gemma_config(file, shape)
    if name == "gpt-oss":
        config |= _gpt_oss_config(file)
    if scaling := _rope_scaling(file, shape):
        config["rope_scaling"] = scaling
    grouped = [group_bits(tensor) for tensor in file.tensors.values() if is_grouped(tensor)]
    if grouped or name == "gpt-oss":  # its experts always have mlx-lm's layout
        # Individual linears may have other bits; loaders infer them from the shapes.
        config["quantization"] = {"group_size": GROUP, "bits": min(grouped, default=4)}
    return config


def _gpt_oss_config(file: GgufFile) -> dict[str, object]:
    return {
        "num_local_experts": file.get("gpt-oss.expert_count", int),
        "num_experts_per_tok": file.get("gpt-oss.expert_used_count", int),
        "intermediate_size": file.get("gpt-oss.expert_feed_forward_length", int),
        "sliding_window": file.get("gpt-oss.attention.sliding_window", int),
        "attention_bias": True,
    }


def _gemma_config(file: GgufFile, shape: Shape) -> dict[str, object]:
    name = shape.architecture.name
    # The largest model of each generation scales queries differently; GGUF omits the number.
    is_largest = shape.num_layers == {"gemma2": 46, "gemma3": 62}[name]
    scalar = shape.hidden_size // shape.num_heads if is_largest else shape.head_dim
    config: dict[str, object] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": file.get(f"{name}.attention.sliding_window", int),
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": file.find(f"{name}.attn_logit_softcapping", float),
        "final_logit_softcapping": file.find(f"{name}.final_logit_softcapping", float),
    }
    if name == "gemma3":
        config |= {"sliding_window_pattern": 6, "rope_local_base_freq": 10000.0}
    return config


def _decimal(value: float) -> float:
    # The shortest decimal that rounds to the same float32: 1e-05, not 9.999999747e-06.
    return float(str(np.float32(value)))


def _rope_scaling(file: GgufFile, shape: Shape) -> dict[str, object] | None:
    name = shape.architecture.name
    kind = file.find(f"{name}.rope.scaling.type", str) or "none"
    if kind == "linear":
        return {"rope_type": "linear", "factor": file.get(f"{name}.rope.scaling.factor", float)}
    if kind == "yarn" and name == "gpt-oss":
        before = f"{name}.rope.scaling"
        return {
            "rope_type": "yarn",
            "factor": file.get(f"{before}.factor", float),
            "original_max_position_embeddings": file.get(f"{before}.original_context_length", int),
            "beta_fast": file.find(f"{before}.yarn_beta_fast", float) or 32.0,
            "beta_slow": file.find(f"{before}.yarn_beta_slow", float) or 1.0,
            "truncate": False,  # as the model was trained
        }
    if kind != "none":
        raise file.refusal(f"RoPE scaling {kind!r} is not supported")
    if ROPE_FACTORS not in file.tensors:
        return None
    factors = read_floats(file.tensors[ROPE_FACTORS])
    factor = float(factors.max(initial=1.0))
    # GGUF stores only the resulting factors: accept them if Llama 3's formula gives the same.
    expected = _llama3_factors(shape, factor)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise file.refusal("its RoPE factors are not supported; only those of Llama 3 are")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _llama3_factors(shape: Shape, factor: float) -> npt.NDArray[np.float64]:
    exponents = np.arange(0, shape.head_dim, 2) / shape.head_dim
    rotations = _LLAMA3_CONTEXT / (2 * math.pi * shape.rope_theta**exponents)
    smooth = np.clip((rotations - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))


def read_vocabulary(file: GgufFile, shape: Shape) -> GgufVocabulary:
    """Read the tokenizer's metadata."""
    ends = [file.find(f"tokenizer.ggml.{end}_token_id", int) for end in ("eos", "eot", "eom")]
    model = file.get("tokenizer.ggml.model", str)
    is_sentencepiece = model == "llama"
    tokens = [str(token) for token in file.get("tokenizer.ggml.tokens", list)]
    if shape.architecture.name == "gpt-oss":
        ends += [tokens.index(end) for end in _HARMONY_ENDS if end in tokens]
    return GgufVocabulary(
        source=file.path,
        model=model,
        pre=file.find("tokenizer.ggml.pre", str) or "default",
        tokens=tokens,
        token_types=file.find("tokenizer.ggml.token_type", list) or (),
        merges=[] if is_sentencepiece else [str(m) for m in file.get(_MERGES, list)],
        scores=file.find("tokenizer.ggml.scores", list) or (),
        adds_space=file.find("tokenizer.ggml.add_space_prefix", bool),
        adds_bos=file.find("tokenizer.ggml.add_bos_token", bool),
        bos=file.find("tokenizer.ggml.bos_token_id", int),
        ends=tuple(dict.fromkeys(end for end in ends if end is not None)),
        pad=file.find("tokenizer.ggml.padding_token_id", int),
        unk=file.find("tokenizer.ggml.unknown_token_id", int),
        chat_template=file.find("tokenizer.chat_template", str),
        max_length=shape.max_length,
    )
