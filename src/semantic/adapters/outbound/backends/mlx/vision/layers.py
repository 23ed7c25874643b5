"""Operations of vision towers, over weights by the names that they have in files."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from semantic.adapters.outbound.backends.mlx.caches import Array

Weights: TypeAlias = Mapping[str, Array]


def linear(weights: Weights, name: str, x: Array) -> Array:
    """Multiply by a matrix, and add its bias if it has one."""
    product = x @ weights[f"{name}.weight"].T
    return product + weights[f"{name}.bias"] if f"{name}.bias" in weights else product


def layer_norm(weights: Weights, name: str, x: Array, eps: float) -> Array:
    """Normalise rows."""
    return mx.fast.layer_norm(x, weights[f"{name}.weight"], weights[f"{name}.bias"], eps)


def patch_embeddings(weights: Weights, name: str, patches: Array) -> Array:
    """Embed patches, ``[patches, numbers]``; a kernel that covers a patch is a matrix."""
    kernel = weights[f"{name}.weight"]
    embedded = patches @ kernel.reshape(kernel.shape[0], -1).T
    return embedded + weights[f"{name}.bias"] if f"{name}.bias" in weights else embedded


def rms_norm(weights: Weights, name: str, x: Array, eps: float) -> Array:
    """Normalise rows, without their mean and a bias."""
    return mx.fast.rms_norm(x, weights[f"{name}.weight"], eps)


def attend(
    query: Array, key: Array, value: Array, num_heads: int, lengths: Sequence[int] = ()
) -> Array:
    """Attend in both directions among all rows, ``[rows, hidden]``, or among runs of rows.

    Args:
        query: Likewise `key` and `value`.
        num_heads: Of attention.
        lengths: Of the runs; empty if all rows are one.
    """
    ends = np.cumsum(lengths)[:-1].tolist() if lengths else []
    heads = [each.reshape(1, each.shape[0], num_heads, -1) for each in (query, key, value)]
    runs = zip(*(mx.split(each.swapaxes(1, 2), ends, axis=2) for each in heads), strict=True)
    scale = heads[0].shape[-1] ** -0.5
    attended = [mx.fast.scaled_dot_product_attention(*run, scale=scale) for run in runs]
    return mx.concatenate(attended, axis=2).swapaxes(1, 2).reshape(query.shape[0], -1)
