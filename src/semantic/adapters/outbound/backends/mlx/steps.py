"""A step's rows on their way through the model: prompts one by one, then all single tokens."""

from collections.abc import Sequence

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.groups import MlxSequence
from semantic.adapters.outbound.backends.mlx.layout import Array
from semantic.adapters.outbound.backends.mlx.runner import MlxRunner
from semantic.adapters.outbound.backends.mlx.sampling import (
    Drawn,
    PendingRow,
    draw_rows,
    fed_tokens,
)
from semantic.ports.backend import LAST_SAMPLED


def run_rows(runner: MlxRunner, rows: Sequence[PendingRow]) -> list[Array]:
    """Build the computation of a step; mutates the sequences.

    Returns:
        What must be computed.
    """
    outputs: list[Array] = []
    by_sequence: dict[MlxSequence, PendingRow] = {}
    last: dict[MlxSequence, int | Drawn] = {}
    for row in rows:
        chunk, sequence = row.chunk, row.sequence
        if chunk.draw is not None:
            row.drawn = Drawn(chunk.draw, chunk.seq, sequence, chunk.start + chunk.num_tokens)
        by_sequence[sequence] = row
        tokens = _tokens_of(row)
        if isinstance(tokens, Drawn) or (len(tokens) == 1 and sequence.length):
            last[sequence] = tokens if isinstance(tokens, Drawn) else tokens[0]
            continue
        logits = runner.extend(sequence, mx.array(tokens, mx.int32))
        outputs += [array for part in sequence.held()[0].arrays for array in part]
        if row.drawn is not None:
            outputs += draw_rows(logits, [row.drawn])
    if last:
        order, logits = runner.decode(
            [*last], lambda given: fed_tokens([last[sequence] for sequence in given])
        )
        outputs += _draw(logits, [by_sequence[sequence].drawn for sequence in order])
        outputs.append(logits)  # rows that ask for no token are computed by it
    for row in rows:
        row.sequence.last = row.drawn
    return outputs


def _tokens_of(row: PendingRow) -> tuple[int, ...] | Drawn:
    """A chunk's tokens, which its sequence knows from now on."""
    chunk, sequence = row.chunk, row.sequence
    if chunk.tokens is LAST_SAMPLED:
        drawn = sequence.last
        if drawn is None:
            raise ValueError("nothing was sampled here")
        sequence.known[chunk.start : chunk.start + 1] = [drawn.token_if_known()]
        return drawn
    sequence.known[chunk.start : chunk.start + len(chunk.tokens)] = chunk.tokens
    return chunk.tokens


def _draw(logits: Array, rows: Sequence[Drawn | None]) -> list[Array]:
    """Draw the rows that ask for it."""
    places = [place for place, row in enumerate(rows) if row is not None]
    drawn = [row for row in rows if row is not None]
    if not drawn:
        return []
    return draw_rows(logits if len(places) == len(rows) else logits[mx.array(places)], drawn)
