"""Prompts' attention in few lengths: each query sees what it sees in its own."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.adapters.outbound.backends.mlx import runtime

runtime.prepare(num_threads=1)
mx = pytest.importorskip("mlx.core")
prompts = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.prompts")

pytestmark = pytest.mark.unit


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
