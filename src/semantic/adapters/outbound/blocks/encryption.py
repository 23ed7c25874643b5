"""The encrypted form of a block part's file: header and token ids apart from the payload.

Both are bound to the file's name, so that a file cannot be exchanged for another.
"""

import struct
from collections.abc import Sequence
from typing import Final, TypeAlias

from semantic.adapters.outbound.cipher import OVERHEAD as CIPHER_OVERHEAD
from semantic.adapters.outbound.cipher import Cipher
from semantic.domain.errors import CacheCorruptionError

Piece: TypeAlias = bytes | memoryview

MAGIC: Final = b"SEMBLK\x00\x01"  # start of an encrypted file; the length of its head follows
OVERHEAD: Final = len(MAGIC) + 4 + 2 * CIPHER_OVERHEAD


def encrypt(pieces: Sequence[Piece], cipher: Cipher, context: bytes) -> list[Piece]:
    """Encrypt the result of `compose`; header and token ids apart, so they can be read alone."""
    head = cipher.encrypt(b"".join(pieces[:2]), context + b" head")
    body = cipher.encrypt(b"".join(pieces[2:]), context + b" body")
    return [MAGIC, struct.pack("<I", len(head)), head, body]


def is_encrypted(content: memoryview) -> bool:
    """Whether a file's first bytes mark it as encrypted."""
    return bytes(content[: len(MAGIC)]) == MAGIC


def encrypted_head(content: memoryview) -> tuple[int, int]:
    """Find the byte range of the encrypted head from a file's first bytes.

    Raises:
        CacheCorruptionError: the file is not encrypted.
    """
    start = len(MAGIC) + 4
    if len(content) < start or not is_encrypted(content):
        raise CacheCorruptionError("the file is not encrypted")
    (length,) = struct.unpack_from("<I", content, len(MAGIC))
    return start, start + length


def decrypt_head(content: memoryview, cipher: Cipher, context: bytes) -> memoryview:
    """Decrypt header and token ids.

    Raises:
        CacheCorruptionError: the head was changed, belongs to another file, or was encrypted with
            another key.
    """
    start, end = encrypted_head(content)
    return memoryview(cipher.decrypt(content[start:end], context + b" head"))


def decrypt(content: memoryview, cipher: Cipher, context: bytes) -> bytes:
    """Decrypt the result of `encrypt`; raises like `decrypt_head`."""
    _, end = encrypted_head(content)
    body = cipher.decrypt(content[end:], context + b" body")
    return bytes(decrypt_head(content, cipher, context)) + body
