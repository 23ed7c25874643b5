"""Samples several tokens in a row in one CUDA kernel, without the host: for draft models.

A pass of a small model takes the device half a millisecond, and the host two: each of a hundred
operations costs it time. This kernel is one operation for all passes of a draft. Its blocks of
threads stay on the device from the first layer to the last token, and meet at a barrier between two
phases, five in a layer. So all of them must run at the same time: there is one per multiprocessor.
If a barrier times out, the kernel ends, samples -1, and is not used again.

The model's code is not used: the kernel computes what `tuning.run_layer` does, and the library's
head. At load, the logits of the library must agree with its tokens.
"""

import ctypes
import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.caches import Array
from semantic.adapters.outbound.backends.mlx.cuda import device as cuda
from semantic.adapters.outbound.backends.mlx.cuda import rope as cuda_rope
from semantic.adapters.outbound.backends.mlx.cuda import tuning
from semantic.adapters.outbound.backends.mlx.cuda.kernels import HEADER, Kernel
from semantic.adapters.outbound.backends.mlx.cuda.linear import PRODUCT
from semantic.adapters.outbound.backends.mlx.loop import source_parts, source_passes
from semantic.adapters.outbound.backends.mlx.loop.source_parts import MAX_ROWS, MAX_STEPS

MAX_LENGTH = 4096  # tokens of a sequence
_TILE_ROWS = 8
_OTHER_BYTES = 45_056  # of shared memory that the source declares, at most
_DIMS = (64, 128)
_FIELDS = source_parts.FIELDS
_STEP = 256  # columns of a matrix are a multiple of this
_MULTIPROCESSORS, _SHARED_BYTES = 16, 97  # the driver's numbers of these attributes
_COPIES_SINCE = (9, 0)  # compute capability with bulk copies into shared memory


@dataclass(frozen=True, slots=True)
class LoopRow:
    """A token of the first pass: its sequence's number, its position, and its id."""

    number: int
    position: int
    token: int


@dataclass(frozen=True, slots=True)
class LoopDraw:
    """How to sample a token: a temperature, 0 for the likeliest, and a random number below 1."""

    temperature: float = 0.0
    point: float = 0.0


@dataclass(frozen=True, slots=True)
class LoopEnd:
    """A token, and a draft after it that a running step verifies.

    Attributes:
        draft: On the device.
        sampled: The tokens that the step samples after the token and after each draft token.
        draws: How to sample at all positions that the loop may reach, from the second one after
            the token on.
    """

    position: int
    token: int
    draft: Array
    sampled: Array
    draws: Sequence[LoopDraw]


@dataclass(frozen=True, slots=True)
class LoopSizes:
    """What the kernel is compiled for."""

    layers: int
    hidden: int
    inner: int
    vocab: int
    num_heads: int
    num_keys: int
    dim: int
    scale: float
    eps: float
    head_eps: float | None
    has_bias: bool
    dtype: Any = mx.bfloat16

    @property
    def all_heads(self) -> int:
        return (self.num_heads + 2 * self.num_keys) * self.dim


@dataclass(eq=False)
class LoopModel:
    """A model's sizes and weights, in the order of the kernel's table.

    Attributes:
        weights: By layer, with None for what the model has not; last the norm, the head and the
            embedding.
    """

    sizes: LoopSizes
    weights: list[list[Array | None]]
    angles: Array


def read_model(model: Any) -> LoopModel | None:
    """Return what the kernel needs of a model; None if it does not support it."""
    body, head = getattr(model, "model", None), getattr(model, "lm_head", None)
    layers = [layer for layer in model.modules() if hasattr(layer, "custom_weights")]
    if not layers or body is None or len(layers) != len(body.layers) or _is_quantised(model):
        return None
    embedding = body.embed_tokens.weight
    output = embedding if head is None else head.weight
    ordered = [layer.custom_weights for layer in body.layers]
    sizes = {_sizes(weights, len(ordered), output.shape[0]) for weights in ordered}
    ropes = {id(weights.rope) for weights in ordered}
    is_biased = head is not None and "bias" in head
    if len(sizes) > 1 or len(ropes) > 1 or is_biased or body.norm.eps != ordered[0].first_norm.eps:
        return None
    (found,) = sizes
    if ordered[0].heads.dtype != embedding.dtype:
        return None
    if not can_run(found) or embedding.dtype != output.dtype:
        return None
    table: list[list[Array | None]] = [_fields(weights) for weights in ordered]
    last: list[Array | None] = [body.norm.weight, output, embedding]
    table.append(last + [None] * (_FIELDS - len(last)))
    rope = ordered[0].rope
    angles = cuda_rope.angles_at(rope, mx.arange(MAX_LENGTH), found.dim).astype(mx.float32)
    return LoopModel(found, table, angles)


def can_run(sizes: LoopSizes) -> bool:
    """Whether the kernel supports a model of these sizes."""
    s, columns = sizes, (sizes.hidden, sizes.num_heads * sizes.dim, sizes.inner)
    return (
        s.dtype == mx.bfloat16
        and s.dim in _DIMS
        and s.num_heads // s.num_keys <= source_parts.WARPS
        and not any(number % _STEP for number in columns)
    )


