"""The library's attention function, wrapped so that it takes what `decode` hands it.

With one group these are plain arrays and a mask, which any model understands. With several it is a
`Groups` object.
"""

import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.cuda import attention as cuda_attention
from semantic.adapters.outbound.backends.mlx.cuda import device as cuda
from semantic.adapters.outbound.backends.mlx.cuda.decode import AttentionView, Groups, joined
from semantic.adapters.outbound.backends.mlx.group_step import GroupStep
from semantic.adapters.outbound.backends.mlx.layout import Array, Part

_ATTENTION = "scaled_dot_product_attention"


def wrap_attention() -> None:
    """Let the library's attention function take `Groups`, in every model that is imported."""
    for name, module in list(sys.modules.items()):
        original = getattr(module, _ATTENTION, None) if name.startswith("mlx_lm.models") else None
        if original is not None and not getattr(original, "takes_groups", False):
            setattr(module, _ATTENTION, _wrapped(original))


def _wrapped(original: Any) -> Any:
    def attention(
        queries: Array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Array | None,
        sinks: Array | None = None,
    ) -> Array:
        if isinstance(keys, Groups):
            return _attend(cache, queries, (keys.arrays, values.arrays), scale, sinks)
        if isinstance(cache, AttentionView) and cache.is_own(mask):
            return _attend(cache, queries, ([keys], [values]), scale, sinks)
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    attention.takes_groups = True  # type: ignore[attr-defined]
    return attention


def _attend(
    view: AttentionView,
    queries: Array,
    fetched: tuple[Sequence[Array], Sequence[Array]],
    scale: float,
    sinks: Array | None,
) -> Array:
    """One query a row. CUDA's kernels take no mask of ours, so there we bring our own."""
    keys, values = fetched
    groups = list(zip(keys, values, strict=True))
    if sinks is None and cuda.is_available() and cuda_attention.can_attend(queries, *groups[0]):
        return view.attend(queries, groups, scale)
    return joined(
        [
            _attend_group(step, view.part, (queries[step.place], *group), scale, sinks)
            for step, group in zip(view.steps, groups, strict=True)
        ]
    )


def _attend_group(
    step: GroupStep,
    part: Part,
    attended: tuple[Array, Array, Array],
    scale: float,
    sinks: Array | None,
) -> Array:
    mask = step.mask(part)
    if mask is None or sinks is not None or not cuda.is_in_use():
        return mx.fast.scaled_dot_product_attention(*attended, scale=scale, mask=mask, sinks=sinks)
    # CUDA's fused kernels are slower with a mask than the same written out.
    queries, keys, values = attended
    num_rows, num_heads, _, dim = queries.shape
    # Heads that share keys become query rows, so that keys are read once.
    folded = (queries * scale).reshape(num_rows, keys.shape[1], -1, dim)
    scores = mx.where(mask, folded @ keys.swapaxes(-1, -2), -mx.inf)
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights @ values).reshape(num_rows, num_heads, 1, values.shape[-1])
