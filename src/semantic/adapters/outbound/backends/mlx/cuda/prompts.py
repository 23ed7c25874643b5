"""Attention over a prompt's tokens by CUDA's fused kernels, in lengths that they have met before.

For every new pair of lengths, of queries and of keys, the library makes a plan that takes some 80
milliseconds: as long as 2,000 tokens take. So queries get rows before and after them, keys are
rounded up, and few pairs are left; most are planned before anybody asks. The word "causal" lets
the last query see all keys and each one before it a key less; with as many rows after the queries
as there are keys too many, each query still sees its own past alone.
"""

import logging
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.caches import Array, fit
from semantic.adapters.outbound.backends.mlx.cuda import device as cuda

_LOG = logging.getLogger(__name__)

# How many queries, and what the number of their keys is a multiple of.
_SIZES = ((512, 512), (1024, 512), (2048, 1024), (4096, 1024), (5120, 1024))
# For how many keys a number of queries is prepared; others are when they first come.
_PLANNED = {512: 16_384, 1024: 8192, 2048: 16_384, 4096: 32_768, 5120: 16_384}
_MAX_DIM = 128  # of a head; wider ones are not fused


def fitting(num_queries: int, num_keys: int) -> tuple[int, int] | None:
    """The least lengths that take so many; None if they are too many."""
    for size, step in _SIZES:
        length = -(-num_keys // step) * step
        if num_queries + length - num_keys <= size <= length:
            return size, length
    return None


def can_attend(queries: Array, keys: Array, num_keys: int) -> bool:
    """Whether such arrays would be planned for, and these are fewer plans."""
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
        keys: ``[1, key heads, room, dim]``; what is after the last token are numbers.
        values: Like keys.
        num_keys: Tokens of the sequence.
        scale: Of the scores.
    """
    num_queries = queries.shape[2]
    lengths = fitting(num_queries, num_keys)
    assert lengths is not None  # noqa: S101 - the caller has asked
    size, length = lengths
    after = length - num_keys
    before = size - num_queries - after
    rows = [(0, 0), (0, 0), (before, after), (0, 0)]
    padded = mx.pad(queries, rows) if size > num_queries else mx.contiguous(queries)
    seen = fit(keys, length), fit(values, length)
    out = mx.fast.scaled_dot_product_attention(padded, *seen, scale=scale, mask="causal")
    return out if size == num_queries else out[:, :, before : before + num_queries]


def plan(model: Any, num_key_heads: int, dim: int, max_context: int) -> int:
    """Have the lengths planned that prompts of a model come in; returns how many there are."""
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
    _LOG.info("preparing attention for %d lengths", len(pairs))
    for size, length in pairs:
        wide = mx.zeros((1, num_heads, size, dim), dtype)
        long = mx.zeros((1, num_key_heads, length, dim), dtype)
        mx.eval(attend(wide, long, long, length, 1.0))
    return len(pairs)


def _floats(model: Any) -> list[Array]:
    kinds = (mx.bfloat16, mx.float16, mx.float32)
    modules = (module for module in model.modules() if "weight" in module)
    return [module["weight"] for module in modules if module["weight"].dtype in kinds]
