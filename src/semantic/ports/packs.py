"""Interface of cache packs: KV cache of a client's system prompt and tools, as a signed file."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from semantic.ports.backend import KVPayload
from semantic.ports.storage import ExportPart


@dataclass(frozen=True, slots=True)
class PackHead:
    """First item of a pack's file.

    Attributes:
        model: The model's name, for display.
        fingerprint: Identifies the weights and the tokenizer that computed the KV cache.
        abi: Layout and dtype of the KV cache; see `Traits.kv_abi`.
        kv_format: Storage format of the KV cache, e.g. ``raw`` or ``q8g64``.
        text: The text of the tokens, for people who want to know what a pack contains.
        created_at: Seconds since the epoch.
    """

    name: str
    model: str
    fingerprint: str
    abi: str
    kv_format: str
    num_tokens: int
    text: str
    created_at: float


PackItem: TypeAlias = PackHead | ExportPart


@dataclass(frozen=True, slots=True)
class PackSigner:
    """Who signed a pack.

    Attributes:
        key: The public key, as hexadecimal digits.
        name: The name under which this server trusts the key; empty if it does not.
    """

    key: str
    name: str


@dataclass(frozen=True, slots=True)
class PackView:
    """A pack that a tenant has.

    Attributes:
        signer: Name and public key of its signer, when it was added.
        is_usable: Whether it belongs to the loaded model and its KV format.
        memory_tokens: Tokens whose KV cache is in memory.
        disk_tokens: Tokens whose KV cache is on disk.
    """

    name: str
    tenant: str
    model: str
    signer: PackSigner
    num_tokens: int
    num_blocks: int
    num_bytes: int
    created_at: float
    is_usable: bool
    memory_tokens: int
    disk_tokens: int


@dataclass(frozen=True, slots=True)
class AddedPack:
    """A pack that was added, and how many of its blocks were computed again and compared."""

    views: tuple[PackView, ...]
    num_checked: int


class PackFilePort(Protocol):
    """Reads and writes files with one pack: the head, then the parts of its blocks in order."""

    def write(self, items: Iterable[PackItem]) -> Iterator[bytes]:
        """Yield the content of a file in pieces, signed with this installation's key.

        Raises:
            InvalidRequestError: the package that signs is not installed.
            CachePersistenceError: the key cannot be read or created.
        """

    def check(self, pieces: Iterable[bytes]) -> PackSigner:
        """Read a file to its end, and verify its checksums and its signature.

        Raises:
            InvalidRequestError: the file is damaged, truncated or of another type, the signature
                is not that of the key in the file, or the package that verifies is not installed.
        """

    def read(self, pieces: Iterable[bytes], *, has_parts: bool) -> Iterator[PackItem]:
        """Yield the items of a checked file, without its parts unless `has_parts`.

        Raises:
            InvalidRequestError: an item is malformed.
        """

    def compare(self, stored: KVPayload, computed: KVPayload) -> str:
        """Compare KV cache of a file with the same computed here; returns how they differ.

        Empty if they agree: exactly, or for floating-point numbers within the tolerance of their
        precision and storage format.
        """
