"""MLX's CUDA build: whether it is in use, and whether our kernels for it are."""

import functools

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.cuda import kernels

_AMPERE = 8  # the first generation with these tiles
_UNUSED_SHARE = 3  # this part of the device's memory, at most


def is_in_use() -> bool:
    """Whether MLX computes on a CUDA device."""
    return bool(mx.cuda.is_available() and mx.default_device() == mx.Device(mx.gpu))


def is_available() -> bool:
    """Whether the device runs the kernels."""
    return is_in_use() and _generation() >= _AMPERE and kernels.can_compile()


def bound_unused_memory() -> None:
    """Let MLX keep less of what nobody uses: to give all of it back takes a third of a second.

    It should be enough for prompts of all sizes: to give some back, for others, waits for the
    device.
    """
    if is_in_use() and (whole := int(mx.device_info().get("total_memory", 0))):
        mx.set_cache_limit(whole // _UNUSED_SHARE)


@functools.cache
def _generation() -> int:
    return int(mx.device_info().get("compute_capability_major", 0))
