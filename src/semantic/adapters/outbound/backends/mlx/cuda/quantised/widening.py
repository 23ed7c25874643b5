"""Packs quantised weights of 2, 3, 5 and 6 bits into 8, which the custom kernel multiplies.

The integers, scales and biases stay the same, and so do the weights. GGUF files mix formats: in a
layer of 4 bits, some matrices have 6. Layers that share an input can only be joined if their
formats are equal, so those become 8 bits as well. MLX multiplies two and more rows by quantised
weights ten times as slowly as the custom kernel, which is worth the memory where there is enough.
"""

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.cuda.linear import SIBLINGS
from semantic.adapters.outbound.backends.mlx.cuda.quantised.kernel import CHUNK
from semantic.adapters.outbound.backends.mlx.runtime import import_library

_LOG = logging.getLogger(__name__)
_BITS = 8
_KERNEL_BITS = (4, _BITS)
_ROOM = 8  # all weights together may grow by one part in this many of the device's memory


def widen(model: Any, device_bytes: int) -> int:
    """Pack weights into 8 bits where that makes the custom kernel usable; returns their number.

    One matrix at a time, so that memory does not double.
    """
    modules = _to_widen(model)
    num_bytes = sum(
        module.weight.nbytes * (_BITS - module.bits) // module.bits for module in modules
    )
    if not modules or num_bytes > device_bytes // _ROOM:
        return 0
    _LOG.info(
        "packing %d quantised matrices into 8 bits: %.1f GB more", len(modules), num_bytes / 1e9
    )
    for module in modules:
        _pack(module)
    return len(modules)


def _to_widen(model: Any) -> list[Any]:
    names = dict(model.named_modules())
    is_tied = not any(name.endswith("lm_head") for name in names)  # the embedding is the head
    nn = import_library("mlx.nn")
    kinds = (nn.QuantizedLinear, nn.QuantizedEmbedding) if is_tied else (nn.QuantizedLinear,)
    found = {
        id(module): module
        for module in names.values()
        if isinstance(module, kinds) and module.mode == "affine" and module.bits not in _KERNEL_BITS
    }
    for parent in names.values():
        for siblings in SIBLINGS:
            if all(name in parent for name in siblings):
                found |= {id(m): m for m in _unlike([parent[name] for name in siblings], kinds)}
    # The kernel takes whole chunks of columns.
    return [module for module in found.values() if _num_columns(module) % CHUNK == 0]


def _num_columns(module: Any) -> int:
    return int(module.scales.shape[1]) * int(module.group_size)


def _unlike(layers: Sequence[Any], kinds: tuple[Any, ...]) -> list[Any]:
    """Return what of these needs 8 bits, so that all of them have the same."""
    if not all(isinstance(layer, kinds) and layer.mode == "affine" for layer in layers):
        return []
    is_unlike = len({layer.bits for layer in layers}) > 1
    return [layer for layer in layers if is_unlike and layer.bits != _BITS]


def _pack(module: Any) -> None:
    shape = module.scales.shape
    ones, zeros = mx.ones(shape, mx.float32), mx.zeros(shape, mx.float32)
    integers = mx.dequantize(
        module.weight, ones, zeros, group_size=module.group_size, bits=module.bits
    )
    module.weight = mx.round(integers).astype(mx.uint8).view(mx.uint32)
    module.bits = _BITS
    mx.eval(module.weight)
