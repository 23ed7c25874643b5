"""The plan of our own attention kernel; the kernel itself where there is a GPU for it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.adapters.outbound import mlx_runtime

mlx_runtime.prepare(num_threads=1)
mx = pytest.importorskip("mlx.core")
mlx_cuda = pytest.importorskip("semantic.adapters.outbound.mlx_cuda")
mlx_cuda_attention = pytest.importorskip("semantic.adapters.outbound.mlx_cuda_attention")

pytestmark = pytest.mark.unit


@given(
    lengths=st.lists(
        st.lists(st.integers(1, 9000), min_size=1, max_size=5), min_size=1, max_size=4
    ),
    num_key_heads=st.sampled_from([1, 2, 8]),
)
def test_a_plan_has_every_token_of_every_row_once(
    lengths: list[list[int]], num_key_heads: int
) -> None:
    plan = mlx_cuda_attention.make_plan(lengths, num_key_heads)
    chunks, firsts = plan.chunks.tolist(), plan.firsts.tolist()
    places = [(n, group, i) for group, rows in enumerate(lengths) for i, n in enumerate(rows)]
    assert firsts[0] == 0
    assert firsts[-1] == len(chunks)
    for row, (length, group, place) in enumerate(places):
        own = chunks[firsts[row] : firsts[row + 1]]
        assert {(c[0], c[3]) for c in own} == {(row, place * mlx_cuda_attention.MAX_GROUPS + group)}
        assert [token for c in own for token in range(c[1], c[1] + c[2])] == list(range(length))


def test_few_tokens_are_many_small_chunks_and_many_are_fewer_large_ones() -> None:
    few = mlx_cuda_attention.make_plan([[4096]], 8)
    many = mlx_cuda_attention.make_plan([[4096] * 8], 8)
    assert few.chunks[:, 2].max().item() < many.chunks[:, 2].max().item()


@pytest.mark.parametrize(
    "queries,keys,values,dtype,expected",
    [
        ((2, 8, 1, 128), (2, 2, 9, 128), (2, 2, 9, 128), mx.bfloat16, True),
        ((2, 8, 1, 128), (2, 2, 9, 128), (2, 2, 9, 128), mx.float32, False),
        ((2, 8, 1, 96), (2, 2, 9, 96), (2, 2, 9, 96), mx.bfloat16, False),
        ((2, 32, 1, 64), (2, 2, 9, 64), (2, 2, 9, 64), mx.float16, False),
        ((2, 8, 1, 128), (2, 8, 9, 128), (2, 8, 9, 64), mx.float16, False),
        ((2, 8, 3, 128), (2, 8, 9, 128), (2, 8, 9, 128), mx.float16, False),
    ],
)
def test_what_the_kernel_takes(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    values: tuple[int, ...],
    dtype: Any,
    expected: bool,
) -> None:
    assert (
        mlx_cuda_attention.can_attend(
            *(mx.zeros(shape, dtype) for shape in (queries, keys, values))
        )
        == expected
    )


@pytest.mark.parametrize("dim,num_shared", [(64, 8), (128, 1), (128, 4), (256, 8)])
def test_each_row_attends_over_its_own_tokens(dim: int, num_shared: int) -> None:
    """Lengths about the ends of tiles and chunks, in groups that are slices of larger arrays."""
    if not mlx_cuda.is_available():
        pytest.skip("no GPU for the kernel")
    groups, queries, expected = [], [], []
    lengths = [[1, 15, 16, 17, 255, 256, 257], [700, 3], [9000]]
    for rows in lengths:
        shape = (len(rows) + 1, 2, max(rows) + 30, dim)
        made = [mx.random.normal(shape).astype(mx.bfloat16) for _ in range(2)]
        keys, values = (array[: len(rows), :, : max(rows)] for array in made)
        asked = mx.random.normal((len(rows), 2 * num_shared, 1, dim)).astype(mx.bfloat16)
        groups.append((keys, values))
        queries.append(asked)
        expected += [
            mx.fast.scaled_dot_product_attention(
                *(a.astype(mx.float32) for a in (asked[i : i + 1], *_first(keys, values, i, n))),
                scale=dim**-0.5,
            )
            for i, n in enumerate(rows)
        ]
    plan = mlx_cuda_attention.make_plan(lengths, 2)
    out = mlx_cuda_attention.attend(mx.concatenate(queries), groups, plan, dim**-0.5)
    assert mx.allclose(out.astype(mx.float32), mx.concatenate(expected), atol=2e-2).item()


def _first(keys: Any, values: Any, row: int, length: int) -> tuple[Any, Any]:
    return keys[row : row + 1, :, :length], values[row : row + 1, :, :length]
