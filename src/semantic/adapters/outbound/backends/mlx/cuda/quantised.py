"""Multiplies a few rows by quantised weights, on tensor cores of MLX's CUDA build.

The kernel is that of `linear.py`, except that it expands the weights on their way to the tensor
cores. It is bound by the instructions that this takes, and by the few bytes that are on their way
at once: copying weights ahead into shared memory, and reading a chunk ahead into registers, were
both slower.

The integers of a group of weights are exact in 16 bits, so the product with them is exact as well,
and the group's scale and bias are applied to its sum in float32: the result is that of the
dequantised weights in float32. Tensor cores also sum up the group's inputs, which the bias takes.

An integer becomes a 16-bit number by writing it into the mantissa of a power of two. The product is
too large by that power times the sum of inputs, which the bias makes up for.
"""

import functools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.caches import Array
from semantic.adapters.outbound.backends.mlx.cuda import linear
from semantic.adapters.outbound.backends.mlx.cuda.kernels import HEADER, Kernel
from semantic.adapters.outbound.backends.mlx.cuda.linear import MAX_ROWS, Norm
from semantic.adapters.outbound.backends.mlx.runtime import import_library

_STEP = 64  # columns that a warp processes at once
_CHUNK = 4 * _STEP  # columns whose weights it reads at once
_BITS = (4, 8)
_GROUPS = (32, 64, 128)
_MXFP4 = ("mxfp4", 4, 32)

