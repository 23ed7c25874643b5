"""Finds the GGUF tensors of a model's layers, and writes them in Hugging Face's layout."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
from safetensors import serialize_file

from semantic.adapters.outbound.models.gguf import layers as the
from semantic.adapters.outbound.models.gguf import restoring as restore
from semantic.adapters.outbound.models.gguf.config import num_layers
from semantic.adapters.outbound.models.gguf.header import GgufFile
from semantic.adapters.outbound.models.gguf.layers import Architecture, Choice, LayerPart
from semantic.adapters.outbound.models.gguf.rope import ROPE_TENSORS
from semantic.adapters.outbound.models.gguf.weights import Stored, tensor_spec

Progress = Callable[[int, int], None]

_UNSHIFTED = "ssm_norm.weight"
# The head for draft tokens (MTP) is the block after the last one, with these in addition. Its names
# in Hugging Face's layout: of its layer, and of these.
_NEXTN = tuple(f"nextn.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head_norm"))
_APPENDED = tuple(f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
_SEPARATE = tuple(
    f"mtp.{name}.weight" for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
)
_HEADS = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe"), ("model.layers.{count}.", _APPENDED)),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), ("mtp.layers.0.", _SEPARATE)),
}
_HALVES = {"attn_q": restore.halves_of_queries, "attn_k": restore.halves_of_keys}


def find_parts(file: GgufFile, architecture: Architecture) -> list[LayerPart]:
    """All parts of a model with their full names; rejects missing and unknown tensors."""
    # Bounds the loop if the layer count is damaged; missing tensors are still detected.
    count = min(num_layers(file), len(file.tensors))
    names = gguf.get_tensor_name_map(architecture.gguf_arch, count + 1)

    def rooted(name: str) -> str:
        return architecture.root + name.removeprefix("model") if name.startswith("model.") else name

    def resolved(part: str | LayerPart, hf_start: str, gguf_start: str) -> LayerPart:
        if isinstance(part, LayerPart):
            hf = tuple(rooted(hf_start + name) for name in part.hf)
            sources = tuple(gguf_start + name for name in part.gguf)
            return LayerPart(hf, sources, _restore(architecture, sources[0], part.restore))
        name = hf_start + (part if part.endswith(".bias") else f"{part}.weight")
        source = names.get_name(name, (".weight", ".bias")) or name
        return LayerPart(
            (rooted(name),), (source,), _restore(architecture, source, restore.unchanged)
        )

    def chosen(choice: Choice, hf_start: str, gguf_start: str) -> list[LayerPart]:
        alternatives = [
            [resolved(part, hf_start, gguf_start) for part in alternative] for alternative in choice
        ]
        missing = [
            [source for part in parts for source in part.gguf if source not in file.tensors]
            for parts in alternatives
        ]
        for parts, lacks in zip(alternatives, missing, strict=True):
            if not lacks:
                return parts
        fewest = min(missing, key=len)
        raise file.refusal(f"tensor {min(fewest)} is missing")

    def layer(number: int) -> list[LayerPart]:
        starts = f"model.layers.{number}.", f"blk.{number}."
        return [part for choice in architecture.layer for part in chosen(choice, *starts)]

    parts = [part for choice in architecture.model or the.MODEL for part in chosen(choice, "", "")]
    parts += [part for i in range(count) for part in layer(i)]
    if _has_head(file, architecture, count):
        parts += _head_parts(layer(count), architecture, count)
    used = {source for part in parts for source in part.gguf} | ROPE_TENSORS
    unknown = {name for name in file.tensors if not _is_extra(name, count)} - used
    if unknown:
        raise file.refusal(f"tensor {min(unknown)} is not supported")
    return parts


def _has_head(file: GgufFile, architecture: Architecture, count: int) -> bool:
    """Whether the file has a head for draft tokens that the backends can use."""
    needed = {f"blk.{count}.{name}" for name in _NEXTN}
    return architecture.model_type in _HEADS and needed <= file.tensors.keys()


def _head_parts(own: list[LayerPart], architecture: Architecture, count: int) -> list[LayerPart]:
    """Return the parts of a head; `own`: those of its layer, named as one more of the model."""
    start, others = _HEADS[architecture.model_type]
    start, named = start.format(count=count), f"{architecture.root}.layers.{count}."
    parts = [
        replace(part, hf=tuple(start + name.removeprefix(named) for name in part.hf))
        for part in own
    ]
    for name, nextn in zip(others, _NEXTN, strict=True):
        source, hf = f"blk.{count}.{nextn}", name if "mtp." in name else start + name
        parts.append(LayerPart((hf,), (source,), _restore(architecture, source, restore.unchanged)))
    return parts


def _is_extra(name: str, count: int) -> bool:
    """Whether a tensor belongs to a layer that predicts further tokens."""
    block, _, rest = name.removeprefix("blk.").partition(".")
    return name.startswith("blk.") and bool(rest) and block.isdecimal() and int(block) >= count


def _restore(architecture: Architecture, source: str, given: restore.Restore) -> restore.Restore:
    part = source.split(".")[-2] if "." in source else source
    if architecture.is_permuted and part in _HALVES:
        return _HALVES[part]
    is_norm = source.endswith("norm.weight") and not source.endswith(_UNSHIFTED)
    return restore.minus_one if architecture.is_shifted and is_norm else given


def write_weights(
    file: GgufFile,
    parts: list[LayerPart],
    config: Mapping[str, Any],
    path: Path,
    progress: Progress,
) -> None:
    """Write all parts into one safetensors file; rejects damaged tensors."""
    sizes = [sum(file.tensors[source].n_bytes for source in part.gguf) for part in parts]
    done = 0
    weights: dict[str, Stored] = {}
    for part, size in zip(parts, sizes, strict=True):
        weights.update(_arrays(file, part, config))
        done += size
        progress(done, sum(sizes))
    # Specs hold raw addresses: `weights` must outlive the call.
    specs = {name: tensor_spec(weight) for name, weight in weights.items()}
    serialize_file(specs, path, {"format": "pt"})


def _arrays(
    file: GgufFile, part: LayerPart, config: Mapping[str, Any]
) -> Iterator[tuple[str, Stored]]:
    try:
        results = part.restore([file.tensors[source] for source in part.gguf], config)
    except ValueError as error:
        raise file.refusal(f"tensor {part.gguf[0]} {error}") from error
    for name, arrays in zip(part.hf, results, strict=True):
        owner, _, end = name.rpartition(".")
        for suffix, array in arrays.items():
            # Only weights of linears have scales and biases; biases and others are one array.
            # safetensors reads memory from an address, in order.
            ordered = array if array.flags.c_contiguous else array.copy()
            yield (f"{owner}.{suffix}" if end == "weight" else name), ordered
