"""Keeps blocks in safetensors files, one for each part.

    <directory>/blocks/<root, 16 digits>/<name, 2 digits>/<name>.<kind>.safetensors

A file is written beside its place and moved there, so it is whole or absent. Nothing in a file is
believed before its checksum, its name and its positions have been compared with what was asked
for. What files consist of is the business of `block_file.py`.
"""

import contextlib
import dataclasses
import errno
import itertools
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from semantic.adapters.outbound import block_file
from semantic.adapters.outbound.block_file import Head, Piece
from semantic.adapters.outbound.disk import (
    fresh_memory,
    read_ahead,
    sync_directory,
    sync_file,
    tree_size,
    write_pieces,
)
from semantic.adapters.outbound.kv_codec import KVCodec, most_expanded
from semantic.domain.blocks import BlockName, BlockPart
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError
from semantic.ports.outbound import KVPayload

_SUFFIX = ".safetensors"
TEMPORARY = ".tmp"  # a file that was being written when the server ended
_MAX_FILE = 2**31 - 2**12  # what one read returns at most
_SCAN_BYTES = 4096  # most headers and the token ids that follow them
# Neither a link nor a pipe that waits for a writer is a file of ours.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class SafetensorsCache:
    """`BlockFilesPort` over one directory, which belongs to one process.

    Several threads may read at a time while one writes or deletes.
    """

    def __init__(self, directory: Path, codec: KVCodec | None = None) -> None:
        """Prepare; nothing is read or made yet.

        Args:
            directory: Where `blocks` is, and whatever else counts as used.
            codec: How payloads rest; files of other formats are still read.
        """
        self._directory = directory
        self._blocks = directory / "blocks"
        self._codec = codec or KVCodec()
        self._fingerprints: dict[BlockName, str] = {}
        self._lock = threading.Lock()
        self._used: int | None = None  # bytes below `blocks`, once they were counted
        self._token = secrets.token_hex(8)  # tells our unfinished files from those of a crash
        self._numbers = itertools.count()

    def announce(self, root: BlockName, fingerprint: str) -> None:
        """Say which model a root belongs to; files tell it to people, nothing else needs it."""
        self._fingerprints[root] = fingerprint

    def write(self, part: BlockPart, payload: KVPayload, *, is_synced: bool) -> BlockPart:
        """Write a payload whole or not at all; returns the part with its size."""
        resting = self._codec.encode(payload)
        fingerprint = self._fingerprints.get(part.root, "")
        pieces = block_file.compose(part, payload, resting, self._codec.kv_format, fingerprint)
        path = self._path(part)
        temporary = path.with_name(f"{self._token}-{next(self._numbers)}{TEMPORARY}")
        try:
            self._make_directories(path.parent, is_synced=is_synced)
            try:
                num_bytes = _write_file(temporary, pieces, is_synced=is_synced)
                self._move(temporary, path, num_bytes)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
            if is_synced:
                sync_directory(path.parent)
        except OSError as error:
            reason = error.strerror or str(error)
            raise CachePersistenceError(f"a block could not be written: {reason}") from error
        return dataclasses.replace(part, nbytes=num_bytes)

    def read(self, part: BlockPart) -> KVPayload:
        """Read a payload and check it; its buffers are views of the one that was read into."""
        try:
            content = _read_file(self._path(part), part.nbytes)
        except OSError as error:
            reason = error.strerror or str(error)
            raise CacheCorruptionError(f"a block could not be read: {reason}") from error
        block_file.verify(content)
        head = _head(content, len(content))
        tokens = bytes(content[head.tokens.start : head.tokens.end])
        found = block_file.identify(head, tokens, part.nbytes, part.last_used)
        if found != part:
            raise CacheCorruptionError("the file holds another part than was asked for")
        resting = block_file.resting_buffers(head, content)
        buffers = tuple(self._codec.decode(buffer) for buffer in resting)
        positions = int(head.field("start")), int(head.field("end"))
        return KVPayload(head.field("abi"), part.kind, *positions, buffers)

    def room_for(self, part: BlockPart) -> int:
        """Say how many bytes of memory reading a part takes at most."""
        payload = part.nbytes - len(part.tokens) - block_file.MIN_HEAD
        return most_expanded(self._codec.kv_format, max(payload, 0))

    def delete(self, part: BlockPart) -> None:
        """Remove a file; one that is not there is passed over."""
        try:
            self._remove(self._path(part))
        except OSError as error:
            reason = error.strerror or str(error)
            raise CachePersistenceError(f"a block could not be deleted: {reason}") from error

    def origin(self, part: BlockPart) -> tuple[str, str]:
        """Tell whose state a file holds: the model's fingerprint, and how the state rests.

        Raises:
            CacheCorruptionError: the file is missing or does not say.
        """
        try:
            content = _read_file(self._path(part), part.nbytes)
        except OSError as error:
            raise CacheCorruptionError(f"a block could not be read: {error.strerror}") from error
        head = _head(content, len(content))
        return head.field("fingerprint"), head.field("kv_format")

    def place(self, part: BlockPart) -> str:
        """Where a part's file is, for people."""
        return str(self._path(part).relative_to(self._directory))

    def scan(self, on_removed: Callable[[str, str], None] | None = None) -> Iterator[BlockPart]:
        """Read what every file says of itself; removes what is no whole part.

        Payloads are not read, so damage to them is found when they are. What cannot be read is
        passed over and left: it says nothing of the file.

        Args:
            on_removed: Told the name of each file that is removed, and why.
        """
        for entry in _files(self._blocks, depth=3):
            if entry.name.startswith(self._token):
                continue
            try:
                part = self._identified(entry.path)
            except CacheCorruptionError as error:
                with contextlib.suppress(OSError):
                    self._remove(Path(entry.path))
                    if on_removed is not None:
                        on_removed(str(Path(entry.path).relative_to(self._directory)), str(error))
            except OSError:
                continue
            else:
                yield part

    def used_bytes(self) -> int:
        """Bytes of everything in the directory; blocks are counted once and then kept count of."""
        with self._lock:
            if self._used is None:
                self._used = tree_size(self._blocks, skip=self._token)
            blocks = self._used
        return blocks + self.other_bytes()

    def other_bytes(self) -> int:
        """Bytes of what is in the directory and no block; counted anew each time."""
        return tree_size(self._directory, skip=self._blocks.name)

    # -- places ---------------------------------------------------------------------------------

    def _path(self, part: BlockPart) -> Path:
        return self._blocks / _place(part)

    def _identified(self, path: str) -> BlockPart:
        try:
            part = _identify(path)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise CacheCorruptionError("the file is a link") from error
        if path != f"{self._blocks}/{_place(part)}":
            raise CacheCorruptionError("the file is not where it belongs")
        return part

    def _make_directories(self, directory: Path, *, is_synced: bool) -> None:
        """Make a file's directory and those above it, readable to nobody else."""
        if directory.is_dir():
            return
        if directory != self._directory:
            self._make_directories(directory.parent, is_synced=is_synced)
            directory.mkdir(mode=0o700, exist_ok=True)
        else:
            directory.mkdir(mode=0o700, exist_ok=True, parents=True)
        if is_synced:
            sync_directory(directory.parent)

    def _move(self, temporary: Path, path: Path, num_bytes: int) -> None:
        with self._lock:
            replaced = _size(path) if self._used is not None else 0
            temporary.replace(path)
            if self._used is not None:
                self._used += num_bytes - replaced

    def _remove(self, path: Path) -> None:
        with self._lock, contextlib.suppress(FileNotFoundError):
            num_bytes = _size(path)
            path.unlink()
            if self._used is not None:
                self._used -= num_bytes


