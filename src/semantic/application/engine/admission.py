"""Opens waiting requests, restores their prefixes, and preempts running ones if memory is short.

Used on the device thread only.
"""

import sys
from collections.abc import Callable, Iterator

from semantic.application.engine.generation import Generation
from semantic.application.engine.kv_reuse import PrefixSharing
from semantic.application.engine.memory import WorkingMemory
from semantic.application.engine.request import as_backend_error
from semantic.application.engine.scheduler import ConcurrentScheduler
from semantic.domain.errors import PoolExhaustedError, SemanticError
from semantic.ports.backend import SequenceId
from semantic.ports.telemetry import EngineCounts


class SequenceAdmission:
    """Decides which sequences are open in the backend."""

    def __init__(
        self,
        memory: WorkingMemory,
        scheduler: ConcurrentScheduler,
        sharing: PrefixSharing,
        new_ids: Iterator[int],
        *,
        counts: EngineCounts,
        is_room_coming: Callable[[], bool],
        fail: Callable[[Generation, SemanticError], None],
    ) -> None:
        """`is_room_coming` tells whether pending work will free memory."""
        self._memory, self._scheduler, self._sharing = memory, scheduler, sharing
        self._new_ids, self._counts = new_ids, counts
        self._is_room_coming, self._fail = is_room_coming, fail

    def make_room(self, *, may_preempt: bool) -> bool:
        """Reserve memory for what the next step may add, preempting sequences if necessary.

        Returns False if launched rows or other pending work must finish before a preemption; set
        `may_preempt` if no rows are launched.
        """
        for generation in list(self._scheduler.running):
            while not self._memory.grow(generation):
                if self._memory.make_room():
                    continue
                victim = self._scheduler.victim()
                # The only running sequence fails once no pending work will free memory for it.
                if not may_preempt or (victim is None and self._is_room_coming()):
                    return False
                self._preempt(victim or generation)
        return True

    def _preempt(self, generation: Generation) -> None:
        """Seal, close and requeue a sequence; if it is the only running one, fail it instead."""
        if len(self._scheduler.running) == 1:
            text = f"KV cache memory is full after {len(generation.tokens)} tokens"
            self._fail(generation, PoolExhaustedError(f"{text}; raise memory_budget_mb."))
            return
        self._counts.preemptions += 1
        self._sharing.seal_tail(generation)
        self.close_sequence(generation)
        self._scheduler.requeue(generation)

    # -- open and close -------------------------------------------------------------------------

    def admit(self, generation: Generation) -> bool:
        """Open a waiting request in the backend; returns False if memory is short."""
        while True:
            source = self._sharing.choose_source(generation, self._scheduler.running)
            taken = source.seq if source and source.is_taken_over else None
            seq = SequenceId(next(self._new_ids)) if taken is None else taken
            if self._memory.admit(seq, len(generation.tokens)):
                break
            if not self._memory.make_room(spared=taken):
                return False
        generation.seq = seq
        self._scheduler.admit(generation)
        self._attempt(generation, lambda it: self._sharing.open_sequence(it, source))
        if not generation.job.is_ephemeral:
            self._memory.close_paired(generation.job.agent)
        if generation.prefix.restore is None:
            return True
        self._advance(generation, self._restore_bytes())
        if generation.prefix.is_starved and len(self._scheduler.running) > 1:
            self.close_sequence(generation)
            self._scheduler.requeue(generation)
            return False
        return True

    def close_sequence(self, generation: Generation) -> None:
        self._memory.close_sequence(generation.seq)
        generation.rewind()

    @property
    def can_restore(self) -> bool:
        return any(
            g.prefix.restore is not None and g.prefix.restore.is_ready
            for g in self._scheduler.running
        )

    # -- restore --------------------------------------------------------------------------------

    def advance_restores(self) -> None:
        restoring = [g for g in self._scheduler.running if g.prefix.restore is not None]
        if not restoring:
            return
        max_bytes = self._restore_bytes() * len(restoring)
        for generation in restoring:
            max_bytes -= self._advance(generation, max_bytes)
        self._relieve()

    def _relieve(self) -> None:
        """Resolve restores that lack memory for their next part when no pending work frees any."""
        while starved := [g for g in self._scheduler.running if g.prefix.is_starved]:
            if self._is_room_coming():
                return
            # While a request is retried alone, no other sequence runs, so none frees memory.
            retried = next((g for g in starved if g.progress.retry_until is not None), None)
            if retried is None and len(starved) < len(self._scheduler.running):
                return
            if retried is None and len(starved) > 1:
                self._preempt(self._scheduler.victim() or starved[0])
            elif not self._memory.tighten(retried or starved[0]):
                self._attempt(retried or starved[0], self._sharing.end_restore_early)
            for generation in starved:
                self._advance(generation, self._restore_bytes())

    def _advance(self, generation: Generation, max_bytes: int) -> int:
        if (restore := generation.prefix.restore) is None:
            return 0
        before = restore.num_bytes
        self._attempt(generation, lambda it: self._sharing.advance_restore(it, max_bytes))
        while generation.prefix.is_starved and self._memory.make_room():
            self._attempt(generation, lambda it: self._sharing.advance_restore(it, max_bytes))
        return restore.num_bytes - before

    def _attempt(self, generation: Generation, work: Callable[[Generation], None]) -> None:
        try:
            work(generation)
        except Exception as error:  # noqa: BLE001 - any backend error fails only this request
            self._fail(generation, as_backend_error(error))

    def _restore_bytes(self) -> int:
        others = [
            g for g in self._scheduler.running if g.prefix.restore is None and not g.is_prefilling
        ]
        return self._sharing.pace.bytes_per_step if others else sys.maxsize
