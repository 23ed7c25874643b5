"""Copies weights from safetensors files to a CUDA device at the speed of the files.

MLX reads them into memory that moves to the device page by page at first access. Here several
threads read them into pinned memory, from which the device copies them at the same time.
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
from semantic.adapters.outbound.backends.mlx.cuda.transfer import UNIT, HostPiece, Transfer
from semantic.adapters.outbound.backends.pinned import PinnedMemory

_DTYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32, "U32": mx.uint32}
_MIN_BYTES = 2**20  # MLX loads smaller tensors
_READ_BYTES = 2**24
_PIECE_BYTES = 2**19  # bytes that one block of threads copies
_AHEAD_BYTES = 2**30  # limit of bytes being read, and also of bytes being copied
_NUM_READERS = 16


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    dtype: Any
    offset: int
    num_bytes: int


class WeightReader:
    """Reads files of weights through pinned memory."""

    def __init__(self, memory: PinnedMemory, transfer: Transfer) -> None:
        self._memory = memory
        self._transfer = transfer
        self._readers = ThreadPoolExecutor(_NUM_READERS, "semantic-weights")

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Replace `mx.load` by this reader within the context."""
        original = mx.load

        def load(file: Any, *args: Any, **options: Any) -> Any:
            given = original(file, *args, **options)
            if args or options or not str(file).endswith(".safetensors"):
                return given
            try:
                return {**given, **self._load(str(file))}
            except (OSError, ValueError, KeyError):
                return given

        mx.load = load
        try:
            yield
        finally:
            mx.load = original
            self._readers.shutdown()
            self._transfer.finish()
            self._memory.pin_rest()

    def _load(self, path: str) -> dict[str, Array]:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        reads = _Reads(self._transfer)
        try:
            for tensor in _tensors(file):
                pieces = self._allocate(tensor.num_bytes, reads)
                if pieces:
                    offset = tensor.offset
                    futures = []
                    for piece in pieces:
                        futures.append(self._readers.submit(_read, file, offset, piece))
                        offset += piece.nbytes
                    reads.add(tensor, pieces, futures)
            return reads.finish()
        finally:
            reads.stop()
            os.close(file)

    def _allocate(self, num_bytes: int, reads: "_Reads") -> list[memoryview]:
        pieces: list[memoryview] = []
        while num_bytes:
            piece = self._memory.allocate(min(num_bytes, _READ_BYTES))
            if piece is not None:
                pieces.append(piece)
                num_bytes -= piece.nbytes
            elif not reads.make_room():
                return []
        return pieces


class _Reads:
    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._arrays: dict[str, Array] = {}
        self._reading: deque[tuple[_Tensor, list[memoryview], list[Future[None]]]] = deque()
        self._fetching: deque[tuple[Array, list[memoryview]]] = deque()
        self._num_bytes = 0

    def add(self, tensor: _Tensor, pieces: list[memoryview], futures: list["Future[None]"]) -> None:
        """Add a tensor that is being read; copies earlier ones to the device."""
        self._reading.append((tensor, pieces, futures))
        self._num_bytes += tensor.num_bytes
        while self._num_bytes > _AHEAD_BYTES:
            self._fetch()

    def make_room(self) -> bool:
        """Wait for the oldest tensor; False if there is none."""
        if self._fetching:
            mx.eval(self._fetching.popleft()[0])
        elif self._reading:
            self._fetch()
        else:
            return False
        return True

    def finish(self) -> dict[str, Array]:
        while self.make_room():
            pass
        return self._arrays

    def stop(self) -> None:
        """Wait for running reads, after a failure."""
        for _, _, futures in self._reading:
            for future in futures:
                future.exception()

    def _fetch(self) -> None:
        tensor, pieces, futures = self._reading[0]
        for future in futures:
            future.result()
        self._reading.popleft()
        self._num_bytes -= tensor.num_bytes
        parts = [
            piece[start : start + _PIECE_BYTES]
            for piece in pieces
            for start in range(0, piece.nbytes, _PIECE_BYTES)
        ]
        given = [HostPiece(p, p.nbytes // UNIT, p.nbytes // UNIT) for p in parts]
        size = tensor.dtype.size
        array = mx.zeros((1, 1, tensor.num_bytes // UNIT, UNIT // size), tensor.dtype)
        copied = self._transfer.copy_in(given, [array], 0)
        self._arrays[tensor.name] = array.reshape(tensor.shape)
        self._fetching.append((copied, pieces))
        while sum(p.nbytes for _, held in self._fetching for p in held) > _AHEAD_BYTES:
            mx.eval(self._fetching.popleft()[0])


def _read(file: int, offset: int, memory: memoryview) -> None:
    start = 0
    while start < memory.nbytes:
        count = os.preadv(file, [memory[start:]], offset + start)
        if not count:
            raise ValueError("the file is truncated")
        start += count


def _tensors(file: int) -> list[_Tensor]:
    """Return the tensors that are worth reading here, in file order."""
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
            raise ValueError(f"the size of {name} does not match its shape")
        if num_bytes >= _MIN_BYTES and num_bytes % UNIT == 0:
            found.append(_Tensor(name, shape, dtype, 8 + length + start, num_bytes))
    return sorted(found, key=lambda tensor: tensor.offset)
