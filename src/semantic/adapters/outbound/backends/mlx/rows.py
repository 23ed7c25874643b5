"""Rows of a step that are being computed: a chunk, its tokens, and what it samples and scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.caches import Array
from semantic.adapters.outbound.backends.mlx.groups import MlxSequence
from semantic.adapters.outbound.backends.mlx.sampling import (
    LoopTokens,
    PendingScores,
    PendingToken,
)
from semantic.adapters.outbound.backends.mlx.vision.tower import ChunkImages
from semantic.adapters.outbound.backends.sampler import NOT_FINITE
from semantic.ports.backend import (
    LAST_SAMPLED,
    Chunk,
    Computed,
    PendingTokens,
    Row,
    RowFailed,
    Sampled,
)

Tokens: TypeAlias = tuple[int, ...] | PendingToken


@dataclass(slots=True, eq=False)
class PendingRow:
    """A chunk that is being computed.

    Attributes:
        mark: An output of the row's computation; when it is evaluated, the row is computed.
        scores: The log-probabilities of the chunk's targets; None if it has none.
        images: The images in the chunk; None if it has none.
        hidden: The hidden states of the token and its draft tokens, if the model has a head.
    """

    chunk: Chunk
    sequence: MlxSequence
    token: PendingToken | None = None
    mark: Array | None = None
    draft: Sequence[int] = ()
    later: list[PendingToken] = field(default_factory=list)
    scores: PendingScores | None = None
    images: ChunkImages | None = None
    hidden: Array | None = None

    def finish(self) -> Row:
        row = self._finish()
        if self.scores is None or isinstance(row, RowFailed):
            return row
        scores = self.scores.answer()
        return RowFailed(row.seq, NOT_FINITE) if scores is None else replace(row, scores=scores)

    def _finish(self) -> Row:
        if self.token is None:
            mx.eval(self.mark)  # wait, so that the measured step time is right
            return Computed(self.chunk.seq)
        if self.draft:
            return self._verified(self.token)
        row = self.token.answer()
        known, position = self.sequence.known, self.token.position
        # The next step may have been launched with a placeholder for this token.
        if isinstance(row, Sampled) and position < len(known) and known[position] < 0:
            known[position] = row.token
        return row

    def _verified(self, token: PendingToken) -> Row:
        sequence, accepted = self.sequence, []
        if isinstance(self.draft, PendingTokens):
            sequence.known[token.position : token.position + len(self.draft)] = self.draft
        row = token.answer()
        for draft_token, following in zip(self.draft, self.later, strict=True):
            if not isinstance(row, Sampled) or row.token != draft_token:
                break
            accepted.append(row)
            token, row = following, following.answer()
        del sequence.known[token.position :]
        if isinstance(row, Sampled):
            sequence.length, sequence.last_token = token.position, token
            row = replace(row, accepted=tuple(accepted))
            if self.hidden is not None:
                mx.async_eval(
                    sequence.ahead.add(self.chunk.start, self.hidden[: 1 + len(accepted)])
                )
        return row


def tokens_of(row: PendingRow) -> Tokens:
    """Return a chunk's tokens, and record them in its sequence."""
    chunk, sequence = row.chunk, row.sequence
    if chunk.tokens is LAST_SAMPLED:
        drawn = sequence.last_token
        if drawn is None:
            raise ValueError("the sequence has no last sampled token")
        sequence.known[chunk.start : chunk.start + 1] = [drawn.token_if_known()]
        return drawn
    # The tokens of a pending draft follow when they are known.
    draft = (-1,) * len(row.draft) if isinstance(row.draft, PendingTokens) else row.draft
    tokens = (*chunk.tokens, *draft)
    sequence.known[chunk.start : chunk.start + len(tokens)] = tokens
    return chunk.tokens


def num_given(tokens: Tokens) -> int:
    """Return the number of tokens, also of one that is not sampled yet."""
    return 1 if isinstance(tokens, PendingToken) else len(tokens)


def split_passes(
    given: Mapping[MlxSequence, Tokens], num_drafts: Mapping[MlxSequence, int], most: int
) -> list[dict[MlxSequence, Tokens]]:
    """Split sequences into passes of at most `most` rows; decoding sequences come first."""
    batches: list[dict[MlxSequence, Tokens]] = []
    num_rows = most
    for sequence in sorted(given, key=lambda sequence: num_given(given[sequence]) > 1):
        size = num_given(given[sequence]) + num_drafts[sequence]
        if num_rows + size > most:
            batches.append({})
            num_rows = 0
        batches[-1][sequence] = given[sequence]
        num_rows += size
    return batches


def drafted_rows(
    group: Sequence[MlxSequence], drafts: Mapping[MlxSequence, Sequence[int]]
) -> list[tuple[MlxSequence, int]]:
    """Return a group's rows in step order: all sequences, then all draft tokens from 1 on."""
    drafted = [(row, n) for row in group for n in range(1, len(drafts.get(row, ())) + 1)]
    return [*((row, 0) for row in group), *drafted]


def drafted_tokens(
    members: Sequence[Sequence[MlxSequence]],
    feed: Callable[[Sequence[MlxSequence]], Array],
    drafts: Mapping[MlxSequence, Sequence[int]],
) -> Array:
    """Return the tokens of `drafted_rows`, for all groups."""
    pieces = []
    for group in members:
        pieces.append(feed(group))
        pieces += [_draft_array(drafts[row]) for row in group if drafts[row]]
    return mx.concatenate(pieces)


def _draft_array(draft: Sequence[int]) -> Array:
    return draft.array if isinstance(draft, LoopTokens) else mx.array([*draft], mx.int32)