# A warp reads the weights of a chunk of four steps at once. Chunks are whole, so that a row's
# scales of a chunk are one read.
#
# Thread (g, c) of a warp takes rows g and g + 8 of the strip, 16 consecutive columns of each, and
# expands them to pairs of columns in the order that takes the fewest instructions; the input is
# put into the same order. A product covers columns of all four threads c. If two groups share the
# 64 columns, threads exchange halves, so that each product stays within a group.
_SOURCE = (
    f"constexpr int HEIGHT = {linear.HEIGHT}, WARPS = {linear.WARPS};"
    f"constexpr int STEP = {_STEP}, CHUNK = {_CHUNK}, STEPS = CHUNK / STEP;"
    """
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int num_outputs = IS_GATED ? height / 2 : height;
    constexpr int WIDTH = IS_GATED ? HEIGHT / 2 : HEIGHT;
    constexpr int WORDS = BITS / 4;  // of eight columns
    constexpr int PARTS = GROUP < STEP ? STEP / GROUP : 1;  // groups of a step
    constexpr int GROUPS = CHUNK / GROUP, HELD = IS_FLOAT ? GROUPS / 4 : GROUPS / 2;
    constexpr int SECOND = PARTS == 2 ? 32 : 8;  // from a thread's first columns to the others
    constexpr unsigned ONES = IsSame<T, __nv_bfloat16>::value ? 0x3f803f80 : 0x3c003c00;
    const int first = blockIdx.x * WIDTH, last = num_outputs - 1;
    const unsigned num_chunks = size / CHUNK;
    const int place = PARTS == 2 ? c % 2 * 16 + c / 2 * 8 : c * 16;
    const T* x[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++)
        x[t] = given + int64_t(min(t * 8 + g, num_rows - 1)) * size + warp * CHUNK + place;
    const T* factor_place = factors + warp * CHUNK + place;
    const unsigned *packed[2], *scale_words[2], *bias_words[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        // Threads beyond the last row repeat it; their results are not written.
        const int64_t row = IS_GATED ? r * num_outputs + min(first + g, last)
                                     : min(first + r * 8 + g, last);
        const int64_t chunk = row * num_chunks + warp;
        packed[r] = weight + chunk * (CHUNK / 8 * WORDS) + c * 2 * WORDS;
        scale_words[r] = reinterpret_cast<const unsigned*>(scales) + chunk * HELD;
        bias_words[r] = reinterpret_cast<const unsigned*>(BIASES) + chunk * HELD;
    }
    struct Chunk {
        unsigned words[STEPS][2][2 * WORDS], scales[2][HELD], biases[2][HELD];
    };
    const auto read_chunk = [&](Chunk& chunk) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int i = 0; i < STEPS; i++)
                read<2 * WORDS>(chunk.words[i][r], packed[r] + i * (STEP / 8 * WORDS));
            read<HELD>(chunk.scales[r], scale_words[r]);
            if (!IS_FLOAT) read<HELD>(chunk.biases[r], bias_words[r]);
            packed[r] += WARPS * CHUNK / 8 * WORDS;
            scale_words[r] += WARPS * HELD;
            bias_words[r] += WARPS * HELD;
        }
    };

    float sum[TILES][4] = {}, square[TILES][4] = {};
    Chunk chunk;
    for (unsigned n = warp; n < num_chunks; n += WARPS) {
        uint4 d[TILES > 1 ? 1 : STEPS][TILES][2];
        if (TILES == 1)
#pragma unroll
            for (int i = 0; i < STEPS; i++)
#pragma unroll
                for (int j = 0; j < 2; j++)
                    d[TILES > 1 ? 0 : i][0][j] =
                        *reinterpret_cast<const uint4*>(x[0] + i * STEP + j * SECOND);
        read_chunk(chunk);
        __syncwarp();  // all reads are on their way before the first is waited for
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const int here = TILES > 1 ? 0 : i;
            if (TILES > 1)
#pragma unroll
                for (int t = 0; t < TILES; t++)
#pragma unroll
                    for (int j = 0; j < 2; j++)
                        d[here][t][j] =
                            *reinterpret_cast<const uint4*>(x[t] + i * STEP + j * SECOND);
            if (PARTS == 2)
#pragma unroll
                for (int r = 0; r < 2; r++) exchange<WORDS>(chunk.words[i][r], c);
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                const int group = PARTS == 2 ? i * 2 + p : i * STEP / GROUP;
                float scale[2], shift[2], part[TILES][4] = {}, plain[TILES][4] = {};
#pragma unroll
                for (int r = 0; r < 2; r++)
                    factors_of<T, BITS, IS_FLOAT>(
                        chunk.scales[r], chunk.biases[r], group, scale[r], shift[r]);
#pragma unroll
                for (int j = PARTS == 2 ? p : 0; j < (PARTS == 2 ? p + 1 : 2); j++) {
                    unsigned a[4], b[4];
                    expand<T, BITS, IS_FLOAT>(chunk.words[i][0] + j * WORDS, a);
                    expand<T, BITS, IS_FLOAT>(chunk.words[i][1] + j * WORDS, b);
                    uint4 factor;
                    if (IS_NORMED)
                        factor = *reinterpret_cast<const uint4*>(
                            factor_place + i * STEP + j * SECOND);
#pragma unroll
                    for (int t = 0; t < TILES; t++) {
                        uint4 e = d[here][t][j];
                        if (IS_NORMED) {
                            multiply<T>(square[t], e.x, 0, e.y, 0, e.x, e.y);
                            multiply<T>(square[t], e.z, 0, e.w, 0, e.z, e.w);
                            e = product<T>(e, factor);
                        }
                        e = arranged<BITS>(e);
                        multiply<T>(part[t], a[0], b[0], a[1], b[1], e.x, e.y);
                        if (!IS_FLOAT) multiply<T>(plain[t], ONES, ONES, ONES, ONES, e.x, e.y);
                        multiply<T>(part[t], a[2], b[2], a[3], b[3], e.z, e.w);
                        if (!IS_FLOAT) multiply<T>(plain[t], ONES, ONES, ONES, ONES, e.z, e.w);
                    }
                }
#pragma unroll
                for (int t = 0; t < TILES; t++)
#pragma unroll
                    for (int n = 0; n < 4; n++) {
                        sum[t][n] = fmaf(scale[n / 2], part[t][n], sum[t][n]);
                        if (!IS_FLOAT) sum[t][n] = fmaf(shift[n / 2], plain[t][n], sum[t][n]);
                    }
            }
        }
#pragma unroll
        for (int t = 0; t < TILES; t++) x[t] += WARPS * CHUNK;
        factor_place += WARPS * CHUNK;
    }
"""
)

