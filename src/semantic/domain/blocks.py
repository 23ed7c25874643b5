"""Blocks of KV cache, named by the inputs they were computed from.

A block is immutable. Its name is a hash of everything its content depends on, so equal names mean
equal content, and sharing needs no bookkeeping. This module handles token ids, names and byte
counts, but no tensors, files or agents. The memory budget is in `pool.py`.
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
        return self.hex()[:12]


@dataclass(frozen=True, slots=True)
class BlockNamespace:
    """What all blocks of one model, one storage format and one tenant have in common.

    Attributes:
        fingerprint: Identifies the model's weights, tokenizer and the backend's layout.
        kv_format: Storage format of payloads, e.g. ``bf16`` or ``q8g64``.
        tenant_salt: Prevents tenants from finding each other's blocks.
    """

    fingerprint: str
    kv_format: str
    tenant_salt: bytes = b""

    def root(self) -> BlockName:
        """Return the name of the empty chain, which is the parent of every first block."""
        digest = hashlib.sha256(_ROOT_TAG)
        for field in (self.fingerprint.encode(), self.kv_format.encode(), self.tenant_salt):
            # Length prefixes distinguish ("ab", "c") from ("a", "bc").
            digest.update(struct.pack("<Q", len(field)) + field)
        return BlockName(digest.digest())


@dataclass(frozen=True, slots=True)
class BlockOrigin:
    """The model and format that computed the blocks of one root, as recorded in their files.

    Attributes:
        abi: The backend's layout and dtype, see `Traits.kv_abi`.
    """

    root: BlockName
    fingerprint: str
    abi: str
    kv_format: str
    num_files: int = 0


def describe_change(stored: tuple[str, str], served: tuple[str, str]) -> str:
    """Explain why stored KV cache is unusable; both arguments are (ABI, storage format).

    Example:
        >>> describe_change(("torch.v1.float32", "raw"), ("torch.v1.bfloat16", "raw"))
        'KV cache was written in float32; the model now runs in bfloat16.'
        >>> describe_change(("torch.v1.float32", "raw"), ("mlx.v1.bfloat16", "raw"))
        'KV cache was written in torch.v1.float32; the model now runs in mlx.v1.bfloat16.'
        >>> describe_change(("torch.v1.float32", "raw"), ("torch.v1.float32", "q8g64"))
        'KV cache was stored as raw; kv_bits now asks for q8g64.'
    """
    old, new = stored[0], served[0]
    if old == new:
        return f"KV cache was stored as {stored[1]}; kv_bits now asks for {served[1]}."
    olds, news = old.split("."), new.split(".")
    if len(olds) == len(news) > 2 and (*olds[:2], *olds[3:]) == (*news[:2], *news[3:]):
        old, new = olds[2], news[2]  # only the dtype differs
    return f"KV cache was written in {old}; the model now runs in {new}."


def block_name(parent: BlockName, tokens: Sequence[int]) -> BlockName:
    """Return the name of the block that follows `parent` and holds `tokens`.

    Raises:
        ValueError: `tokens` is empty, an id is not in ``[0, 2**32)``, or `parent` is not a digest.
    """
    # With a variable length, the end of a parent could be confused with the first token.
    if len(parent) != _NAME_BYTES:
        raise ValueError(f"a name has {_NAME_BYTES} bytes, got {len(parent)}")
    if not tokens:
        raise ValueError("a block holds at least one token")
    return packed_block_name(parent, pack_tokens(tokens))


def packed_block_name(parent: BlockName, packed: bytes) -> BlockName:
    """Return the name of the block that follows `parent` and holds ids packed by `pack_tokens`."""
    return BlockName(hashlib.sha256(_BLOCK_TAG + parent + packed).digest())


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Pack token ids as four bytes each, little-endian.

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
    """The state of one kind of layer in one block, as stored on disk.

    Attributes:
        start: Position of the block's first token.
        tokens: The block's token ids, packed: four bytes each, little-endian.
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
        return (self.name, self.kind)

    def is_same_block(self, other: "BlockPart") -> bool:
        """Whether both have the tokens and the parent from which a block's name is computed."""
        return self.tokens == other.tokens and self.parent == other.parent

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


PartKey: TypeAlias = tuple[BlockName, LayerKind]


def block_end(start: int, block_tokens: int, boundaries: Sequence[int] = ()) -> int:
    """Return the end of a block that begins at `start`: where it is full, or the next boundary.

    Example:
        >>> [block_end(start, 4, boundaries=[5]) for start in (0, 4, 5)]
        [4, 5, 9]
    """
    return min([start + block_tokens, *(b for b in boundaries if b > start)])


def common_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    """Return the length of the longest common prefix.

    Example:
        >>> common_prefix([1, 2, 3], [1, 2, 4, 5])
        2
        >>> common_prefix([1, 2, 3], (1, 2))
        2
    """
    stride, start, end = 512, 0, min(len(left), len(right))
    # Comparing slices runs in C; where slices differ, halve their length.
    while stride > 1 and start < end:
        if left[start : start + stride] == right[start : start + stride]:
            start += stride
        else:
            stride //= 2
    # Finally one by one, because a list slice never equals a tuple slice.
    while start < end and left[start] == right[start]:
        start += 1
    return min(start, end)
