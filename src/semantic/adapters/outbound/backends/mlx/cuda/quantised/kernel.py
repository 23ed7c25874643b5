"""The kernel that multiplies a few rows by quantised weights, on tensor cores.

It is that of `linear.py`, except that it expands the weights on their way to the tensor cores.
Expanding takes most of its instructions, so a warp expands two tiles of rows for one reading of the
input where there are rows enough.

The integers of a group of weights are exact in 16 bits, so the product with them is exact as well,
and the group's scale and bias are applied to its sum in float32: the result is that of the
dequantised weights in float32. The bias takes the sum of the group's inputs.

An integer becomes a 16-bit number by writing it into the mantissa of a power of two. The product is
too large by that power times the sum of inputs, which the bias makes up for.
"""

import functools
from dataclasses import dataclass, replace

from semantic.adapters.outbound.backends.mlx.cuda import linear
from semantic.adapters.outbound.backends.mlx.cuda.kernels import HEADER, Kernel

_STEP = 64  # columns that a warp processes at once
CHUNK = 4 * _STEP  # columns whose weights it copies at once
_SHARED_BYTES = 48 * 1024  # of a block, on every GPU
_FEW = 4096  # with at most so many rows of weights, a strip is one tile, and more warps share it

# Every warp copies whole chunks of its part of the columns into a ring in shared memory of its own,
# so that it waits for other warps only at the end. A row's piece of a chunk is one or two lines of
# the device's caches. Its pieces of 16 bytes are stored in another order for each row, so that
# threads read different banks.
#
# Thread (g, c) of a warp takes rows g and g + 8 of each tile, 16 columns of each in a step, and
# expands them to pairs of columns in the order that takes the fewest instructions; the input is
# put into the same order. A product covers columns of all four threads c, within a group.
#
# A single row is copied into the ring as well: reads of device memory return in order, so a read of
# the input would wait for all weights that were asked for before. The warp then prepares it once
# for all its rows of weights. Several rows of input would not fit.
_SOURCE = (
    f"constexpr int STEP = {_STEP}, CHUNK = {CHUNK}, STEPS = CHUNK / STEP;"
    """
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int num_outputs = IS_GATED ? height / 2 : height;
    constexpr int HEIGHT = 16 * TALL, WIDTH = IS_GATED ? HEIGHT / 2 : HEIGHT;
    constexpr int WORDS = BITS / 4;  // of eight columns
    constexpr int ROW = 8 * WORDS;  // of a chunk, in 16 bytes
    constexpr int ROWS = 32 / ROW, COPIES = HEIGHT / ROWS;  // by all threads at once; of a thread
    constexpr int PARTS = GROUP < STEP ? STEP / GROUP : 1;  // groups of a step
    constexpr int GROUPS = CHUNK / GROUP, HELD = IS_FLOAT ? GROUPS / 4 : GROUPS / 2;
    constexpr int FACTORS = IS_FLOAT ? 1 : 2;
    constexpr int SECOND = PARTS == 2 ? 32 : 8;  // from a thread's first columns to the others
    constexpr int HERE = PARTS == 2 ? 8 : 16;  // columns of a thread side by side
    constexpr unsigned ONES = IsSame<T, __nv_bfloat16>::value ? 0x3f803f80 : 0x3c003c00;
    constexpr int SUMMED = GROUP < STEP ? GROUP : STEP;  // columns of a product with one scale
    constexpr int SPAN = 2 * WORDS / PARTS;  // that four threads read at once, in 16 bytes
    constexpr int INPUTS = IS_SINGLE ? CHUNK / 8 : 1, NORMS = IS_SINGLE && IS_NORMED ? INPUTS : 1;
    struct Stage {
        uint4 words[HEIGHT][ROW];
        unsigned factors[FACTORS][HEIGHT][HELD];
        uint4 input[INPUTS], norm[NORMS];
        float totals[CHUNK / SUMMED];
    };
    struct Sums {
        float sums[WARPS][TILES * 8][HEIGHT + 4], squares[WARPS][TILES * 8];
    };
    constexpr int RING = WARPS * STAGES * sizeof(Stage);
    __shared__ uint4 memory[(RING > sizeof(Sums) ? RING : sizeof(Sums)) / 16];
    Stage* const ring = reinterpret_cast<Stage*>(memory) + warp * STAGES;

    const int first = blockIdx.x * WIDTH, last = num_outputs - 1;
    const unsigned num_chunks = size / CHUNK;
    const auto row_of = [&](int place) {
        // Places beyond the last row repeat it; their results are not written.
        if (!IS_GATED) return unsigned(min(first + place, last));
        const int row = min(first + place / 16 * 8 + place % 8, last);
        return unsigned(place % 16 < 8 ? row : row + num_outputs);
    };
    unsigned from[COPIES];
#pragma unroll
    for (int k = 0; k < COPIES; k++)
        from[k] = row_of(k * ROWS + lane / ROW) * num_chunks * ROW + lane % ROW;
    const unsigned factors_from = row_of(lane % HEIGHT) * num_chunks;
    const auto fetch = [&](unsigned n, Stage& stage) {
#pragma unroll
        for (int k = 0; k < COPIES; k++)
            copy_ahead<16>(
                &stage.words[k * ROWS + lane / ROW]
                            [lane % ROW ^ (k * ROWS + lane / ROW) % (8 / SPAN) * SPAN],
                reinterpret_cast<const uint4*>(weight) + from[k] + n * ROW);
        const unsigned place = (factors_from + n) * HELD;
        const unsigned* scale_words = reinterpret_cast<const unsigned*>(scales) + place;
        const unsigned* bias_words = reinterpret_cast<const unsigned*>(BIASES) + place;
        if (TALL == 2) {
            copy_ahead<4 * HELD>(stage.factors[0][lane % HEIGHT], scale_words);
            if (!IS_FLOAT)
                copy_ahead<4 * HELD>(stage.factors[FACTORS - 1][lane % HEIGHT], bias_words);
        } else if (!IS_FLOAT || lane < 16) {
            copy_ahead<4 * HELD>(
                stage.factors[lane / 16 % FACTORS][lane % HEIGHT],
                lane < 16 ? scale_words : bias_words);
        }
        if (IS_SINGLE) {
            copy_ahead<16>(&stage.input[lane], given + n * CHUNK + lane * 8);
            if (IS_NORMED)
                copy_ahead<16>(&stage.norm[lane % NORMS], factors + n * CHUNK + lane * 8);
        }
    };

    unsigned n = warp * num_chunks / WARPS;
    const unsigned end = (warp + 1) * num_chunks / WARPS;
    const int start = n * CHUNK + c * HERE;
    const T* x[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++)
        x[t] = given + int64_t(min(t * 8 + g, num_rows - 1)) * size + start;
    const T* factor_place = factors + start;
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        if (n + s < end) fetch(n + s, ring[s]);
        end_copies();
    }
    // The compiler would write a constant into a register before every use.
    const unsigned mask = 0x000f000f ^ unsigned(num_rows) >> 31;

    constexpr bool IS_EAGER = TILES == 1 && !IS_SINGLE;  // with more tiles, registers are few
    const int turn = g % (8 / SPAN) * SPAN * 4;
    float sum[TALL][TILES][4] = {}, square[TILES][4] = {};
    for (int s = 0; n < end; n++, s = s + 1 == STAGES ? 0 : s + 1) {
        uint4 d[IS_EAGER ? STEPS : 1][TILES][2];
        if (IS_EAGER)
#pragma unroll
            for (int i = 0; i < STEPS; i++)
#pragma unroll
                for (int j = 0; j < 2; j++)
                    d[IS_EAGER ? i : 0][0][j] =
                        *reinterpret_cast<const uint4*>(x[0] + i * STEP + j * SECOND);
        Stage& stage = ring[s];
        await_copies<STAGES - 1>();
        __syncwarp();
        if (IS_SINGLE) {
            uint4 e = stage.input[lane];
            if (IS_NORMED) {
                square[0][0] = add_up<T, true>(e, square[0][0]);
                e = product<T>(e, stage.norm[lane % NORMS]);
            }
            float total = add_up<T, false>(e, 0.0f);
#pragma unroll
            for (int k = SUMMED / 16; k > 0; k /= 2) total += __shfl_xor_sync(0xffffffff, total, k);
            stage.input[lane % INPUTS] = arranged<BITS>(e);
            if (lane % (SUMMED / 8) == 0) stage.totals[lane / (SUMMED / 8)] = total;
            __syncwarp();
        }
        unsigned held[TALL][FACTORS][2][HELD];
#pragma unroll
        for (int m = 0; m < TALL * FACTORS * 2; m++)
            read<HELD>(
                held[m / FACTORS / 2][m / 2 % FACTORS][m % 2],
                stage.factors[m / 2 % FACTORS][m / FACTORS / 2 * 16 + m % 2 * 8 + g]);
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const int here = IS_EAGER ? i : 0;
            if (!IS_EAGER && !IS_SINGLE)
#pragma unroll
                for (int t = 0; t < TILES; t++)
#pragma unroll
                    for (int j = 0; j < 2; j++)
                        d[here][t][j] =
                            *reinterpret_cast<const uint4*>(x[t] + i * STEP + j * SECOND);
            unsigned words[TALL][2][2 * WORDS];
#pragma unroll
            for (int m = 0; m < TALL * 2; m++) {
                const unsigned* row = reinterpret_cast<const unsigned*>(
                    stage.words[m / 2 * 16 + m % 2 * 8 + g]);
                row += c * HERE / 8 * WORDS;
                constexpr int STRIDE = STEP / 8 * WORDS / PARTS, COUNT = 2 * WORDS / PARTS;
#pragma unroll
                for (int p = 0; p < PARTS; p++)
                    read<COUNT>(
                        words[m / 2][m % 2] + p * WORDS, row + ((i * PARTS + p) * STRIDE ^ turn));
            }
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                const int group = PARTS == 2 ? i * 2 + p : i * STEP / GROUP;
                float part[TALL][TILES][4] = {}, plain[TILES][4] = {};
                constexpr bool HAS_PLAIN = !IS_FLOAT && !IS_SINGLE;
#pragma unroll
                for (int j = PARTS == 2 ? p : 0; j < (PARTS == 2 ? p + 1 : 2); j++) {
                    unsigned a[TALL][4], b[TALL][4];
#pragma unroll
                    for (int m = 0; m < TALL; m++) {
                        expand<T, BITS, IS_FLOAT>(words[m][0] + j * WORDS, a[m], mask);
                        expand<T, BITS, IS_FLOAT>(words[m][1] + j * WORDS, b[m], mask);
                    }
                    uint4 factor;
                    if (IS_NORMED && !IS_SINGLE)
                        factor = *reinterpret_cast<const uint4*>(
                            factor_place + i * STEP + j * SECOND);
#pragma unroll
                    for (int t = 0; t < TILES; t++) {
                        uint4 e = IS_SINGLE
                                      ? stage.input[(i * STEP + c * HERE + j * SECOND) / 8 % INPUTS]
                                      : d[here][t][j];
                        if (IS_NORMED && !IS_SINGLE) {
                            multiply<T>(square[t], e.x, 0, e.y, 0, e.x, e.y);
                            multiply<T>(square[t], e.z, 0, e.w, 0, e.z, e.w);
                            e = product<T>(e, factor);
                        }
                        if (!IS_SINGLE) e = arranged<BITS>(e);
#pragma unroll
                        for (int m = 0; m < TALL; m++)
                            multiply<T>(part[m][t], a[m][0], b[m][0], a[m][1], b[m][1], e.x, e.y);
                        if (HAS_PLAIN) multiply<T>(plain[t], ONES, ONES, ONES, ONES, e.x, e.y);
#pragma unroll
                        for (int m = 0; m < TALL; m++)
                            multiply<T>(part[m][t], a[m][2], b[m][2], a[m][3], b[m][3], e.z, e.w);
                        if (HAS_PLAIN) multiply<T>(plain[t], ONES, ONES, ONES, ONES, e.z, e.w);
                    }
                }
#pragma unroll
                for (int m = 0; m < TALL; m++) {
                    float scale[2], shift[2];
#pragma unroll
                    for (int r = 0; r < 2; r++)
                        factors_of<T, BITS, IS_FLOAT>(
                            held[m][0][r], held[m][FACTORS - 1][r], group, scale[r], shift[r]);
#pragma unroll
                    for (int t = 0; t < TILES; t++)
#pragma unroll
                        for (int k = 0; k < 4; k++) {
                            float& all = sum[m][t][k];
                            all = fmaf(scale[k / 2], part[m][t][k], all);
                            if (!IS_FLOAT)
                                all = fmaf(
                                    shift[k / 2],
                                    IS_SINGLE ? stage.totals[i * PARTS + p] : plain[t][k], all);
                        }
                }
            }
        }
        __syncwarp();  // all threads have read the stage
        if (n + STAGES < end) fetch(n + STAGES, stage);
        end_copies();
#pragma unroll
        for (int t = 0; t < TILES; t++) x[t] += CHUNK;
        factor_place += CHUNK;
    }
    if (IS_SINGLE && IS_NORMED)
#pragma unroll
        for (int k = 16; k > 0; k /= 2)
            square[0][0] += __shfl_xor_sync(0xffffffff, square[0][0], k);
    await_copies<0>();
    __syncthreads();
    auto& sums = reinterpret_cast<Sums*>(memory)->sums;
    auto& squares = reinterpret_cast<Sums*>(memory)->squares;
"""
)

