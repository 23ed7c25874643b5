"""MLX's CUDA build: whether it is in use, and what our kernels for it have in common."""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

_AMPERE = 8  # the first generation with these tiles
_UNUSED_SHARE = 6  # this part of the device's memory, at most

# A tile of 16 times 16 numbers, by one of 16 times 8, added to one of 16 times 8.
HEADER = """
#include <cuda/std/type_traits>

template <typename T>
__device__ inline void multiply(
    float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    if constexpr (cuda::std::is_same_v<T, __nv_bfloat16>) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}
"""


def is_in_use() -> bool:
    """Whether MLX computes on a CUDA device."""
    return bool(mx.cuda.is_available() and mx.default_device() == mx.Device(mx.gpu))


def is_available() -> bool:
    """Whether the device runs the kernels."""
    return is_in_use() and _generation() >= _AMPERE


def bound_unused_memory() -> None:
    """Let MLX keep less of what nobody uses: to give all of it back takes a fifth of a second."""
    if is_in_use() and (whole := int(mx.device_info().get("total_memory", 0))):
        mx.set_cache_limit(whole // _UNUSED_SHARE)


@functools.cache
def _generation() -> int:
    return int(mx.device_info().get("compute_capability_major", 0))


def make_kernel(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    source: str,
    header: str = "",
    *,
    ensure_row_contiguous: bool = True,
) -> Any:
    """A kernel that is compiled when it is first called.

    MLX keeps what it compiled by name alone, on disk too, so the name must tell sources apart. It
    writes the arrays' number formats into them as well: these must follow from the template's.
    """
    told = "\n".join([header, source, *inputs, *outputs]).encode()
    return mx.fast.cuda_kernel(
        f"{name}_{hashlib.sha256(told).hexdigest()[:12]}",
        list(inputs),
        list(outputs),
        source,
        header=header,
        ensure_row_contiguous=ensure_row_contiguous,
    )
