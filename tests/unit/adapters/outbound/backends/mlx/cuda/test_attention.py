"""Attention by the custom kernel: plans, angles and lengths; runs the kernel if there is a GPU."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.adapters.outbound.backends.mlx import runtime

runtime.prepare(num_threads=1)
mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")
mlx_cuda = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.device")
mlx_cuda_attention = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.attention")
mlx_cuda_rope = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.rope")
prompts = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.prompts")

pytestmark = pytest.mark.unit


make_plan = mlx_cuda_attention.make_plan


@given(
    lengths=st.lists(
        st.lists(st.integers(1, 9000), min_size=1, max_size=5), min_size=1, max_size=4
    ),
    num_key_heads=st.sampled_from([1, 2, 8]),
)
def test_a_plan_has_every_token_of_every_row_once(
    lengths: list[list[int]], num_key_heads: int
) -> None:
    plan = make_plan(lengths, num_key_heads)
    chunks, firsts = plan.chunks.tolist(), plan.firsts.tolist()
    places = [(n, group, i) for group, rows in enumerate(lengths) for i, n in enumerate(rows)]
    assert firsts[0] == 0
    assert not any(size for _, _, size, _ in chunks[firsts[-1] :])
    for row, (length, group, place) in enumerate(places):
        own = chunks[firsts[row] : firsts[row + 1]]
        assert {(c[0], c[3]) for c in own} == {(row, place * mlx_cuda_attention.MAX_GROUPS + group)}
        assert [token for c in own for token in range(c[1], c[1] + c[2])] == list(range(length))


def test_few_tokens_are_many_small_chunks_and_many_are_fewer_large_ones() -> None:
    few = make_plan([[4096]], 8)
    many = make_plan([[4096] * 8], 8)
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


LENGTHS = [[1, 15, 16, 17, 255, 256, 257], [700, 3], [9000]]


@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("dim,num_shared", [(64, 8), (128, 1), (128, 4), (256, 8)])
def test_each_row_attends_over_its_own_tokens(
    dim: int, num_shared: int, is_normed: bool, is_raw: bool
) -> None:
    """Lengths about the ends of tiles and chunks, in groups of one and of several rows."""
    if not mlx_cuda.is_available():
        pytest.skip("no GPU for the kernel")
    if is_normed and not is_raw:
        pytest.skip("norms are the kernel's own with raw heads only")
    mx.random.seed(dim)
    num_rows, num_heads = sum(map(len, LENGTHS)), 2 * num_shared
    plan = make_plan(LENGTHS, 2)
    heads = (2 * mx.random.normal((num_rows, num_heads + 4, 1, dim))).astype(mx.bfloat16)
    wide = heads.astype(mx.float32)
    queries, keys, values = mx.split(wide, [num_heads, num_heads + 2], axis=1)
    groups: list[Any] = []
    for rows in LENGTHS:
        shape = (len(rows) + 1, 2, max(rows) + 30, dim)
        groups.append([mx.random.normal(shape).astype(mx.bfloat16) for _ in range(2)])
    table = mx.stack([mlx_cuda_attention.addresses([group, group]) for group in groups], axis=1)
    held = mlx_cuda_rope.Held(table, 1, 2)
    if is_raw:
        positions = mx.array([n - 1 for rows in LENGTHS for n in rows])
        angles = mlx_cuda_rope.angles_at(nn.RoPE(dim, base=10_000), positions, dim)
        factors = [mx.random.normal((dim,)).astype(mx.bfloat16) for _ in range(2)]
        out = mlx_cuda_attention.keep_and_attend(
            heads,
            angles,
            mlx_cuda_rope.HeadNorms(*factors, 1e-6) if is_normed else None,
            held,
            plan,
            dim**-0.5,
        )
        mx.eval(out)
        if is_normed:
            queries, keys = (
                mx.fast.rms_norm(array, factor.astype(mx.float32), 1e-6)
                for array, factor in zip((queries, keys), factors, strict=True)
            )
        queries, keys = (mlx_cuda_rope.apply_rope(angles, array) for array in (queries, keys))
    else:
        out = mlx_cuda_attention.attend(heads[:, :num_heads], held, plan, dim**-0.5)
    expected: list[Any] = []
    for group, rows in zip(groups, LENGTHS, strict=True):
        for place, length in enumerate(rows):
            row = len(expected)
            cut = [a[place : place + 1, :, :length].astype(mx.float32) for a in group]
            if is_raw:
                for array, new in zip(cut, (keys, values), strict=True):
                    kept = array[:, :, -1:]
                    assert mx.allclose(kept, new[row : row + 1], rtol=2e-2, atol=2e-2).item()
            expected.append(
                mx.fast.scaled_dot_product_attention(queries[row : row + 1], *cut, scale=dim**-0.5)
            )
    wide = out.astype(mx.float32)  # queries are rounded after RoPE
    assert mx.allclose(wide, mx.concatenate(expected), rtol=2e-2, atol=4e-2).item()


# -- angles, which the kernel turns by ----------------------------------------------------------

POSITIONS = [0, 1, 700, 31_000]


def _rope(scaling: dict[str, Any] | None) -> Any:
    made = runtime.import_library("mlx_lm.models.rope_utils").initialize_rope
    return made(64, 500_000.0, False, scaling, 131_072)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN], ids=["plain", "llama3", "yarn"])
def test_angles_rotate_as_the_library_does(scaling: dict[str, Any] | None) -> None:
    rope, positions = _rope(scaling), mx.array(POSITIONS)
    heads = mx.random.normal((4, 3, 1, 64))
    expected = rope(heads[...], offset=positions)
    rotated = mlx_cuda_rope.apply_rope(mlx_cuda_rope.angles_at(rope, positions, 64), heads)
    assert mx.allclose(rotated, expected, atol=1e-4).item()


# -- prompts, in few lengths --------------------------------------------------------------------


@given(start=st.integers(0, 200_000), size=st.integers(1, 4096))
def test_lengths_are_few_and_have_room(start: int, size: int) -> None:
    fitting = prompts.fitting(size, start + size)
    if fitting is None:
        assert start < 1024  # there are not as many keys as the least queries that fit
        return
    num_queries, num_keys = fitting
    assert num_queries in (512, 1024, 2048, 4096, 5120)
    assert num_keys % 512 == 0
    # As many rows after the queries as keys too many, and none before the first key.
    assert num_queries >= size + num_keys - (start + size)
    assert num_keys >= num_queries


@pytest.mark.parametrize("start,size", [(0, 3), (0, 512), (700, 37), (512, 512), (300, 600)])
def test_queries_see_their_own_past_alone(start: int, size: int) -> None:
    def numbers(heads: int, tokens: int) -> Any:
        return mx.random.normal((1, heads, tokens, 16))

    queries, keys, values = numbers(4, size), numbers(2, 1280), numbers(2, 1280)
    end = start + size
    out = prompts.attend(queries, keys, values, end, 0.3)
    expected = mx.fast.scaled_dot_product_attention(
        queries, keys[:, :, :end], values[:, :, :end], scale=0.3, mask="causal"
    )
    assert out.shape == expected.shape
    assert mx.allclose(out, expected, atol=1e-5).item()
