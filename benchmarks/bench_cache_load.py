"""How fast attention state comes back from files, and goes there.

Bandwidths of blocks: writing them, reading and checking them, and what that consists of, against
copying as many bytes in memory. Files are in the page cache: a disk's speed is the disk's own.

Also the gather: 32 blocks of a model with 48 layers, 40 of them with a window, put into the
working buffers of one sequence layer by layer, against a plain copy. And the resting formats.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import xxhash

from benchmarks.common import Rounds, Target, interleaved, seconds, verdict
from semantic.adapters.outbound.blocks.codec import FORMATS, KVCodec, StoredBuffer
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.domain.blocks import BlockNamespace, BlockPart, block_name, pack_tokens
from semantic.domain.spec import LayerKind
from semantic.ports.backend import HostBuffer, KVPayload

BLOCK_TOKENS = 256
ROUNDS = 7


@dataclass(frozen=True)
class Geometry:
    """The layers of one kind of a model, in bfloat16."""

    name: str
    num_layers: int
    num_heads: int
    dim: int
    num_blocks: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a block's keys, and of its values."""
        return (self.num_layers, self.num_heads, BLOCK_TOKENS, self.dim)


STARTER = Geometry("SmolLM2-135M", 30, 3, 64, 16)
GEMMA_FULL = Geometry("Gemma-3-12B, full layers", 8, 8, 256, 8)
GEMMA_WINDOW = Geometry("Gemma-3-12B, window layers", 40, 8, 256, 4)


def make_payload(geometry: Geometry, index: int) -> KVPayload:
    """A block of normally distributed numbers, cut to bfloat16."""
    random = np.random.default_rng(index)
    buffers = []
    for name in ("keys", "values"):
        numbers = random.standard_normal(geometry.shape, np.float32)
        bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        data = bits.reshape(-1).view(np.uint8).data
        buffers.append(HostBuffer(name, geometry.shape, "bfloat16", data))
    start = index * BLOCK_TOKENS
    return KVPayload("bench", LayerKind.FULL, start, start + BLOCK_TOKENS, tuple(buffers))


def make_part(index: int) -> BlockPart:
    """A first block of its own for each index; positions are those of the payload."""
    root = BlockNamespace("bench", "raw").root()
    tokens = range(index, index + BLOCK_TOKENS)
    name, start = block_name(root, tokens), index * BLOCK_TOKENS
    return BlockPart(root, name, root, LayerKind.FULL, start, pack_tokens(tokens))


class Files:
    """Some blocks of a geometry in files, and the calls that are measured on them."""

    def __init__(self, geometry: Geometry, directory: Path) -> None:
        self._cache = SafetensorsCache(directory)
        self._parts = [make_part(index) for index in range(geometry.num_blocks)]
        self._payloads = [make_payload(geometry, index) for index in range(2)]
        self.write(is_synced=True)
        self._paths = sorted(directory.rglob("*.safetensors"))
        self.num_bytes = sum(path.stat().st_size for path in self._paths)
        self._memory = [np.fromfile(path, np.uint8) for path in self._paths]
        self._target = np.zeros(self.num_bytes, np.uint8)

    def write(self, *, is_synced: bool = False) -> None:
        """Write every block anew."""
        for index, part in enumerate(self._parts):
            payload = self._payloads[index % 2]
            start = index * BLOCK_TOKENS
            moved = KVPayload(
                payload.abi, payload.kind, start, start + BLOCK_TOKENS, payload.buffers
            )
            self._cache.write(part, moved, is_synced=is_synced)

    def read(self) -> None:
        """Read and check every block, as a recall does."""
        for part in self._parts:
            self._cache.read(part)

    def plain_read(self) -> None:
        """Read every file into memory that is in use already, and check nothing."""
        for path, memory in zip(self._paths, self._memory, strict=True):
            with path.open("rb", buffering=0) as file:
                file.readinto(memory.data)

    def checksum(self) -> None:
        """Compute the checksums alone."""
        for memory in self._memory:
            xxhash.xxh3_128_digest(memory.data)

    def copy(self) -> None:
        """Copy as many bytes in memory."""
        position = 0
        for memory in self._memory:
            self._target[position : position + len(memory)] = memory
            position += len(memory)


def gigabytes(num_bytes: int, call: Callable[[], object]) -> float:
    """GB a second."""
    return num_bytes / seconds(call) / 1e9


