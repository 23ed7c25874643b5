"""Keys of cache packs: this installation signs with its own, and trusts the public keys of others.

Packs are passed on to other people, so the signature is Ed25519: with a shared secret, as exported
agents have, everyone who can verify a pack could also sign one.
"""

import re
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from semantic.adapters.outbound.blocks.agent_archive import OWN_SIGNER, own_key
from semantic.domain.agents import check_agent_id
from semantic.domain.errors import CachePersistenceError, InvalidRequestError
from semantic.ports.packs import PackSigner

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_KEY: Final = re.compile("[0-9a-f]{64}")
_SIGNATURE: Final = re.compile("[0-9a-f]{128}")
_TITLE: Final = (
    "# Public keys whose cache packs this server accepts: a name and a key in each line.\n"
)


class PackKeys:
    """The key pair of this installation, and the public keys that it trusts. Thread-safe.

    Both files are read when they are needed, so that changes need no restart.
    """

    def __init__(self, own_file: Path, trusted_file: Path) -> None:
        self._own_file = own_file
        self._trusted_file = trusted_file

    @property
    def public(self) -> str:
        """This installation's public key as 64 hexadecimal digits; creates it at the first use.

        Raises:
            InvalidRequestError: the package `cryptography` is not installed.
            CachePersistenceError: the key's file cannot be read or created.
        """
        return self._private().public_key().public_bytes_raw().hex()

    def sign(self, content: bytes) -> str:
        return self._private().sign(content).hex()

    def signer(self, content: bytes, key: str, signature: str) -> PackSigner | None:
        """Return the signer of a content; None if the signature is not that of the key.

        Raises:
            InvalidRequestError: the package `cryptography` is not installed.
        """
        if not (_KEY.fullmatch(key) and _SIGNATURE.fullmatch(signature)):
            return None
        _require_cryptography()
        from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - an optional extra
        from cryptography.hazmat.primitives.asymmetric.ed25519 import (  # noqa: PLC0415
            Ed25519PublicKey,
        )

        try:
            public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
            public.verify(bytes.fromhex(signature), content)
        except (InvalidSignature, ValueError):
            return None
        is_own = self._own_file.exists() and self.public == key
        names = [name for name, known in self.trusted().items() if known == key]
        return PackSigner(key, OWN_SIGNER if is_own else "".join(names[:1]))

    def trusted(self) -> dict[str, str]:
        """Return the trusted keys by name.

        Raises:
            CachePersistenceError: the file cannot be read, or a line is not a name and a key.
        """
        try:
            lines = self._trusted_file.read_text("ascii").splitlines()
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            raise CachePersistenceError(f"{self._trusted_file} cannot be read: {error}.") from error
        found: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            match line.split():
                case [] | ["#", *_]:
                    continue
                case [name, key] if _KEY.fullmatch(key):
                    found[name] = key
                case _:
                    raise CachePersistenceError(
                        f"line {number} of {self._trusted_file} is not a name and a key of 64 "
                        "hexadecimal digits; correct or delete it."
                    )
        return found

    def trust(self, name: str, key: str) -> None:
        """Accept packs that a key has signed.

        Raises:
            InvalidRequestError: the name or the key is malformed, or the name has another key.
        """
        check_agent_id(name, "NAME", "the name of a key")
        if not _KEY.fullmatch(key):
            raise InvalidRequestError(
                "a key has 64 hexadecimal digits; `semantic pack key` prints it.", param="KEY"
            )
        known = self.trusted()
        if known.get(name, key) != key:
            raise InvalidRequestError(
                f"{name} has another key; remove it first: semantic pack untrust {name}",
                param="NAME",
            )
        self._write({**known, name: key})

    def untrust(self, name: str) -> None:
        """Accept no further packs of a key; packs that were added stay.

        Raises:
            InvalidRequestError: no trusted key has this name.
        """
        known = self.trusted()
        if name not in known:
            raise InvalidRequestError(
                f"there is no trusted key {name!r}; `semantic pack key` lists them.", param="NAME"
            )
        self._write({other: key for other, key in known.items() if other != name})

    def _write(self, keys: Mapping[str, str]) -> None:
        file = self._trusted_file
        text = _TITLE + "".join(f"{name} {key}\n" for name, key in keys.items())
        temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}.tmp")
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.write_text(text, "ascii")
        temporary.replace(file)

    def _private(self) -> "Ed25519PrivateKey":
        _require_cryptography()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import (  # noqa: PLC0415
            Ed25519PrivateKey,
        )

        return Ed25519PrivateKey.from_private_bytes(own_key(self._own_file))


def _require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401, PLC0415 - an optional extra
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            f"cache packs need {error.name}; in the directory of the checkout run: "
            f"{sys.executable} -m pip install -c constraints.txt -e '.[encryption]'"
        ) from error
