"""Fast linear layers for MLX's CUDA build: a custom kernel for few rows, and joined layers.

MLX has its own kernel for one row. For two and more it calls cuBLAS, which is as fast on the device
but costs the host half as much again, and a decode step is bound by the host. Here a block of
threads computes a strip of the matrix for all rows at once, in tiles of eight: its warps divide the
strip's columns and add their sums at the end. The kernel can also apply the operations just before
and after the multiplication, which would be separate operations otherwise. It applies a norm for
one tile of rows only: with more tiles the norm fills the registers, and 32 layers take 6.9 instead
of 4.5 ms for sixteen rows, and 7.4 instead of 5.2 ms for thirty-two.

Small matrices do not use the full memory bandwidth, so layers with the same input are joined into
one. The model's code does not change: it still calls each layer, and the first call computes for
the others.
"""

import copy
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.caches import Array
from semantic.adapters.outbound.backends.mlx.cuda.kernels import HEADER, Kernel
from semantic.adapters.outbound.backends.mlx.runtime import import_library

MAX_ROWS = 32  # four tiles: with more, reading the input takes longer than reading the weights
MAX_STEP_ROWS = 256  # most rows of the custom layers; above MAX_ROWS they use cuBLAS

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers with the same input
HEIGHT = 16  # of a strip; the height of a tile
_TILE_ROWS = 8
_TILES = (1, 2, MAX_ROWS // _TILE_ROWS)  # a separate kernel is compiled for each
WARPS = 8
_STEP = 32  # columns that a warp processes at once

# Thread (g, c) of a warp holds rows g and g + 8 of the strip, and row g of the input. The order of
# columns does not matter as long as both agree, so each thread reads 16 consecutive bytes.
# Constants are part of the source, because MLX writes out a kernel's arguments at every call.
#
# The root mean square is the same for all columns, so rows are divided by it at the end. The sums
# of squares are on the diagonal of the rows' product with themselves, computed by tensor cores.
# In gated layers, the strip's first eight rows are gates and the others the gated values.
_SOURCE = (
    f"constexpr int TALL = 1, HEIGHT = {HEIGHT}, WARPS = {WARPS}, STEP = {_STEP};"
    """
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int num_outputs = IS_GATED ? height / 2 : height;
    constexpr int WIDTH = IS_GATED ? HEIGHT / 2 : HEIGHT;
    // With more, fewer blocks of threads run at once.
    constexpr int AHEAD = IS_NORMED || TILES > 1 ? 2 : 4;
    const int first = blockIdx.x * WIDTH, last = num_outputs - 1;
    // Threads beyond the last row repeat it; their results are not written.
    const int upper = min(first + g, last);
    const int lower = IS_GATED ? num_outputs + upper : min(first + 8 + g, last);
    const T* x[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++)
        x[t] = given + int64_t(min(t * 8 + g, num_rows - 1)) * size + c * 8;
    const T* top = weight + int64_t(upper) * size + c * 8;
    const T* low = weight + int64_t(lower) * size + c * 8;

    float sum[TALL][TILES][4] = {}, square[TILES][4] = {};
    for (int start = warp * AHEAD * STEP; start < size; start += WARPS * AHEAD * STEP) {
        uint4 a[AHEAD], b[AHEAD], d[TILES][AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int k = start + i * STEP, column = min(k, size - STEP);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                d[t][i] = *reinterpret_cast<const uint4*>(x[t] + column);
                if (k >= size) d[t][i] = make_uint4(0, 0, 0, 0);
            }
            a[i] = __ldcs(reinterpret_cast<const uint4*>(top + column));
            b[i] = __ldcs(reinterpret_cast<const uint4*>(low + column));
        }
        __syncwarp();  // all reads are on their way before the first is waited for
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            uint4 factor;
            if (IS_NORMED) {
                const int column = min(start + i * STEP, size - STEP);
                factor = *reinterpret_cast<const uint4*>(factors + column + c * 8);
            }
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                uint4 e = d[t][i];
                if (IS_NORMED) {
                    multiply<T>(square[t], e.x, 0, e.y, 0, e.x, e.y);
                    multiply<T>(square[t], e.z, 0, e.w, 0, e.z, e.w);
                    e = product<T>(e, factor);
                }
                multiply<T>(sum[0][t], a[i].x, b[i].x, a[i].y, b[i].y, e.x, e.y);
                multiply<T>(sum[0][t], a[i].z, b[i].z, a[i].w, b[i].w, e.z, e.w);
            }
        }
    }
    __shared__ float sums[WARPS][TILES * 8][HEIGHT + 4], squares[WARPS][TILES * 8];
"""
)

# Adds up the warps' sums, and applies the norm, the gate and the addition.
FINISH = """
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int m = 0; m < TALL; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums[warp][t * 8 + 2 * c + i % 2][m * 16 + i / 2 * 8 + g] = sum[m][t][i];
        if (IS_NORMED && c == g / 2) squares[warp][t * 8 + g] = g % 2 ? square[t][1] : square[t][0];
    }
    __syncthreads();
    for (int n = threadIdx.x; n < num_rows * WIDTH; n += WARPS * 32) {
        const int row = n / WIDTH, place = n % WIDTH;
        const int held = IS_GATED ? place / 8 * 16 + place % 8 : place;
        float all = 0, passed = 0, norm = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            all += sums[i][row][held];
            if (IS_GATED) passed += sums[i][row][held + 8];
            if (IS_NORMED) norm += squares[i][row];
        }
        if (IS_NORMED) {
            norm = rsqrtf(norm / size + EPS);
            all *= norm;
            passed *= norm;
        }
        if (IS_GATED) all = all / (1 + expf(-all)) * passed;
        const int64_t at = int64_t(row) * num_outputs + first + place;
        if (first + place > last) continue;
        if (IS_ADDED) all += float(added[IS_BIAS ? first + place : at]);
        out[at] = T(all);
    }
"""

PRODUCT = """
template <typename T> struct PairOf { using type = __half2; };
template <> struct PairOf<__nv_bfloat16> { using type = __nv_bfloat162; };

template <typename T>
__device__ inline uint4 product(uint4 one, uint4 two) {
    using Pair = typename PairOf<T>::type;
    const Pair *a = reinterpret_cast<Pair*>(&one), *b = reinterpret_cast<Pair*>(&two);
    uint4 both;
    Pair* out = reinterpret_cast<Pair*>(&both);
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = __hmul2(a[i], b[i]);
    return both;
}
"""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm of the rows."""

    factors: Array
    eps: float


def can_multiply(given: Array, weight: Array) -> bool:
    """Whether the kernel supports these arrays and is faster: one token each for a few rows."""
    return (
        given.ndim == 3
        and given.shape[1] == 1
        and 1 < given.shape[0] <= MAX_ROWS
        and weight.dtype in (mx.bfloat16, mx.float16)
        and given.dtype == weight.dtype
        and weight.shape[1] % _STEP == 0
    )


def multiply(
    given: Array,
    weight: Array,
    *,
    norm: Norm | None = None,
    added: Array | None = None,
    is_gated: bool = False,
) -> Array:
    """Multiply ``[rows, 1, columns]`` by the transpose of ``[outputs, columns]``.

    Args:
        added: Added to the result: a bias, or rows of the result's shape.
        is_gated: The weight consists of SwiGLU's gate and, below it, the gated values; the result
            has half as many outputs.
    """
    num_rows = given.shape[0]
    if norm is not None and not can_norm(given):
        given, norm = mx.fast.rms_norm(given, norm.factors, norm.eps), None
    if num_rows > MAX_ROWS:
        return _multiply_many(given, weight, added, is_gated=is_gated)
    num_outputs = weight.shape[0] // 2 if is_gated else weight.shape[0]
    num_strips = -(-num_outputs // (HEIGHT // 2 if is_gated else HEIGHT))
    is_bias = added is not None and added.ndim == 1
    eps = None if norm is None else norm.eps
    optional = [norm and norm.factors, added]
    (out,) = _kernel(eps, added is not None, is_bias, is_gated)(
        inputs=[given, weight, *(array for array in optional if array is not None)],
        template={"T": weight.dtype, "TILES": num_tiles(num_rows)},
        grid=(num_strips * 32 * WARPS, 1, 1),
        threadgroup=(32 * WARPS, 1, 1),
        outputs=[((num_rows, 1, num_outputs), weight.dtype)],
        numbers=(num_rows, *weight.shape),
    )
    return out


def can_norm(given: Array) -> bool:
    """Whether the kernel can apply a norm: float16 could overflow before the division."""
    return bool(given.shape[0] <= _TILE_ROWS and given.dtype != mx.float16)


def num_tiles(num_rows: int) -> int:
    """Return the tiles of the smallest kernel for so many rows."""
    return next(tiles for tiles in _TILES if num_rows <= tiles * _TILE_ROWS)


def _multiply_many(given: Array, weight: Array, added: Array | None, *, is_gated: bool) -> Array:
    rows = given[:, 0]
    if added is not None and not is_gated:
        return mx.addmm(added if added.ndim == 1 else added[:, 0], rows, weight.T)[:, None]
    out = rows @ weight.T
    if is_gated:
        out = swiglu(*mx.split(out, 2, axis=-1))
    return (out if added is None else out + added.reshape(-1, out.shape[-1]))[:, None]


def _gated(gate: Array, passed: Array) -> Array:
    return gate * mx.sigmoid(gate) * passed


swiglu = mx.compile(_gated)


@functools.cache
def _kernel(eps: float | None, is_added: bool, is_bias: bool, is_gated: bool) -> Kernel:
    kinds, names, lines = kernel_flags(eps, is_added, is_bias, is_gated)
    return Kernel(
        "_".join(["multiply_few_rows", *kinds]),
        ["given", "weight", *names],
        ["out"],
        lines + _SOURCE + FINISH,
        header=HEADER + PRODUCT,
        numbers=("num_rows", "height", "size"),
    )


def kernel_flags(
    eps: float | None, is_added: bool, is_bias: bool, is_gated: bool
) -> tuple[list[str], list[str], str]:
    """Return what a kernel does in words, its optional inputs, and constants for its source."""
    is_normed = eps is not None
    optional = {"factors": is_normed, "added": is_added}
    flags = {"NORMED": is_normed, "ADDED": is_added, "BIAS": is_bias, "GATED": is_gated}
    lines = [f"constexpr float EPS = {eps or 0:e}f;"]
    lines += [f"constexpr bool IS_{name} = {int(is_so)};" for name, is_so in flags.items()]
    lines += [f"const T* {name} = given;" for name, is_there in optional.items() if not is_there]
    kinds = [name.lower() for name, is_so in flags.items() if is_so]
    return kinds, [name for name, is_there in optional.items() if is_there], "".join(lines)


# -- a model's layers ----------------------------------------------------------------------------


class JoinedLinears:
    """The concatenated weights of several layers."""

    def __init__(self, whole: Any, sizes: Sequence[int]) -> None:
        self.whole = whole
        self.ends = list(itertools.accumulate(sizes))
        self._input: Array | None = None
        self._outputs: dict[int, Array] = {}

    def output(self, index: int, given: Array) -> Array:
        """Return a layer's output; computes all layers at once if they share the input."""
        if self._input is not given or index not in self._outputs:
            pieces = mx.split(self.whole(given), self.ends[:-1], axis=-1)
            self._input, self._outputs = given, dict(enumerate(pieces))
        output = self._outputs.pop(index)
        if not self._outputs:
            self._input = None  # keep no arrays beyond the last call
        return output


class LinearPart:
    """Replaces one of the joined layers."""

    def __init__(self, joined: JoinedLinears, index: int) -> None:
        self._joined = joined
        self._index = index

    def __call__(self, given: Array) -> Array:
        return self._joined.output(self._index, given)

    @property
    def whole(self) -> Any:
        return self._joined.whole

    @property
    def weight(self) -> Array:
        start, end = [0, *self._joined.ends][self._index : self._index + 2]
        return self._joined.whole.weight[start:end]


def use_custom_linears(model: Any) -> None:
    """Use the custom kernel for few rows in unquantised layers, including the head."""
    kinds = _custom_kinds()
    for module in model.modules():
        if type(module) in kinds:
            module.__class__ = kinds[type(module)]


def mend_experts(model: Any) -> None:
    """Multiply unquantised experts one row after another.

    If rows are declared as sorted by expert, MLX 0.32.4 uses another kernel that sometimes returns
    the results of other rows.
    """
    base, mended = _expert_kinds()
    for module in model.modules():
        if type(module) is base:
            module.__class__ = mended


def join_linears(model: Any) -> int:
    """Join layers that share an input; returns the number of joined sets.

    One set at a time, so that memory does not double. Quantised layers are joined if their formats
    are equal.
    """
    # Only the parent modules, so that this list keeps no weights alive.
    parents = [
        (module, names)
        for _, module in model.named_modules()
        for names in SIBLINGS
        if all(name in module for name in names) and _can_join(module, names)
    ]
    for module, names in parents:
        _join(module, names)
    return len(parents)


def _can_join(module: Any, names: Sequence[str]) -> bool:
    layers = [module[name] for name in names]
    kinds = {(type(layer), *_format(layer)) for layer in layers}
    return len(kinds) == 1 and type(layers[0]) in (_linear(), _quantised_linear())


def _format(layer: Any) -> tuple[Any, ...]:
    """Return what layers that are joined have in common: columns, number formats, packing."""
    if not isinstance(layer, (_linear(), _quantised_linear())):
        return ()
    arrays = {name: (array.shape[1:], array.dtype) for name, array in layer.parameters().items()}
    packing = (getattr(layer, name, None) for name in ("bits", "group_size", "mode"))
    return *sorted(arrays.items()), *packing


def _join(module: Any, names: Sequence[str]) -> None:
    layers = [module[name] for name in names]
    whole = copy.copy(layers[0])
    for name in layers[0].parameters():
        whole[name] = mx.concatenate([layer[name] for layer in layers])
    mx.eval(whole.parameters())
    joined = JoinedLinears(whole, [layer.weight.shape[0] for layer in layers])
    for index, name in enumerate(names):
        setattr(module, name, LinearPart(joined, index))
    module["_".join(names)] = whole  # so that it belongs to the model's parameters


@functools.cache
def _expert_kinds() -> tuple[type, type]:
    layers = import_library("mlx_lm.models.switch_layers")

    class UnsortedExperts(layers.SwitchLinear):  # type: ignore[misc, name-defined]
        def __call__(self, x: Array, indices: Array, sorted_indices: bool = False) -> Array:  # noqa: ARG002 - the library's own signature
            return super().__call__(x, indices, sorted_indices=False)

    return layers.SwitchLinear, UnsortedExperts


@functools.cache
def _linear() -> Any:
    return import_library("mlx.nn").Linear


@functools.cache
def _quantised_linear() -> Any:
    return import_library("mlx.nn").QuantizedLinear


@functools.cache
def _custom_kinds() -> dict[type, type]:
    nn = import_library("mlx.nn")

    class FewRowsLinear(nn.Linear):  # type: ignore[misc, name-defined]
        def __call__(self, x: Array) -> Array:
            if not can_multiply(x, self.weight):
                return super().__call__(x)
            out = multiply(x, self.weight)
            return out + self.bias if "bias" in self else out

    class FewRowsEmbedding(nn.Embedding):  # type: ignore[misc, name-defined]
        def as_linear(self, x: Array) -> Array:
            if not can_multiply(x, self.weight):
                return super().as_linear(x)
            return multiply(x, self.weight)

    return {nn.Linear: FewRowsLinear, nn.Embedding: FewRowsEmbedding}
