"""The packed attention function on its own: long contexts, against the formula in float64."""

from types import SimpleNamespace

import pytest
import torch

from semantic.adapters.outbound.backends.torch.attention import packed_attention
from semantic.adapters.outbound.backends.torch.kv.sequences import ChunkSpan, TorchSequence
from semantic.ports.backend import Chunk, SequenceId

pytestmark = pytest.mark.contract

NUM_HEADS, NUM_KV_HEADS, DIM = 6, 2, 16
SCALING = 0.3


def _sequence(num_computed: int, capacity: int) -> TorchSequence:
    keys, values = torch.randn(2, 1, NUM_KV_HEADS, capacity, DIM)
    return TorchSequence([0] * capacity, num_computed, buffers=[(keys, values)])


def _by_formula(
    query: torch.Tensor, span: ChunkSpan, window: int | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """What a span's queries attend to, ``[tokens, heads, dim]``."""
    groups = NUM_HEADS // NUM_KV_HEADS
    keys, values = (
        buffer[0, :, : span.end].double().repeat_interleave(groups, dim=0)
        for buffer in span.sequence.buffers[0]
    )
    scores = query[0, :, span.place].double() @ keys.transpose(1, 2) * SCALING
    ends = torch.arange(span.sequence.length, span.end)[:, None]
    places = torch.arange(span.end)
    is_hidden = (places > ends) | (places <= ends - (window or span.end))
    scores = scores.masked_fill(is_hidden, -torch.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, len(span.tokens), 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : span.end]
    return (weights @ values).transpose(0, 1)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 40, 2200])
def test_attention_is_the_formulas(window: int | None, has_sinks: bool) -> None:
    """In all sizes at once: whole prompts, chunks after few and many keys, single tokens."""
    torch.manual_seed(0)
    spans: list[ChunkSpan] = []
    offset = 0
    for num_computed, num_new in ((0, 90), (7, 5), (2100, 70), (2100, 3), (30, 1), (2500, 1)):
        chunk = Chunk(SequenceId(len(spans)), num_computed, (0,) * num_new)
        sequence = _sequence(num_computed, num_computed + num_new + 4)
        spans.append(ChunkSpan(chunk, sequence, (0,) * num_new, offset))
        spans[-1].make_views()
        offset += num_new
    query = torch.randn(1, NUM_HEADS, offset, DIM)
    key, value = torch.randn(2, 1, NUM_KV_HEADS, offset, DIM)
    sinks = torch.randn(NUM_HEADS) + 3 if has_sinks else None
    with torch.inference_mode():
        attended, _ = packed_attention(
            SimpleNamespace(layer_idx=0),
            query,
            key,
            value,
            None,
            spans=spans,
            scaling=SCALING,
            sliding_window=window,
            s_aux=sinks,
        )
    assert attended.shape == (1, offset, NUM_HEADS, DIM)
    for span in spans:
        expected = _by_formula(query, span, window, sinks)
        torch.testing.assert_close(attended[0, span.place].double(), expected, atol=2e-5, rtol=1e-4)
