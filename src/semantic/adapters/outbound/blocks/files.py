"""Stores blocks in safetensors files, one per part.

    <directory>/blocks/<root, 16 digits>/<name, 2 digits>/<name>.<kind>.safetensors
    <directory>/quarantine/<milliseconds>-<number>-<file name>

A file is written under a temporary name and renamed, so it is either complete or absent. Before
any content is used, checksum, name and positions are compared with the requested part. A bad file
is moved to quarantine, not removed. Files with any other name are never touched. Directories are
opened level by level, relative to their parent, and links are refused. `format.py` defines the
content of files.
"""

import contextlib
import errno
import itertools
import logging
import os
import secrets
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from semantic.adapters.outbound import host_memory
from semantic.adapters.outbound.blocks import encryption, listing
from semantic.adapters.outbound.blocks import format as block_format
from semantic.adapters.outbound.blocks.encryption import Piece
from semantic.adapters.outbound.blocks.format import KVCodec
from semantic.adapters.outbound.blocks.listing import (
    BLOCKS,
    QUARANTINE,
    SUFFIX,
    TEMPORARY,
    Shard,
)
from semantic.adapters.outbound.blocks.usage import RunningCount
from semantic.adapters.outbound.cipher import Cipher
from semantic.adapters.outbound.ledger.files import sync
from semantic.domain.blocks import BlockName, BlockOrigin, BlockPart
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError, SemanticError
from semantic.ports.backend import KVPayload

_log = logging.getLogger(__name__)

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MAX_FILE = 2**31 - 2**12  # the most that one read returns
_MAX_TRIED = 8  # files of a root, or of a directory, whose headers are tried to find its origin
_MAX_LOGGED = 20  # bad files that a scan logs by name; it only counts the others
# Block files are regular files: do not follow links, and do not wait for a pipe's writer.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_PIECES_AT_ONCE = 512  # systems accept at least 1024
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class FilePath:
    """The location of a file below `blocks`."""

    root: str
    shard: str
    name: str

    @classmethod
    def of(cls, part: BlockPart) -> "FilePath":
        name = part.name.hex()
        return cls(part.root.hex()[:16], name[:2], f"{name}.{part.kind.value}{SUFFIX}")

    @property
    def is_temporary(self) -> bool:
        return self.name.endswith(TEMPORARY)

    def __str__(self) -> str:
        return f"{BLOCKS}/{self.root}/{self.shard}/{self.name}"


class BlockTree:
    """The block files of one cache directory, and its quarantine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count()

    def shard(
        self, path: FilePath, *, is_made: bool = False, is_synced: bool = False
    ) -> contextlib.AbstractContextManager[int]:
        """Open the directory of a file; with `is_made`, create missing directories.

        Raises:
            OSError: the directory is missing, or a link or a file is in its place.
        """
        levels = (BLOCKS, path.root, path.shard)
        return self._opened(*levels, is_made=is_made, is_synced=is_synced)

    def shards(self) -> Iterator[Shard]:
        """List all directories of block files, each of which is open until the next."""
        return listing.shards(self._opened)

    def empty_quarantine(self, before: float) -> int:
        return listing.empty_quarantine(self._opened, before)

    def quarantine(self, path: FilePath) -> None:
        """Move a file to quarantine; raises `OSError` if it is missing or cannot be moved."""
        name = f"{time.time_ns() // 10**6:013}-{next(self._numbers)}-{path.name}"
        with self.shard(path) as source, self._opened(QUARANTINE, is_made=True) as target:
            os.rename(path.name, name, src_dir_fd=source, dst_dir_fd=target)

    @contextlib.contextmanager
    def _opened(
        self, *levels: str, is_made: bool = False, is_synced: bool = False
    ) -> Iterator[int]:
        # The cache directory itself may be a link, which its owner has chosen.
        if is_made and not self._directory.is_dir():
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(self._directory, _OPEN_DIRECTORY)
        try:
            for name in levels:
                below = _open_below(handle, name, is_made=is_made, is_synced=is_synced)
                os.close(handle)
                handle = below
            yield handle
        finally:
            os.close(handle)


def size_of(name: str, directory: int) -> int:
    """Bytes of a file; 0 if it is missing."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def tree_size(directory: Path, skip: str | tuple[str, ...] = ()) -> int:
    """Bytes of all files below a directory, except names that start with (one of) `skip`.

    Ignores what vanishes during the walk, and what cannot be read.
    """
    total = 0
    try:
        with os.scandir(directory) as entries:
            listed = list(entries)
    except OSError:
        return 0
    for entry in listed:
        if not entry.name.startswith(skip):
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    total += tree_size(directory / entry.name, skip)
                else:
                    total += entry.stat(follow_symlinks=False).st_size
    return total


