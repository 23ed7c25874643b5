"""Who may vouch for attention state: this installation's own key, and others that it trusts.

Block names say what state should be; only who computed it can say that it is. A key is a shared
secret: whoever has it can sign as its owner.
"""

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from semantic.domain.errors import CachePersistenceError

OWN_SIGNER = "this server"
_KEY_BYTES = 32
_KEY_PATTERN = re.compile(r"[0-9a-f]{64}\n?")


@dataclass(frozen=True, slots=True)
class ExportKeys:
    """Signs with one key and knows the signatures of several."""

    own: bytes = field(repr=False)
    trusted: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def sign(self, content: bytes) -> str:
        """Sign as this installation."""
        return _signature(self.own, content)

    def signer(self, content: bytes, signature: str) -> str:
        """Say whose signature it is; empty if no key that is known here made it."""
        known = {OWN_SIGNER: self.own, **self.trusted}
        matching = [
            name
            for name, key in known.items()
            if hmac.compare_digest(_signature(key, content).encode(), signature.encode())
        ]
        return matching[0] if matching else ""


def own_key(path: Path) -> bytes:
    """Read this installation's key, or make it if there is none.

    Raises:
        CachePersistenceError: the file cannot be read or made, or is no key.
    """
    try:
        if not path.exists():
            _make(path)
        text = path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise CachePersistenceError(f"{path} cannot be used: {error}.") from error
    if not _KEY_PATTERN.fullmatch(text):
        raise CachePersistenceError(
            f"{path} is not a key: 64 hexadecimal digits. Delete it; a new one is made, and files "
            "of agents that were exported before then count as a stranger's."
        )
    return bytes.fromhex(text)


def _make(path: Path) -> None:
    """Make the file whole or not at all; whoever was first keeps theirs."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(_KEY_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()


def _signature(key: bytes, content: bytes) -> str:
    return hmac.new(key, content, hashlib.sha256).hexdigest()