_HELPERS = """
template <int COUNT>
__device__ inline void read(unsigned* words, const unsigned* from) {
    if constexpr (COUNT == 1) {
        words[0] = *from;
    } else if constexpr (COUNT == 2) {
        const uint2 two = __ldcs(reinterpret_cast<const uint2*>(from));
        words[0] = two.x, words[1] = two.y;
    } else {
        const uint4 four = __ldcs(reinterpret_cast<const uint4*>(from));
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    }
}

template <int WORDS>
__device__ inline void exchange(unsigned* words, int c) {
#pragma unroll
    for (int n = 0; n < WORDS; n++) {
        const unsigned low = words[n], high = words[WORDS + n];
        const unsigned other = __shfl_xor_sync(0xffffffff, c < 2 ? high : low, 2);
        words[n] = c < 2 ? low : other;
        words[WORDS + n] = c < 2 ? other : high;
    }
}

template <typename T> __device__ inline float number(unsigned word, bool is_high) {
    if constexpr (IsSame<T, __nv_bfloat16>::value)
        return __uint_as_float(is_high ? word & 0xffff0000 : word << 16);
    const unsigned short half = is_high ? word >> 16 : word;
    return float(*reinterpret_cast<const T*>(&half));
}

// The factors of a group's sums: of products, and of inputs.
template <typename T, int BITS, bool IS_FLOAT>
__device__ inline void factors_of(
    const unsigned* scales, const unsigned* biases, int group, float& scale, float& shift) {
    if constexpr (IS_FLOAT) {
        const unsigned bits = scales[group / 4] >> group % 4 * 8 & 0xff;
        scale = __uint_as_float(bits ? bits << 23 : 0x00400000);
        shift = 0;
    } else {
        constexpr float OFFSET =
            IsSame<T, __half>::value ? -1024.0f : BITS == 4 ? -128.0f : 128.0f;
        scale = number<T>(scales[group / 2], group % 2);
        shift = fmaf(OFFSET, scale, number<T>(biases[group / 2], group % 2));
    }
}

// Eight columns to four pairs. Of four bits: columns 0 and 4, 1 and 5, 2 and 6, 3 and 7;
// of eight bits: 0 and 2, 1 and 3, 4 and 6, 5 and 7.
template <typename T, int BITS, bool IS_FLOAT>
__device__ inline void expand(const unsigned* words, unsigned* pairs) {
    using Pair = typename PairOf<T>::type;
    constexpr bool IS_HALF = IsSame<T, __half>::value;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        if constexpr (IS_FLOAT) {  // its exponent and mantissa in those of T, which is too small
            const unsigned bits = words[0] >> 4 * n;
            unsigned small = (bits & 0x00070007) << (IS_HALF ? 9 : 6) | (bits & 0x00080008) << 12;
            unsigned factor = IS_HALF ? 0x74007400 : 0x7e807e80;  // 2^14, 2^126
            const Pair pair =
                __hmul2(*reinterpret_cast<Pair*>(&small), *reinterpret_cast<Pair*>(&factor));
            pairs[n] = *reinterpret_cast<const unsigned*>(&pair);
        } else if constexpr (BITS == 4) {  // 128 + integer, or 1024 + integer
            pairs[n] = words[0] >> 4 * n & 0x000f000f | (IS_HALF ? 0x64006400 : 0x43004300);
        } else if constexpr (IS_HALF) {
            pairs[n] = words[n / 2] >> 8 * (n % 2) & 0x00ff00ff | 0x64006400;
        } else {  // integer - 128, by its lower seven bits less 256, or less 128 if it has the top
            const unsigned bits = words[n / 2] >> 8 * (n % 2);
            unsigned low = bits & 0x007f007f | 0x43004300;
            unsigned less = ~bits & 0x00800080 | 0x43004300;
            const Pair pair =
                __hsub2(*reinterpret_cast<Pair*>(&low), *reinterpret_cast<Pair*>(&less));
            pairs[n] = *reinterpret_cast<const unsigned*>(&pair);
        }
    }
}

template <int BITS>
__device__ inline uint4 arranged(uint4 e) {
    const unsigned other = BITS == 4 ? e.z : e.y, one = BITS == 4 ? e.y : e.z;
    return make_uint4(
        __byte_perm(e.x, other, 0x5410), __byte_perm(e.x, other, 0x7632),
        __byte_perm(one, e.w, 0x5410), __byte_perm(one, e.w, 0x7632));
}
"""


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """Quantised weights ``[outputs, columns]``, as MLX packs them."""

    weight: Array
    scales: Array
    biases: Array | None
    group_size: int
    bits: int
    mode: str

    @classmethod
    def of(cls, module: Any) -> "QuantisedMatrix":
        """Return the weights of a quantised layer of MLX."""
        return cls(
            module.weight,
            module.scales,
            module.get("biases"),
            module.group_size,
            module.bits,
            module.mode,
        )

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.weight.shape[0]), int(self.weight.shape[1]) * 32 // self.bits

    @property
    def is_float(self) -> bool:
        return (self.mode, self.bits, self.group_size) == _MXFP4


def can_multiply(given: Array, matrix: QuantisedMatrix) -> bool:
    """Whether the kernel supports these arrays: one token each for a few rows."""
    return (
        given.ndim == 3
        and given.shape[1] == 1
        and given.shape[0] <= MAX_ROWS
        and has_kernel(matrix, given.dtype)
    )


