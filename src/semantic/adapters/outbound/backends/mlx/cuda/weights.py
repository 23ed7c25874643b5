"""Weights from safetensors files to a CUDA device, at the speed of the files.

MLX reads them into memory that moves to the device page by page when it is first looked at. Here
several threads read them into pinned memory, from where the device fetches them meanwhile.
"""

import contextlib
import json
import math
import os
import struct
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.caches import Array
from semantic.adapters.outbound.backends.mlx.cuda.pinned import PinnedMemory
from semantic.adapters.outbound.backends.mlx.cuda.transfer import UNIT, HostPiece, Transfer

_DTYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32, "U32": mx.uint32}
_MIN_BYTES = 2**20  # smaller ones are MLX's own business
_READ_BYTES = 2**24
_PIECE_BYTES = 2**19  # that a block of threads fetches
_AHEAD_BYTES = 2**30  # being read, and again being fetched
_NUM_READERS = 16


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    dtype: Any
    offset: int
    num_bytes: int


class WeightReader:
    """Reads files of weights."""

    def __init__(self, memory: PinnedMemory, transfer: Transfer) -> None:
        self._memory = memory
        self._transfer = transfer
        self._readers = ThreadPoolExecutor(_NUM_READERS, "semantic-weights")

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Let `mx.load` read by this."""
        original = mx.load

        def load(file: Any, *args: Any, **options: Any) -> Any:
            given = original(file, *args, **options)
            if args or options or not str(file).endswith(".safetensors"):
                return given
            try:
                return {**given, **self._load(str(file))}
            except (OSError, ValueError, KeyError, MemoryError):
                return given

        mx.load = load
        try:
            yield
        finally:
            mx.load = original
            self._readers.shutdown()
            self._transfer.finish()

    def _load(self, path: str) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        reading: deque[tuple[_Tensor, memoryview, list[Future[None]]]] = deque()
        fetching: deque[tuple[Array, memoryview]] = deque()

        def fetch() -> None:
            tensor, memory, reads = reading.popleft()
            for read in reads:
                read.result()
            array = self._fetch(tensor, memory)
            mx.async_eval(array)
            arrays[tensor.name] = array.reshape(tensor.shape)
            fetching.append((array, memory))
            while sum(held.nbytes for _, held in fetching) > _AHEAD_BYTES:
                mx.eval(fetching.popleft()[0])

        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for tensor in _tensors(file):
                memory = self._memory.allocate(tensor.num_bytes)
                if memory is None:
                    raise MemoryError("no pinned memory")
                reading.append((tensor, memory, self._read(file, tensor.offset, memory)))
                while sum(held.nbytes for _, held, _ in reading) > _AHEAD_BYTES:
                    fetch()
            while reading:
                fetch()
            mx.eval([array for array, _ in fetching])
        finally:
            for _, _, reads in reading:
                for read in reads:
                    read.exception()
            os.close(file)
        return arrays

    def _read(self, file: int, offset: int, memory: memoryview) -> list["Future[None]"]:
        def read(start: int, end: int) -> None:
            while start < end:
                count = os.preadv(file, [memory[start:end]], offset + start)
                if not count:
                    raise ValueError("the file is cut off")
                start += count

        starts = range(0, memory.nbytes, _READ_BYTES)
        return [
            self._readers.submit(read, start, min(start + _READ_BYTES, memory.nbytes))
            for start in starts
        ]

    def _fetch(self, tensor: _Tensor, memory: memoryview) -> Array:
        pieces = []
        for start in range(0, tensor.num_bytes, _PIECE_BYTES):
            piece = memory[start : start + _PIECE_BYTES]
            pieces.append(HostPiece(piece, piece.nbytes // UNIT, piece.nbytes // UNIT))
        return self._transfer.copy_in(pieces, (1, 1, UNIT // tensor.dtype.size), tensor.dtype)


def _tensors(file: int) -> list[_Tensor]:
    """What of a file is worth it, in its order."""
    (length,) = struct.unpack("<Q", os.pread(file, 8, 0))
    header = json.loads(os.pread(file, length, 8))
    found = []
    for name, entry in header.items():
        dtype = None if name == "__metadata__" else _DTYPES.get(entry["dtype"])
        if dtype is None:
            continue
        start, end = entry["data_offsets"]
        shape, num_bytes = tuple(entry["shape"]), end - start
        if math.prod(shape) * dtype.size != num_bytes:
            raise ValueError(f"{name} has not the size of its shape")
        if num_bytes >= _MIN_BYTES and num_bytes % UNIT == 0:
            found.append(_Tensor(name, shape, dtype, 8 + length + start, num_bytes))
    return sorted(found, key=lambda tensor: tensor.offset)
