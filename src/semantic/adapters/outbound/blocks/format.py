"""The format of a block part's file: a self-describing safetensors file with a checksum.

Buffers are stored raw, or quantised to 8 or 4 bits per number.

`docs/cache-format.md` describes it byte by byte. This module encodes and decodes files, treats all
input as untrusted, and opens no files.
"""

import errno
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import xxhash

from semantic.adapters.outbound.blocks import encryption, quantisation
from semantic.adapters.outbound.blocks.encryption import Piece
from semantic.adapters.outbound.cipher import Cipher
from semantic.domain.blocks import TOKEN_BYTES, BlockName, BlockPart, packed_block_name
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError
from semantic.domain.spec import LayerKind
from semantic.ports.backend import HostBuffer, KVPayload

FORMAT: Final = "semantic.block.v1"
ALIGNMENT: Final = 64
LENGTH_BYTES: Final = 8
MAX_HEADER: Final = 2**20
_SCAN_BYTES: Final = 4096  # covers most headers and the token ids after them
MIN_HEAD: Final = 448  # lower bound of the bytes before the token ids: three names, a checksum, …
_TOKENS: Final = "tokens"
_OPENING: Final = '{"__metadata__":{"checksum":"'
_DIGITS: Final = 32
_SUM_START: Final = LENGTH_BYTES + len(_OPENING)
_SUM_END: Final = _SUM_START + _DIGITS
_DESCRIPTION: Final = re.compile(r"(\S+)\[([0-9,]{0,99})\] (\w+)", re.ASCII)

# Backends use long or short names of dtypes; tensors of other dtypes are stored as bytes.
_DTYPES: Final = {
    spelling: (code, size)
    for code, size, spellings in (
        ("U8", 1, "uint8 u8 bool"),
        ("I8", 1, "int8 i8"),
        ("U16", 2, "uint16 u16"),
        ("I16", 2, "int16 i16"),
        ("F16", 2, "float16 f16"),
        ("BF16", 2, "bfloat16 bf16"),
        ("U32", 4, "uint32 u32"),
        ("I32", 4, "int32 i32"),
        ("F32", 4, "float32 f32"),
        ("U64", 8, "uint64 u64"),
        ("I64", 8, "int64 i64"),
        ("F64", 8, "float64 f64"),
    )
    for spelling in spellings.split()
}
_SIZES: Final = dict(_DTYPES.values())

KVFormat = Literal["raw", "q8g64", "q4g64"]
FORMATS: Final[dict[int, KVFormat]] = {16: "raw", 8: "q8g64", 4: "q4g64"}


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor's dtype code, shape, and byte range ``[start, end)`` within the file."""

    code: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Head:
    """A file's header; its tensors are known to fill the file without gaps or overlaps."""

    metadata: dict[str, str]
    tensors: dict[str, FileTensor]

    def field(self, name: str) -> str:
        """One entry of the metadata; raises `CacheCorruptionError` if it is missing."""
        try:
            return self.metadata[name]
        except KeyError:
            raise CacheCorruptionError(f"the file's header lacks {name}") from None

    @property
    def tokens(self) -> FileTensor:
        """The tensor of the token ids; raises `CacheCorruptionError` if it is missing."""
        tensor = self.tensors.get(_TOKENS)
        if tensor is None or tensor.code != "U32" or len(tensor.shape) != 1 or not tensor.shape[0]:
            raise CacheCorruptionError("the file has no token ids")
        return tensor


