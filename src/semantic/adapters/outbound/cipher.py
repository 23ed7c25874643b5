"""Encrypts data at rest with AES-256-GCM; the key is stored outside the cache directory.

Ciphertext starts with a magic number, is bound to its location by the associated data, and is
authenticated: decryption detects any change. This module knows neither files nor rows.
"""

import os
import re
import shlex
import stat
import subprocess
from pathlib import Path

from semantic.adapters.extras import missing_extra
from semantic.domain.errors import CacheCorruptionError, InvalidRequestError

MAGIC = b"SEM\x01"
OVERHEAD = len(MAGIC) + 12 + 16  # magic number, nonce and tag
_NONCE_BYTES = 12
_KEY = re.compile(rb"\s*([0-9a-fA-F]{64})\s*")
_COMMAND_S = 60


class Cipher:
    """Encrypts and decrypts bytes. Thread-safe."""

    def __init__(self, key: bytes) -> None:
        """Load the AES-GCM implementation for a key of 32 bytes.

        Raises:
            InvalidRequestError: the `cryptography` package is not installed.
        """
        try:
            from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - an optional extra
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise InvalidRequestError(
                missing_extra("encryption", error.name, "encryption"),
                param="encryption_key_file",
            ) from error
        self._gcm = AESGCM(key)
        self._invalid = InvalidTag

    def encrypt(self, content: bytes | memoryview, context: bytes) -> bytes:
        """Encrypt `content` and authenticate `context` with it.

        `decrypt` needs the same `context`, which names the location that the content belongs to.
        """
        nonce = os.urandom(_NONCE_BYTES)  # 96 random bits: a repeated nonce is not expected
        return b"".join((MAGIC, nonce, self._gcm.encrypt(nonce, content, context)))

    def decrypt(self, encrypted: bytes | memoryview, context: bytes) -> bytes:
        """Decrypt and authenticate the result of `encrypt`.

        Raises:
            CacheCorruptionError: the content is not encrypted, was changed, belongs to another
                `context`, or was encrypted with another key.
        """
        start = len(MAGIC) + _NONCE_BYTES
        if len(encrypted) < OVERHEAD or not is_encrypted(encrypted):
            raise CacheCorruptionError("it is not encrypted")
        try:
            return self._gcm.decrypt(
                bytes(encrypted[len(MAGIC) : start]), encrypted[start:], context
            )
        except self._invalid:
            raise CacheCorruptionError("it was changed, or encrypted with another key") from None


def is_encrypted(content: bytes | memoryview) -> bool:
    """Whether content starts with the magic number of encrypted content."""
    return content[: len(MAGIC)] == MAGIC


def load_cipher(key_file: Path | None, key_command: str | None) -> Cipher | None:
    """Load the encryption key; returns None if neither source is set, which disables encryption.

    Args:
        key_file: A file with the key as 64 hexadecimal digits; only its owner may have access.
        key_command: A command that prints the key, such as a keyring's. It runs without a shell.

    Raises:
        InvalidRequestError: the key cannot be read, or is not 64 hexadecimal digits.
    """
    if key_file is not None:
        return Cipher(_parse_key(_read(key_file.expanduser()), "encryption_key_file"))
    if key_command is not None:
        return Cipher(_parse_key(_run_key_command(key_command), "encryption_key_command"))
    return None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            is_open = os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO)
            content = file.read(1024)
    except OSError as error:
        raise InvalidRequestError(
            f"encryption_key_file {path} cannot be read: {error.strerror}",
            param="encryption_key_file",
        ) from error
    if is_open:
        raise InvalidRequestError(
            f"encryption_key_file {path} can be read by others; run: chmod 600 {path}",
            param="encryption_key_file",
        )
    return content


def _run_key_command(command: str) -> bytes:
    try:
        done = subprocess.run(  # noqa: S603 - the operator's own command
            shlex.split(command), stdout=subprocess.PIPE, timeout=_COMMAND_S, check=True
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise InvalidRequestError(
            f"encryption_key_command gave no key: {_reason(error)}", param="encryption_key_command"
        ) from error
    return done.stdout


def _reason(error: OSError | ValueError | subprocess.SubprocessError) -> str:
    """Describe the failure without the command line, which may contain a secret."""
    match error:
        case subprocess.CalledProcessError():
            return f"it ended with status {error.returncode}"
        case subprocess.TimeoutExpired():
            return f"it took longer than {_COMMAND_S} s"
        case OSError():
            return str(error.strerror)
        case _:
            return "it is not a command"


def _parse_key(text: bytes, param: str) -> bytes:
    found = _KEY.fullmatch(text)
    if found is None:
        raise InvalidRequestError(
            f"{param}: a key is 64 hexadecimal digits, for example from: openssl rand -hex 32",
            param=param,
        )
    return bytes.fromhex(found[1].decode())
