"""Whose a directory is: nothing is read or written in one that is not a cache of ours.

A cache directory is marked when it is made. One of an earlier version, which made no marker, is
told by its ledger. It knows nothing of what the ledger and the blocks hold.
"""

import logging
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from semantic.adapters.outbound.blocks.block_tree import BLOCKS, QUARANTINE
from semantic.adapters.outbound.blocks.disk import keep_private
from semantic.adapters.outbound.blocks.lock import LOCK_FILE
from semantic.adapters.outbound.ledger.files import SIDECARS
from semantic.adapters.outbound.ledger.schema import APPLICATION_ID
from semantic.adapters.outbound.ledger.sqlite import BACKUP_FILE, LEDGER_FILE, MARK_FILE
from semantic.domain.errors import CachePersistenceError, InvalidRequestError

_log = logging.getLogger(__name__)

MARKER_FILE = "semantic-cache"
_MARKER_TEXT = b"This is a cache directory of Semantic, which writes and deletes files in it.\n"
_OWN_NAMES = (
    *(MARKER_FILE, LOCK_FILE, BLOCKS, QUARANTINE, BACKUP_FILE, MARK_FILE),
    *(f"{LEDGER_FILE}{suffix}" for suffix in ("", *SIDECARS)),
)
# SQLite's file format: what a database begins with, and its log.
_MAGIC = b"SQLite format 3\0"
_ID_PLACE = 68
_LOG_HEADER, _FRAME_HEADER, _MAX_FRAMES = 32, 24, 64


def claim(directory: Path) -> None:
    """See that a directory is a cache, or make it one; mutates it only then.

    Raises:
        InvalidRequestError: it holds something else, or one of our names in it is a link.
        CachePersistenceError: it cannot be read or written.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_links(directory)
        if not (directory / MARKER_FILE).is_file():
            _adopt(directory)
        keep_private(directory.resolve(), skip=BLOCKS)
    except OSError as error:
        raise CachePersistenceError(
            f"{directory} cannot be used as a cache: {error.strerror}. Let the directory belong "
            "to whoever runs the server, or choose another --cache-dir."
        ) from error


def _refuse_links(directory: Path) -> None:
    for name in _OWN_NAMES:
        if (directory / name).is_symlink():
            raise InvalidRequestError(
                f"{directory / name} is a link, and none is followed inside of a cache directory. "
                "Remove it, or choose another --cache-dir (which may itself be a link).",
                param="cache_dir",
            )


def _adopt(directory: Path) -> None:
    """Mark a directory that is empty or of an earlier version."""
    is_empty = not any(directory.iterdir())
    if not is_empty and not _holds_ledger(directory):
        raise InvalidRequestError(
            f"{directory} is not empty and is no cache of Semantic: it has no file {MARKER_FILE}. "
            "Choose a new or empty directory with --cache-dir. If it is a cache after all, make "
            "an empty file of that name in it.",
            param="cache_dir",
        )
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(FileExistsError):  # another server was faster; the lock tells them apart
        marker = os.open(directory / MARKER_FILE, flags, 0o600)
        try:
            os.write(marker, _MARKER_TEXT)
        finally:
            os.close(marker)
        if not is_empty:
            _log.info(
                "%s is a cache of an earlier version of Semantic; it is marked now", directory
            )


def _holds_ledger(directory: Path) -> bool:
    """Whether there is a ledger, read without opening it as one: it may be somebody else's."""
    application = struct.pack(">I", APPLICATION_ID)
    return any(
        page.startswith(_MAGIC) and page[_ID_PLACE : _ID_PLACE + 4] == application
        for page in _first_pages(directory)
    )


def _first_pages(directory: Path) -> Iterator[bytes]:
    """The first page of the ledger, as far as is needed, wherever a version of it may be."""
    yield _read(directory / LEDGER_FILE, 0)
    yield _read(directory / BACKUP_FILE, 0)
    # A server that was killed before the first checkpoint has left it in the log alone.
    log = directory / f"{LEDGER_FILE}-wal"
    header = _read(log, 0)
    if len(header) < _LOG_HEADER:
        return
    (page_size,) = struct.unpack_from(">I", header, 8)
    for index in range(_MAX_FRAMES):
        frame = _read(log, _LOG_HEADER + index * (_FRAME_HEADER + page_size))
        if frame[:4] == struct.pack(">I", 1):
            yield frame[_FRAME_HEADER:]


def _read(path: Path, place: int) -> bytes:
    """A few bytes of a file; none if it is not there, or is no plain file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(file, 128, place)
    except OSError:
        return b""
    finally:
        os.close(file)