def _is_quantised(model: Any) -> bool:
    return any("scales" in module for module in model.modules())


def _sizes(w: Any, num_layers: int, vocab: int) -> LoopSizes:
    return LoopSizes(
        layers=num_layers,
        hidden=w.heads.shape[1],
        inner=w.outer.shape[1],
        vocab=vocab,
        num_heads=w.num_heads,
        num_keys=w.num_key_heads,
        dim=w.dim,
        scale=w.scale,
        eps=w.first_norm.eps,
        head_eps=None if w.head_norms is None else w.head_norms.eps,
        has_bias=w.heads_bias is not None,
        dtype=w.heads.dtype,
    )


def _fields(w: "tuning.LayerWeights") -> list[Array | None]:
    norms = w.head_norms
    return [
        w.first_norm.factors,
        w.heads,
        w.heads_bias,
        None if norms is None else norms.query_factors,
        None if norms is None else norms.key_factors,
        w.attended,
        w.second_norm.factors,
        w.inner,
        w.outer,
    ]


class LoopKernel:
    """The kernel for one model, and the memory that it works in."""

    def __init__(self, model: LoopModel, num_blocks: int, num_tiles: int) -> None:
        self.sizes = model.sizes
        self._num_blocks, self._num_tiles = num_blocks, num_tiles
        self._angles = model.angles
        # The table holds addresses: these arrays must not be copied, moved or freed.
        self._held = [
            [None if array is None else mx.contiguous(array) for array in row]
            for row in model.weights
        ]
        mx.eval([array for row in self._held for array in row if array is not None])
        self._weights = mx.stack([_addresses(row) for row in self._held])
        s = self.sizes
        per_row = 2 * s.hidden + s.all_heads + s.num_heads * s.dim + s.inner
        chunks = MAX_ROWS * source_parts.MAX_CHUNKS
        numbers = chunks * s.num_heads * (s.dim + 2) + MAX_ROWS * (
            source_parts.MAX_BLOCKS + s.vocab
        )
        self._buffers = mx.zeros(MAX_ROWS * per_row, mx.bfloat16)
        self._floats = mx.zeros(numbers, mx.float32)
        self._state = mx.zeros(4 + MAX_ROWS * (s.num_keys + MAX_STEPS), mx.uint32)
        self._winners = mx.zeros(MAX_STEPS * MAX_ROWS, mx.int64)
        self._latest = mx.zeros(1, mx.int32)
        mx.eval(self._weights, self._angles, self._buffers, self._floats)
        mx.eval(self._state, self._winners, self._latest)

    def run(
        self, rows: Sequence[LoopRow], draws: Sequence[Sequence[LoopDraw]], table: Array
    ) -> Array:
        """Sample tokens after the rows, lazily.

        Returns the tokens by step and sequence, -1 if the kernel failed, and the microseconds that
        it took. Writes to the sequences' arrays in place: the caller starts the evaluation before
        anything else that uses them.

        Args:
            rows: Of all sequences, ascending by sequence and position.
            draws: By step and sequence.
            table: Addresses of keys and values, by layer and sequence.
        """
        count, num_seqs = len(draws), len(draws[0])
        ends = {row.number: (place, row.position) for place, row in enumerate(rows)}
        given = [n for row in rows for n in (row.number, row.position, row.token, 0)]
        given += [n for number in range(num_seqs) for n in ends[number]]
        wanted = [draw for step in draws for draw in step]
        given += _bits(wanted)
        # One array, since each takes the host time.
        sizes = len(rows), num_seqs, count
        return self._launch(mx.array(given, mx.int32), sizes, table, _is_sampled(wanted))

    def run_after(self, ends: Sequence[LoopEnd], count: int, table: Array) -> Array:
        """Sample `count` tokens of each sequence after the accepted part of its draft, as `run`.

        The last accepted token and the one that follows it are computed, since the sequence may
        lack both.
        """
        sizes = 2 * len(ends), len(ends), count
        is_sampled = any(_is_sampled(end.draws) for end in ends)
        return self._launch(_given_after(ends, count), sizes, table, is_sampled)

    def _launch(
        self, given: Array, sizes: tuple[int, int, int], table: Array, is_sampled: bool
    ) -> Array:
        """Launch the kernel for numbers of rows, sequences and steps."""
        num_rows, num_seqs, count = sizes
        (tokens,) = _kernel(self.sizes, self._num_tiles)(
            inputs=[
                self._weights,
                table,
                self._angles,
                given,
                self._latest,  # so that this launch follows the one before
                self._buffers,
                self._floats,
                self._state,
                self._winners,
            ],
            template={
                "T": mx.bfloat16,
                "TILES": 1 if num_rows <= _TILE_ROWS else MAX_ROWS // _TILE_ROWS,
            },
            grid=(self._num_blocks * source_parts.THREADS, 1, 1),
            threadgroup=(source_parts.THREADS, 1, 1),
            outputs=[((count * num_seqs + 1,), mx.int32)],
            numbers=(num_rows, num_seqs, count, table.shape[1], int(is_sampled)),
        )
        self._latest = tokens
        return tokens


