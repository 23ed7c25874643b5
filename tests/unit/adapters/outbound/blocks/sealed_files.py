"""Makes block parts, and files that carry a right checksum whatever else they say."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from semantic.domain.blocks import BlockName, BlockNamespace, BlockPart, block_name, pack_tokens
from semantic.domain.spec import LayerKind
from semantic.ports.backend import HostBuffer, KVPayload

ROOT = BlockNamespace("example", "raw").root()
OPENING = b'{"__metadata__":{"checksum":"'


def make_part(
    tokens: Sequence[int] = (7, 8),
    kind: LayerKind = LayerKind.FULL,
    parent: BlockName = ROOT,
    start: int = 0,
    root: BlockName = ROOT,
) -> BlockPart:
    return BlockPart(root, block_name(parent, tokens), parent, kind, start, pack_tokens(tokens))


def make_payload(part: BlockPart, *buffers: HostBuffer) -> KVPayload:
    end = part.start + part.num_tokens
    numbers = bytes(index % 251 for index in range(4 * part.num_tokens))
    keys = HostBuffer("keys", (1, part.num_tokens, 2), "float16", numbers)
    return KVPayload("demo.v1", part.kind, part.start, end, buffers or (keys,))


def file_of(directory: Path, part: BlockPart) -> Path:
    """Where a part's file is to be, by the documented rule."""
    name = part.name.hex()
    shard = directory / "blocks" / part.root.hex()[:16] / name[:2]
    return shard / f"{name}.{part.kind.value}.safetensors"


def take_apart(content: bytes) -> tuple[dict[str, dict[str, Any]], bytes]:
    """A file's header and what follows it."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def seal(header: bytes, data: bytes, length: int | None = None) -> bytes:
    """Put the right checksum into a file; the header holds 32 digits where it belongs."""
    size = len(header) if length is None else length
    content = size.to_bytes(8, "little") + header + data
    start = 8 + len(OPENING)
    digits = xxhash.xxh3_128_hexdigest(content[:start] + content[start + 32 :])
    return content[:start] + digits.encode() + content[start + 32 :]


def put_together(header: dict[str, dict[str, Any]], data: bytes) -> bytes:
    """Undo `take_apart`, sealed anew."""
    return seal(json.dumps(header, separators=(",", ":")).encode(), data)


def buffers_of(payload: KVPayload) -> list[tuple[str, tuple[int, ...], str, bytes]]:
    """Buffers as values that can be compared."""
    return [(b.name, b.shape, b.dtype, bytes(b.data)) for b in payload.buffers]
