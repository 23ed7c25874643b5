"""Attention state between a CUDA device and pinned host memory, on a stream of its own.

Pageable memory would travel at a sixth of the link's speed, and whoever asks would wait for it.
Here a block is packed on the device, in the order of the steps, and copied beside the next ones.
"""

from collections import deque

import torch

from semantic.adapters.outbound.backends.pinned import PinnedMemory
from semantic.domain.errors import CacheCorruptionError
from semantic.ports.backend import HostBuffer


class ArrivingBytes:
    """Memory that a copy goes to; see `PendingBytes`."""

    def __init__(self, memory: memoryview, done: torch.cuda.Event) -> None:
        self._memory = memory
        self._done = done

    @property
    def nbytes(self) -> int:
        """How many bytes there will be."""
        return self._memory.nbytes

    @property
    def is_there(self) -> bool:
        """Whether the device is done with the memory."""
        return bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> memoryview:
        """Wait for the copy; this lets other threads run.

        Raises:
            CacheCorruptionError: it failed.
        """
        try:
            self._done.synchronize()
        except RuntimeError as error:
            raise CacheCorruptionError(f"state was not copied: {error}") from error
        return self._memory


class DeviceCopies:
    """Copies to the host. On the engine's thread only, but for what they return."""

    def __init__(self, memory: PinnedMemory, device: torch.device) -> None:
        self._memory = memory
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The device writes there even if nobody wants it any more: it must not be handed out again.
        self._under_way: deque[ArrivingBytes] = deque()

    def copy_out(self, name: str, tensor: torch.Tensor) -> HostBuffer | None:
        """Begin to copy a tensor; None if there is no memory for it."""
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
        """Wait for all of them."""
        self._stream.synchronize()
        self._under_way.clear()
