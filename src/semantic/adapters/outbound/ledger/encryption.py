"""Encrypts the content of ledger rows: messages, tokens, system prompts and tenants' salts.

Ids, names, times and sizes stay unencrypted, because SQL looks rows up by them. An encrypted value
is bound to its table, key and column. The checksum covers the row as stored in the file, so that
damage is distinguishable from a wrong key, and rows can be rescued without the key. This module
opens no connections.
"""

import sqlite3
from contextlib import suppress

from semantic.adapters.outbound.cipher import Cipher, is_encrypted
from semantic.adapters.outbound.ledger.schema import (
    CHECKED_TABLES,
    PARTS,
    DamagedLedgerError,
    Row,
    Table,
    with_checksum,
    without_checksum,
)
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError

_TEXT, _BYTES = b"t", b"b"
_NUM_TRIED = 16


class WrongKeyError(CachePersistenceError):
    """A value was encrypted with a different key, or is damaged."""


class LedgerConnection(sqlite3.Connection):
    """A connection with the cipher of its rows; None if they are not encrypted."""

    cipher: Cipher | None = None


def to_stored(connection: sqlite3.Connection, table: Table, values: Row) -> Row:
    """Encrypt a row, if the connection has a key, and append its checksum."""
    cipher = _cipher(connection)
    if cipher is not None:
        encrypted = list(values)
        for index in table.secret:
            content = _packed(table, values[index])
            encrypted[index] = cipher.encrypt(content, _context(table, values, index))
        values = tuple(encrypted)
    return with_checksum(table, values)


def from_stored(connection: sqlite3.Connection, table: Table, row: Row) -> Row:
    """Check and decrypt a row that `to_stored` made.

    Raises:
        DamagedLedgerError: the row does not match its checksum.
        CachePersistenceError: the key is wrong or missing, or the row is not encrypted although
            a key is set.
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


def check_key(connection: sqlite3.Connection) -> bool:
    """Try the key on a row and raise like `from_stored`; False if there is no undamaged row."""
    for table in (*CHECKED_TABLES, PARTS):
        for row in connection.execute(table.select("LIMIT ?"), (_NUM_TRIED,)):
            with suppress(DamagedLedgerError):
                from_stored(connection, table, row)
                return True
    return False


def _cipher(connection: sqlite3.Connection) -> Cipher | None:
    return connection.cipher if isinstance(connection, LedgerConnection) else None


def _check_presence(cipher: Cipher | None, value: object) -> None:
    has_cipher_text = isinstance(value, bytes) and is_encrypted(value)
    if has_cipher_text and cipher is None:
        raise CachePersistenceError(
            "the cache is encrypted: set its key with encryption_key_file or "
            "encryption_key_command, or choose another --cache-dir. Nothing was changed."
        )
    if not has_cipher_text and cipher is not None:
        raise CachePersistenceError(
            "the cache is not encrypted, but a key is set: choose a new --cache-dir (export the "
            "agents and import them there), or remove the key. Nothing was changed."
        )


def _decrypted(cipher: Cipher, value: bytes, context: bytes) -> bytes:
    try:
        return cipher.decrypt(value, context)
    except CacheCorruptionError as error:
        raise WrongKeyError(
            "the cache was encrypted with a different key. Nothing was changed."
        ) from error


def _context(table: Table, values: Row, column: int) -> bytes:
    """The associated data of a value: it makes a value invalid in any other place."""
    place = (table.name, *values[: table.num_keys], column)
    return repr(place).encode("utf-8", "surrogatepass")


def _packed(table: Table, value: str | bytes) -> bytes:
    if isinstance(value, str):
        return _TEXT + value.encode()
    return value if table is PARTS else _BYTES + value  # tokens of parts are always bytes


def _unpacked(table: Table, content: bytes) -> str | bytes:
    if table is PARTS:
        return content
    return content[1:].decode() if content[:1] == _TEXT else content[1:]
