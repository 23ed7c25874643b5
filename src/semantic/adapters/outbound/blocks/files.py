"""Keeps blocks in safetensors files, one for each part.

A file is written beside its place and moved there, so it is whole or absent. Nothing in a file is
believed before its checksum, its name and its positions have been compared with what was asked
for. A bad file is moved to quarantine, never removed at once. What files consist of is the
business of `format.py`, where they lie that of `tree.py`.
"""

import contextlib
import dataclasses
import errno
import itertools
import logging
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
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
from semantic.domain.blocks import BlockName, BlockPart
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError, SemanticError
from semantic.ports.backend import KVPayload

_log = logging.getLogger(__name__)

_MAX_FILE = 2**31 - 2**12  # what one read returns at most
_SCAN_BYTES = 4096  # most headers and the token ids that follow them
_MAX_LOGGED = 20  # bad files that a scan names in the log; the others it counts
# Neither a link nor a pipe that waits for a writer is a file of ours.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_PIECES_AT_ONCE = 512  # systems take 1024 or more
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class SafetensorsCache:
    """`BlockFilesPort` over one directory, which belongs to one process.

    Several threads may read at a time while one writes or deletes.
    """

    def __init__(
        self, directory: Path, codec: KVCodec | None = None, cipher: Cipher | None = None
    ) -> None:
        """Prepare; nothing is read or made yet.

        Args:
            directory: Where `blocks` is, and whatever else counts as used.
            codec: How payloads rest; files of other formats are still read.
            cipher: Encrypts files; None writes them as they are.
        """
        self._directory = directory
        self._tree = BlockTree(directory)
        self._codec = codec or KVCodec()
        self._cipher = cipher
        self._fingerprints: dict[BlockName, str] = {}
        self._lock = threading.Lock()
        self._used: int | None = None  # bytes of blocks and quarantine, once they were counted
        self._token = secrets.token_hex(8)  # tells our unfinished files from those of a crash
        self._numbers = itertools.count()

    def announce(self, root: BlockName, fingerprint: str) -> None:
        """Say which model a root belongs to; files tell it to people, nothing else needs it."""
        self._fingerprints[root] = fingerprint

    def write(self, part: BlockPart, payload: KVPayload, *, is_synced: bool) -> BlockPart:
        """Write a payload whole or not at all; returns the part with its size."""
        fingerprint = self._fingerprints.get(part.root, "")
        pieces = block_format.compose(part, payload, self._codec, fingerprint)
        place = Place.of(part)
        if self._cipher is not None:
            pieces = block_format.encrypt(pieces, self._cipher, place.name.encode())
        with (
            _refusal("a block could not be written"),
            self._tree.shard(place, is_made=True, is_synced=is_synced) as directory,
        ):
            num_bytes = self._write(place.name, directory, pieces, is_synced=is_synced)
        return dataclasses.replace(part, nbytes=num_bytes)

    def read(self, part: BlockPart) -> KVPayload:
        """Read a payload and check it; its buffers are views of the one that was read into."""
        return self.parse(part, self.content(part))

    def content(self, part: BlockPart) -> memoryview:
        """Read the bytes of a file as they are, encrypted if they are."""
        place = Place.of(part)
        with (
            _refusal("a block could not be read", CacheCorruptionError),
            self._tree.shard(place) as directory,
        ):
            return _read_file(place.name, directory, part.nbytes)

    def parse(self, part: BlockPart, content: memoryview) -> KVPayload:
        """Make a payload of the bytes of a file, and check it."""
        stored, payload = block_format.read(self._opened(part, content), self._codec)
        if dataclasses.replace(stored, nbytes=part.nbytes, last_used=part.last_used) != part:
            raise CacheCorruptionError("the file holds a different part")
        return payload

    def room_for(self, part: BlockPart) -> int:
        """Say how many bytes of memory reading a part takes at most."""
        payload = part.nbytes - len(part.tokens) - block_format.MIN_HEAD
        return max_expanded_bytes(self._codec.kv_format, max(payload, 0))

    def delete(self, part: BlockPart) -> None:
        """Remove a file; one that is not there is passed over."""
        place = Place.of(part)
        with (
            _refusal("a block could not be deleted"),
            contextlib.suppress(FileNotFoundError),
            self._tree.shard(place) as directory,
        ):
            self._remove(place.name, directory)

    def quarantine(self, part: BlockPart) -> None:
        """Move a bad file to quarantine; one that is not there is passed over."""
        place = Place.of(part)
        with _refusal("a bad block could not be moved"), contextlib.suppress(FileNotFoundError):
            self._quarantine(place)
            _log.info("%s is bad and is now in quarantine", place)

    def empty_quarantine(self, *, before: float) -> int:
        """Remove what was set aside up to a time; returns the bytes freed."""
        with self._lock:
            freed = self._tree.empty_quarantine(before)
            if self._used is not None:
                self._used -= freed
        return freed

    def origin(self, part: BlockPart) -> tuple[str, str]:
        """Tell whose state a file holds: the model's fingerprint, and how the state rests.

        Raises:
            CacheCorruptionError: the file is missing or does not say.
        """
        content = self._opened(part, self.content(part))
        head = block_format.read_head(content, len(content))
        return head.field("fingerprint"), head.field("kv_format")

    def place(self, part: BlockPart) -> str:
        """Where a part's file is, for people."""
        return str(Place.of(part))

    def scan(self, on_removed: Callable[[str, str], None] | None = None) -> Iterator[BlockPart]:
        """Read what every file says of itself; moves what is no whole part to quarantine.

        Payloads are not read, so damage to them is found when they are. What cannot be read is
        passed over and left: it says nothing of the file. So is what is not named like a block.

        Args:
            on_removed: Told the name of each file that is moved, and why; None logs it.
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
        """Bytes of everything in the directory; blocks are counted once and then kept count of."""
        with self._lock:
            if self._used is None:
                blocks = tree_size(self._directory / BLOCKS, skip=self._token)
                self._used = blocks + tree_size(self._directory / QUARANTINE, skip=())
            blocks = self._used
        return blocks + self.other_bytes()

    def other_bytes(self) -> int:
        """Bytes of what is neither block nor quarantine; counted anew each time."""
        return tree_size(self._directory, skip=(BLOCKS, QUARANTINE))

    # -- files ----------------------------------------------------------------------------------

    def _opened(self, part: BlockPart, content: memoryview) -> memoryview:
        if self._cipher is None:
            return content
        plain = block_format.decrypt(content, self._cipher, Place.of(part).name.encode())
        # Into memory that begins with a page, as where nothing is encrypted.
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
        with self._lock:  # so that it is not counted twice
            self._tree.quarantine(place)

    def _remove(self, name: str, directory: int) -> None:
        with self._lock:
            num_bytes = size_of(name, directory)
            os.unlink(name, dir_fd=directory)
            if self._used is not None:
                self._used -= num_bytes


@contextlib.contextmanager
def _refusal(problem: str, kind: type[SemanticError] = CachePersistenceError) -> Iterator[None]:
    """Raise the domain's error in place of the system's."""
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
    """Read a file at once into fresh memory; pages begin on multiples of 64."""
    with _reading(name, directory) as (file, status):
        size = status.st_size
        if not stat.S_ISREG(status.st_mode) or not 0 < size <= _MAX_FILE:
            raise CacheCorruptionError("the file is not a block of KV cache")
        if expected not in (0, size):
            raise CacheCorruptionError(f"the file has {size} bytes, not {expected}")
        if hasattr(os, "posix_fadvise"):  # all of it is about to be read
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
        content = host_memory.allocate(size)
        if os.readv(file, [content]) != size:
            raise CacheCorruptionError("the file was cut off while it was read")
    return content


@contextlib.contextmanager
def _reading(name: str, directory: int) -> Iterator[tuple[int, os.stat_result]]:
    """Open a file, which may be anything."""
    file = os.open(name, _READ_FLAGS, dir_fd=directory)
    try:
        yield file, os.fstat(file)
    finally:
        os.close(file)


def _identify(name: str, directory: int, cipher: Cipher | None) -> BlockPart:
    """Read a file's header and token ids, mostly at once."""
    with _reading(name, directory) as (file, status):
        if not stat.S_ISREG(status.st_mode):
            raise CacheCorruptionError("not a file")
        size = whole = status.st_size
        content = memoryview(os.pread(file, _SCAN_BYTES, 0))
        if cipher is not None:
            _, end = block_format.encrypted_head(content)
            if end > len(content):
                content = memoryview(os.pread(file, min(end, _MAX_FILE), 0))
            content = block_format.decrypt_head(content, cipher, name.encode())
            size -= block_format.SEALED_OVERHEAD
        elif block_format.is_encrypted(content):
            raise PermissionError(errno.EACCES, "the file is encrypted")  # which is no damage
        end = block_format.LENGTH_BYTES + block_format.header_length(content, size)
        if end > len(content):
            content = memoryview(os.pread(file, end, 0))
        head = block_format.read_head(content, size)
        place = head.tokens
        if place.end <= len(content):
            tokens = bytes(content[place.start : place.end])
        else:
            tokens = os.pread(file, min(place.end - place.start, _MAX_FILE), place.start)
    return block_format.identify(head, tokens, whole, status.st_mtime)


# -- what the system does for files -------------------------------------------------------------


def _write_pieces(file: int, pieces: Sequence[bytes | memoryview]) -> int:
    """Write all pieces to a descriptor without joining them; returns the bytes written."""
    left = [memoryview(piece) for piece in pieces if len(piece)]
    total = sum(len(piece) for piece in left)
    while left:
        written = os.writev(file, left[:_PIECES_AT_ONCE])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]
    return total