def _place(part: BlockPart) -> str:
    """Where a part's file is below the directory of blocks."""
    name = part.name.hex()
    return f"{part.root.hex()[:16]}/{name[:2]}/{name}.{part.kind.value}{_SUFFIX}"


def _files(directory: Path | str, depth: int) -> Iterator["os.DirEntry[str]"]:
    """All that is no directory, down to the depth where files belong."""
    try:
        with os.scandir(directory) as entries:
            found = list(entries)
    except OSError:
        return
    for entry in found:
        if not entry.is_dir(follow_symlinks=False):
            yield entry
        elif depth > 1:
            yield from _files(entry.path, depth - 1)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _write_file(path: Path, pieces: list[Piece], *, is_synced: bool) -> int:
    file = os.open(path, _WRITE_FLAGS, 0o600)
    try:
        num_bytes = write_pieces(file, pieces)
        if is_synced:
            sync_file(file)
    finally:
        os.close(file)
    return num_bytes


def _read_file(path: Path, expected: int) -> memoryview:
    """Read a file at once into fresh memory; pages begin on multiples of 64."""
    file = os.open(path, _READ_FLAGS)
    try:
        status = os.fstat(file)
        size = status.st_size
        if not stat.S_ISREG(status.st_mode) or not 0 < size <= _MAX_FILE:
            raise CacheCorruptionError("the file is no block of attention state")
        if expected not in (0, size):
            raise CacheCorruptionError(f"the file has {size} bytes, not {expected}")
        read_ahead(file)
        content = fresh_memory(size)
        if os.readv(file, [content]) != size:
            raise CacheCorruptionError("the file was cut off while it was read")
    finally:
        os.close(file)
    return content


def _head(content: memoryview, file_size: int) -> Head:
    end = block_file.LENGTH_BYTES + block_file.header_length(content, file_size)
    return block_file.parse(content[block_file.LENGTH_BYTES : end], file_size)


def _identify(path: str) -> BlockPart:
    """Read a file's header and token ids, mostly at once."""
    if not path.endswith(_SUFFIX):
        raise CacheCorruptionError("the file is not named like a block")
    file = os.open(path, _READ_FLAGS)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise CacheCorruptionError("not a file")
        size = status.st_size
        content = memoryview(os.pread(file, _SCAN_BYTES, 0))
        end = block_file.LENGTH_BYTES + block_file.header_length(content, size)
        if end > len(content):
            content = memoryview(os.pread(file, end, 0))
        head = _head(content, size)
        place = head.tokens
        if place.end <= len(content):
            tokens = bytes(content[place.start : place.end])
        else:
            tokens = os.pread(file, min(place.end - place.start, _MAX_FILE), place.start)
    finally:
        os.close(file)
    return block_file.identify(head, tokens, size, status.st_mtime)
