"""Reports whether MLX's CUDA build is in use, and whether the custom kernels can run."""

import functools

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.cuda import kernels

_AMPERE = 8  # the first generation that supports the kernels' tiles
_UNUSED_SHARE = 3  # MLX caches at most one part in this many of the device's memory


def is_in_use() -> bool:
    """Whether MLX computes on a CUDA device."""
    return bool(mx.cuda.is_available() and mx.default_device() == mx.Device(mx.gpu))


def is_available() -> bool:
    """Whether the device can run the custom kernels."""
    return is_in_use() and _generation() >= _AMPERE and kernels.can_compile()


def bound_unused_memory() -> None:
    """Limit the unused memory that MLX caches: releasing all of it takes a third of a second.

    The limit should suffice for prompts of all sizes, because releasing some for a new size waits
    for the device.
    """
    if is_in_use() and (whole := int(mx.device_info().get("total_memory", 0))):
        mx.set_cache_limit(whole // _UNUSED_SHARE)


@functools.cache
def _generation() -> int:
    return int(mx.device_info().get("compute_capability_major", 0))