def _open_below(parent: int, name: str, *, is_made: bool, is_synced: bool) -> int:
    flags = _OPEN_DIRECTORY | os.O_NOFOLLOW
    try:
        return os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        if not is_made:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
        if is_synced:
            os.fsync(parent)
    return os.open(name, flags, dir_fd=parent)


class SafetensorsCache:
    """`BlockFilesPort` over one directory, which belongs to one process.

    Several threads may read while one writes or deletes.

    Attributes:
        fingerprint_of: Returns the fingerprint of a root's model, for the headers of new files.
    """

    def __init__(
        self, directory: Path, codec: KVCodec | None = None, cipher: Cipher | None = None
    ) -> None:
        """Set the directory without reading or creating anything.

        Everything in it counts as used space. `codec` is for new files; others are still read.
        """
        self._directory = directory
        self._tree = BlockTree(directory)
        self._codec = codec or KVCodec()
        self._cipher = cipher
        self.fingerprint_of: Callable[[BlockName], str] = lambda _: ""
        self._lock = threading.Lock()
        # Marks this process's temporary files, unlike leftovers of a crash.
        self._token = secrets.token_hex(8)
        self._used: int | None = None  # bytes of blocks and quarantine
        self._running_count: RunningCount | None = None
        self._numbers = itertools.count()

    def write(self, part: BlockPart, payload: KVPayload, *, is_synced: bool) -> BlockPart:
        fingerprint = self.fingerprint_of(part.root)
        pieces = block_format.compose(part, payload, self._codec, fingerprint)
        path = FilePath.of(part)
        if self._cipher is not None:
            pieces = encryption.encrypt(pieces, self._cipher, path.name.encode())
        with (
            _as_domain_error("cannot write a block"),
            self._tree.shard(path, is_made=True, is_synced=is_synced) as directory,
        ):
            num_bytes = self._write(path, directory, pieces, is_synced=is_synced)
        return replace(part, nbytes=num_bytes)

    def read(self, part: BlockPart) -> KVPayload:
        return self.parse(part, self.content(part))

    def content(self, part: BlockPart) -> memoryview:
        path = FilePath.of(part)
        with (
            _as_domain_error("cannot read a block", CacheCorruptionError),
            self._tree.shard(path) as directory,
        ):
            return _read_file(path.name, directory, part.nbytes)

    def parse(self, part: BlockPart, content: memoryview) -> KVPayload:
        stored, payload = block_format.read(self._decrypted(part, content), self._codec)
        if replace(stored, nbytes=part.nbytes, last_used=part.last_used) != part:
            raise CacheCorruptionError("the file holds a different part")
        return payload

    def room_for(self, part: BlockPart) -> int:
        payload = part.nbytes - len(part.tokens) - block_format.MIN_HEAD
        return self._codec.max_decoded_bytes(max(payload, 0))

    def delete(self, part: BlockPart) -> None:
        path = FilePath.of(part)
        with (
            _as_domain_error("cannot delete a block"),
            contextlib.suppress(FileNotFoundError),
            self._tree.shard(path) as directory,
        ):
            self._remove(path, directory)

    def quarantine(self, part: BlockPart) -> None:
        path = FilePath.of(part)
        with (
            _as_domain_error("cannot move a damaged block"),
            contextlib.suppress(FileNotFoundError),
        ):
            self._quarantine(path)
            _log.info("moved damaged file %s to quarantine", path)

    def empty_quarantine(self, *, before: float) -> int:
        with self._lock:
            freed = self._tree.empty_quarantine(before)
            if self._used is not None:
                self._used = max(0, self._used - freed)
        return freed

    def origins(self, parts: Sequence[BlockPart] | None = None) -> list[BlockOrigin]:
        # One header per root is enough. No lock is needed, since nothing changes.
        found: dict[str, BlockOrigin] = {}
        numbers: Counter[str] = Counter()
        for path, num_files in self._listed() if parts is None else _some_of_each_root(parts):
            numbers[path.root] += num_files
            if path.root not in found:
                with contextlib.suppress(CacheCorruptionError, OSError, ValueError):
                    found[path.root] = self._origin(path)
        return [replace(found[r], num_files=n) for r, n in numbers.most_common() if r in found]

    def relative_path(self, part: BlockPart) -> str:
        return str(FilePath.of(part))

    def scan(self, on_removed: Callable[[str, str], None] | None = None) -> Iterator[BlockPart]:
        """Read the headers of all files; `read` finds damage to payloads.

        Unreadable files are left in place, because a read error does not prove damage. Calls
        `on_removed` with the name of each quarantined file and the reason; None logs them.
        """
        num_removed = 0
        for path, directory in self._found():
            try:
                part = self._identified(path, directory)
            except CacheCorruptionError as error:
                with contextlib.suppress(OSError):
                    self._quarantine(path)
                    num_removed += 1
                    if on_removed is not None:
                        on_removed(str(path), error.message)
                    elif num_removed <= _MAX_LOGGED:
                        _log.warning("moved %s to quarantine: %s", path, error.message)
            except OSError:
                continue
            else:
                yield part
        if num_removed > _MAX_LOGGED and on_removed is None:
            _log.warning("moved %d files to quarantine in total", num_removed)

    def used_bytes(self) -> int:
        with self._lock:
            if self._used is None:
                blocks = tree_size(self._directory / BLOCKS, self._token)
                self._used = blocks + tree_size(self._directory / QUARANTINE)
            used = self._used
        return used + self.other_bytes()

    def expect(self, num_bytes: int) -> None:
        """Take over the bytes of all blocks from the index, until `count` has counted them."""
        with self._lock:
            self._used = num_bytes + tree_size(self._directory / QUARANTINE)

    def count(self, pause: Callable[[], bool]) -> None:
        blocks = self._directory / BLOCKS
        with self._lock:
            self._running_count = running = RunningCount(blocks)
        for place in running.places:
            with self._lock:
                running.add(place, tree_size(blocks / place, self._token))
            if pause():
                return
        with self._lock:
            self._running_count = None
            self._used = running.num_bytes + tree_size(self._directory / QUARANTINE)

    def other_bytes(self) -> int:
        return tree_size(self._directory, skip=(BLOCKS, QUARANTINE))

    # -- files ----------------------------------------------------------------------------------

    def _decrypted(self, part: BlockPart, content: memoryview) -> memoryview:
        if self._cipher is None:
            return content
        plain = encryption.decrypt(content, self._cipher, FilePath.of(part).name.encode())
        # Copy to page-aligned memory, as unencrypted files have.
        opened = host_memory.allocate(len(plain))
        opened[:] = plain
        return opened

    def _listed(self) -> Iterator[tuple[FilePath, int]]:
        """Some files of every directory, and how many files each stands for."""
        for shard in self._tree.shards():
            names = [name for name in shard.files if not name.endswith(TEMPORARY)]
            for place, name in enumerate(names[:_MAX_TRIED]):
                yield FilePath(shard.root, shard.name, name), 0 if place else len(names)

    def _found(self) -> Iterator[tuple[FilePath, int]]:
        """All files, except those that this process is writing, and handles of their directories.

        Opening the directory for every file would take as long as reading the file's header.
        """
        for shard in self._tree.shards():
            for name in shard.files:
                if not name.startswith(self._token):
                    yield FilePath(shard.root, shard.name, name), shard.directory

    def _identified(self, path: FilePath, directory: int) -> BlockPart:
        if path.is_temporary:
            raise CacheCorruptionError("the file is unfinished")
        try:
            head, tokens, status = _read_beginning(path.name, directory, self._cipher)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise CacheCorruptionError("the file is a link") from error
        part = block_format.identify(head, tokens, status.st_size, status.st_mtime)
        if path != FilePath.of(part):
            raise CacheCorruptionError("the file's path does not match its content")
        return part

    def _origin(self, path: FilePath) -> BlockOrigin:
        with self._tree.shard(path) as directory:
            head, _, _ = _read_beginning(path.name, directory, self._cipher)
        root = BlockName(bytes.fromhex(head.field("root")))
        return BlockOrigin(
            root, head.field("fingerprint"), head.field("abi"), head.field("kv_format")
        )

    def _write(
        self, path: FilePath, directory: int, pieces: list[Piece], *, is_synced: bool
    ) -> int:
        temporary = f"{self._token}-{next(self._numbers)}{TEMPORARY}"
        try:
            num_bytes = _write_file(temporary, directory, pieces, is_synced=is_synced)
            with self._lock:
                replaced = size_of(path.name, directory)
                os.replace(temporary, path.name, src_dir_fd=directory, dst_dir_fd=directory)
                self._change(path, num_bytes - replaced)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            raise
        if is_synced:
            os.fsync(directory)
        return num_bytes

    def _quarantine(self, path: FilePath) -> None:
        with self._lock:  # keeps `used_bytes` from counting the file twice
            with self._tree.shard(path) as directory:
                num_bytes = size_of(path.name, directory)
            self._tree.quarantine(path)
            self._change(path, -num_bytes, to_quarantine=num_bytes)

    def _remove(self, path: FilePath, directory: int) -> None:
        with self._lock:
            num_bytes = size_of(path.name, directory)
            os.unlink(path.name, dir_fd=directory)
            self._change(path, -num_bytes)

    def _change(self, path: FilePath, num_bytes: int, to_quarantine: int = 0) -> None:
        """Count a file that was written, removed or moved. The caller holds the lock."""
        if self._used is not None:
            self._used = max(0, self._used + num_bytes + to_quarantine)
        running = self._running_count
        if running is not None and f"{path.root}/{path.shard}" not in running.uncounted:
            running.num_bytes += num_bytes


