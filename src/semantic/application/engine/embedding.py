"""Texts become vectors beside the replies that run: a piece of one text after each step.

A vector is the sum of the model's last hidden states over the text's tokens; whoever asked scales
it. Texts share nothing with the cache: each is computed whole, in a sequence of its own.
"""

import contextlib
from collections import deque
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Final
from uuid import uuid4

from semantic.application.engine.request import EventBatch
from semantic.domain.errors import SemanticError
from semantic.domain.events import Finished, Usage
from semantic.domain.sampling import FinishReason
from semantic.ports.backend import ModelBackendPort, SequenceId

_SEQUENCE: Final = SequenceId(-1)  # the engine counts from 0
_TOKENS_ALONE = 128
_TOKENS_BESIDE_OTHERS = 32  # of a text in one go, so that streams do not stutter


@dataclass(slots=True, eq=False)
class EmbeddingJob:
    """A text to be embedded.

    Attributes:
        result: Gets the sum; cancelled, the text is not computed further.
        num_done: Tokens computed so far.
    """

    tokens: tuple[int, ...]
    id: str = field(default_factory=lambda: uuid4().hex)
    result: "Future[tuple[float, ...]]" = field(default_factory=Future)
    num_done: int = 0
    sums: tuple[float, ...] = ()


class EmbeddingQueue:
    """Texts in the order they came. Used on the device's thread."""

    def __init__(self) -> None:
        self._jobs: deque[EmbeddingJob] = deque()

    def __bool__(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._jobs)

    def add(self, job: EmbeddingJob) -> None:
        """Queue a text."""
        self._jobs.append(job)

    def step(self, backend: ModelBackendPort, *, is_alone: bool) -> EventBatch:
        """Compute a piece of the first text there is; returns the event of its end, if it ended."""
        job = self._jobs[0]
        try:
            if not job.result.done():
                self._compute(job, backend, _TOKENS_ALONE if is_alone else _TOKENS_BESIDE_OTHERS)
        except SemanticError as error:
            _settle(job, error)
        if job.num_done == len(job.tokens):
            _settle(job, None)
        if not job.result.done():
            return []
        return self._end(self._jobs.popleft(), backend)

    def fail(self, error: SemanticError, backend: ModelBackendPort) -> EventBatch:
        """Answer everyone who waits; returns the events of their ends."""
        ended, self._jobs = self._jobs, deque()
        for job in ended:
            _settle(job, error)
        return [event for job in ended for event in self._end(job, backend)]

    def _end(self, job: EmbeddingJob, backend: ModelBackendPort) -> EventBatch:
        backend.close(_SEQUENCE)
        return [(job.id, Finished(FinishReason.END_TURN, Usage(len(job.tokens))))]

    def _compute(self, job: EmbeddingJob, backend: ModelBackendPort, num_tokens: int) -> None:
        start = job.num_done
        if start == 0:
            backend.open(_SEQUENCE, job.tokens)
        piece = job.tokens[start : start + num_tokens]
        sums = backend.embed(_SEQUENCE, start, piece)
        before = job.sums or (0.0,) * len(sums)
        job.sums = tuple(a + b for a, b in zip(before, sums, strict=True))
        job.num_done += len(piece)


def _settle(job: EmbeddingJob, error: SemanticError | None) -> None:
    """Answer, unless that was done already or nobody waits any more."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            job.result.set_result(job.sums)
        else:
            job.result.set_exception(error)
