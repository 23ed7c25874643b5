"""Copies KV cache from a CUDA device to pinned host memory on a separate stream.

Copies to pageable memory reach a sixth of the link's speed and block the caller. Here the device
packs a block in stream order with the steps, and copies it while the next steps run.
"""

from collections import deque

import torch

from semantic.adapters.outbound.backends.pinned import PinnedMemory
from semantic.domain.errors import CacheCorruptionError
from semantic.ports.backend import HostBuffer


class ArrivingBytes:
    """Host memory that a running copy writes to; see `PendingBytes`."""

    def __init__(self, memory: memoryview, done: torch.cuda.Event) -> None:
        self._memory = memory
        self._done = done

    @property
    def nbytes(self) -> int:
        """Size of the copy in bytes."""
        return self._memory.nbytes

    @property
    def is_there(self) -> bool:
        """Whether the device no longer uses the memory; also true after a failed copy."""
        try:
            return bool(self._done.query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True  # `wait` reports the error to the reader of these bytes

    def wait(self) -> memoryview:
        """Wait for the copy, releasing the GIL.

        Raises:
            CacheCorruptionError: the copy failed.
        """
        try:
            self._done.synchronize()
        except RuntimeError as error:
            raise CacheCorruptionError(f"state was not copied: {error}") from error
        return self._memory


class DeviceCopies:
    """Copies tensors to the host. For the engine's thread only; any thread may use the results."""

    def __init__(self, memory: PinnedMemory, device: torch.device) -> None:
        self._memory = memory
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The device writes here even if the block was dropped: no reuse until the copy is done.
        self._under_way: deque[ArrivingBytes] = deque()

    def copy_out(self, name: str, tensor: torch.Tensor) -> HostBuffer | None:
        """Start to copy a tensor; None if no pinned memory is free."""
        while self._under_way and self._under_way[0].is_there:
            self._under_way.popleft()
        memory = self._memory.allocate(tensor.numel() * tensor.element_size())
        if memory is None:
            return None
        packed = tensor.clone(memory_format=torch.contiguous_format)
        host = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(packed, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        packed.record_stream(self._stream)
        arriving = ArrivingBytes(memory, done)
        self._under_way.append(arriving)
        number_format = str(tensor.dtype).removeprefix("torch.")
        return HostBuffer(name, tuple(tensor.shape), number_format, arriving)

    def finish(self) -> None:
        """Wait for all copies."""
        self._stream.synchronize()
        self._under_way.clear()
