"""Computes embeddings alongside running replies: a piece of one text after each step.

A vector is the sum of the model's last hidden states over the text's tokens; the caller scales it.
Embeddings do not use cached blocks: each text is computed whole, in its own sequence within the
memory budget. An error fails only the text in which it occurs.
"""

from collections import deque
from collections.abc import Iterator

from semantic.application.engine.memory import WorkingMemory
from semantic.application.engine.request import (
    NO_SEQUENCE,
    EmbeddingJob,
    EventBatch,
    as_backend_error,
)
from semantic.domain.errors import PoolExhaustedError, SemanticError
from semantic.domain.events import Finished, Usage
from semantic.domain.sampling import FinishReason
from semantic.ports.backend import ModelBackendPort, SequenceId

_TOKENS_ALONE = 128
_TOKENS_BESIDE_OTHERS = 32  # small pieces, so that streamed replies do not stutter


class EmbeddingQueue:
    """Texts in order of arrival, each in its own sequence. Used on the device thread only.

    Attributes:
        jobs: The texts; the engine calls `step` while there are any.
        is_waiting: Whether the first text waits for memory; the engine admits no further requests
            until it has some.
    """

    def __init__(
        self, backend: ModelBackendPort, memory: WorkingMemory, new_ids: Iterator[int]
    ) -> None:
        self._backend, self._memory, self._new_ids = backend, memory, new_ids
        self.jobs: deque[EmbeddingJob] = deque()
        self.is_waiting = False

    @property
    def sequences(self) -> set[SequenceId]:
        """The open sequence, if any; its memory becomes free when the text ends."""
        return {job.seq for job in self.jobs if job.seq != NO_SEQUENCE}

    def step(self, *, is_alone: bool, may_wait: bool) -> EventBatch:
        """Compute a piece of the first text; returns its final event if the text ended.

        Args:
            is_alone: Whether no replies run, so that the piece may be large.
            may_wait: Whether other work may free memory; if not, a text without memory fails.
        """
        job = self.jobs[0]
        try:
            if not job.result.done() and self._has_room(job, may_wait=may_wait):
                self._compute(job, _TOKENS_ALONE if is_alone else _TOKENS_BESIDE_OTHERS)
        except Exception as error:  # noqa: BLE001 - any backend error fails only this text
            job.fail(as_backend_error(error))
        if job.num_done == len(job.tokens):
            job.finish()
        if not job.result.done():
            return []
        return self._end(self.jobs.popleft())

    def fail(self, error: SemanticError) -> EventBatch:
        ended, self.jobs = self.jobs, deque()
        for job in ended:
            job.fail(error)
        return [event for job in ended for event in self._end(job)]

    def _has_room(self, job: EmbeddingJob, *, may_wait: bool) -> bool:
        """Open a text's sequence; False if it must wait, `PoolExhaustedError` if it cannot."""
        if job.seq != NO_SEQUENCE:
            return True
        seq = SequenceId(next(self._new_ids))
        while not self._memory.resize(seq, len(job.tokens)):
            if self._memory.make_room():
                continue
            if not may_wait:
                what = f"a text of {len(job.tokens)} tokens does not fit this server's memory"
                raise PoolExhaustedError(f"{what}; send a shorter one or raise memory_budget_mb.")
            self.is_waiting = True
            return False
        self.is_waiting, job.seq = False, seq
        self._backend.open_sequence(seq, job.tokens)
        return True

    def _end(self, job: EmbeddingJob) -> EventBatch:
        self.is_waiting = False
        if job.seq != NO_SEQUENCE:
            self._memory.close_sequence(job.seq)
        return [(job.id, Finished(FinishReason.END_TURN, Usage(len(job.tokens))))]

    def _compute(self, job: EmbeddingJob, num_tokens: int) -> None:
        start = job.num_done
        piece = job.tokens[start : start + num_tokens]
        sums = self._backend.embed(job.seq, start, piece)
        before = job.sums or (0.0,) * len(sums)
        job.sums = tuple(a + b for a, b in zip(before, sums, strict=True))
        job.num_done += len(piece)