def measure_files(geometry: Geometry, directory: Path) -> None:
    """Print the bandwidths of one geometry."""
    files = Files(geometry, directory)
    calls: dict[str, Callable[[], object]] = {
        "memcpy": files.copy,
        "checksum": files.checksum,
        "plain read": files.plain_read,
        "read and check": files.read,
        "write": files.write,
        "write, synced": partial(files.write, is_synced=True),
    }
    rounds = interleaved(
        {name: partial(gigabytes, files.num_bytes, call) for name, call in calls.items()}, ROUNDS
    )
    size = files.num_bytes / geometry.num_blocks / 1e6
    print(f"{geometry.name}: {geometry.num_blocks} files of {size:.1f} MB")
    rounds.print("GB/s")
    parts = [rounds.figures[name] for name in ("memcpy", "checksum", "plain read")]
    slowest = [min(figures) for figures in zip(*parts, strict=True)]
    together = Rounds({**rounds.figures, "slowest": slowest})
    ratio = together.ratio("read and check", "slowest")
    print(f"  read and check, of the slowest of the first three: {ratio:.2f}x")


Gather = Callable[[int, int, slice], None]


def measure_gather() -> int:
    """Put blocks into one sequence's buffers, with torch as `TorchBackend.load` does and numpy."""
    num_blocks = 32
    layers, heads, _, dim = shape = (48, 8, BLOCK_TOKENS, 256)
    blocks = [torch.ones(shape, dtype=torch.bfloat16) for _ in range(4)]
    working = torch.ones(layers, heads, num_blocks * BLOCK_TOKENS, dim, dtype=torch.bfloat16)
    arrays = [block.view(torch.int16).numpy() for block in blocks]
    array = working.view(torch.int16).numpy()
    flat = array.reshape(num_blocks, -1)
    num_bytes = array.nbytes

    def copy() -> None:
        for index in range(num_blocks):
            flat[index] = arrays[index % 4].reshape(-1)

    def by_torch(block: int, layer: int, place: slice) -> None:
        working[layer, :, place] = blocks[block % 4][layer]

    def by_numpy(block: int, layer: int, place: slice) -> None:
        array[layer, :, place] = arrays[block % 4][layer]

    def gather(put: Gather) -> None:
        for block in range(num_blocks):
            place = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
            for layer in range(layers):
                put(block, layer, place)

    calls: dict[str, Callable[[], object]] = {
        "memcpy": copy,
        "torch": partial(gather, by_torch),
        "numpy": partial(gather, by_numpy),
    }
    rounds = interleaved(
        {name: partial(gigabytes, num_bytes, call) for name, call in calls.items()}, ROUNDS
    )
    print(f"gather of {num_blocks} blocks x {layers} layers, {num_bytes / 1e9:.2f} GB")
    rounds.print("GB/s")
    return verdict(
        [
            Target(f"{name}, of memcpy", rounds.ratio(name, "memcpy"), 0.5, is_least=True)
            for name in ("torch", "numpy")
        ]
    )


def measure_codecs(geometry: Geometry) -> None:
    """Print what quantising and expanding a block costs."""
    payload = make_payload(geometry, 0)
    print(f"resting formats, one block of {geometry.name}, MB/s of bfloat16")
    for bits in (8, 4):
        codec = KVCodec(FORMATS[bits])
        resting = codec.encode(payload)
        rounds = interleaved(
            {
                "quantise": partial(gigabytes, payload.nbytes, partial(codec.encode, payload)),
                "expand": partial(gigabytes, payload.nbytes, partial(expand, codec, resting)),
            },
            ROUNDS,
        )
        kept = sum(memoryview(t.data).nbytes for buffer in resting for t in buffer.tensors)
        speeds = ", ".join(f"{name} {rounds.median(name) * 1000:5.0f}" for name in rounds.figures)
        print(f"  {codec.kv_format}: {speeds}; {kept / payload.nbytes:.2f} of the bytes")


def expand(codec: KVCodec, resting: tuple[StoredBuffer, ...]) -> None:
    """Decode a block."""
    for buffer in resting:
        codec.decode(buffer)


def measure_scan(directory: Path, num_files: int) -> None:
    """Print how long the index takes to be rebuilt from files; their payloads are left out."""
    cache = SafetensorsCache(directory)
    ids = HostBuffer("ids", (1,), "u32", bytes(4))
    for index in range(num_files):
        part = make_part(index)
        end = part.start + BLOCK_TOKENS
        payload = KVPayload("bench", LayerKind.FULL, part.start, end, (ids,))
        cache.write(part, payload, is_synced=False)
    parts: list[BlockPart] = []
    spent = seconds(lambda: parts.extend(cache.scan()))
    count = seconds(cache.used_bytes)
    assert len(parts) == num_files
    print(f"{num_files} files: scanned in {spent:.2f} s, their sizes added up in {count:.2f} s")


def main() -> int:
    """Print all figures; 1 if a target is missed."""
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as directory:
        for geometry in (STARTER, GEMMA_FULL, GEMMA_WINDOW):
            measure_files(geometry, Path(directory) / geometry.name)
            shutil.rmtree(Path(directory) / geometry.name)
        measure_scan(Path(directory), 20_000)
    measure_codecs(STARTER)
    return measure_gather()


if __name__ == "__main__":
    sys.exit(main())