@dataclass(frozen=True, slots=True)
class StoredBuffer:
    """A buffer's name, shape, dtype and storage format, and the tensors that store it.

    Attributes:
        tensors: The buffer itself if the format is ``raw``; else its codes, steps and minima.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kv_format: str
    tensors: tuple[HostBuffer, ...]


@dataclass(frozen=True, slots=True)
class KVCodec:
    """The storage format of new payloads; it decodes all formats. Thread-safe.

    Attributes:
        kv_format: Part of block names; see `BlockNamespace`.
    """

    kv_format: KVFormat = "raw"

    def encode(self, payload: KVPayload) -> tuple[StoredBuffer, ...]:
        """Quantise a payload's buffers, in order; raw buffers are not copied."""
        kv_format = "raw" if payload.kind is LayerKind.STATE else self.kv_format
        stored = []
        for buffer in payload.buffers:
            tensors = None if kv_format == "raw" else quantisation.quantise(buffer, kv_format)
            used = "raw" if tensors is None else kv_format
            stored.append(
                StoredBuffer(buffer.name, buffer.shape, buffer.dtype, used, tensors or (buffer,))
            )
        return tuple(stored)

    def decode(self, stored: StoredBuffer) -> HostBuffer:
        """Dequantise a buffer of any format; a raw buffer is not copied.

        Raises:
            CacheCorruptionError: the tensors do not match the buffer's shape and dtype.
        """
        name, shape, dtype, kv_format = stored.name, stored.shape, stored.dtype, stored.kv_format
        if kv_format == "raw":
            (buffer,) = stored.tensors
            return HostBuffer(name, shape, dtype, buffer.data)
        return quantisation.dequantise(name, shape, dtype, kv_format, stored.tensors)

    def max_decoded_bytes(self, num_bytes: int) -> int:
        """Upper bound of the bytes that stored and decoded buffers take together."""
        if self.kv_format == "raw":
            return num_bytes
        return quantisation.max_expanded_bytes(self.kv_format, num_bytes)


def compose(part: BlockPart, payload: KVPayload, codec: KVCodec, fingerprint: str) -> list[Piece]:
    """Build a file as pieces to be written one after the other.

    Raises:
        CachePersistenceError: the payload does not belong to the part.
    """
    if payload.kind is not part.kind or payload.end != part.start + part.num_tokens:
        raise CachePersistenceError("the payload does not belong to the part")
    buffers = codec.encode(payload)
    entries, pieces = _layout(part.tokens, [t for buffer in buffers for t in buffer.tensors])
    metadata = {
        "format": FORMAT,
        "root": part.root.hex(),
        "name": part.name.hex(),
        "parent": part.parent.hex(),
        "kind": part.kind.value,
        "start": str(payload.start),
        "end": str(payload.end),
        "abi": payload.abi,
        "kv_format": codec.kv_format,
        "fingerprint": fingerprint,
        **{f"buffer.{buffer.name}": _described(buffer) for buffer in buffers},
    }
    text = json.dumps(
        {"__metadata__": {"checksum": "0" * _DIGITS, **metadata}, **entries}, separators=(",", ":")
    ).encode()
    # Spaces align the first buffer, which follows the token ids, to 64 bytes.
    text += b" " * (-(LENGTH_BYTES + len(text) + len(part.tokens)) % ALIGNMENT)
    head = struct.pack("<Q", len(text)) + text
    digits = _checksum([head[:_SUM_START], head[_SUM_END:], *pieces]).encode()
    return [head[:_SUM_START] + digits + head[_SUM_END:], *pieces]


