"""Drafts of the served model's own head (multi-token prediction, MTP).

The backend keeps what the head needs beside each sequence. The head samples with the request's own
parameters and random numbers, so that it draws the model's token where their probabilities are
similar.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from semantic.application.engine.generation import Generation
from semantic.application.engine.request import NO_SEQUENCE, Clock, as_backend_error
from semantic.application.engine.speculative.source import NUM_FIRST, ReplyDraft, SourceMeasures
from semantic.application.engine.steps import blended
from semantic.domain.events import DraftOrigin
from semantic.ports.backend import Chunk, DraftHead, Draw, SequenceId, Ticket

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class _HeadDraft(ReplyDraft):
    """A reply's draft, and the sequence that the head has caught up with."""

    seq: SequenceId = NO_SEQUENCE


class HeadDrafts:
    """A `TimedSource` over the head of the served model."""

    origin = DraftOrigin.HEAD

    def __init__(self, head: DraftHead, clock: Clock) -> None:
        self._head, self._clock = head, clock
        self._replies: dict[int, _HeadDraft] = {}
        self._measured = SourceMeasures()
        self._start_s: tuple[float, int] | None = None
        self._is_broken = False
        self.spent_s = 0.0

    def chances(self, row: Generation, limit: int, num_unknown: int = 0) -> list[float]:  # noqa: ARG002
        """As of the interface: the draft will begin with the tokens that are being sampled."""
        reply = self._reply_of(row)
        self._measured.compare(reply, row.tokens)
        return [] if self._is_broken else self._measured.chances(reply, limit)

    def seconds(self, rows: Sequence[Generation], count: int) -> float:
        return count * self._measured.pass_seconds(len(rows))

    def start_seconds(self, row: Generation) -> float:
        seconds, num_measured = self._start_s or (0.0, 0)
        is_new = self._reply_of(row).seq != row.seq
        return seconds if is_new and num_measured >= NUM_FIRST else 0.0

    def draft(self, rows: Sequence[Generation], count: int) -> list[list[int]]:
        started = self._clock()
        try:
            drafted = [[*tokens] for tokens in self._head.draft([*map(_chunk, rows)], count)]
        except Exception as error:  # noqa: BLE001 - replies do not depend on drafts
            reason = as_backend_error(error).message
            _log.error("the model's MTP head failed and is not used any more: %s", reason)
            self._is_broken, drafted = True, [[] for _ in rows]
        self.spent_s = self._clock() - started
        replies = [self._reply_of(row) for row in rows]
        new = [row for row, reply in zip(rows, replies, strict=True) if reply.seq != row.seq]
        if new:  # the first draft of a reply also passes the prompt's tokens
            pass_s = self._measured.pass_seconds(len(rows))
            start_s = max(self.spent_s - count * pass_s, 0.0) / len(new)
            self._start_s = blended(self._start_s, start_s, NUM_FIRST)
        else:
            self._measured.note_pass(len(rows), self.spent_s / count)
        for row, reply, tokens in zip(rows, replies, drafted, strict=True):
            reply.seq, reply.tokens = row.seq, [*tokens]
        return drafted

    def draft_ahead(self, rows: Sequence[Generation], count: int, verifying: Ticket) -> None:
        """Does nothing: a head needs the hidden states of accepted tokens."""

    def forget(self, generation: Generation) -> None:
        self._replies.pop(generation.order, None)

    def _reply_of(self, row: Generation) -> _HeadDraft:
        if row.order not in self._replies:
            self._replies[row.order] = _HeadDraft(num_seen=row.num_prompt)
        return self._replies[row.order]


def _chunk(row: Generation) -> Chunk:
    """The row's last token, after which to draft."""
    draw = Draw(replace(row.job.sampling, top_logprobs=None), row.num_prompt)
    return Chunk(row.seq, len(row.tokens) - 1, (row.tokens[-1],), draw)
