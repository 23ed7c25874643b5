"""The custom CUDA kernels as plain operations, for machines that cannot run them."""

import ctypes
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.contract.plain_loop import PlainLoop


class PlainKernels:
    """Stands in for the kernels, and writes into memory as they do.

    Attributes:
        calls: How often each was called, by name.
        row_counts: How often so many rows were multiplied.
        error: Factor of all products by quantised weights, of a kernel that is wrong.
        loops: Of all models, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from semantic.adapters.outbound.backends.mlx import runner
        from semantic.adapters.outbound.backends.mlx.cuda import attention as cuda_attention
        from semantic.adapters.outbound.backends.mlx.cuda import device as cuda
        from semantic.adapters.outbound.backends.mlx.cuda import linear as cuda_linear
        from semantic.adapters.outbound.backends.mlx.cuda import rope as cuda_rope
        from semantic.adapters.outbound.backends.mlx.cuda.quantised import linear as cuda_quantised
        from semantic.adapters.outbound.backends.mlx.cuda.quantised import widening
        from semantic.adapters.outbound.backends.mlx.loop import kernel as loop_kernel

        self.calls: Counter[str] = Counter()
        self.row_counts: Counter[int] = Counter()
        self.error = 1.0
        self.loops: list[PlainLoop] = []
        max_rows = cuda_linear.MAX_ROWS
        for module, name, value in (
            (cuda, "is_in_use", lambda: True),
            (cuda, "is_available", lambda: True),
            (cuda_attention, "can_attend", lambda *_: True),
            (cuda_attention, "addresses", self._addresses),
            (cuda_attention, "attend", self._attend),
            (
                cuda_linear,
                "can_multiply",
                lambda given, _: 1 < given.shape[0] <= max_rows,
            ),
            (cuda_linear, "multiply", self._multiply),
            (cuda_quantised, "has_kernel", lambda *_: True),
            (cuda_quantised, "multiply", self._multiply_quantised),
            (widening, "CHUNK", 32),
            (cuda_attention, "keep_and_attend", self._keep_and_attend),
            (cuda_rope, "keep", self._keep),
            (loop_kernel, "can_run", lambda _: True),
            (loop_kernel, "make_loop", self._make_loop),
            (runner, "_CHUNK_COUNTS", (32,)),
        ):
            monkeypatch.setattr(module, name, value)
        # Tuning replaces it in library models; the test ends with their own.
        for name, module in [*sys.modules.items()]:
            if name.startswith("mlx_lm.models") and hasattr(module, "ssm_update"):
                monkeypatch.setattr(module, "ssm_update", module.ssm_update)

    def _make_loop(self, model: Any) -> PlainLoop | None:
        from semantic.adapters.outbound.backends.mlx.loop.kernel import read_model

        found = read_model(model)
        if found is not None:
            self.loops.append(PlainLoop(found))
        return None if found is None else self.loops[-1]

    def _addresses(self, pairs: Any) -> Any:
        import mlx.core as mx

        mx.eval(list(pairs))
        self.calls["addresses"] += 1
        return mx.array([[*map(_address, pair), pair[0].shape[2]] for pair in pairs], mx.int64)

    def _attend(self, queries: Any, held: Any, plan: Any, scale: float) -> Any:
        import mlx.core as mx

        from semantic.adapters.outbound.backends.mlx.cuda.attention import MAX_GROUPS

        self.calls["attend"] += 1
        mx.eval(queries)
        rows = []
        for row, start, size, where in _last_chunks(plan):
            place, group = divmod(where, MAX_GROUPS)
            memory = _memory(held, group, place, queries.shape[-1])
            cut = (mx.array(array[None, :, : start + size]) for array in memory)
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
        self.row_counts[given.shape[0]] += 1
        if norm is not None:
            given = mx.fast.rms_norm(given, norm.factors, norm.eps)
        out = given @ weight.T
        if is_gated:
            gate, passed = mx.split(out, 2, axis=-1)
            out = nn.silu(gate) * passed
        return out if added is None else out + added

    def _multiply_quantised(self, given: Any, matrix: Any, **options: Any) -> Any:
        self.calls["multiply_quantised"] += 1
        weight = matrix.dequantise(given.dtype) * self.error
        return self._multiply(given, weight, **options)

    def _keep_and_attend(
        self, heads: Any, angles: Any, norms: Any, held: Any, plan: Any, scale: float
    ) -> Any:
        import mlx.core as mx

        from semantic.adapters.outbound.backends.mlx.cuda.attention import MAX_GROUPS

        self.calls["keep_and_attend"] += 1
        places = [
            (*divmod(where, MAX_GROUPS)[::-1], start + size - 1, 0)
            for _, start, size, where in _last_chunks(plan)
        ]
        queries = self._keep(heads, angles, norms, held, mx.array(places))
        out = self._attend(queries, held, plan, scale)
        mx.eval(out)  # before anybody writes again
        return out

    def _keep(self, heads: Any, angles: Any, norms: Any, held: Any, places: Any) -> Any:
        import mlx.core as mx

        from semantic.adapters.outbound.backends.mlx.cuda.rope import apply_rope

        self.calls["keep"] += 1
        num_heads = heads.shape[1] - 2 * held.num_key_heads
        ends = [num_heads, num_heads + held.num_key_heads]
        queries, keys, values = mx.split(heads, ends, axis=1)
        if norms is not None:
            queries = mx.fast.rms_norm(queries, norms.query_factors, norms.eps)
            keys = mx.fast.rms_norm(keys, norms.key_factors, norms.eps)
        queries, keys = apply_rope(angles, queries), apply_rope(angles, keys)
        mx.eval(queries, keys, values, held.table)
        for row, (group, place, position, _) in enumerate(places.tolist()):
            memory = _memory(held, group, place, heads.shape[-1])
            for array, new in zip(memory, (keys, values), strict=True):
                array[:, position] = np.array(new[row, :, 0])
        return queries


def _address(array: Any) -> int:
    view = memoryview(array)
    assert view.c_contiguous
    return int(np.array(view, copy=False).ctypes.data)


def _memory(held: Any, group: int, place: int, dim: int) -> list[Any]:
    """Keys and values of a row ``[heads, room, dim]``, where they are."""
    *addresses, room = held.table[held.layer, group].tolist()
    shape = (held.num_key_heads, room, dim)
    size = held.num_key_heads * room * dim
    return [
        np.ctypeslib.as_array(
            (ctypes.c_float * size).from_address(address + 4 * place * size)
        ).reshape(shape)
        for address in addresses
    ]


def _last_chunks(plan: Any) -> list[list[int]]:
    """Of each row."""
    chunks = plan.chunks.tolist()
    return [chunks[end - 1] for end in plan.firsts.tolist()[1:]]
