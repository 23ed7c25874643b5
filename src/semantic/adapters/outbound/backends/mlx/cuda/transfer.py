"""Copies KV cache between the device and pinned host memory, by kernels on a separate stream.

MLX's CUDA arrays are device memory: reading one on the host moves it whole, at a twentieth of the
link's speed, and blocks the reading thread. These kernels write to and read from host memory
directly, on few of the device's processors, while the model's steps run. A copy is one operation
for any number of layers, and only the reader of its bytes waits for it.
"""

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from semantic.adapters.outbound.backends.mlx.caches import Array
from semantic.adapters.outbound.backends.mlx.cuda.kernels import Kernel
from semantic.adapters.outbound.backends.pinned import ArrivingBytes, PinnedMemory
from semantic.domain.errors import CacheCorruptionError

UNIT = 16  # bytes that a GPU thread copies at once
_BLOCKS = 32
_THREADS = 512
_MAX_BEGUN = 2  # pending flushes; by the next one the oldest is complete

# Copies spans of tokens of one set of arrays, by layer and head; a head's tokens are consecutive
# unless a ring wraps.
_OUT = """
    const int heads = where[0], room = where[1], width = where[2], num_spans = where[3];
    for (int n = blockIdx.x; n < num_spans * COUNT * heads; n += gridDim.x) {
        const int64_t* span = where + 4 + n / (COUNT * heads) * 5;
        const int r = n % (COUNT * heads), first = span[3], ring = span[4];
        const int size = int(span[2]) * width, until_wrap = (ring - first) * width;
        const uint4* from = sources[r / heads]
            + (span[1] * heads + r % heads) * room * width + int64_t(first) * width;
        uint4* to = reinterpret_cast<uint4*>(span[0]) + int64_t(r) * size;
#pragma unroll 4
        for (int i = threadIdx.x; i < size; i += blockDim.x)
            to[i] = from[i < until_wrap ? i : i - ring * width];
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) done[0] = 1;
"""

# Copies consecutive pieces of tokens, each with all layers and heads, to their positions.
_IN = """
    const int heads = where[0], room = where[1], width = where[2], num_pieces = where[3];
    for (int n = blockIdx.x; n < COUNT * heads * num_pieces; n += gridDim.x) {
        const int64_t* piece = where + 4 + n % num_pieces * 4;
        const int r = n / num_pieces, size = piece[3] * width;
        const uint4* from = reinterpret_cast<const uint4*>(piece[0]) + r * piece[1] * width;
        uint4* to = targets[r / heads] + (int64_t(r % heads) * room + piece[2]) * width;
        int i = threadIdx.x;
        for (; i + 3 * blockDim.x < size; i += 4 * blockDim.x) {
            const uint4 a = from[i], b = from[i + blockDim.x];
            const uint4 c = from[i + 2 * blockDim.x], d = from[i + 3 * blockDim.x];
            to[i] = a;
            to[i + blockDim.x] = b;
            to[i + 2 * blockDim.x] = c;
            to[i + 3 * blockDim.x] = d;
        }
        for (; i < size; i += blockDim.x) to[i] = from[i];
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) done[0] = 1;
"""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens of one row of arrays ``[rows, heads, room, dim]``.

    Attributes:
        ring: Positions are taken modulo this number; 0 if the arrays are not a ring.
    """

    row: int
    start: int
    num_tokens: int
    ring: int = 0


class Copying:
    """Copies to the host that start together. Any thread may wait for them.

    Attributes:
        spans: What to copy of each set of arrays, as the kernel's arguments.
        after: Array that is evaluated before the copies start.
        memory: Destination. The device writes to it even if the copy is no longer needed, so it
            must not be reused until the copy is complete.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        """`begin` starts the copies, on the engine's thread."""
        self.spans: dict[tuple[int, ...], tuple[Sequence[Array], list[int]]] = {}
        self.after: Array | None = None
        self.memory: list[memoryview] = []
        self._begin = begin
        self._thread = threading.get_ident()
        self._are_begun = threading.Event()
        self._lock = threading.Lock()  # MLX supports only one thread waiting for an array
        self._done: list[Array] = []
        self._failure = ""

    def note_begun(self, done: Sequence[Array], failure: str = "") -> None:
        """Record that the copies have started, with arrays that signal completion, or failed."""
        self.spans.clear()
        self.after = None
        self._done, self._failure = list(done), failure
        self._are_begun.set()

    def wait(self) -> None:
        """Wait for the copies, without blocking other threads.

        Raises:
            CacheCorruptionError: they failed.
        """
        if threading.get_ident() == self._thread and not self._are_begun.is_set():
            self._begin()
        self._are_begun.wait()
        with self._lock:
            try:
                while self._done:
                    memoryview(self._done[-1])
                    self._done.pop()
            except RuntimeError as error:
                self._failure = str(error)
            if self._failure:
                raise CacheCorruptionError(f"KV cache was not copied: {self._failure}")
            self.memory.clear()

    def settle(self) -> None:
        """Wait until they are complete or failed; readers of the bytes get the error."""
        with contextlib.suppress(CacheCorruptionError):
            self.wait()


@dataclass(frozen=True, slots=True)
class HostPiece:
    """Tokens of all layers and heads in host memory.

    Attributes:
        data: ``[layers, heads, tokens, dim]``
        num_held: Number of tokens in `data`.
        num_tokens: Number of tokens to copy, from the first.
    """

    data: memoryview
    num_held: int
    num_tokens: int


