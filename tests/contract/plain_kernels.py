"""What our CUDA kernels compute, by plain operations, for machines that cannot run them."""

from collections import Counter
from typing import Any

import numpy as np
import pytest


class PlainKernels:
    """Stands in for the kernels, and writes into memory as they do.

    Attributes:
        calls: How often each was called, by name.
        group_counts: How often keys and values of so many groups were kept.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from semantic.adapters.outbound.backends.mlx.cuda import attention as cuda_attention
        from semantic.adapters.outbound.backends.mlx.cuda import device as cuda
        from semantic.adapters.outbound.backends.mlx.cuda import linear as cuda_linear
        from semantic.adapters.outbound.backends.mlx.cuda import rope as cuda_rope

        self.calls: Counter[str] = Counter()
        self.group_counts: Counter[int] = Counter()
        max_rows = cuda_linear.MAX_ROWS
        for module, name, value in (
            (cuda, "is_in_use", lambda: True),
            (cuda, "is_available", lambda: True),
            (cuda_attention, "can_attend", lambda *_: True),
            (cuda_attention, "attend", self._attend),
            (
                cuda_linear,
                "can_multiply",
                lambda given, _: 1 < given.shape[0] <= max_rows,
            ),
            (cuda_linear, "multiply", self._multiply),
            (cuda_attention, "keep_and_attend", self._keep_and_attend),
            (cuda_rope, "keep", self._keep),
        ):
            monkeypatch.setattr(module, name, value)

    def _attend(self, queries: Any, groups: Any, plan: Any, scale: float) -> Any:
        import mlx.core as mx

        from semantic.adapters.outbound.backends.mlx.cuda.attention import MAX_GROUPS

        self.calls["attend"] += 1
        rows = []
        for row, start, size, where in _last_chunks(plan):
            place, group = divmod(where, MAX_GROUPS)
            cut = (a[place : place + 1, :, : start + size] for a in groups[group])
            asked = queries[row : row + 1]
            rows.append(mx.fast.scaled_dot_product_attention(asked, *cut, scale=scale))
        return mx.concatenate(rows)

    def _multiply(
        self,
        given: Any,
        weight: Any,
        *,
        norm: Any = None,
        added: Any = None,
        is_gated: bool = False,
    ) -> Any:
        import mlx.core as mx
        from mlx import nn

        self.calls["multiply"] += 1
        if norm is not None:
            given = mx.fast.rms_norm(given, norm.factors, norm.eps)
        out = given @ weight.T
        if is_gated:
            gate, passed = mx.split(out, 2, axis=-1)
            out = nn.silu(gate) * passed
        return out if added is None else out + added

    def _keep_and_attend(
        self, heads: Any, angles: Any, norms: Any, groups: Any, plan: Any, scale: float
    ) -> Any:
        import mlx.core as mx

        from semantic.adapters.outbound.backends.mlx.cuda.attention import MAX_GROUPS

        self.calls["keep_and_attend"] += 1
        self.group_counts[len(groups)] += 1
        places = [
            (*divmod(where, MAX_GROUPS)[::-1], start + size - 1, 0)
            for _, start, size, where in _last_chunks(plan)
        ]
        queries = self._keep(heads, angles, norms, groups, mx.array(places))
        out = self._attend(queries, groups, plan, scale)
        mx.eval(out)  # before anybody writes again
        return out

    def _keep(self, heads: Any, angles: Any, norms: Any, groups: Any, places: Any) -> Any:
        import mlx.core as mx

        from semantic.adapters.outbound.backends.mlx.cuda.rope import rotate

        self.calls["keep"] += 1
        num_key_heads = groups[0][0].shape[1]
        num_heads = heads.shape[1] - 2 * num_key_heads
        queries, keys, values = mx.split(heads, [num_heads, num_heads + num_key_heads], axis=1)
        if norms is not None:
            queries = mx.fast.rms_norm(queries, norms.query_factors, norms.eps)
            keys = mx.fast.rms_norm(keys, norms.key_factors, norms.eps)
        queries, keys = rotate(angles, queries), rotate(angles, keys)
        mx.eval(queries, keys, values, list(groups))
        for row, (group, place, position, _) in enumerate(places.tolist()):
            for array, new in zip(groups[group], (keys, values), strict=True):
                memory = np.array(memoryview(array), copy=False)
                memory[place, :, position] = np.array(new[row, :, 0])
        return queries


def _last_chunks(plan: Any) -> list[list[int]]:
    """Of each row."""
    chunks = plan.chunks.tolist()
    return [chunks[end - 1] for end in plan.firsts.tolist()[1:]]
