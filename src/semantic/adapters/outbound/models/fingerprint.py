"""Identifies a model by the files that determine its KV cache and its token ids.

Small files are hashed completely, except those that affect neither. For weights, the header and
samples of every tensor suffice: training changes all weights, and reading the rest would take
longer than loading the model. Results are cached with the size and time of every file.
"""

import contextlib
import hashlib
import json
import logging
import os
import secrets
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

_log = logging.getLogger(__name__)

_WHOLE = frozenset({".json", ".jinja", ".model", ".tiktoken", ".txt", ".py"})
_WEIGHTS = frozenset({".safetensors", ".bin", ".npz", ".npy", ".pt", ".pth", ".gguf"})
# Sampling defaults, which do not affect what is computed.
_IGNORED = frozenset({"generation_config.json"})
_TAG = b"semantic.fingerprint.v1"
_SAMPLE = 4096
_STRIDE = 2**20
_MAX_HEADER = 100_000_000  # same as in the safetensors library
_FILE_VERSION = 1


def fingerprint(directory: Path, cache_file: Path | None) -> str:
    """Identify the model in a directory; returns 64 hex digits.

    Args:
        cache_file: Stores the results of any number of models; None always recomputes. A damaged
            or unwritable file is ignored.

    Raises:
        OSError: the directory or a file in it cannot be read.
    """
    files = sorted(path for path in directory.iterdir() if _counts(path))
    stamps = {path.name: _stamp(path) for path in files}
    key = str(directory.resolve())
    known = read_records(cache_file)
    found = known.get(key)
    if isinstance(found, dict) and found.get("files") == stamps:
        kept = found.get("fingerprint")
        if isinstance(kept, str) and kept:
            return kept
    computed = _compute(files)
    if isinstance(found, dict) and found.get("fingerprint") not in (None, computed):
        _log.warning(
            "the files of %s changed: KV cache that was stored before is not used", directory.name
        )
    if cache_file is not None:
        write_records(cache_file, {**known, key: {"files": stamps, "fingerprint": computed}})
    return computed


def known_models(cache_file: Path) -> dict[str, str]:
    """Names of the models in the cache file, by fingerprint."""
    return {
        str(found.get("fingerprint")): Path(directory).name
        for directory, found in read_records(cache_file).items()
        if isinstance(found, dict)
    }


def _counts(path: Path) -> bool:
    suffixes = _WHOLE | _WEIGHTS
    return path.suffix in suffixes and path.name not in _IGNORED and path.is_file()


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _compute(files: Iterable[Path]) -> str:
    digest = hashlib.sha256(_TAG)
    for path in files:
        content = hashlib.sha256()
        with path.open("rb") as file:
            for piece in _pieces(file, path.suffix):
                content.update(piece)
        # Fixed-size lengths and digests separate one file's content from the next one's name.
        name = path.name.encode()
        size = path.stat().st_size
        digest.update(struct.pack("<QQ", len(name), size) + name + content.digest())
    return digest.hexdigest()


def _pieces(file: BinaryIO, suffix: str) -> Iterator[bytes]:
    size = os.fstat(file.fileno()).st_size
    if suffix in _WHOLE:
        yield file.read()
    elif suffix == ".safetensors" and (header := _header(file, size)) is not None:
        yield header
        for start, end in _tensors(header, size):
            yield from _samples(file, start, end)
    else:
        for start in range(0, size, _STRIDE):
            yield os.pread(file.fileno(), _SAMPLE, start)
        yield os.pread(file.fileno(), _SAMPLE, max(0, size - _SAMPLE))


def _header(file: BinaryIO, size: int) -> bytes | None:
    beginning = file.read(8)
    if len(beginning) < 8:
        return None
    (length,) = struct.unpack("<Q", beginning)
    if length > min(size - 8, _MAX_HEADER):
        return None
    header = file.read(length)
    return header if header.startswith(b"{") else None


def _tensors(header: bytes, size: int) -> list[tuple[int, int]]:
    """Byte ranges of the tensors; one range for everything if the header is invalid."""
    first = 8 + len(header)
    try:
        entries = json.loads(header)
        offsets = [entry["data_offsets"] for name, entry in entries.items() if name[:2] != "__"]
        places = sorted((first + int(start), first + int(end)) for start, end in offsets)
    except (ValueError, KeyError, TypeError, RecursionError):
        return [(first, size)]
    is_sound = all(first <= start <= end <= size for start, end in places)
    return places if is_sound else [(first, size)]


def _samples(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """The first, middle and last bytes of a tensor; all bytes of a small one."""
    if end - start <= 3 * _SAMPLE:
        yield os.pread(file.fileno(), end - start, start)
        return
    for place in (start, (start + end - _SAMPLE) // 2, end - _SAMPLE):
        yield os.pread(file.fileno(), _SAMPLE, place)


def read_records(file: Path | None) -> dict[str, object]:
    """Read a file with one record per model; a missing or damaged file has none."""
    if file is None:
        return {}
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict) or content.get("version") != _FILE_VERSION:
        return {}
    models = content.get("models")
    return models if isinstance(models, dict) else {}


def write_records(file: Path, models: dict[str, object]) -> bool:
    """Replace a file of records atomically; returns False if it cannot be written."""
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"version": _FILE_VERSION, "models": models}))
        temporary.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return False
    return True
