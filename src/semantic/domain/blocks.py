"""Blocks of KV cache, named by what they were computed from.

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

from semantic.domain.spec import LayerKind

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
        ValueError: `tokens` is empty, an id is not in ``[0, 2**32)``, or `parent` is not a digest.
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


def common_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    """Length of the longest common prefix.

    Example:
        >>> common_prefix([1, 2, 3], [1, 2, 4, 5])
        2
        >>> common_prefix([1, 2, 3], (1, 2))
        2
    """
    stride, start, end = 512, 0, min(len(left), len(right))
    # Slices are compared in C; where they differ, shorter ones are.
    while stride > 1 and start < end:
        if left[start : start + stride] == right[start : start + stride]:
            start += stride
        else:
            stride //= 2
    # One by one at last: a list and a tuple of the same are not equal.
    while start < end and left[start] == right[start]:
        start += 1
    return min(start, end)
