"""Samples several tokens of sequences in a row, by one kernel; see `kernel.py`."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.groups import MlxSequence
from semantic.adapters.outbound.backends.mlx.loop.kernel import (
    MAX_LENGTH,
    LoopDraw,
    LoopEnd,
    LoopKernel,
    LoopRow,
)
from semantic.adapters.outbound.backends.mlx.loop.source_parts import MAX_ROWS, MAX_STEPS
from semantic.adapters.outbound.backends.mlx.rows import PendingRow
from semantic.adapters.outbound.backends.mlx.runner import MlxRunner
from semantic.adapters.outbound.backends.mlx.sampling import (
    LoopRun,
    LoopTokens,
    PendingToken,
    input_tokens,
    is_drawn_on_device,
    random_number,
)
from semantic.ports.backend import LAST_SAMPLED, Chunk, Draw, RowFailed

_LOG = logging.getLogger(__name__)
_TOLERANCE = 0.05  # of the logits' spread
_PROBED = 8  # tokens


@dataclass(frozen=True, slots=True)
class VerifiedDraft:
    """A draft of a loop's sequence, and the tokens that a running step samples to verify it.

    Attributes:
        start: Position of the last token before the draft.
        sampled: The tokens that the step samples after that one and after each draft token.
    """

    sequence: MlxSequence
    start: int
    token: int
    tokens: LoopTokens
    draw: Draw
    sampled: list[PendingToken]

    @classmethod
    def of(
        cls, chunk: Chunk, sequence: MlxSequence, verifying: PendingRow | RowFailed
    ) -> Self | None:
        """Return what a chunk drafts; None if the device does not verify it."""
        if isinstance(verifying, RowFailed) or verifying.token is None:
            return None
        if chunk.draw is None or chunk.tokens is LAST_SAMPLED:
            return None
        tokens, sampled = verifying.draft, [verifying.token, *verifying.later]
        if not isinstance(tokens, LoopTokens) or not is_drawn_on_device(chunk.draw):
            return None
        if not tokens or any(token.device is None for token in sampled):
            return None
        return cls(sequence, chunk.start, chunk.tokens[0], tokens, chunk.draw, sampled)

    def end(self, count: int) -> LoopEnd:
        draws = [_draw(self.draw, self.start + 2 + n) for n in range(len(self.tokens) + count)]
        return LoopEnd(self.start, self.token, self.tokens.array, input_tokens(self.sampled), draws)


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
        tokens = self._runner.run_loop(sequences, partial(self._loop.run, given, wanted))
        sampled = _loop_tokens(tokens, len(rows), count)
        self.adopt(rows, sampled)
        return sampled

    def sample_ahead(self, drafts: Sequence[VerifiedDraft], count: int) -> list[LoopTokens]:
        """Start the kernel after drafts that a step verifies; leaves the sequences as they are."""
        most = max(draft.start + 2 + len(draft.tokens) + count for draft in drafts)
        if 2 * len(drafts) > MAX_ROWS or not 0 < count <= MAX_STEPS or most > MAX_LENGTH:
            return []
        ends = [draft.end(count) for draft in drafts]
        sequences = [draft.sequence for draft in drafts]
        for sequence in sequences:
            self._runner.groups.make_room(sequence, most)
        tokens = self._runner.run_loop(sequences, partial(self._loop.run_after, ends, count))
        sampled = _loop_tokens(tokens, len(drafts), count)
        for sequence, new in zip(sequences, sampled, strict=True):
            sequence.begun = new.run
        return sampled

    def adopt(self, rows: Sequence[PendingRow], sampled: Sequence[LoopTokens]) -> None:
        """Extend sequences by the rows' tokens and by all sampled ones but the last."""
        for row, new in zip(rows, sampled, strict=True):
            sequence, end = row.sequence, row.chunk.start + row.chunk.num_tokens
            sequence.known[row.chunk.start :] = [*_tokens(row), *[-1] * (len(new) - 1)]
            sequence.looped = end, LoopTokens(new.run, new.number, len(new) - 1)
            sequence.length, sequence.last_token = end + len(new) - 1, None
            sequence.begun = sequence.checkpoint = None
            sequence.ahead.clear()

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
            tokens = self._runner.run_loop(rows[:1], partial(self._loop.run, given, [[LoopDraw()]]))
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


def _loop_tokens(tokens: mx.array, num_sequences: int, count: int) -> list[LoopTokens]:
    run = LoopRun(tokens, num_sequences)
    return [LoopTokens(run, number, count) for number in range(num_sequences)]


def _tokens(row: PendingRow) -> tuple[int, ...]:
    return () if row.chunk.tokens is LAST_SAMPLED else row.chunk.tokens


def _draw(draw: Draw | None, position: int) -> LoopDraw:
    if draw is None or draw.params.is_greedy:
        return LoopDraw()
    number = random_number(draw.params, draw.num_before + position)
    return LoopDraw(draw.params.temperature, number)
