"""Blocks of attention state, named by what they were computed from.

A block is immutable: its name is a hash of everything its content depends on, so equal names
mean equal content and sharing needs no bookkeeping. This module knows token ids, names and byte
counts; it does not know tensors, files or agents. The memory budget is in `pool.py`.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from semantic.domain.spec import LayerKind, ModelCacheSpec

_ROOT_TAG = b"semantic.root.v1"
_BLOCK_TAG = b"semantic.block.v1"
TOKEN_BYTES = 4
_NAME_BYTES = hashlib.sha256().digest_size


class BlockName(bytes):
    """The SHA-256 digest that names a block, or the root a chain starts from."""

    __slots__ = ()

    @property
    def short(self) -> str:
        """The first twelve hex digits, for people and logs."""
        return self.hex()[:12]


@dataclass(frozen=True, slots=True)
class BlockNamespace:
    """What all blocks of one model, one resting format and one tenant have in common.

    Attributes:
        fingerprint: Identifies the model's weights, tokenizer and the backend's layout.
        kv_format: How payloads rest, e.g. ``bf16`` or ``q8g64``.
        tenant_salt: Keeps tenants from finding each other's blocks.
    """

    fingerprint: str
    kv_format: str
    tenant_salt: bytes = b""

    def root(self) -> BlockName:
        """Name the empty chain; every first block has it as parent."""
        digest = hashlib.sha256(_ROOT_TAG)
        for field in (self.fingerprint.encode(), self.kv_format.encode(), self.tenant_salt):
            # Lengths keep ("ab", "c") and ("a", "bc") apart.
            digest.update(struct.pack("<Q", len(field)) + field)
        return BlockName(digest.digest())


def block_name(parent: BlockName, tokens: Sequence[int]) -> BlockName:
    """Name the block that follows `parent` and holds `tokens`.

    Raises:
        ValueError: `tokens` is empty, an id is not in ``[0, 2**32)``, or `parent` is no digest.
    """
    # Of any other length, the end of a parent and the first token could not be told apart.
    if len(parent) != _NAME_BYTES:
        raise ValueError(f"a name has {_NAME_BYTES} bytes, got {len(parent)}")
    if not tokens:
        raise ValueError("a block holds at least one token")
    return packed_block_name(parent, pack_tokens(tokens))


def packed_block_name(parent: BlockName, packed: bytes) -> BlockName:
    """Name the block that follows `parent` and holds the ids packed by `pack_tokens`."""
    return BlockName(hashlib.sha256(_BLOCK_TAG + parent + packed).digest())


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Write ids as four bytes each, little-endian.

    Raises:
        ValueError: an id is not in ``[0, 2**32)``.
    """
    try:
        ids = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be in [0, 2**32): {error}") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """Undo `pack_tokens`."""
    return struct.unpack(f"<{len(packed) // TOKEN_BYTES}I", packed)


@dataclass(frozen=True, slots=True)
class KVBlock:
    """The attention state of a run of tokens that follows `parent`.

    Build one with `KVBlock.of`, which derives the name.
    """

    name: BlockName
    parent: BlockName
    tokens: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, parent: BlockName, tokens: Sequence[int], nbytes: int) -> "KVBlock":
        """Make the block that follows `parent`.

        Raises:
            ValueError: no tokens, an id out of range, or a negative size.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes must not be negative, got {nbytes}")
        return cls(block_name(parent, tokens), parent, tuple(tokens), nbytes)

    @property
    def num_tokens(self) -> int:
        """How many tokens the block holds."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class BlockPart:
    """One kind of layers' state of one block, as it rests on disk.

    Attributes:
        root: Where the block's chain begins.
        start: Position of the block's first token.
        tokens: The block's ids, packed: four bytes each, little-endian.
        nbytes: Size of the file.
        last_used: Seconds since the epoch.
    """

    root: BlockName
    name: BlockName
    parent: BlockName
    kind: LayerKind
    start: int
    tokens: bytes
    nbytes: int = 0
    last_used: float = 0.0

    @property
    def key(self) -> "PartKey":
        """What tells it from every other part."""
        return (self.name, self.kind)

    @property
    def num_tokens(self) -> int:
        """Tokens of the block."""
        return len(self.tokens) // TOKEN_BYTES


PartKey: TypeAlias = tuple[BlockName, LayerKind]


def block_end(start: int, block_tokens: int, boundaries: Sequence[int] = ()) -> int:
    """Where a block that begins at `start` ends: when it is full, or at a boundary.

    Example:
        >>> [block_end(start, 4, boundaries=[5]) for start in (0, 4, 5)]
        [4, 5, 9]
    """
    return min([start + block_tokens, *(b for b in boundaries if b > start)])


def split_tokens(
    tokens: Sequence[int], spec: ModelCacheSpec, boundaries: Sequence[int] = ()
) -> list[tuple[int, int]]:
    """Cut `tokens` into block ranges ``[start, end)``: at every boundary and when a block is full.

    Example:
        >>> from semantic.domain.spec import LayerKind, LayerSpec
        >>> layer = LayerSpec(LayerKind.FULL, num_kv_heads=1, key_dim=8, value_dim=8)
        >>> spec = ModelCacheSpec("tiny", (layer,), vocab_size=9, max_context=99, block_tokens=4)
        >>> split_tokens(range(10), spec, boundaries=[5])
        [(0, 4), (4, 5), (5, 9), (9, 10)]
    """
    ranges: list[tuple[int, int]] = []
    start = 0
    while start < len(tokens):
        end = min(block_end(start, spec.block_tokens, boundaries), len(tokens))
        ranges.append((start, end))
        start = end
    return ranges