def has_kernel(matrix: QuantisedMatrix, dtype: Any) -> bool:
    """Whether the kernel supports weights of this format, for inputs of a number format."""
    is_affine = (
        matrix.mode == "affine"
        and matrix.bits in _BITS
        and matrix.group_size in _GROUPS
        and matrix.biases is not None
        and matrix.scales.dtype == matrix.biases.dtype == dtype
    )
    return (
        dtype in (mx.bfloat16, mx.float16)
        and (is_affine or matrix.is_float)
        and matrix.shape[1] % _CHUNK == 0
    )


def multiply(
    given: Array,
    matrix: QuantisedMatrix,
    *,
    norm: Norm | None = None,
    added: Array | None = None,
    is_gated: bool = False,
) -> Array:
    """Multiply ``[rows, 1, columns]`` by the transpose of a matrix; see `linear.multiply`."""
    num_rows = given.shape[0]
    if norm is not None and not linear.can_norm(given):
        given, norm = mx.fast.rms_norm(given, norm.factors, norm.eps), None
    if num_rows > MAX_ROWS:
        return _multiply_many(given, matrix, added, is_gated=is_gated)
    num_outputs = matrix.shape[0] // 2 if is_gated else matrix.shape[0]
    num_strips = -(-num_outputs // (linear.HEIGHT // 2 if is_gated else linear.HEIGHT))
    is_bias = added is not None and added.ndim == 1
    eps = None if norm is None else norm.eps
    optional = [matrix.biases, norm and norm.factors, added]
    template = {
        "T": given.dtype,
        "TILES": linear.num_tiles(num_rows),
        "BITS": matrix.bits,
        "GROUP": matrix.group_size,
    }
    (out,) = _kernel(matrix.is_float, eps, added is not None, is_bias, is_gated)(
        inputs=[given, matrix.weight, matrix.scales, *(x for x in optional if x is not None)],
        template=template,
        grid=(num_strips * 32 * linear.WARPS, 1, 1),
        threadgroup=(32 * linear.WARPS, 1, 1),
        outputs=[((num_rows, 1, num_outputs), given.dtype)],
        numbers=(num_rows, *matrix.shape),
    )
    return out


def _multiply_many(
    given: Array, matrix: QuantisedMatrix, added: Array | None, *, is_gated: bool
) -> Array:
    out = mx.quantized_matmul(
        given[:, 0],
        matrix.weight,
        matrix.scales,
        matrix.biases,
        group_size=matrix.group_size,
        bits=matrix.bits,
        mode=matrix.mode,
    )
    if is_gated:
        out = linear.swiglu(*mx.split(out, 2, axis=-1))
    return (out if added is None else out + added.reshape(-1, out.shape[-1]))[:, None]


@functools.cache
def _kernel(
    is_float: bool, eps: float | None, is_added: bool, is_bias: bool, is_gated: bool
) -> Kernel:
    kinds, names, lines = linear.kernel_flags(eps, is_added, is_bias, is_gated)
    lines += f"constexpr bool IS_FLOAT = {int(is_float)};"
    source = _SOURCE.replace("BIASES", "scales" if is_float else "biases")
    return Kernel(
        "_".join(["multiply_quantised", *(["mxfp4"] if is_float else []), *kinds]),
        ["given", "weight", "scales", *([] if is_float else ["biases"]), *names],
        ["out"],
        lines + source + linear.FINISH,
        header=HEADER + linear.PRODUCT + _HELPERS,
        numbers=("num_rows", "height", "size"),
        bounds=(32 * linear.WARPS, 2),
    )


# -- a model's layers ----------------------------------------------------------------------------


def use_custom_linears(model: Any) -> None:
    """Use the custom kernel for few rows in quantised layers, including the head."""
    kinds = _custom_kinds()
    for module in model.modules():
        if type(module) in kinds:
            module.__class__ = kinds[type(module)]


@functools.cache
def _custom_kinds() -> dict[type, type]:
    nn = import_library("mlx.nn")

    class FewRowsQuantisedLinear(nn.QuantizedLinear):  # type: ignore[misc, name-defined]
        def __call__(self, x: Array) -> Array:
            matrix = QuantisedMatrix.of(self)
            if not can_multiply(x, matrix):
                return super().__call__(x)
            return multiply(x, matrix, added=self.get("bias"))

    class FewRowsQuantisedEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc, name-defined]
        def as_linear(self, x: Array) -> Array:
            matrix = QuantisedMatrix.of(self)
            return multiply(x, matrix) if can_multiply(x, matrix) else super().as_linear(x)

    return {
        nn.QuantizedLinear: FewRowsQuantisedLinear,
        nn.QuantizedEmbedding: FewRowsQuantisedEmbedding,
    }
