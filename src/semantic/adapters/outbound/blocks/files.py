"""Stores blocks in safetensors files, one per part.

A file is written under a temporary name and renamed, so it is either complete or absent. Before
any content is used, checksum, name and positions are compared with the requested part. A bad file
is moved to quarantine, not removed. `format.py` defines the content of files, `tree.py` their
paths.
"""

import contextlib
import errno
import itertools
import logging
import os
import secrets
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from semantic.adapters.outbound import host_memory
from semantic.adapters.outbound.blocks import format as block_format
from semantic.adapters.outbound.blocks.codec import KVCodec, max_expanded_bytes
from semantic.adapters.outbound.blocks.format import Piece
from semantic.adapters.outbound.blocks.tree import (
    BLOCKS,
    QUARANTINE,
    TEMPORARY,
    BlockTree,
    Place,
    size_of,
    tree_size,
)
from semantic.adapters.outbound.cipher import Cipher
from semantic.adapters.outbound.ledger.files import sync
from semantic.domain.blocks import BlockName, BlockOrigin, BlockPart
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError, SemanticError
from semantic.ports.backend import KVPayload

_log = logging.getLogger(__name__)

_MAX_FILE = 2**31 - 2**12  # the most that one read returns
_SCAN_BYTES = 4096  # covers most headers and the token ids after them
_MAX_TRIED = 8  # files of a root whose headers are tried to find its origin
_MAX_LOGGED = 20  # bad files that a scan logs by name; it only counts the others
# Block files are regular files: do not follow links, and do not wait for a pipe's writer.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_PIECES_AT_ONCE = 512  # systems accept at least 1024
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


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

        Args:
            directory: The cache directory; everything in it counts as used space.
            codec: Storage format of new files; files of other formats are still read.
            cipher: Encrypts files; None writes them unencrypted.
        """
        self._directory = directory
        self._tree = BlockTree(directory)
        self._codec = codec or KVCodec()
        self._cipher = cipher
        self.fingerprint_of: Callable[[BlockName], str] = lambda _: ""
        self._lock = threading.Lock()
        self._used: int | None = None  # bytes of blocks and quarantine, once counted
        self._token = secrets.token_hex(
            8
        )  # marks this process's temporary files, unlike leftovers of a crash
        self._numbers = itertools.count()

    def write(self, part: BlockPart, payload: KVPayload, *, is_synced: bool) -> BlockPart:
        """Write a payload atomically; returns the part with its size."""
        fingerprint = self.fingerprint_of(part.root)
        pieces = block_format.compose(part, payload, self._codec, fingerprint)
        place = Place.of(part)
        if self._cipher is not None:
            pieces = block_format.encrypt(pieces, self._cipher, place.name.encode())
        with (
            _refusal("a block could not be written"),
            self._tree.shard(place, is_made=True, is_synced=is_synced) as directory,
        ):
            num_bytes = self._write(place.name, directory, pieces, is_synced=is_synced)
        return replace(part, nbytes=num_bytes)

    def read(self, part: BlockPart) -> KVPayload:
        """Read and check a payload; its buffers are views of the memory that was read into."""
        return self.parse(part, self.content(part))

    def content(self, part: BlockPart) -> memoryview:
        """Read a file's bytes without decrypting them."""
        place = Place.of(part)
        with (
            _refusal("a block could not be read", CacheCorruptionError),
            self._tree.shard(place) as directory,
        ):
            return _read_file(place.name, directory, part.nbytes)

    def parse(self, part: BlockPart, content: memoryview) -> KVPayload:
        """Decrypt and check a file's bytes; returns the payload."""
        stored, payload = block_format.read(self._opened(part, content), self._codec)
        if replace(stored, nbytes=part.nbytes, last_used=part.last_used) != part:
            raise CacheCorruptionError("the file holds a different part")
        return payload

    def room_for(self, part: BlockPart) -> int:
        """Return an upper bound of the memory that reading a part takes, in bytes."""
        payload = part.nbytes - len(part.tokens) - block_format.MIN_HEAD
        return max_expanded_bytes(self._codec.kv_format, max(payload, 0))

    def delete(self, part: BlockPart) -> None:
        """Remove a file; ignores a missing one."""
        place = Place.of(part)
        with (
            _refusal("a block could not be deleted"),
            contextlib.suppress(FileNotFoundError),
            self._tree.shard(place) as directory,
        ):
            self._remove(place.name, directory)

    def quarantine(self, part: BlockPart) -> None:
        """Move a bad file to quarantine; ignores a missing one."""
        place = Place.of(part)
        with _refusal("a bad block could not be moved"), contextlib.suppress(FileNotFoundError):
            self._quarantine(place)
            _log.info("%s is bad and is now in quarantine", place)

    def empty_quarantine(self, *, before: float) -> int:
        """Remove files that were quarantined up to `before`; returns the bytes freed."""
        with self._lock:
            freed = self._tree.empty_quarantine(before)
            if self._used is not None:
                self._used -= freed
        return freed

    def origins(self) -> list[BlockOrigin]:
        """Return model fingerprint, ABI and format of each root's blocks, most files first.

        Reads the header of one file per root. Needs no lock, since it changes nothing. Omits roots
        without a readable file.
        """
        found: dict[str, BlockOrigin] = {}
        numbers: Counter[str] = Counter()
        for place in self._tree.places():
            if place.is_temporary:
                continue
            numbers[place.root] += 1
            if place.root in found or numbers[place.root] > _MAX_TRIED:
                continue
            with contextlib.suppress(CacheCorruptionError, OSError, ValueError):
                found[place.root] = self._origin(place)
        return [replace(found[r], num_files=n) for r, n in numbers.most_common() if r in found]

    def place(self, part: BlockPart) -> str:
        """The path of a part's file relative to the cache directory, for messages."""
        return str(Place.of(part))

    def scan(self, on_removed: Callable[[str, str], None] | None = None) -> Iterator[BlockPart]:
        """Read the headers of all files; moves files that are no complete part to quarantine.

        Payloads are not read, so damage to them is only found by `read`. Unreadable files are
        skipped and left in place, because a read error does not prove damage. Files that are not
        named like a block are skipped too.

        Args:
            on_removed: Called with the name of each moved file and the reason; None logs them.
        """
        num_removed = 0
        for place in self._tree.places():
            if place.name.startswith(self._token):
                continue
            try:
                part = self._identified(place)
            except CacheCorruptionError as error:
                with contextlib.suppress(OSError):
                    self._quarantine(place)
                    num_removed += 1
                    if on_removed is not None:
                        on_removed(str(place), error.message)
                    elif num_removed <= _MAX_LOGGED:
                        _log.warning("%s is now in quarantine: %s", place, error.message)
            except OSError:
                continue
            else:
                yield part
        if num_removed > _MAX_LOGGED and on_removed is None:
            _log.warning("%d files in all were moved to quarantine", num_removed)

    def used_bytes(self) -> int:
        """Bytes of everything in the directory; blocks are counted once and tracked afterwards."""
        with self._lock:
            if self._used is None:
                blocks = tree_size(self._directory / BLOCKS, skip=self._token)
                self._used = blocks + tree_size(self._directory / QUARANTINE, skip=())
            blocks = self._used
        return blocks + self.other_bytes()

    def other_bytes(self) -> int:
        """Bytes of everything except blocks and quarantine; counted on each call."""
        return tree_size(self._directory, skip=(BLOCKS, QUARANTINE))

    # -- files ----------------------------------------------------------------------------------

    def _opened(self, part: BlockPart, content: memoryview) -> memoryview:
        if self._cipher is None:
            return content
        plain = block_format.decrypt(content, self._cipher, Place.of(part).name.encode())
        # Copy to page-aligned memory, as unencrypted files have.
        opened = host_memory.allocate(len(plain))
        opened[:] = plain
        return opened

    def _identified(self, place: Place) -> BlockPart:
        if place.is_temporary:
            raise CacheCorruptionError("the file was not finished")
        try:
            with self._tree.shard(place) as directory:
                part = _identify(place.name, directory, self._cipher)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise CacheCorruptionError("the file is a link") from error
        if place != Place.of(part):
            raise CacheCorruptionError("the file is not where it belongs")
        return part

    def _origin(self, place: Place) -> BlockOrigin:
        with self._tree.shard(place) as directory:
            head = _read_head(place.name, directory, self._cipher).head
        root = BlockName(bytes.fromhex(head.field("root")))
        return BlockOrigin(
            root, head.field("fingerprint"), head.field("abi"), head.field("kv_format")
        )

    def _write(self, name: str, directory: int, pieces: list[Piece], *, is_synced: bool) -> int:
        temporary = f"{self._token}-{next(self._numbers)}{TEMPORARY}"
        try:
            num_bytes = _write_file(temporary, directory, pieces, is_synced=is_synced)
            with self._lock:
                replaced = size_of(name, directory) if self._used is not None else 0
                os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
                if self._used is not None:
                    self._used += num_bytes - replaced
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            raise
        if is_synced:
            os.fsync(directory)
        return num_bytes

    def _quarantine(self, place: Place) -> None:
        with self._lock:  # keeps `used_bytes` from counting the file twice
            self._tree.quarantine(place)

    def _remove(self, name: str, directory: int) -> None:
        with self._lock:
            num_bytes = size_of(name, directory)
            os.unlink(name, dir_fd=directory)
            if self._used is not None:
                self._used -= num_bytes


