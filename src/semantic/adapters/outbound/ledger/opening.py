"""Checks and migrates a ledger's file when it is opened."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path

from semantic.adapters.outbound.cipher import Cipher
from semantic.adapters.outbound.ledger.encryption import check_key
from semantic.adapters.outbound.ledger.files import (
    READ_ERRORS,
    check_pages,
    connect_read_only,
    connect_unchanged,
    sync_file,
)
from semantic.adapters.outbound.ledger.schema import (
    DamagedLedgerError,
    check_tables,
    migrate,
    num_logged,
    version_of,
)

_LOG_BYTES = 2**24


def check_access(paths: Iterable[Path], cipher: Cipher | None) -> None:
    """Check version and key of the first readable file, without changing any file.

    `paths` are the ledger and its backups, in order.

    Raises:
        NewerLedgerError: a newer server wrote the ledger or, if that is missing, its backup.
        CachePersistenceError: the key is wrong.
    """
    for path in paths:
        if not path.is_file() or not path.stat().st_size:
            continue
        with suppress(*READ_ERRORS), closing(connect_unchanged(path, cipher)) as found:
            if version_of(found) and check_key(found):
                return  # damage is handled when the ledger is opened


def prepare(writer: sqlite3.Connection, path: Path, *, has_backup: bool) -> None:
    """Check the file and migrate it to the latest version.

    Raises:
        DamagedLedgerError: the file is damaged, or empty although there is a backup.
    """
    version = version_of(writer)
    if version:
        check_pages(writer)
    elif has_backup:
        raise DamagedLedgerError("it was empty")
    else:
        writer.execute("PRAGMA auto_vacuum = INCREMENTAL")
    writer.execute("PRAGMA secure_delete = ON")
    # On macOS, a plain fsync stops at the drive's cache; other systems ignore these pragmas.
    writer.execute("PRAGMA fullfsync = ON")
    writer.execute("PRAGMA checkpoint_fullfsync = ON")
    writer.execute("PRAGMA journal_mode = WAL").fetchone()
    writer.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}").fetchone()
    # Runs even if up to date: a failing write shows at start, not at the first turn.
    migrate(writer, version)
    check_tables(writer)
    if not version:
        sync_file(path.parent)


def num_backed_up(backup: Path, timeout_s: float) -> int:
    """Read the number of logged changes in a backup; 0 if it cannot be read."""
    try:
        with closing(connect_read_only(backup, timeout_s)) as connection:
            return num_logged(connection)
    except READ_ERRORS:
        return 0