def _layout(
    tokens: bytes, tensors: Sequence[HostBuffer]
) -> tuple[dict[str, dict[str, object]], list[Piece]]:
    """Assign offsets: token ids first, then tensors by decreasing width, so all stay aligned."""
    if len({_TOKENS, "__metadata__", *(t.name for t in tensors)}) < len(tensors) + 2:
        raise CachePersistenceError("two buffers of the payload have one name")
    views = {tensor.name: _as_bytes(tensor.data) for tensor in tensors}
    by_width = sorted(tensors, key=lambda tensor: -_DTYPES.get(tensor.dtype, ("U8", 1))[1])
    offset, places = len(tokens), {}
    for tensor in by_width:
        places[tensor.name] = [offset, offset := offset + len(views[tensor.name])]
    entries: dict[str, dict[str, object]] = {
        _TOKENS: _entry("U32", [len(tokens) // TOKEN_BYTES], [0, len(tokens)])
    }
    for tensor in tensors:
        code, size = _DTYPES.get(tensor.dtype, ("U8", 0))
        num_bytes = len(views[tensor.name])
        if size and math.prod(tensor.shape) * size != num_bytes:
            raise CachePersistenceError(f"buffer {tensor.name} does not match its shape")
        shape = list(tensor.shape) if size else [num_bytes]
        entries[tensor.name] = _entry(code, shape, places[tensor.name])
    return entries, [tokens, *(views[tensor.name] for tensor in by_width)]


def _entry(code: str, shape: list[int], offsets: list[int]) -> dict[str, object]:
    return {"dtype": code, "shape": shape, "data_offsets": offsets}


def _described(buffer: StoredBuffer) -> str:
    return f"{buffer.dtype}[{','.join(map(str, buffer.shape))}] {buffer.kv_format}"


def _as_bytes(data: bytes | bytearray | memoryview) -> Piece:
    view = memoryview(data)
    return view.cast("B") if view.nbytes else b""


def _checksum(pieces: Iterable[Piece]) -> str:
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def read(content: memoryview, codec: KVCodec) -> tuple[BlockPart, KVPayload]:
    """Check a whole file; returns its part and its payload, whose raw buffers are views of it.

    Raises:
        CacheCorruptionError: the file is damaged or inconsistent.
    """
    _verify(content)
    head = read_head(content, len(content))
    tokens = bytes(content[head.tokens.start : head.tokens.end])
    part = identify(head, tokens, len(content), 0.0)
    buffers = tuple(codec.decode(buffer) for buffer in _stored_buffers(head, content))
    positions = int(head.field("start")), int(head.field("end"))
    return part, KVPayload(head.field("abi"), part.kind, *positions, buffers)


def _verify(content: memoryview) -> None:
    """Compare a whole file with its checksum, which covers every other byte."""
    if len(content) < _SUM_END or content[LENGTH_BYTES:_SUM_START] != _OPENING.encode():
        raise CacheCorruptionError("the file is not a block of KV cache")
    expected = bytes(content[_SUM_START:_SUM_END])
    if _checksum([content[:_SUM_START], content[_SUM_END:]]).encode() != expected:
        raise CacheCorruptionError("the file's checksum does not match its content")


def header_length(beginning: memoryview, file_size: int) -> int:
    """Read the header's length from the first bytes; `CacheCorruptionError` if it is impossible."""
    if len(beginning) < LENGTH_BYTES:
        raise CacheCorruptionError("the file is too short")
    (length,) = struct.unpack_from("<Q", beginning)
    if length > min(MAX_HEADER, file_size - LENGTH_BYTES):
        raise CacheCorruptionError(f"the file's header cannot have {length} bytes")
    return int(length)


def read_head(beginning: memoryview, file_size: int) -> Head:
    """Parse the header from a file's first bytes, which must contain all of it.

    Raises:
        CacheCorruptionError: the header is invalid, or the tensors do not fill the file exactly.
    """
    first = LENGTH_BYTES + header_length(beginning, file_size)
    header = beginning[LENGTH_BYTES:first]
    try:
        entries = json.loads(str(header, "utf-8"))
    except (ValueError, RecursionError):
        raise CacheCorruptionError("the file's header is not JSON") from None
    metadata = entries.pop("__metadata__", None) if isinstance(entries, dict) else None
    if not isinstance(metadata, dict) or {*map(type, metadata.values())} - {str}:
        raise CacheCorruptionError("the file's header has no metadata")
    if metadata.get("format") != FORMAT:
        raise CacheCorruptionError("the file has an unknown format or version")
    tensors = {name: _tensor(entry, first) for name, entry in entries.items()}
    position = first
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != position:
            raise CacheCorruptionError("the file's tensors overlap, or leave a gap")
        position = tensor.end
    if position != file_size:
        raise CacheCorruptionError("the file is shorter or longer than its tensors")
    return Head(metadata, tensors)


def _tensor(entry: Any, first: int) -> FileTensor:
    # A pattern takes three times as long, and the server reads all headers after a start.
    try:
        code, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = (*shape, start, end)
        are_typed = isinstance(code, str) and isinstance(shape, list)
        are_sizes = {*map(type, numbers)} == {int} and min(numbers) >= 0
        if are_typed and are_sizes and math.prod(shape) * _SIZES.get(code, -1) == end - start:
            return FileTensor(code, tuple(shape), first + start, first + end)
    except (KeyError, TypeError, ValueError):
        pass
    raise CacheCorruptionError("the file's header describes an impossible tensor")


def read_beginning(
    read: Callable[[int, int], bytes], file_size: int, cipher: Cipher | None, context: bytes
) -> tuple[Head, bytes]:
    """Read a file's header and token ids, usually in one call.

    Args:
        read: Reads a number of bytes at an offset.
        context: Name of the file.

    Raises:
        CacheCorruptionError: the file is damaged.
        PermissionError: the file is encrypted, and there is no cipher.
    """
    content = memoryview(read(_SCAN_BYTES, 0))
    if cipher is not None:
        _, end = encryption.encrypted_head(content)
        if end > len(content):
            content = memoryview(read(end, 0))
        content = encryption.decrypt_head(content, cipher, context)
        file_size -= encryption.OVERHEAD
    elif encryption.is_encrypted(content):
        raise PermissionError(errno.EACCES, "the file is encrypted")  # not damage
    end = LENGTH_BYTES + header_length(content, file_size)
    if end > len(content):
        content = memoryview(read(end, 0))
    head = read_head(content, file_size)
    ids = head.tokens
    if ids.end <= len(content):
        return head, bytes(content[ids.start : ids.end])
    return head, read(ids.end - ids.start, ids.start)


def identify(head: Head, tokens: bytes, nbytes: int, last_used: float) -> BlockPart:
    """Determine which part a file holds; recomputes its name from parent and token ids.

    Raises:
        CacheCorruptionError: the header is inconsistent.
    """
    try:
        root, name, parent = (
            BlockName(bytes.fromhex(head.field(field))) for field in ("root", "name", "parent")
        )
        kind = LayerKind(head.field("kind"))
        first, end = int(head.field("start")), int(head.field("end"))
    except ValueError as error:
        raise CacheCorruptionError(f"the file's header is invalid: {error}") from None
    start = end - len(tokens) // TOKEN_BYTES
    if not 0 <= start <= first < end:
        raise CacheCorruptionError("the file's positions do not match its token ids")
    if packed_block_name(parent, tokens) != name or {len(root), len(parent)} != {len(name)}:
        raise CacheCorruptionError("the file's name does not match its parent and token ids")
    return BlockPart(root, name, parent, kind, start, tokens, nbytes, last_used)


def _stored_buffers(head: Head, content: memoryview) -> list[StoredBuffer]:
    buffers = []
    num_tensors = 1
    for key, description in head.metadata.items():
        if not key.startswith("buffer."):
            continue
        match = _DESCRIPTION.fullmatch(description)
        if match is None:
            raise CacheCorruptionError(f"the file's header does not describe {key}")
        dtype, numbers, kv_format = match.groups()
        name = key.removeprefix("buffer.")
        shape = tuple(int(number) for number in numbers.split(",") if number)
        names = (name,) if kv_format == "raw" else quantisation.tensor_names(name)
        num_tensors += len(names)
        tensors = tuple(_host_buffer(head, tensor, dtype, content) for tensor in names)
        buffer = StoredBuffer(name, shape, dtype, kv_format, tensors)
        _check_raw(buffer)
        buffers.append(buffer)
    if num_tensors != len(head.tensors):
        raise CacheCorruptionError("the file has tensors that belong to no buffer")
    return buffers


def _host_buffer(head: Head, name: str, dtype: str, content: memoryview) -> HostBuffer:
    tensor = head.tensors.get(name)
    if tensor is None:
        raise CacheCorruptionError(f"the file lacks the tensor {name}")
    return HostBuffer(name, tensor.shape, dtype, content[tensor.start : tensor.end])


def _check_raw(buffer: StoredBuffer) -> None:
    if buffer.kv_format != "raw" or buffer.dtype not in _DTYPES:
        return
    num_bytes = math.prod(buffer.shape) * _DTYPES[buffer.dtype][1]
    if memoryview(buffer.tensors[0].data).nbytes != num_bytes:
        raise CacheCorruptionError(f"buffer {buffer.name} does not match its shape")