def _some_of_each_root(parts: Sequence[BlockPart]) -> Iterator[tuple[FilePath, int]]:
    """Some files of every root, and how many files each stands for."""
    numbers: Counter[BlockName] = Counter()
    some: list[BlockPart] = []
    for part in parts:
        numbers[part.root] += 1
        if numbers[part.root] <= _MAX_TRIED:
            some.append(part)
    for part in some:
        yield FilePath.of(part), numbers.pop(part.root, 0)


@contextlib.contextmanager
def _as_domain_error(
    problem: str, kind: type[SemanticError] = CachePersistenceError
) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise kind(f"{problem}: {error.strerror or error}") from error


def _write_file(name: str, directory: int, pieces: list[Piece], *, is_synced: bool) -> int:
    file = os.open(name, _WRITE_FLAGS, 0o600, dir_fd=directory)
    try:
        num_bytes = _write_pieces(file, pieces)
        if is_synced:
            sync(file)
    finally:
        os.close(file)
    return num_bytes


def _read_file(name: str, directory: int, expected: int) -> memoryview:
    """Read a file in one call into fresh page-aligned memory."""
    with _reading(name, directory) as (file, status):
        size = status.st_size
        if not stat.S_ISREG(status.st_mode) or not 0 < size <= _MAX_FILE:
            raise CacheCorruptionError("the file is not a block of KV cache")
        if expected not in (0, size):
            raise CacheCorruptionError(f"the file has {size} bytes, not {expected}")
        if hasattr(os, "posix_fadvise"):  # the whole file is about to be read
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
        content = host_memory.allocate(size)
        if os.readv(file, [content]) != size:
            raise CacheCorruptionError("the file was truncated while it was read")
    return content


@contextlib.contextmanager
def _reading(name: str, directory: int) -> Iterator[tuple[int, os.stat_result]]:
    file = os.open(name, _READ_FLAGS, dir_fd=directory)
    try:
        yield file, os.fstat(file)
    finally:
        os.close(file)


def _read_beginning(
    name: str, directory: int, cipher: Cipher | None
) -> tuple[block_format.Head, bytes, os.stat_result]:
    with _reading(name, directory) as (file, status):
        if not stat.S_ISREG(status.st_mode):
            raise CacheCorruptionError("not a file")

        def read(num_bytes: int, offset: int) -> bytes:
            return os.pread(file, min(num_bytes, _MAX_FILE), offset)

        head, tokens = block_format.read_beginning(read, status.st_size, cipher, name.encode())
    return head, tokens, status


# -- system calls -------------------------------------------------------------------------------


def _write_pieces(file: int, pieces: Sequence[bytes | memoryview]) -> int:
    left = [memoryview(piece) for piece in pieces if len(piece)]
    total = sum(len(piece) for piece in left)
    while left:
        written = os.writev(file, left[:_PIECES_AT_ONCE])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]
    return total
