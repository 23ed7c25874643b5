"""Copies KV cache from a CUDA device to pinned host memory on a separate stream.

Copies to pageable memory reach a sixth of the link's speed and block the caller. Here the device
packs a block in stream order with the steps, and copies it while the next steps run.
"""

import functools
from collections import deque

import torch

from semantic.adapters.outbound.backends.pinned import ArrivingBytes, PinnedMemory
from semantic.domain.errors import CacheCorruptionError
from semantic.ports.backend import HostBuffer


def is_over(done: torch.cuda.Event) -> bool:
    """Whether the device no longer uses the memory of a copy; also true after a failed copy."""
    try:
        return bool(done.query())  # type: ignore[no-untyped-call]
    except RuntimeError:
        return True  # `wait_for` reports the error to the reader of these bytes


def wait_for(done: torch.cuda.Event) -> None:
    """Wait for a copy, releasing the GIL.

    Raises:
        CacheCorruptionError: the copy failed.
    """
    try:
        done.synchronize()
    except RuntimeError as error:
        raise CacheCorruptionError(f"KV cache was not copied: {error}") from error


class DeviceCopies:
    """Copies tensors to the host. For the engine's thread only; any thread may use the results."""

    def __init__(self, memory: PinnedMemory, device: torch.device) -> None:
        self._memory = memory
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The device writes here even if the block was dropped: no reuse until the copy is done.
        self._under_way: deque[tuple[torch.cuda.Event, memoryview]] = deque()

    def copy_out(self, name: str, tensor: torch.Tensor) -> HostBuffer | None:
        """Start to copy a tensor; None if no pinned memory is free."""
        while self._under_way and is_over(self._under_way[0][0]):
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
        self._under_way.append((done, memory))
        arriving = ArrivingBytes(memory, functools.partial(wait_for, done))
        number_format = str(tensor.dtype).removeprefix("torch.")
        return HostBuffer(name, tuple(tensor.shape), number_format, arriving)

    def finish(self) -> None:
        self._stream.synchronize()
        self._under_way.clear()
