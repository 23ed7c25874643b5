"""Drafts of a draft model: a smaller model with the same tokenizer, loaded beside the served one.

Each reply has a sequence in the draft model. It is short-lived: it begins at most some hundred
tokens before the reply's end, is never stored, and is computed again after a restore or a fork, or
when memory is short. Before each draft it is cut back to the tokens that the reply has, and gets
those that it lacks. All rows of a step are drafted together.

The draft model samples with the request's own parameters and random numbers, so that both models
choose the same token where their probabilities are similar.

Where the backend has a loop, it samples a whole draft without the host, and the step that verifies
the draft starts before its tokens are known here. How long the device took is known afterwards.
The loop also begins the next draft before that step ends, because the device can find out by itself
where to go on; it need not wait for the host. If the next draft is not that one, it is dropped.
"""

import itertools
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.generation import Generation
from semantic.application.engine.memory import WorkingMemory
from semantic.application.engine.request import NO_SEQUENCE, Clock, as_backend_error
from semantic.application.engine.speculative.source import NUM_FIRST, ReplyDraft, SourceMeasures
from semantic.application.engine.steps import blended
from semantic.domain.blocks import common_prefix
from semantic.domain.errors import BackendError
from semantic.domain.events import DraftOrigin
from semantic.ports.backend import (
    LAST_SAMPLED,
    Chunk,
    Draw,
    ModelBackendPort,
    PendingTokens,
    RowFailed,
    Sampled,
    SequenceId,
    Step,
    StepOutput,
    Ticket,
)

_log = logging.getLogger(__name__)
_CONTEXT = 1024  # tokens before the reply's end at which a new sequence begins
_MAX_LENGTH = 2048  # a longer sequence is replaced by a new one
_PIECE = 256  # tokens that a row catches up per step, so that other rows do not wait for long
_SHORT = 8  # tokens that a row may lack when it is drafted for
_USUAL_REPLY, _SMOOTHING = 256.0, 0.1  # tokens of a reply before any has ended
_LEAST_LEFT = 32  # tokens that a reply is expected to get at least
_PAUSE = 64  # chances of rows without a sequence to skip after memory was short


@dataclass(slots=True, eq=False, kw_only=True)
class _FollowedReply(ReplyDraft):
    """A reply and its sequence in the draft model.

    Attributes:
        offset: The reply's token that the sequence begins with.
        held: Tokens whose KV cache the draft model holds.
        pending: Further such tokens, which the device may still sample.
    """

    seq: SequenceId = NO_SEQUENCE
    offset: int = 0
    held: list[int] = field(default_factory=list)
    pending: Sequence[int] = ()
    num_reserved: int = 0

    def reset(self) -> None:
        self.seq, self.num_reserved, self.pending = NO_SEQUENCE, 0, ()
        self.held.clear()

    def settle(self) -> None:
        """Wait for the draft tokens that the draft model holds as well."""
        self.held += self.pending
        self.pending = ()


@dataclass(frozen=True, slots=True)
class _Looped:
    """The last draft, if the device sampled it without the host."""

    num_rows: int
    tokens: PendingTokens


@dataclass(frozen=True, slots=True)
class _Begun:
    """A reply's draft that was begun before the tokens of a step were known.

    Attributes:
        num_known: The reply's tokens without those of the step.
        verified: The draft that the step verifies.
    """

    seq: SequenceId
    num_known: int
    verified: Sequence[int]
    tokens: PendingTokens

    def follows(self, reply: _FollowedReply, known: Sequence[int]) -> bool:
        """Whether a reply has the tokens of the step, and no others."""
        new = known[self.num_known :]
        num_accepted = common_prefix([*self.verified], new)
        return reply.seq == self.seq and len(new) == num_accepted + 1


