"""Computes the beginnings of expected prompts while no request runs; then reopens conversations.

A job lengthens its agent's idle copy, a short step at a time. Between steps the copy is a valid
source for any request, so a request never waits for more than the step in progress. Nothing is
sealed: the request that uses the tokens seals them. Only free memory is used.

If the copy can be cut anywhere, a request with another prompt cuts it back. The KV cache of window
and recurrent layers cannot be cut, so there a fork is lengthened, and the copy stays as it is. It
also stays if the expected prompt departs from it before its end.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.memory import IdleCopy, WorkingMemory
from semantic.application.engine.request import AheadJob, as_backend_error
from semantic.application.engine.speculative.reopening import ReopenQueue
from semantic.application.engine.steps import ChunkBudget
from semantic.application.settings import EngineLimits
from semantic.domain.blocks import common_prefix
from semantic.domain.images.spans import cut_before_image, spans_within, whole_chunk_end
from semantic.domain.spec import LayerKind
from semantic.ports.backend import Chunk, ModelBackendPort, RowFailed, SequenceId, Step

_log = logging.getLogger(__name__)
_MAX_JOBS = 64


@dataclass(slots=True, eq=False)
class _Progress:
    """A started job: the copy that it lengthens, its length so far, and the length to reach."""

    copy: IdleCopy
    num_done: int
    end: int
    is_fork: bool = False


class AheadQueue:
    """Prompts to compute ahead, in order of arrival. Used on the device thread only.

    Attributes:
        jobs: One for each agent; the engine removes it when the agent's next request arrives.
    """

    def __init__(
        self,
        backend: ModelBackendPort,
        memory: WorkingMemory,
        store: AgentCacheStore,
        new_ids: Iterator[int],
        budget: ChunkBudget,
        on_ready: Callable[[], None],
    ) -> None:
        """`on_ready` is called on any thread when a read that the next step waits for completes."""
        self._backend, self._memory, self._new_ids = backend, memory, new_ids
        self._budget, self._counts = budget, store.telemetry.counts.engine
        self._reopening = ReopenQueue(backend, memory, store, new_ids, on_ready)
        self._can_cut_anywhere = backend.spec.kinds == (LayerKind.FULL,)
        self.jobs: OrderedDict[str, AheadJob] = OrderedDict()
        self._started: tuple[AheadJob, _Progress] | None = None

    @property
    def can_step(self) -> bool:
        return bool(self.jobs) or self._reopening.can_step

    @property
    def sequences(self) -> set[SequenceId]:
        """Open sequences that are not idle copies yet."""
        return self._reopening.sequences

    def add(self, job: AheadJob) -> None:
        if job.is_stored:
            self._reopening.add(job)
            return
        self.jobs[job.agent] = job
        self.jobs.move_to_end(job.agent)
        if len(self.jobs) > _MAX_JOBS:
            self.jobs.popitem(last=False)

    def step(self, limits: EngineLimits) -> None:
        """Compute the next tokens of the first job; drops a job that is done or cannot go on."""
        if not self.jobs:
            self._reopening.step(limits.max_idle)
            return
        job = next(iter(self.jobs.values()))
        progress = self._progress(job, limits)
        if progress is not None and self._attempt(job, progress, limits):
            return
        del self.jobs[job.agent]
        if progress is not None and progress.is_fork and not progress.copy.num_ahead:
            self._memory.close_sequence(progress.copy.seq)

    def interrupt(self, agent: str | None = None) -> None:
        """Make way for a request, of this agent unless it is ephemeral."""
        if agent is not None:
            self.jobs.pop(agent, None)
        self._reopening.interrupt(agent)

    def clear(self) -> None:
        self.jobs.clear()
        self._reopening.clear()

    def _attempt(self, job: AheadJob, progress: _Progress, limits: EngineLimits) -> bool:
        try:
            return self._compute(job, progress, limits)
        except Exception as error:  # noqa: BLE001 - no request waits for the job
            _log.error("cannot compute a prompt ahead: %s", as_backend_error(error).message)
            self._memory.close_sequence(progress.copy.seq)  # its state may be corrupt
            return False

    def _progress(self, job: AheadJob, limits: EngineLimits) -> _Progress | None:
        """Return the job's copy; None if there is none, or if requests have changed it."""
        if self._started is None or self._started[0] is not job:
            progress = self._begin(job, limits)
            self._started = None if progress is None else (job, progress)
            return progress
        progress = self._started[1]
        is_same = any(copy is progress.copy for copy in self._memory.idle)
        return progress if is_same and len(progress.copy.tokens) == progress.num_done else None

    def _begin(self, job: AheadJob, limits: EngineLimits) -> _Progress | None:
        copies = [c for c in self._memory.idle if c.agent == job.agent and c.root == job.root]
        shared = [
            (cut_before_image(common_prefix(copy.tokens, job.tokens), job.images), copy)
            for copy in copies
        ]
        num_shared, copy = max(shared, key=lambda pair: pair[0], default=(0, None))
        end = min(len(job.tokens), num_shared + limits.ahead_tokens)
        end = cut_before_image(min(end, self._memory.longest_that_fits()), job.images)
        if copy is None or end <= num_shared or not num_shared:
            return None
        if num_shared == len(copy.tokens) and (self._can_cut_anywhere or copy.num_ahead):
            return _Progress(copy, num_shared, end)
        seq = SequenceId(next(self._new_ids))
        forked = self._memory.fork_idle(copy, seq, num_shared, limits.max_idle)
        return None if forked is None else _Progress(forked, num_shared, end, is_fork=True)

    def _compute(self, job: AheadJob, progress: _Progress, limits: EngineLimits) -> bool:
        """Compute a chunk; returns False if nothing is left or memory is short."""
        copy, start = progress.copy, progress.num_done
        left = progress.end - start
        end = start + self._budget.chunk(start, self._budget.tokens_ahead(limits, start), left)
        if self._backend.traits.needs_whole_images:
            end = whole_chunk_end(start, end, job.images)
        if not self._memory.extend_idle(copy, end, limits.max_idle):
            return False
        images = spans_within(job.images, start, end)
        chunk = Chunk(copy.seq, start, job.tokens[start:end], images=images)
        (row,) = self._backend.collect(self._backend.launch(Step((chunk,)))).rows
        if isinstance(row, RowFailed):
            self._memory.resize(copy.seq, start)
            return False
        copy.tokens.extend(job.tokens[start:end])
        copy.num_ahead += end - start
        progress.num_done = end
        self._counts.ahead_tokens += end - start
        return end < progress.end