@contextlib.contextmanager
def _refusal(problem: str, kind: type[SemanticError] = CachePersistenceError) -> Iterator[None]:
    """Convert the system's errors to domain errors."""
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
            raise CacheCorruptionError("the file was cut off while it was read")
    return content


@contextlib.contextmanager
def _reading(name: str, directory: int) -> Iterator[tuple[int, os.stat_result]]:
    file = os.open(name, _READ_FLAGS, dir_fd=directory)
    try:
        yield file, os.fstat(file)
    finally:
        os.close(file)


@dataclass(frozen=True, slots=True)
class _Beginning:
    """A file's header, the token ids that follow it, and its status."""

    head: block_format.Head
    tokens: bytes
    status: os.stat_result


def _read_head(name: str, directory: int, cipher: Cipher | None) -> _Beginning:
    """Read a file's header and token ids, usually in one call."""
    with _reading(name, directory) as (file, status):
        if not stat.S_ISREG(status.st_mode):
            raise CacheCorruptionError("not a file")
        size = status.st_size
        content = memoryview(os.pread(file, _SCAN_BYTES, 0))
        if cipher is not None:
            _, end = block_format.encrypted_head(content)
            if end > len(content):
                content = memoryview(os.pread(file, min(end, _MAX_FILE), 0))
            content = block_format.decrypt_head(content, cipher, name.encode())
            size -= block_format.SEALED_OVERHEAD
        elif block_format.is_encrypted(content):
            raise PermissionError(errno.EACCES, "the file is encrypted")  # not damage
        end = block_format.LENGTH_BYTES + block_format.header_length(content, size)
        if end > len(content):
            content = memoryview(os.pread(file, end, 0))
        head = block_format.read_head(content, size)
        place = head.tokens
        if place.end <= len(content):
            tokens = bytes(content[place.start : place.end])
        else:
            tokens = os.pread(file, min(place.end - place.start, _MAX_FILE), place.start)
    return _Beginning(head, tokens, status)


def _identify(name: str, directory: int, cipher: Cipher | None) -> BlockPart:
    read = _read_head(name, directory, cipher)
    return block_format.identify(read.head, read.tokens, read.status.st_size, read.status.st_mtime)


# -- system calls -------------------------------------------------------------------------------


def _write_pieces(file: int, pieces: Sequence[bytes | memoryview]) -> int:
    """Write all pieces without joining them; returns the bytes written."""
    left = [memoryview(piece) for piece in pieces if len(piece)]
    total = sum(len(piece) for piece in left)
    while left:
        written = os.writev(file, left[:_PIECES_AT_ONCE])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]
    return total