class ModelDrafts:
    """A `TimedSource` over the backend of a draft model."""

    origin = DraftOrigin.MODEL

    def __init__(
        self, backend: ModelBackendPort, store: AgentCacheStore, clock: Clock, vocab_size: int
    ) -> None:
        """Draft tokens below `vocab_size`, the served model's; `store` accounts for the memory."""
        self._backend, self._clock, self._vocab_size = backend, clock, vocab_size
        self._num_known = backend.spec.vocab_size
        self._memory = WorkingMemory(backend, store)
        self._new_ids = itertools.count()
        self._replies: dict[int, _FollowedReply] = {}
        self._measured = SourceMeasures()
        self._token_s: tuple[float, int] | None = None
        self._usual_reply = _USUAL_REPLY
        longest = min(_MAX_LENGTH, backend.spec.max_context, backend.traits.draft_end)
        self._max_length, self._context = longest, min(_CONTEXT, longest // 2)
        self._num_paused = 0
        self._is_broken = False
        self._loop = backend.loop
        self._spent_s = 0.0
        self._looped: _Looped | None = None
        self._begun: dict[int, _Begun] = {}

    @property
    def acceptance(self) -> float:
        """Share of correct draft tokens among those that follow correct ones."""
        return self._measured.acceptance

    # -- the interface --------------------------------------------------------------------------

    def chances(self, row: Generation, limit: int, num_unknown: int = 0) -> list[float]:  # noqa: ARG002
        """As of the interface: the draft will begin with the tokens that are being sampled."""
        reply = self._reply_of(row)
        self._measured.compare(reply, row.tokens)
        if self._is_broken:
            return []
        if self._num_paused and reply.seq == NO_SEQUENCE:
            self._num_paused -= 1
            return []
        return self._measured.chances(reply, limit)

    def seconds(self, rows: Sequence[Generation], count: int) -> float:
        pass_s = self._measured.pass_seconds(len(rows))
        shares = (self.start_seconds(row) * (1 + count) / self._num_left(row) for row in rows)
        return count * pass_s + sum(shares)

    def start_seconds(self, row: Generation) -> float:
        reply = self._reply_of(row)
        behind = len(row.tokens) - reply.offset - len(reply.held) - len(reply.pending)
        token_s, num_measured = self._token_s or (0.0, 0)
        return token_s * min(behind, self._context) if num_measured >= NUM_FIRST else 0.0

    @property
    def spent_s(self) -> float:
        """As of the interface: the host's time, and the device's after it."""
        if self._looped is not None:
            looped, self._looped = self._looped, None
            if looped.tokens[0] < 0:
                _log.error("the draft model's kernel failed and is not used any more")
                self._loop = None
            else:
                seconds = looped.tokens.seconds
                self._spent_s += seconds
                self._measured.note_pass(looped.num_rows, seconds / len(looped.tokens))
        return self._spent_s

    def draft(self, rows: Sequence[Generation], count: int) -> Sequence[Sequence[int]]:
        _ = self.spent_s  # of the draft before, if the planner did not need it
        started = self._clock()
        drafted: Mapping[int, Sequence[int]] = {}
        try:
            ready = [row for row in rows if self._follow(row, count)]
            drafted = self._sample(ready, count)
        except Exception as error:  # noqa: BLE001 - replies do not depend on drafts
            self._give_up(error)
        # The device computed a begun draft all this time.
        self._spent_s = 0.0 if self._begun else self._clock() - started
        self._begun.clear()
        for order, tokens in drafted.items():
            self._replies[order].tokens = tokens
        return [drafted.get(row.order, []) for row in rows]

    def draft_ahead(self, rows: Sequence[Generation], count: int, verifying: Ticket) -> None:
        self._begun.clear()
        lengths = [len(row.tokens) + len(row.drafting.latest.tokens) + 1 for row in rows]
        replies = [self._reply_of(row) for row in rows]
        fits = [
            length - reply.offset + count <= min(reply.num_reserved, self._max_length)
            for reply, length in zip(replies, lengths, strict=True)
        ]
        if self._loop is None or self._is_broken or not all(fits):
            return
        ends = [self._chunk(row, len(row.tokens) - 1) for row in rows]
        try:
            begun = self._loop.sample_ahead(ends, verifying, count)
        except Exception as error:  # noqa: BLE001 - replies do not depend on drafts
            self._give_up(error)
            return
        for row, reply, tokens in zip(rows, replies, begun, strict=False):  # none, or one each
            verified = row.drafting.latest.tokens
            self._begun[row.order] = _Begun(reply.seq, len(row.tokens), verified, tokens)

    def forget(self, generation: Generation) -> None:
        self._begun.pop(generation.order, None)
        reply = self._replies.pop(generation.order, None)
        if reply is not None:
            self._close(reply)
            self._usual_reply += _SMOOTHING * (generation.num_generated - self._usual_reply)

    def release(self) -> bool:
        """Close all sequences, because memory is short; returns whether there were any."""
        if not self._memory.sequences:
            return False
        self._memory.close_all()
        for reply in self._replies.values():
            reply.reset()
        self._num_paused = _PAUSE
        return True

    def _give_up(self, error: Exception) -> None:
        reason = as_backend_error(error).message
        _log.error("the draft model failed and is not used any more: %s", reason)
        self._is_broken = True
        self.release()

    # -- sequences ------------------------------------------------------------------------------

    def _reply_of(self, row: Generation) -> _FollowedReply:
        if row.order not in self._replies:
            self._replies[row.order] = _FollowedReply(
                num_seen=row.num_prompt, offset=self._first_token(row.tokens)
            )
        return self._replies[row.order]

    def _num_left(self, row: Generation) -> float:
        """Tokens that a reply is expected to get."""
        usual = max(self._usual_reply - row.num_generated, _LEAST_LEFT)
        return max(min(usual, row.job.max_tokens - row.num_generated), 1)

    def _follow(self, row: Generation, count: int) -> bool:
        """Bring a row's sequence to its last tokens; False if it is not there yet."""
        reply, known = self._reply_of(row), row.tokens
        reply.settle()
        self._cut(reply, common_prefix(reply.held, known[reply.offset : -1]))
        is_too_long = len(known) - reply.offset + count > self._max_length
        missing = known[reply.offset + len(reply.held) :]
        if is_too_long or max(missing, default=0) >= self._num_known:
            self._close(reply)
            reply.offset = self._first_token(known)
        end = len(known) - reply.offset
        if not end or not self._reserve(reply, end + count, known):
            return False
        if end - len(reply.held) > _SHORT:
            self._feed(reply, known[reply.offset : -1])
        return end - len(reply.held) <= _SHORT

    def _cut(self, reply: _FollowedReply, num_agreed: int) -> None:
        if num_agreed < len(reply.held):
            num_agreed = self._backend.truncate(reply.seq, num_agreed)
            del reply.held[num_agreed:]

    def _first_token(self, known: Sequence[int]) -> int:
        """Return where a sequence begins: after the last token that the draft model lacks."""
        first = max(0, len(known) - self._context)
        lacking = (at for at in range(len(known), first, -1) if known[at - 1] >= self._num_known)
        return next(lacking, first)

    def _reserve(self, reply: _FollowedReply, length: int, known: Sequence[int]) -> bool:
        """Open a sequence if there is none, with memory for it; False if memory is short."""
        if length <= reply.num_reserved:
            return True
        seq = SequenceId(next(self._new_ids)) if reply.seq == NO_SEQUENCE else reply.seq
        length = min(length + _PIECE, self._max_length)
        if not self._memory.resize(seq, length):
            self._num_paused = _PAUSE
            return False
        reply.num_reserved = length
        if reply.seq == NO_SEQUENCE:
            reply.seq = seq
            try:
                self._backend.open_sequence(seq, known[reply.offset :])
            except Exception:
                self._close(reply)
                raise
        return True

    def _feed(self, reply: _FollowedReply, known: Sequence[int]) -> None:
        start, started = len(reply.held), self._clock()
        tokens = tuple(known[start : start + _PIECE])
        step = Step((Chunk(reply.seq, start, tokens),))
        (row,) = self._backend.collect(self._backend.launch(step)).rows
        if isinstance(row, RowFailed):
            raise BackendError(row.reason)
        reply.held += tokens
        token_s = (self._clock() - started) / len(tokens)
        self._token_s = blended(self._token_s, token_s, NUM_FIRST)

    def _close(self, reply: _FollowedReply) -> None:
        if reply.seq != NO_SEQUENCE:
            self._memory.close_sequence(reply.seq)
            reply.reset()

    # -- drafts ---------------------------------------------------------------------------------

    def _sample(self, rows: Sequence[Generation], count: int) -> Mapping[int, Sequence[int]]:
        """Sample draft tokens for rows whose sequences lack few tokens; keyed by their order."""
        if not rows:
            return {}
        replies = [self._replies[row.order] for row in rows]
        firsts = [
            self._chunk(row, reply.offset + len(reply.held))
            for row, reply in zip(rows, replies, strict=True)
        ]
        return self._sample_in_a_row(rows, firsts, count) or self._sample_each(rows, firsts, count)

    def _sample_in_a_row(
        self, rows: Sequence[Generation], firsts: Sequence[Chunk], count: int
    ) -> Mapping[int, Sequence[int]]:
        """Sample all tokens without waiting for them; empty if the backend cannot."""
        if self._loop is None or self._num_known > self._vocab_size:
            return {}
        if not (sampled := self._begun_drafts(rows) or self._loop.sample(firsts, count)):
            return {}
        if self._begun:
            self._loop.adopt(firsts, sampled)
        for row, first, tokens in zip(rows, firsts, sampled, strict=True):
            reply = self._replies[row.order]
            reply.held += row.tokens[-first.num_tokens :]
            reply.pending = tokens[:-1]
        self._looped = _Looped(len(rows), sampled[0])
        return {row.order: tokens for row, tokens in zip(rows, sampled, strict=True)}

    def _begun_drafts(self, rows: Sequence[Generation]) -> Sequence[PendingTokens]:
        """Return the drafts that were begun for these rows; drops them if they are of no use."""
        if self._begun.keys() == {row.order for row in rows} and all(
            self._begun[row.order].follows(self._replies[row.order], row.tokens) for row in rows
        ):
            return [self._begun[row.order].tokens for row in rows]
        self._begun.clear()
        return ()

    def _sample_each(
        self, rows: Sequence[Generation], firsts: Sequence[Chunk], count: int
    ) -> Mapping[int, Sequence[int]]:
        """Sample the tokens in one pass each."""
        started = self._clock()
        drafted: dict[int, list[int]] = {row.order: [] for row in rows}
        for output in self._run(firsts, count):
            for row, drawn in zip(rows, output.rows, strict=True):
                if isinstance(drawn, Sampled):
                    drafted[row.order].append(drawn.token)
                else:
                    reason = drawn.reason if isinstance(drawn, RowFailed) else "it drew no token"
                    raise BackendError(reason)
        for row, first in zip(rows, firsts, strict=True):
            held = self._replies[row.order].held
            held += [*row.tokens[-first.num_tokens :], *drafted[row.order][:-1]]
        self._measured.note_pass(len(rows), (self._clock() - started) / count)
        for tokens in drafted.values():
            del tokens[next((at for at, t in enumerate(tokens) if t >= self._vocab_size), count) :]
        return drafted

    def _chunk(self, row: Generation, start: int) -> Chunk:
        """The tokens of a reply from `start` on, and how to sample after them."""
        reply = self._replies[row.order]
        params = replace(row.job.sampling, top_logprobs=None)
        num_prompt = max(row.num_prompt - reply.offset, 0)
        draw = Draw(params, num_prompt, num_before=reply.offset)
        return Chunk(reply.seq, start - reply.offset, tuple(row.tokens[start:]), draw)

    def _run(self, firsts: Sequence[Chunk], count: int) -> Iterator[StepOutput]:
        """Run steps that each sample one token per row, launched ahead where the backend can."""
        launched: deque[Ticket] = deque()
        chunks = tuple(firsts)
        for _ in range(count):
            launched.append(self._backend.launch(Step(chunks)))
            if len(launched) > self._backend.traits.pipeline_depth:
                yield self._backend.collect(launched.popleft())
            chunks = tuple(
                replace(chunk, start=chunk.start + chunk.num_tokens, tokens=LAST_SAMPLED)
                for chunk in chunks
            )
        while launched:
            yield self._backend.collect(launched.popleft())