@functools.cache
def _kernel(sizes: LoopSizes, num_tiles: int) -> Kernel:
    s = sizes
    whole = {
        "LAYERS": s.layers,
        "HIDDEN": s.hidden,
        "INNER": s.inner,
        "VOCAB": s.vocab,
        "NUM_HEADS": s.num_heads,
        "NUM_KEYS": s.num_keys,
        "DIM": s.dim,
        "HAS_BIAS": int(s.has_bias),
        "NUM_TILES": num_tiles,
        "HAS_NORMS": int(s.head_eps is not None),
    }
    real = {"SCALE": s.scale, "EPS": s.eps, "HEAD_EPS": s.head_eps or 0.0}
    lines = [f"constexpr int {name} = {value};" for name, value in whole.items()]
    lines += [f"constexpr float {name} = {value:.9e}f;" for name, value in real.items()]
    parts = [HEADER, PRODUCT, source_parts.ASSEMBLY, source_parts.HELPERS, source_passes.HEADS]
    names = ["weights", "table", "angles", "given", "latest"]
    return Kernel(
        "sample_in_a_row",
        [*names, "buffers", "floats", "state", "winners"],
        ["tokens"],
        "".join(lines) + source_passes.SOURCE,
        header="".join(parts),
        numbers=("num_first", "num_seqs", "count", "num_groups", "is_sampled"),
        is_copying=False,
        bounds=(source_parts.THREADS, 1),
        shared_bytes=num_tiles * source_parts.TILE_BYTES,
    )


def _given_after(ends: Sequence[LoopEnd], count: int) -> Array:
    """Return what `run` gives the kernel: rows, the last row of each sequence, and draws."""
    rows, lasts, draws = [], [], []
    for number, end in enumerate(ends):
        is_right = (end.sampled[: end.draft.shape[0]] == end.draft).astype(mx.int32)
        num_accepted = mx.sum(mx.cumprod(is_right))
        places = num_accepted + mx.array([0, 1], mx.int32)
        tokens = mx.concatenate([mx.array([end.token], mx.int32), end.sampled])[places]
        positions = places + end.position
        same = mx.array([number, number], mx.int32)
        rows.append(mx.stack([same, positions, tokens, mx.zeros_like(same)], axis=1).reshape(-1))
        lasts += [mx.array([2 * number + 1], mx.int32), positions[1:]]
        wanted = mx.array(_bits(end.draws), mx.int32).reshape(-1, 2)
        draws.append(wanted[num_accepted + mx.arange(count)])
    return mx.concatenate([*rows, *lasts, mx.stack(draws, axis=1).reshape(-1)])


def _is_sampled(draws: Sequence[LoopDraw]) -> bool:
    return any(draw.temperature > 0 for draw in draws)


def _bits(draws: Sequence[LoopDraw]) -> tuple[int, ...]:
    """Return temperatures and random numbers, in 32 bits, as integers."""
    numbers = [n for draw in draws for n in (draw.temperature, draw.point)]
    return struct.unpack(f"{len(numbers)}i", struct.pack(f"{len(numbers)}f", *numbers))


def _addresses(row: Sequence[Array | None]) -> Array:
    """Return the addresses of arrays, 0 for None."""
    given = [array for array in row if array is not None]
    (found,) = _addresses_kernel(len(given))(
        inputs=given,
        template={"T": mx.bfloat16},
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        outputs=[((len(given),), mx.int64)],
    )
    values = iter(found.tolist())
    return mx.array([0 if array is None else next(values) for array in row], mx.int64)


@functools.cache
def _addresses_kernel(count: int) -> Kernel:
    names = [f"array{n}" for n in range(count)]
    source = f"const void* arrays[] = {{{', '.join(names)}}};"
    source += f"if (threadIdx.x < {count}) "
    source += "found[threadIdx.x] = reinterpret_cast<int64_t>(arrays[threadIdx.x]);"
    return Kernel(f"weights_{count}", names, ["found"], source, is_copying=False)


@functools.cache
def _attribute(number: int) -> int:
    """Return an attribute of the device; 0 if unknown."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    value = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetAttribute(ctypes.byref(value), number, 0):
        return 0
    return value.value


def make_loop(model: Any) -> LoopKernel | None:
    """Return the loop of a model that the kernel supports, on a device that can run it."""
    if not cuda.is_available() or cuda.capability() < _COPIES_SINCE:
        return None
    num_blocks = min(_attribute(_MULTIPROCESSORS), source_parts.MAX_BLOCKS)
    num_tiles = (_attribute(_SHARED_BYTES) - _OTHER_BYTES) // source_parts.TILE_BYTES
    found = read_model(model) if num_blocks and num_tiles > 1 else None
    return None if found is None else LoopKernel(found, num_blocks, num_tiles)
