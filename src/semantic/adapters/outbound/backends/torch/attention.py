"""Attention over packed chunks; the models of the transformers library call it.

All chunks of a step lie in one row without padding. For each chunk, the function appends the new
keys and values to the chunk's sequence's buffers and attends within that sequence only. It supports
full attention, sliding windows, attention sinks (GPT-OSS), capped scores (Gemma 2) and attention in
both directions within an image (Gemma 3).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional

from semantic.adapters.outbound.backends.torch.kv.sequences import ChunkSpan
from semantic.domain.errors import BackendError

ATTENTION_NAME = "semantic_packed"
_UNSUPPORTED_OPTIONS = ("indices", "position_bias")
# With more keys, on a CPU, two calls without a mask are faster than one with it.
_MIN_KEYS_BEFORE = 2048
_MAX_FOLDED_QUERIES = 16


@dataclass(frozen=True, slots=True)
class _Rules:
    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    spans: Sequence[ChunkSpan],
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each span's own sequence; the library calls this once per layer."""
    refused = [name for name in _UNSUPPORTED_OPTIONS if options.get(name) is not None]
    if refused or attention_mask is not None:
        raise BackendError(f"attention with {', '.join(refused) or 'a mask'} is not supported")
    scaling = options.get("scaling")
    rules = _Rules(
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        options.get("sliding_window"),
        options.get("softcap"),
        options.get("s_aux"),
    )
    layer, outputs = module.layer_idx, []
    for span in spans:
        rows = query, key, value
        if len(spans) > 1:
            rows = query[:, :, span.place], key[:, :, span.place], value[:, :, span.place]
        span.new_keys[layer].copy_(rows[1])
        span.new_values[layer].copy_(rows[2])
        keys, values = span.keys[layer], span.values[layer]
        first = span.sequence.length + 1 - rules.window if rules.window else 0
        if first > 0:
            keys, values = keys[:, :, first:], values[:, :, first:]
        if span.features is not None and span.features.blocks:
            attended = _attend_in_blocks(rows[0], keys, values, rules, span.features.blocks)
        else:
            attended = _attend(rows[0], keys, values, rules)
        outputs.append(attended.transpose(1, 2))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rules: _Rules
) -> torch.Tensor:
    # The CPU's fused kernel also returns each query's log-sum-exp, which allows merging parts.
    is_fused = query.shape[3] == values.shape[3]
    if rules.softcap is not None or (rules.sinks is not None and not is_fused):
        return _attend_by_hand(query, keys, values, rules)
    if not is_fused:
        return _attend_by_library(query, keys, values, rules)
    num_queries, num_keys = query.shape[2], keys.shape[2]
    if num_queries == 1:
        attended, totals = _attend_to_all(query, keys, values, rules.scaling)
    elif rules.window is None and num_keys - num_queries >= _MIN_KEYS_BEFORE:
        attended, totals = _attend_in_parts(query, keys, values, rules.scaling)
    else:
        mask = _mask_if_needed(query, num_keys, rules.window)
        attended, totals = _flash(query, keys, values, rules.scaling, mask, mask is None)
    if rules.sinks is None:
        return attended
    # A sink adds to the softmax's denominator and has no value.
    shares = torch.sigmoid(totals - rules.sinks.float()[:, None])
    return (attended * shares[..., None]).to(attended.dtype)


def _attend_in_blocks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rules: _Rules,
    blocks: Sequence[tuple[int, int]],
) -> torch.Tensor:
    """Attend causally, and in both directions among the queries of each block."""
    num_queries, num_keys = query.shape[2], keys.shape[2]
    if rules.softcap is not None or rules.sinks is not None:
        raise BackendError("attention in both directions with capped scores is not supported")
    mask = _mask(num_queries, num_keys, rules.window, query.dtype).clone()
    first = num_keys - num_queries
    for start, end in blocks:
        block = mask[start:end, first + start : first + end]
        block.masked_fill_(torch.ones_like(block, dtype=torch.bool).triu(), 0)
    return functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=rules.scaling, enable_gqa=True
    )


def _attend_by_library(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rules: _Rules
) -> torch.Tensor:
    if query.shape[2] == 1:
        attended = functional.scaled_dot_product_attention(
            _folded(query, keys), keys, values, scale=rules.scaling
        )
        return attended.reshape(1, query.shape[1], 1, values.shape[3])
    mask = _mask_if_needed(query, keys.shape[2], rules.window)
    return functional.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=rules.scaling,
        enable_gqa=True,
    )


def _attend_to_all(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend without a mask. Folds few queries, so that the kernel reads the keys once."""
    num_heads, num_queries = query.shape[1], query.shape[2]
    if num_queries > _MAX_FOLDED_QUERIES:
        return _flash(query, keys, values, scaling)
    attended, totals = _flash(_folded(query, keys), keys, values, scaling)
    shape = (1, num_heads, num_queries)
    return attended.reshape(*shape, values.shape[3]), totals.reshape(shape)


def _attend_in_parts(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend unmasked to keys before the queries, causally among them; merge by log-sum-exp."""
    middle = keys.shape[2] - query.shape[2]
    before, totals_before = _attend_to_all(
        query, keys[:, :, :middle], values[:, :, :middle], scaling
    )
    among, totals_among = _flash(
        query, keys[:, :, middle:], values[:, :, middle:], scaling, is_causal=True
    )
    share = torch.sigmoid(totals_before - totals_among)[..., None]
    attended = torch.lerp(among.float(), before.float(), share).to(query.dtype)
    return attended, torch.logaddexp(totals_before, totals_among)


def _flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the CPU's fused attention; also returns each query's log-sum-exp."""
    attended, totals = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, is_causal, attn_mask=mask, scale=scaling
    )
    return attended, totals


def _folded(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Treat the heads of a group as further queries of the key head that they share."""
    return query.reshape(1, keys.shape[1], -1, query.shape[3])


def _attend_by_hand(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rules: _Rules
) -> torch.Tensor:
    """Compute scores, softmax and sum explicitly, for options that fused kernels lack."""
    num_heads, num_queries = query.shape[1], query.shape[2]
    grouped = query[0].reshape(keys.shape[1], -1, num_queries, query.shape[3])
    scores = (grouped @ keys[0][:, None].transpose(-1, -2)).float() * rules.scaling
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    scores += _mask(num_queries, keys.shape[2], rules.window, torch.float32)
    if rules.sinks is not None:
        # A sink adds to the softmax's denominator and has no value.
        sinks = rules.sinks.float().view(keys.shape[1], -1, 1, 1)
        scores = torch.cat([scores, sinks.expand(-1, -1, num_queries, 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[2]].to(values.dtype)
    attended = weights @ values[0][:, None]
    return attended.reshape(1, num_heads, num_queries, values.shape[3])


def _mask_if_needed(query: torch.Tensor, num_keys: int, window: int | None) -> torch.Tensor | None:
    num_queries = query.shape[2]
    if num_keys == num_queries and not (window and num_queries > window):
        return None
    return _mask(num_queries, num_keys, window, query.dtype)


@lru_cache(maxsize=8)
def _mask(num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where a query sees a key, -inf elsewhere; the queries are the last positions.

    Cached, because the layers of a step use the same few masks.
    """
    ends = torch.arange(num_keys - num_queries, num_keys)[:, None]
    places = torch.arange(num_keys)[None, :]
    is_seen = places <= ends
    if window:
        is_seen &= places > ends - window
    mask = torch.zeros(num_queries, num_keys, dtype=dtype)
    return mask.masked_fill_(~is_seen, -torch.inf)
