"""Rearranges a loaded model as it is fastest on the device."""

from typing import Any

from semantic.adapters.outbound.backends.mlx.cuda import device as cuda
from semantic.adapters.outbound.backends.mlx.cuda.layers import use_own_blocks
from semantic.adapters.outbound.backends.mlx.cuda.linears import join_linears, use_own_kernel


def tune(model: Any) -> None:
    """On CUDA, where it was seen to pay, join what can be joined and take our own kernels."""
    if cuda.is_in_use():
        join_linears(model)
    if cuda.is_available():
        use_own_kernel(model)
        use_own_blocks(model)
