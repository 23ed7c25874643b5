"""Tries a loaded model on a few tokens, to find how its sequences and draft tokens can be batched.

Batched rows are compared with rows that run alone. The best batching that gives the same results is
used: several groups per pass, one group per pass, or one row per pass.
"""

import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.caches import Array, CacheLayout, capacity_for
from semantic.adapters.outbound.backends.mlx.cuda.tuning import untune
from semantic.adapters.outbound.backends.mlx.groups import MlxSequence, RowGroups
from semantic.domain.spec import LayerKind

# Each row's sequence with the number of its draft token, and the rows' logits.
DraftLogits: TypeAlias = tuple[list[tuple[MlxSequence, int]], Array]

_LOG = logging.getLogger(__name__)
_PROBLEMS = (ValueError, TypeError, AttributeError, IndexError, RuntimeError)
_TOKENS = (1, 2, 3)  # a token, and draft tokens after it
_TOLERANCES = {mx.float32: 1e-3, mx.float16: 3e-2, mx.bfloat16: 1e-1}


class Batching(enum.Enum):
    """Which rows share a pass, from the fastest to the last resort."""

    GROUPS = "all rows"
    GROUP = "rows of similar length"
    ALONE = "one row"


class ProbedRunner(Protocol):
    """What probes need of a runner; see `MlxRunner`."""

    layout: CacheLayout
    groups: RowGroups

    def extend(self, sequence: MlxSequence, tokens: Array, num_kept: int = 1) -> Array: ...

    def decode(
        self,
        sequences: Sequence[MlxSequence],
        feed: Callable[[Sequence[MlxSequence]], Array],
        batching: Batching,
        drafts: Mapping[MlxSequence, tuple[int, ...]] | None = None,
    ) -> DraftLogits: ...


class Probes:
    """Compares ways to run rows with running them alone, one token after another."""

    def __init__(self, runner: ProbedRunner, *, has_index: bool) -> None:
        """`has_index`: an index selects tokens, in long contexts only: no probe shows it."""
        self._runner = runner
        self._has_index = has_index

    def choose_batching(self, model: Any) -> Batching:
        """Find the best batching; restores the library's layers if the custom ones disagree."""
        if self._has_index:
            return Batching.ALONE
        if self._is_sound(Batching.GROUPS):
            return Batching.GROUPS
        if num_layers := untune(model):
            _LOG.warning("custom kernels disagree on %d layers; disabled", num_layers)
            return self.choose_batching(model)
        return Batching.GROUP if self._is_sound(Batching.GROUP) else Batching.ALONE

    def are_drafts_rows(self, batching: Batching) -> bool:
        """Whether draft tokens can be further rows of a pass."""
        if batching is not Batching.GROUPS or self._runner.layout.of_kind(LayerKind.STATE):
            return False
        first, *drafted = _TOKENS

        def verify(given: list[MlxSequence]) -> DraftLogits:
            drafts = dict(zip(given, (tuple(drafted), (), (drafted[0],)), strict=True))
            return self._runner.decode(
                given, lambda rows: mx.array([first] * len(rows), mx.int32), batching, drafts
            )

        return self._is_draft_sound(verify)

    def can_drafts_follow(self) -> bool:
        """Whether draft tokens can follow a token in a pass of one sequence.

        They are dropped by its length, and from recurrent arrays by a `Checkpoint`.
        """
        if self._runner.layout.of_kind(LayerKind.WINDOW) or self._has_index:
            return False

        def verify(given: list[MlxSequence]) -> DraftLogits:
            tokens = mx.array(_TOKENS, mx.int32)
            logits = [self._runner.extend(row, tokens, len(_TOKENS)) for row in given]
            rows = [(row, number) for row in given for number in range(len(_TOKENS))]
            return rows, mx.concatenate(logits)

        return self._is_draft_sound(verify)

    def _is_sound(self, batching: Batching) -> bool:
        """Whether rows batched this way get the same logits as alone."""
        token = mx.array(_TOKENS[:1], mx.int32)
        alone = [self._runner.extend(row, token) for row in self._rows()]
        try:
            given = self._rows()
            rows, logits = self._runner.decode(
                given, lambda rows: mx.repeat(token, len(rows)), batching
            )
            expected = mx.concatenate([alone[given.index(row)] for row, _ in rows])
            return is_close(logits, expected)
        except _PROBLEMS as error:
            _LOG.debug("batching %s in one pass fails: %s", batching.value, error)
            return False

    def _is_draft_sound(self, verify: Callable[[list[MlxSequence]], DraftLogits]) -> bool:
        """Whether draft tokens get the same logits as when computed one after another."""
        tokens = [mx.array([token], mx.int32) for token in _TOKENS]
        alone = [[self._runner.extend(row, token) for token in tokens] for row in self._rows()]
        given = self._rows()
        try:
            rows, logits = verify(given)
            expected = mx.concatenate([alone[given.index(row)][number] for row, number in rows])
            return is_close(logits, expected)
        except _PROBLEMS as error:
            _LOG.debug("draft tokens cannot be verified: %s", error)
            return False

    def _rows(self) -> list[MlxSequence]:
        """Create two sequences of different length in one group, and one in another."""
        rows, groups = [MlxSequence([]) for _ in range(3)], self._runner.groups
        for row, length in zip(rows, (3, 6, 4), strict=True):
            self._runner.extend(row, mx.arange(length))
        groups.isolate(rows[-1], capacity_for(rows[-1].group_row()[0].capacity + 1))
        return rows


def is_close(logits: Array, expected: Array) -> bool:
    """Whether logits are equal up to the rounding of their number format."""
    tolerance = _TOLERANCES.get(expected.dtype, 1e-1)
    wide, other = logits.astype(mx.float32), expected.astype(mx.float32)
    limit = tolerance * mx.maximum(mx.max(mx.abs(other)), 1e-3)
    # A model with NaN logits cannot be compared; its rows fail when they are sampled.
    is_judged = mx.all(mx.isfinite(other))
    return bool(mx.logical_or(mx.max(mx.abs(wide - other)) <= limit, ~is_judged).item())