_HELPERS = """
template <int COUNT>
__device__ inline void copy_ahead(void* to, const void* from) {
    const unsigned place = __cvta_generic_to_shared(to);
    if constexpr (COUNT == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                     ::"r"(place), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                     ::"r"(place), "l"(from), "n"(COUNT) : "memory");
}

__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ inline void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

template <int COUNT>
__device__ inline void read(unsigned* words, const unsigned* from) {
    if constexpr (COUNT == 1) {
        words[0] = *from;
    } else if constexpr (COUNT == 2) {
        const uint2 two = *reinterpret_cast<const uint2*>(from);
        words[0] = two.x, words[1] = two.y;
    } else {
        const uint4 four = *reinterpret_cast<const uint4*>(from);
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    }
}

template <typename T> __device__ inline float number(unsigned word, bool is_high) {
    if constexpr (IsSame<T, __nv_bfloat16>::value)
        return __uint_as_float(is_high ? word & 0xffff0000 : word << 16);
    const unsigned short half = is_high ? word >> 16 : word;
    return float(*reinterpret_cast<const T*>(&half));
}

// Eight numbers, or their squares.
template <typename T, bool IS_SQUARE>
__device__ inline float add_up(uint4 e, float all) {
    const unsigned words[4] = {e.x, e.y, e.z, e.w};
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float one = number<T>(words[n / 2], n % 2);
        all = IS_SQUARE ? fmaf(one, one, all) : all + one;
    }
    return all;
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
__device__ inline void expand(const unsigned* words, unsigned* pairs, unsigned mask) {
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
            pairs[n] = words[0] >> 4 * n & mask | (IS_HALF ? 0x64006400 : 0x43004300);
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
class Format:
    """How weights are packed.

    Attributes:
        is_float: Whether they are floating-point numbers (MXFP4), which have no biases.
    """

    bits: int
    group_size: int
    is_float: bool

    def __str__(self) -> str:
        return "MXFP4" if self.is_float else f"{self.bits} bits in groups of {self.group_size}"


@dataclass(frozen=True, slots=True)
class Form:
    """How the work is divided.

    Attributes:
        tall: Tiles of 16 rows in a strip, which a block of threads multiplies.
        stages: Chunks in the ring of a warp.
        blocks: How many must fit on a multiprocessor.
        is_single: Whether there is one row of input.
    """

    tall: int
    warps: int
    blocks: int
    stages: int = 1
    is_single: bool = False

    @property
    def height(self) -> int:
        return self.tall * linear.HEIGHT


def form_of(packing: Format, height: int, num_rows: int, *, is_normed: bool) -> Form:
    """Return the fastest form on an H200 whose ring fits into the shared memory of any GPU."""
    is_single, is_few = num_rows == 1, height <= _FEW
    if linear.num_tiles(num_rows) > 1:
        form = Form(2, 8, 1) if is_few and packing.bits == 4 else Form(2, 4, 3)
    elif is_few:
        form = Form(1, 4, 4) if is_single and is_normed else Form(1, 8, 2)
    else:
        form = Form(2, 4, 4)
    factor_bytes = 1 if packing.is_float else 4  # of a group, scale and bias together
    row_bytes = CHUNK * packing.bits // 8 + CHUNK // packing.group_size * factor_bytes
    num_bytes = form.height * row_bytes + 2 * CHUNK * (1 + is_normed) * is_single + 64
    is_long = 2 * form.warps * num_bytes <= _SHARED_BYTES and (is_single or form.warps == 4)
    return replace(form, stages=2 if is_long else 1, is_single=is_single)


@functools.cache
def make_kernel(
    form: Form,
    eps: float | None,
    *,
    is_float: bool,
    is_added: bool,
    is_bias: bool,
    is_gated: bool,
) -> Kernel:
    """Return a kernel that also applies a norm, a gate and an addition."""
    kinds, names, lines = linear.kernel_flags(eps, is_added, is_bias, is_gated)
    lines += f"constexpr bool IS_FLOAT = {int(is_float)}, IS_SINGLE = {int(form.is_single)};"
    lines += f"constexpr int TALL = {form.tall}, WARPS = {form.warps}, STAGES = {form.stages};"
    source = _SOURCE.replace("BIASES", "scales" if is_float else "biases")
    return Kernel(
        "_".join(["multiply_quantised", *(["mxfp4"] if is_float else []), *kinds]),
        ["given", "weight", "scales", *([] if is_float else ["biases"]), *names],
        ["out"],
        lines + source + linear.FINISH,
        header=HEADER + linear.PRODUCT + _HELPERS,
        numbers=("num_rows", "height", "size"),
        bounds=(32 * form.warps, form.blocks),
    )