class Transfer:
    """Copies by kernels. For the engine's thread only; any thread may use `copy_out`'s results."""

    def __init__(self, memory: PinnedMemory) -> None:
        self._memory = memory
        self._stream = mx.new_stream(mx.gpu)
        self._asked = Copying(self.flush)
        self._begun: deque[Copying] = deque()

    def can_copy(self, shape: Sequence[int], dtype: Any) -> bool:
        """Whether heads of this shape can be copied: they must consist of whole units."""
        return bool(shape[-1] * dtype.size % UNIT == 0)

    def copy_out(
        self, arrays: Sequence[Array], span: TokenSpan, after: Array
    ) -> ArrivingBytes | None:
        """Request a copy of tokens of some layers; the next `flush` starts it. None without memory.

        Args:
            arrays: One per layer, all of one shape; they are copied layer by layer.
            after: Evaluated before the copy starts, because the custom kernels write without MLX's
                knowledge.
        """
        _, heads, room, dim = arrays[0].shape
        width = dim * arrays[0].dtype.size // UNIT
        memory = self._memory.allocate(len(arrays) * heads * span.num_tokens * width * UNIT)
        if memory is None:
            return None
        ring = span.ring or room
        key = tuple(id(array) for array in arrays)
        _, spans = self._asked.spans.setdefault(key, (arrays, [heads, room, width, 0]))
        spans[3] += 1
        spans += [_address(memory), span.row, span.num_tokens, span.start % ring, ring]
        self._asked.after = after
        self._asked.memory.append(memory)
        return ArrivingBytes(memory, self._asked.wait)

    @property
    def asked(self) -> Copying:
        """The copies that the next `flush` starts."""
        return self._asked

    def flush(self) -> None:
        """Start the requested copies in few calls, because MLX limits how many are pending."""
        asked = self._asked
        if not asked.spans:
            return
        self._asked = Copying(self.flush)
        self._begun.append(asked)
        try:
            done = [self._copy(*given, asked.after) for given in asked.spans.values()]
            mx.async_eval(done)
        except BaseException as error:
            asked.note_begun([], str(error) or type(error).__name__)
            raise
        asked.note_begun(done)
        while len(self._begun) > _MAX_BEGUN:
            self._begun.popleft().settle()

    def _copy(self, arrays: Sequence[Array], spans: Sequence[int], after: Array | None) -> Array:
        (done,) = _out_kernel(len(arrays))(
            inputs=[*arrays, mx.array(spans, mx.int64), after],
            template={"T": arrays[0].dtype},
            grid=(_BLOCKS * _THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            outputs=[((1,), mx.uint8)],
            stream=self._stream,
        )
        return done

    def copy_in(self, pieces: Sequence[HostPiece], arrays: Sequence[Array], start: int) -> Array:
        """Start to copy consecutive tokens into the first row of arrays, which must not be shared.

        Computations after this call see the tokens. The pieces must stay unchanged until the copy
        is complete, which is when the returned array is evaluated. `arrays` has one per layer,
        contiguous ``[rows, heads, room, dim]``.
        """
        _, heads, room, dim = arrays[0].shape
        numbers = [heads, room, dim * arrays[0].dtype.size // UNIT, len(pieces)]
        for piece in pieces:
            numbers += [_address(piece.data), piece.num_held, start, piece.num_tokens]
            start += piece.num_tokens
        (done,) = _in_kernel(len(arrays))(
            inputs=[*arrays, mx.array(numbers, mx.int64)],
            template={"T": arrays[0].dtype},
            grid=(2 * _BLOCKS * _THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            outputs=[((1,), mx.uint8)],
            stream=self._stream,
        )
        copied = done + 1  # on the default stream, so that its next steps wait for the copy
        mx.async_eval(copied)
        return copied

    def pinned(self, data: memoryview) -> memoryview | None:
        """Return the bytes in pinned memory, copied if necessary; None if there is no room."""
        address = _address(data)
        if address % UNIT == 0 and self._memory.holds(address, data.nbytes):
            return data
        memory = self._memory.allocate(data.nbytes)
        if memory is not None:
            np.copyto(np.frombuffer(memory, np.uint8), np.frombuffer(data, np.uint8))
        return memory

    def prepare(self, counts: Sequence[int], dtype: Any) -> None:
        """Compile the kernels for these numbers of layers."""
        for count in counts:
            array = mx.zeros((1, 1, 1, UNIT), dtype)
            copy = self.copy_out([array] * count, TokenSpan(0, 0, 1), array)
            if copy is not None:
                mx.eval(self.copy_in([HostPiece(copy.wait(), 1, 1)], [array] * count, 0))

    def finish(self) -> None:
        self.flush()
        mx.synchronize(self._stream)
        self._begun.clear()


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data) if data.nbytes else 0


@functools.cache
def _out_kernel(count: int) -> Kernel:
    names = [f"layer{n}" for n in range(count)]
    places = ", ".join(f"reinterpret_cast<const uint4*>({name})" for name in names)
    constants = f"constexpr int COUNT = {count}; const uint4* sources[COUNT] = {{{places}}};"
    return Kernel(f"copy_out_{count}", [*names, "where", "after"], ["done"], constants + _OUT)


@functools.cache
def _in_kernel(count: int) -> Kernel:
    names = [f"layer{n}" for n in range(count)]
    # MLX does not support kernels that write to their inputs; these arrays are not shared.
    places = ", ".join(f"reinterpret_cast<uint4*>(const_cast<T*>({name}))" for name in names)
    constants = f"constexpr int COUNT = {count}; uint4* const targets[COUNT] = {{{places}}};"
    inputs = [*names, "where"]
    return Kernel(f"copy_in_{count}", inputs, ["done"], constants + _IN, is_copying=False)
