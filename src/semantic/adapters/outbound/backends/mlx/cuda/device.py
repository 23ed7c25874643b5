"""Reports whether MLX's CUDA build is in use, and whether the custom kernels can run.

Kernels that multiply use tensor cores by m16n8k16 tiles of 16-bit numbers, which compute capability
8.0 introduced. On older devices MLX's own layers run; only the copies of `transfer.py`, which need
no tensor cores, are custom there. None of these kernels uses more than the 48 KB of shared memory
that a block of threads has on every device; that of `mlx.loop` does, and checks what there is.
"""

import ctypes
import functools

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.cuda import kernels

_TILES_SINCE = (8, 0)  # compute capability
_RESERVED = 5  # the driver's number of the attribute: bytes that a pool holds, in use or not


def is_in_use() -> bool:
    """Whether MLX computes on a CUDA device."""
    return bool(mx.cuda.is_available() and mx.default_device() == mx.Device(mx.gpu))


def is_available() -> bool:
    """Whether the device can run all custom kernels."""
    return is_in_use() and capability() >= _TILES_SINCE and kernels.can_compile()


def pool_bytes() -> int:
    """Return the memory that the driver's pool holds for MLX's arrays, freed ones included."""
    driver, pool = _pool()
    size = ctypes.c_uint64()
    if driver is not None:
        driver.cuMemPoolGetAttribute(pool, _RESERVED, ctypes.byref(size))
    return size.value


def trim_pool(num_bytes: int) -> None:
    """Give memory of freed arrays back to the device, down to a size of the pool."""
    driver, pool = _pool()
    if driver is not None:
        driver.cuMemPoolTrimTo(pool, ctypes.c_size_t(num_bytes))


@functools.cache
def _pool() -> tuple[ctypes.CDLL | None, ctypes.c_void_p]:
    pool = ctypes.c_void_p()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        has_failed = driver.cuDeviceGetDefaultMemPool(ctypes.byref(pool), 0)
    except (OSError, AttributeError):
        return None, pool
    return (None if has_failed else driver), pool


@functools.cache
def capability() -> tuple[int, int]:
    """Return the device's compute capability."""
    info = mx.device_info()
    major, minor = (info.get(f"compute_capability_{part}", 0) for part in ("major", "minor"))
    return int(major), int(minor)
