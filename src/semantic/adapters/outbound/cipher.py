"""Encrypts what rests on disk: AES-256-GCM, with a key that is kept elsewhere.

What is encrypted says so in its first bytes, is bound to its place, and cannot be changed
unnoticed. It knows neither files nor rows.
"""

import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

from semantic.domain.errors import CacheCorruptionError, InvalidRequestError

MAGIC = b"SEM\x01"
OVERHEAD = len(MAGIC) + 12 + 16  # with nonce and tag
_NONCE_BYTES = 12
_KEY = re.compile(rb"\s*([0-9a-fA-F]{64})\s*")
_COMMAND_S = 60


class Cipher:
    """Seals and opens bytes. Safe on any thread."""

    def __init__(self, key: bytes) -> None:
        """Prepare.

        Args:
            key: 32 bytes.

        Raises:
            InvalidRequestError: the package that does it is not installed.
        """
        try:
            from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - an optional extra
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise InvalidRequestError(
                f"encryption needs {error.name}; in the directory of the checkout run: "
                f"{sys.executable} -m pip install -c constraints.txt -e '.[encryption]'",
                param="encryption_key_file",
            ) from error
        self._gcm = AESGCM(key)
        self._invalid = InvalidTag

    def encrypt(self, content: bytes | memoryview, context: bytes) -> bytes:
        """Encrypt; `context` says what it is, and has to be given again to open it."""
        nonce = os.urandom(_NONCE_BYTES)  # of 96 bits: the same one twice is not to be expected
        return b"".join((MAGIC, nonce, self._gcm.encrypt(nonce, content, context)))

    def decrypt(self, encrypted: bytes | memoryview, context: bytes) -> bytes:
        """Decrypt.

        Raises:
            CacheCorruptionError: it was changed, belongs elsewhere, or has another key.
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
    """Whether bytes say that they are encrypted."""
    return content[: len(MAGIC)] == MAGIC


def load_cipher(key_file: Path | None, key_command: str | None) -> Cipher | None:
    """Get the key, and what encrypts with it; None if nothing is to be encrypted.

    Args:
        key_file: Holds the key as 64 hexadecimal digits, and nobody else may read it.
        key_command: Prints it, such as a keyring's; it is run without a shell.

    Raises:
        InvalidRequestError: the key cannot be had, or is none.
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
    """What went wrong, without the command: it may hold a secret."""
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
