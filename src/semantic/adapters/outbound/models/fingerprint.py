"""Identifies a model by its files: what its KV cache and token ids are computed from.

Small files are hashed whole, but for those that neither can depend on. Of weights, headers and
samples of every tensor are enough: whoever trains a model changes all of it, and reading the rest
would take longer than loading. A result is kept with the size and time of every file it is of.
"""

import contextlib
import hashlib
import json
import os
import secrets
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

_WHOLE = frozenset({".json", ".jinja", ".model", ".tiktoken", ".txt", ".py"})
_WEIGHTS = frozenset({".safetensors", ".bin", ".npz", ".npy", ".pt", ".pth", ".gguf"})
# Sampling defaults, which say nothing of what is computed.
_IGNORED = frozenset({"generation_config.json"})
_TAG = b"semantic.fingerprint.v1"
_SAMPLE = 4096
_STRIDE = 2**20
_MAX_HEADER = 100_000_000  # as in the library
_CACHE_VERSION = 1


def fingerprint(directory: Path, cache_file: Path | None) -> str:
    """Identify the model in a directory; 64 hex digits.

    Args:
        directory: With config.json, tokenizer and weights.
        cache_file: Where results are kept, of any number of models; None computes anew. One that
            is damaged or cannot be written is passed over.

    Raises:
        OSError: the directory or a file in it cannot be read.
    """
    files = sorted(path for path in directory.iterdir() if _counts(path))
    stamps = {path.name: _stamp(path) for path in files}
    key = str(directory.resolve())
    known = _read_cache(cache_file)
    found = known.get(key)
    if isinstance(found, dict) and found.get("files") == stamps:
        kept = found.get("fingerprint")
        if isinstance(kept, str) and kept:
            return kept
    computed = _compute(files)
    if cache_file is not None:
        _write_cache(cache_file, {**known, key: {"files": stamps, "fingerprint": computed}})
    return computed


def known_models(cache_file: Path) -> dict[str, str]:
    """Names of the models whose fingerprints were computed, by fingerprint."""
    return {
        str(found.get("fingerprint")): Path(directory).name
        for directory, found in _read_cache(cache_file).items()
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
        # Lengths and digests keep one file's end and the next one's name apart.
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
    """A safetensors file's header, or None if there is no such thing."""
    beginning = file.read(8)
    if len(beginning) < 8:
        return None
    (length,) = struct.unpack("<Q", beginning)
    if length > min(size - 8, _MAX_HEADER):
        return None
    header = file.read(length)
    return header if header.startswith(b"{") else None


def _tensors(header: bytes, size: int) -> list[tuple[int, int]]:
    """Where tensors lie in a file; a header that makes no sense leaves one for all its bytes."""
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
    """A tensor's first, middle and last bytes; a small one whole."""
    if end - start <= 3 * _SAMPLE:
        yield os.pread(file.fileno(), end - start, start)
        return
    for place in (start, (start + end - _SAMPLE) // 2, end - _SAMPLE):
        yield os.pread(file.fileno(), _SAMPLE, place)


def _read_cache(cache_file: Path | None) -> dict[str, object]:
    if cache_file is None:
        return {}
    try:
        content = json.loads(cache_file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict) or content.get("version") != _CACHE_VERSION:
        return {}
    models = content.get("models")
    return models if isinstance(models, dict) else {}


def _write_cache(cache_file: Path, models: dict[str, object]) -> None:
    """Replace the file as a whole; what cannot be kept is computed again next time."""
    temporary = cache_file.with_name(f"{cache_file.name}.{secrets.token_hex(4)}.tmp")
    try:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"version": _CACHE_VERSION, "models": models}))
        temporary.replace(cache_file)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
