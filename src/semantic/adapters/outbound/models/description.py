"""Describes a model from its files, without loading it."""

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from semantic.adapters.outbound.models.chat_template import template_source
from semantic.adapters.outbound.models.gguf.importing import has_mark
from semantic.adapters.outbound.vision.families import takes_images
from semantic.ports.models import ModelFacts

_MAX_HEADER = 100_000_000  # bytes, same as in the safetensors library


def directory_facts(directory: Path) -> ModelFacts:
    """Describe the model in a directory."""
    weights = sorted(directory.glob("*.safetensors"))
    config = _object(directory / "config.json")
    vocabulary = directory / "tokenizer.json"
    nested = config.get("text_config")  # of a multimodal model
    text = {**config, **nested} if isinstance(nested, dict) else config
    quantisation = text.get("quantization")
    group = quantisation.get("group_size", 0) if isinstance(quantisation, dict) else 0

    def number(name: str) -> int:
        value = text.get(name)
        return value if isinstance(value, int) else 0

    stamps = [(path, path.stat().st_size, path.stat().st_mtime_ns) for path in weights]
    return ModelFacts(
        architecture=str(text.get("model_type", "")),
        file_format="gguf" if has_mark(directory) else "safetensors",
        precision=_precision(text),
        num_parameters=sum(_num_parameters(*stamp, group) for stamp in stamps),
        max_context=number("max_position_embeddings"),
        hidden_size=number("hidden_size"),
        num_layers=number("num_hidden_layers"),
        num_heads=number("num_attention_heads"),
        num_kv_heads=number("num_key_value_heads") or number("num_attention_heads"),
        vocab_size=number("vocab_size"),
        template=template_source(directory, _object(directory / "tokenizer_config.json")) or "",
        special_tokens=_special_tokens(vocabulary, vocabulary.stat().st_mtime_ns),
        modified_at=max((stamp[2] for stamp in stamps), default=0) / 1e9,
        digest=_digest([json.dumps(config), *(f"{p.name} {size} {at}" for p, size, at in stamps)]),
        accepts_images=takes_images(config),
    )


def file_facts(path: Path) -> ModelFacts:
    """Describe a GGUF file that is not imported yet."""
    status = path.stat()
    digest = _digest([path.name, str(status.st_size), str(status.st_mtime_ns)])
    return ModelFacts(file_format="gguf", modified_at=status.st_mtime, digest=digest)


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


@functools.lru_cache(maxsize=64)
def _special_tokens(path: Path, _modified_ns: int) -> tuple[str, ...]:
    added = _object(path).get("added_tokens")
    entries = added if isinstance(added, list) else ()
    return tuple(str(entry.get("content")) for entry in entries if isinstance(entry, dict))


def _precision(config: dict[str, Any]) -> str:
    quantisation = config.get("quantization") or config.get("quantization_config")
    if isinstance(quantisation, dict):
        bits = quantisation.get("bits")
        return f"Q{bits}" if bits else str(quantisation.get("quant_method", "")).upper()
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "")
    return dtype.replace("bfloat", "BF").replace("float", "F")


@functools.lru_cache(maxsize=1024)
def _num_parameters(path: Path, _size: int, _modified_ns: int, group: int) -> int:
    """Count the parameters in a file from its header; of quantised ones, `group` share a scale."""
    try:
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(num_bytes)) if num_bytes <= _MAX_HEADER else {}
        shapes = {name: entry["shape"] for name, entry in header.items() if "shape" in entry}
        total = 0
        for name, shape in shapes.items():
            layer, _, kind = name.rpartition(".")
            scales = shapes.get(f"{layer}.scales")
            if scales is None:
                total += math.prod(shape)
            elif kind == "weight":
                total += math.prod(scales) * group
    except (OSError, ValueError, TypeError, AttributeError):
        return 0  # a damaged file; loading it names the damage
    return total


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
