"""Restores the sequences of stored conversations while no request runs.

After a restart, the most recently used agents' KV cache is on disk. Their sequences are restored in
the order of the jobs, a piece at a time, and become idle copies, as if the agents' last turns had
just ended. A request ends the restore in progress at once. Only free memory is used, and the first
conversation that finds none ends the work: the ones after it were used longer ago.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.memory import IdleCopy, WorkingMemory
from semantic.application.engine.request import AheadJob, as_backend_error
from semantic.application.engine.restore import Restore
from semantic.domain.images.spans import num_before_images
from semantic.ports.backend import ModelBackendPort, SequenceId

_log = logging.getLogger(__name__)
_PIECE_BYTES = 2**24  # a request waits for the piece in progress


@dataclass(frozen=True, slots=True, eq=False)
class _Reopened:
    job: AheadJob
    seq: SequenceId
    restore: Restore


class ReopenQueue:
    """Conversations to restore, the first one first. Used on the device thread only."""

    def __init__(
        self,
        backend: ModelBackendPort,
        memory: WorkingMemory,
        store: AgentCacheStore,
        new_ids: Iterator[int],
        on_ready: Callable[[], None],
    ) -> None:
        """`on_ready` is called on any thread when a read that the next step waits for completes."""
        self._backend, self._memory, self._store = backend, memory, store
        self._new_ids, self._on_ready = new_ids, on_ready
        self._jobs: OrderedDict[str, AheadJob] = OrderedDict()
        self._current: _Reopened | None = None

    @property
    def can_step(self) -> bool:
        if self._current is not None:
            return self._current.restore.is_ready or self._current.restore.is_starved
        return bool(self._jobs)

    @property
    def sequences(self) -> set[SequenceId]:
        """The sequence that is being restored, if any."""
        return set() if self._current is None else {self._current.seq}

    def add(self, job: AheadJob) -> None:
        self._jobs[job.agent] = job

    def step(self, max_idle: int) -> None:
        """Load the next piece."""
        if self._current is None:
            self._current = self._begin(max_idle)
        if (current := self._current) is None:
            return
        try:
            if not current.restore.advance(self._backend, _PIECE_BYTES):
                if current.restore.is_starved:
                    self.clear()
                return
        except Exception as error:  # noqa: BLE001 - the agent's next turn computes what is missing
            _log.warning("cannot restore a conversation: %s", as_backend_error(error).message)
            self._drop()
            return
        self._current = None
        job, plan = current.job, current.restore.plan
        tokens = list(job.tokens[: plan.end])
        self._memory.idle.put_oldest(IdleCopy(current.seq, job.agent, job.root, tokens))

    def _begin(self, max_idle: int) -> _Reopened | None:
        _, job = self._jobs.popitem(last=False)
        if any(copy.agent == job.agent for copy in self._memory.idle):
            return None  # the agent has continued
        known = job.tokens[: num_before_images(job.tokens)]
        plan = self._store.plan(job.root, known, is_used=False)
        if not plan.parts:
            return None
        seq = SequenceId(next(self._new_ids))
        if not self._memory.open_idle(seq, plan.end, max_idle):
            self._jobs.clear()
            return None
        try:
            self._backend.open_sequence(seq, known[: plan.end], ())
        except Exception as error:  # noqa: BLE001 - see `step`
            _log.warning("cannot restore a conversation: %s", as_backend_error(error).message)
            self._memory.close_sequence(seq)
            return None
        restore = Restore(seq, plan, self._store.tiers, on_ready=self._on_ready)
        return _Reopened(job, seq, restore)

    def interrupt(self, agent: str | None = None) -> None:
        """Stop the restore in progress, to begin it again later; forget an agent's job."""
        if self._current is not None:
            job = self._current.job
            self._jobs[job.agent] = job
            self._jobs.move_to_end(job.agent, last=False)
            self._drop()
        if agent is not None:
            self._jobs.pop(agent, None)

    def clear(self) -> None:
        self._jobs.clear()
        self._drop()

    def _drop(self) -> None:
        if (current := self._current) is not None:
            self._current = None
            current.restore.close()
            self._memory.close_sequence(current.seq)
