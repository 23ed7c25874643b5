"""Rows with their text encrypted: what was said, its tokens, system prompts, tenants' salts.

Ids, names, times and sizes stay as they are: SQL looks things up by them. An encrypted row is
bound to its table and key. Its checksum is that of the row as it stands in the file, so that damage
differs from a wrong key, and rows can be rescued without one. It opens no connection.
"""

import sqlite3

from semantic.adapters.outbound.cipher import Cipher, is_encrypted
from semantic.adapters.outbound.ledger.schema import (
    Row,
    Table,
    is_sound,
    with_checksum,
)
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError

_PART_TOKENS = 5
_TEXT, _BYTES = b"t", b"b"


class LedgerConnection(sqlite3.Connection):
    """A connection that knows how its rows are encrypted; None if they are not."""

    cipher: Cipher | None = None


def encrypt_row(connection: sqlite3.Connection, table: Table, row: Row) -> Row:
    """A row as it is to be written."""
    cipher = _cipher(connection)
    if cipher is None:
        return row
    key, values = row[: table.num_keys], list(row[:-1])
    for index in table.secret:
        values[index] = cipher.encrypt(_packed(values[index]), _context(table.name, key, index))
    return with_checksum(table, tuple(values))


def decrypt_row(connection: sqlite3.Connection, table: Table, row: Row) -> Row:
    """Undo `encrypt_row`; a damaged row stays as it is, for whoever checks it.

    Raises:
        CachePersistenceError: the key is wrong or missing, or there should be none.
    """
    if not is_sound(table, row):
        return row
    cipher = _cipher(connection)
    _check_presence(cipher, row[table.secret[-1]])
    if cipher is None:
        return row
    key, values = row[: table.num_keys], list(row[:-1])
    for index in table.secret:
        context = _context(table.name, key, index)
        values[index] = _unpacked(_decrypted(cipher, values[index], context))
    return with_checksum(table, tuple(values))


def encrypt_part_row(connection: sqlite3.Connection, row: Row) -> Row:
    """The row of a part as it is to be written."""
    cipher = _cipher(connection)
    if cipher is None:
        return row
    tokens = cipher.encrypt(row[_PART_TOKENS], _part_context(row))
    return (*row[:_PART_TOKENS], tokens, *row[_PART_TOKENS + 1 :])


def decrypt_part_row(connection: sqlite3.Connection, row: Row) -> Row:
    """Undo `encrypt_part_row`.

    Raises:
        CachePersistenceError: the key is wrong or missing, or there should be none.
    """
    cipher = _cipher(connection)
    _check_presence(cipher, row[_PART_TOKENS])
    if cipher is None:
        return row
    tokens = _decrypted(cipher, row[_PART_TOKENS], _part_context(row))
    return (*row[:_PART_TOKENS], tokens, *row[_PART_TOKENS + 1 :])


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


def _context(table: str, key: Row, column: int) -> bytes:
    """What an encrypted value is, so that it counts nowhere else."""
    return repr((table, *key, column)).encode("utf-8", "surrogatepass")


def _part_context(row: Row) -> bytes:
    return _context("parts", row[:2], _PART_TOKENS)


def _packed(value: str | bytes) -> bytes:
    return _TEXT + value.encode() if isinstance(value, str) else _BYTES + value


def _unpacked(content: bytes) -> str | bytes:
    return content[1:].decode() if content[:1] == _TEXT else content[1:]
