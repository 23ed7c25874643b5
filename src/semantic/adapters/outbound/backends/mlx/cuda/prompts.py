"""Attention over a prompt's tokens by CUDA's fused kernels, padded to lengths that have a plan.

For every new pair of lengths, of queries and of keys, the library makes a plan that takes about
80 milliseconds, as long as computing 2,000 tokens. Therefore rows are added before and after the
queries and keys are rounded up, so that few pairs remain; most are planned while the model loads.
A "causal" mask lets the last query see all keys, and each earlier query one key less. There are as
many rows after the queries as surplus keys, so each query still sees only its own past.
"""

import logging
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.caches import Array, fit
from semantic.adapters.outbound.backends.mlx.cuda import device as cuda

_LOG = logging.getLogger(__name__)

# Number of queries, and the number that their key count is a multiple of.
_SIZES = ((512, 512), (1024, 512), (2048, 1024), (4096, 1024), (5120, 1024))
# Maximum keys to plan for at load, by number of queries; others are planned at first use.
_PLANNED = {512: 16_384, 1024: 8192, 2048: 16_384, 4096: 32_768, 5120: 16_384}
_MAX_DIM = 128  # of a head; there is no fused kernel for larger ones


def fitting(num_queries: int, num_keys: int) -> tuple[int, int] | None:
    """Return the smallest planned lengths that hold these; None if they are too many."""
    for size, step in _SIZES:
        length = -(-num_keys // step) * step
        if num_queries + length - num_keys <= size <= length:
            return size, length
    return None


def can_attend(queries: Array, keys: Array, num_keys: int) -> bool:
    """Whether `attend` supports these arrays."""
    return (
        cuda.is_in_use()
        and queries.dtype in (mx.bfloat16, mx.float16)
        and queries.dtype == keys.dtype
        and queries.shape[0] == 1
        and queries.shape[-1] <= _MAX_DIM
        and fitting(queries.shape[2], num_keys) is not None
    )


def attend(queries: Array, keys: Array, values: Array, num_keys: int, scale: float) -> Array:
    """Attend with the last tokens of a sequence.

    Args:
        queries: ``[1, heads, tokens, dim]``
        keys: ``[1, key heads, room, dim]``, like `values`; numbers after the last token must be
            finite.
    """
    num_queries = queries.shape[2]
    lengths = fitting(num_queries, num_keys)
    assert lengths is not None  # noqa: S101 - the caller has called can_attend
    size, length = lengths
    after = length - num_keys
    before = size - num_queries - after
    rows = [(0, 0), (0, 0), (before, after), (0, 0)]
    padded = mx.pad(queries, rows) if size > num_queries else mx.contiguous(queries)
    seen = fit(keys, length), fit(values, length)
    out = mx.fast.scaled_dot_product_attention(padded, *seen, scale=scale, mask="causal")
    return out if size == num_queries else out[:, :, before : before + num_queries]


def plan(model: Any, num_key_heads: int, dim: int, max_context: int) -> int:
    """Plan attention for the common prompt lengths of a model; returns their number."""
    num_heads = getattr(getattr(model, "args", None), "num_attention_heads", 0)
    dtype = next((p.dtype for p in _floats(model)), mx.float32)
    queries = mx.zeros((1, num_heads, 1, dim), dtype)
    keys = mx.zeros((1, num_key_heads, 1, dim), dtype)
    if not num_heads or not can_attend(queries, keys, 1):
        return 0
    pairs = [
        (size, length)
        for size, step in _SIZES
        for length in range(size, min(max_context, _PLANNED[size]) + 1, step)
    ]
    _LOG.info("planning attention for %d prompt lengths", len(pairs))
    for size, length in pairs:
        wide = mx.zeros((1, num_heads, size, dim), dtype)
        long = mx.zeros((1, num_key_heads, length, dim), dtype)
        mx.eval(attend(wide, long, long, length, 1.0))
    return len(pairs)


def _floats(model: Any) -> list[Array]:
    kinds = (mx.bfloat16, mx.float16, mx.float32)
    modules = (module for module in model.modules() if "weight" in module)
    return [module["weight"] for module in modules if module["weight"].dtype in kinds]
