"""What our CUDA kernels compute, by plain operations, for machines that cannot run them."""

import itertools
from collections import Counter
from typing import Any

import pytest


class PlainKernels:
    """Stands in for the kernels.

    Attributes:
        calls: How often each was called, by name.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from semantic.adapters.outbound import (
            mlx_cuda,
            mlx_cuda_attention,
            mlx_cuda_linear,
            mlx_cuda_rope,
        )

        self.calls: Counter[str] = Counter()
        for module, name, value in (
            (mlx_cuda, "is_in_use", lambda: True),
            (mlx_cuda, "is_available", lambda: True),
            (mlx_cuda_attention, "can_attend", lambda *_: True),
            (mlx_cuda_attention, "attend", self._attend),
            (mlx_cuda_linear, "can_multiply", lambda given, _: 1 < given.shape[0] <= 8),
            (mlx_cuda_linear, "multiply", self._multiply),
            (mlx_cuda_rope, "split_heads", self._split_heads),
        ):
            monkeypatch.setattr(module, name, value)

    def _attend(self, queries: Any, groups: Any, plan: Any, scale: float) -> Any:
        import mlx.core as mx

        from semantic.adapters.outbound.mlx_cuda_attention import MAX_GROUPS

        self.calls["attend"] += 1
        chunks, firsts = plan.chunks.tolist(), plan.firsts.tolist()
        rows = []
        for first, after in itertools.pairwise(firsts):
            row, start, size, where = chunks[after - 1]
            place, group = divmod(where, MAX_GROUPS)
            assert chunks[first][1] == 0
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

    def _split_heads(
        self, given: Any, angles: Any, num_heads: int, num_key_heads: int, norms: Any = None
    ) -> Any:
        import mlx.core as mx

        from semantic.adapters.outbound.mlx_cuda_rope import turned_by

        self.calls["split_heads"] += 1
        num_rows, dim = angles.shape
        heads = given.reshape(num_rows, -1, 1, dim)
        queries, keys, values = mx.split(heads, [num_heads, num_heads + num_key_heads], axis=1)
        if norms is not None:
            queries, keys = (
                mx.fast.rms_norm(array, norm.factors, norm.eps)
                for array, norm in zip((queries, keys), norms, strict=True)
            )
        return turned_by(angles, queries), turned_by(angles, keys), values
