"""Rows with their text encrypted: what was said, its tokens, system prompts, tenants' salts.

Ids, names, times and sizes stay as they are: SQL looks things up by them. An encrypted row is
bound to its table and key. Its checksum is that of the row as it stands in the file, so that damage
differs from a wrong key, and rows can be rescued without one. It opens no connection.
"""

import sqlite3

from semantic.adapters.outbound.cipher import Cipher, is_encrypted
from semantic.adapters.outbound.ledger.schema import (
    PARTS,
    Row,
    Table,
    with_checksum,
    without_checksum,
)
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError

_TEXT, _BYTES = b"t", b"b"


class LedgerConnection(sqlite3.Connection):
    """A connection that knows how its rows are encrypted; None if they are not."""

    cipher: Cipher | None = None


def to_stored(connection: sqlite3.Connection, table: Table, values: Row) -> Row:
    """A row as it is to be written: encrypted, if there is a key, and with its checksum."""
    cipher = _cipher(connection)
    if cipher is not None:
        encrypted = list(values)
        for index in table.secret:
            content = _packed(table, values[index])
            encrypted[index] = cipher.encrypt(content, _context(table, values, index))
        values = tuple(encrypted)
    return with_checksum(table, values)


def from_stored(connection: sqlite3.Connection, table: Table, row: Row) -> Row:
    """Undo `to_stored`.

    Raises:
        DamagedLedgerError: the row is not as it was written.
        CachePersistenceError: the key is wrong or missing, or there should be none.
    """
    values = without_checksum(table, row)
    cipher = _cipher(connection)
    _check_presence(cipher, values[table.secret[-1]])
    if cipher is None:
        return values
    decrypted = list(values)
    for index in table.secret:
        content = _decrypted(cipher, values[index], _context(table, values, index))
        decrypted[index] = _unpacked(table, content)
    return tuple(decrypted)


def _cipher(connection: sqlite3.Connection) -> Cipher | None:
    return connection.cipher if isinstance(connection, LedgerConnection) else None


def _check_presence(cipher: Cipher | None, value: object) -> None:
    """See that a value is encrypted if and only if there is a key.

    Raises:
        CachePersistenceError: it is not so; nothing was changed.
    """
    has_cipher_text = isinstance(value, bytes) and is_encrypted(value)
    if has_cipher_text and cipher is None:
        raise CachePersistenceError(
            "the cache is encrypted: give its key with encryption_key_file or "
            "encryption_key_command, or choose another --cache-dir. Nothing was changed."
        )
    if not has_cipher_text and cipher is not None:
        raise CachePersistenceError(
            "the cache is not encrypted, and a key was given: choose a new --cache-dir (agents can "
            "be exported and imported), or leave the key out. Nothing was changed."
        )


def _decrypted(cipher: Cipher, value: bytes, context: bytes) -> bytes:
    try:
        return cipher.decrypt(value, context)
    except CacheCorruptionError as error:
        raise CachePersistenceError(
            "the cache was encrypted with a different key. Nothing was changed."
        ) from error


def _context(table: Table, values: Row, column: int) -> bytes:
    """What an encrypted value is, so that it counts nowhere else."""
    place = (table.name, *values[: table.num_keys], column)
    return repr(place).encode("utf-8", "surrogatepass")


def _packed(table: Table, value: str | bytes) -> bytes:
    if isinstance(value, str):
        return _TEXT + value.encode()
    return value if table is PARTS else _BYTES + value  # tokens of parts are never text


def _unpacked(table: Table, content: bytes) -> str | bytes:
    if table is PARTS:
        return content
    return content[1:].decode() if content[:1] == _TEXT else content[1:]
