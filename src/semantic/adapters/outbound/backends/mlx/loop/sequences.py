"""Samples several tokens of sequences in a row, by one kernel; see `kernel.py`."""

import logging
from collections.abc import Sequence

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.groups import MlxSequence
from semantic.adapters.outbound.backends.mlx.loop.kernel import (
    MAX_LENGTH,
    LoopDraw,
    LoopKernel,
    LoopRow,
)
from semantic.adapters.outbound.backends.mlx.loop.source_parts import MAX_ROWS, MAX_STEPS
from semantic.adapters.outbound.backends.mlx.rows import PendingRow
from semantic.adapters.outbound.backends.mlx.runner import MlxRunner
from semantic.adapters.outbound.backends.mlx.sampling import (
    LoopRun,
    LoopTokens,
    is_drawn_on_device,
    random_number,
)
from semantic.ports.backend import LAST_SAMPLED, Draw

_LOG = logging.getLogger(__name__)
_TOLERANCE = 0.05  # of the logits' spread
_PROBED = 8  # tokens


class MlxLoop:
    """The loop of a model over its runner's sequences."""

    def __init__(self, loop: LoopKernel, runner: MlxRunner) -> None:
        self._loop, self._runner = loop, runner

    def can_sample(self, rows: Sequence[PendingRow], count: int) -> bool:
        """Whether the kernel takes these rows: of some sequences, sampled on the device."""
        sizes = [row.chunk.num_tokens for row in rows]
        return (
            sum(sizes) <= MAX_ROWS
            and 0 < count <= MAX_STEPS
            and len({row.chunk.seq for row in rows}) == len(rows)
            and all(_is_plain(row) for row in rows)
            and all(
                row.sequence.length + size + count <= MAX_LENGTH
                for row, size in zip(rows, sizes, strict=True)
            )
        )

    def sample(self, rows: Sequence[PendingRow], count: int) -> list[LoopTokens]:
        """Start the kernel for rows that it takes; mutates the sequences."""
        sequences = [row.sequence for row in rows]
        draws = [row.chunk.draw for row in rows]
        ends = [row.chunk.start + row.chunk.num_tokens for row in rows]
        for sequence, end in zip(sequences, ends, strict=True):
            self._runner.groups.make_room(sequence, end + count)
        given = [
            LoopRow(number, row.chunk.start + place, token)
            for number, row in enumerate(rows)
            if row.chunk.tokens is not LAST_SAMPLED
            for place, token in enumerate(row.chunk.tokens)
        ]
        wanted = [
            [_draw(draw, end + step) for draw, end in zip(draws, ends, strict=True)]
            for step in range(count)
        ]
        tokens = self._runner.run_loop(self._loop, sequences, given, wanted)
        run = LoopRun(tokens, len(rows))
        sampled = [LoopTokens(run, number, count) for number in range(len(rows))]
        for row, end, new in zip(rows, ends, sampled, strict=True):
            sequence = row.sequence
            sequence.known[row.chunk.start :] = [*_tokens(row), *[-1] * (count - 1)]
            sequence.looped = end, LoopTokens(run, new.number, count - 1)
            sequence.length, sequence.last_token = end + count - 1, None
            sequence.checkpoint = None
            sequence.ahead.clear()
        return sampled

    def warm_up(self) -> bool:
        """Compile the kernel, and compare a token with the library's logits."""
        rows, expected = [MlxSequence([]), MlxSequence([])], mx.arange(1, _PROBED + 1)
        for row in rows:
            self._runner.extend(row, expected)
        logits = self._runner.extend(rows[1], mx.array([0]))[-1].astype(mx.float32)
        mx.eval(logits, [row.group_row()[0].arrays for row in rows])
        for num_rows in (1, MAX_ROWS):
            given = [LoopRow(0, n, n + 1) for n in range(_PROBED - num_rows + 1, _PROBED)]
            given = [row for row in given if row.position >= 0]
            given = [LoopRow(0, 0, 1)] * (num_rows - 1 - len(given)) + given
            given.append(LoopRow(0, _PROBED, 0))
            tokens = self._runner.run_loop(self._loop, rows[:1], given, [[LoopDraw()]])
            token = tokens.tolist()[0]
            most, mean = mx.max(logits).item(), mx.mean(logits).item()
            if token < 0 or most - logits[token].item() > _TOLERANCE * (most - mean):
                _LOG.warning("the kernel for draft tokens disagrees with the library; disabled")
                return False
        return True


def make_loop(runner: MlxRunner) -> MlxLoop | None:
    """Return the loop of a model; None if it is not supported, or does not work."""
    try:
        made = runner.make_loop()
        loop = None if made is None else MlxLoop(made, runner)
        return loop if loop is not None and loop.warm_up() else None
    except RuntimeError as error:  # drafts then take one pass per token
        _LOG.warning("the kernel for draft tokens does not run here; disabled: %s", error)
        return None


def _is_plain(row: PendingRow) -> bool:
    chunk = row.chunk
    return (
        chunk.tokens is not LAST_SAMPLED
        and chunk.draw is not None
        and is_drawn_on_device(chunk.draw)
        and bool(row.sequence.length)
        and not (chunk.draft or chunk.targets or row.images)
    )


def _tokens(row: PendingRow) -> tuple[int, ...]:
    return () if row.chunk.tokens is LAST_SAMPLED else row.chunk.tokens


def _draw(draw: Draw | None, position: int) -> LoopDraw:
    if draw is None or draw.params.is_greedy:
        return LoopDraw()
    number = random_number(draw.params, draw.num_before + position)
    return LoopDraw(draw.params.temperature, number)
