"""Reports whether MLX's CUDA build is in use, and whether the custom kernels can run.

Kernels that multiply use tensor cores by m16n8k16 tiles of 16-bit numbers, which compute capability
8.0 introduced. On older devices MLX's own layers run; only the copies of `transfer.py`, which need
no tensor cores, are custom there. No kernel uses more than the 48 KB of shared memory that a block
of threads has on every device.
"""

import functools

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.cuda import kernels

_TILES_SINCE = (8, 0)  # compute capability


def is_in_use() -> bool:
    """Whether MLX computes on a CUDA device."""
    return bool(mx.cuda.is_available() and mx.default_device() == mx.Device(mx.gpu))


def is_available() -> bool:
    """Whether the device can run all custom kernels."""
    return is_in_use() and _capability() >= _TILES_SINCE and kernels.can_compile()


@functools.cache
def _capability() -> tuple[int, int]:
    info = mx.device_info()
    major, minor = (info.get(f"compute_capability_{part}", 0) for part in ("major", "minor"))
    return int(major), int(minor)
