"""The device loop: many requests, one device, each gets the tokens it would have got alone.

One turn of the loop, said aloud: take who may run, schedule a step, launch it, collect the one
before it (or this one, without pipelining), and hand out what came of it.

Runs on the device's thread and on no other; `device_thread.py` owns the thread and the queues.
"""

import itertools
import logging
import sys
from collections import deque
from collections.abc import Callable, Sequence

from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.embedding import EmbeddingJob, EmbeddingQueue
from semantic.application.engine.kv_reuse import PrefixSharing
from semantic.application.engine.memory import WorkingMemory
from semantic.application.engine.request import (
    Clock,
    EngineEvent,
    EngineWatch,
    EventBatch,
    EventSink,
    Flight,
    Generation,
    Job,
    TextAssembler,
    as_backend_error,
    monotonic,
)
from semantic.application.engine.scheduler import ConcurrentScheduler, EngineLimits
from semantic.application.engine.speculation import AdaptiveDraftPlanner, DraftPlanner
from semantic.domain.errors import (
    BackendError,
    GenerationTimeoutError,
    InvalidRequestError,
    PoolExhaustedError,
    SemanticError,
)
from semantic.domain.events import Failed, Finished
from semantic.domain.sampling import FinishReason
from semantic.ports.backend import (
    Chunk,
    Computed,
    ModelBackendPort,
    Row,
    RowFailed,
    Sampled,
    SequenceId,
    Step,
)
from semantic.ports.text import TokenizerPort

_log = logging.getLogger(__name__)


class BlockPoolBatchEngine:
    """Continuous batching over a backend, with state kept in a block pool."""

    def __init__(
        self,
        backend: ModelBackendPort,
        tokenizer: TokenizerPort,
        store: AgentCacheStore,
        limits: EngineLimits,
        emit: EventSink,
        clock: Clock = monotonic,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Start empty.

        Args:
            backend: One loaded model; the engine is its only user.
            tokenizer: The model's.
            store: Sealed blocks, and the memory budget.
            limits: May be replaced by `reconfigure`.
            emit: Gets the events of a step.
            clock: In seconds.
            on_ready: Called, on any thread, when an idle engine has something to do again.
        """
        self._backend, self._tokenizer, self._store = backend, tokenizer, store
        self._emit, self._clock = emit, clock
        self._memory = WorkingMemory(backend, store)
        self._scheduler = ConcurrentScheduler(
            limits, window=backend.spec.window, has_state=backend.spec.num_state > 0
        )
        budget = self._scheduler.budget
        self._sharing = PrefixSharing(backend, store, self._memory.idle, budget, on_ready)
        self.guess_with(AdaptiveDraftPlanner(backend.traits, tokenizer.eos_ids))
        self._generations: dict[str, Generation] = {}
        self._embeddings = EmbeddingQueue()
        self._flights: deque[Flight] = deque()
        self._last_collect = 0.0
        self._last_flight: Flight | None = None
        self._events: EventBatch = []
        self._orders, self._sequence_ids = itertools.count(), itertools.count()
        self._watch = EngineWatch(store.telemetry)
        self._short_of_memory: Generation | None = None

    # -- what the thread asks for ---------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._generations or self._flights or self._events or self._embeddings)

    def submit(self, job: Job | EmbeddingJob) -> None:
        """Queue a job; one that could not run even alone is answered with an error."""
        if isinstance(job, EmbeddingJob):
            self._embeddings.add(job)
            return
        assembler = TextAssembler(self._tokenizer.token_bytes, job.stop.strings, job.visible)
        block_tokens = self._backend.spec.block_tokens
        generation = Generation(job, next(self._orders), assembler, self._clock(), block_tokens)
        self._generations[job.id] = generation
        self._scheduler.add(generation)
        if len(job.tokens) >= self.longest_sequence:
            most = max(self.longest_sequence - 1, 0)
            what = f"a prompt of {len(job.tokens)} tokens does not fit this server's memory"
            self._fail(generation, PoolExhaustedError(f"{what}; at most {most} do."))
            return
        self._sharing.prefetch(generation)

    @property
    def longest_sequence(self) -> int:
        """Tokens of prompt and reply that fit this server's memory if nothing else runs."""
        return self._memory.longest_that_fits()

    def cancel(self, job_id: str) -> None:
        """End a request; its sequence is closed as soon as no row of it is on the device."""
        generation = self._generations.get(job_id)
        if generation is not None and not generation.is_done:
            self._finish(generation, FinishReason.CANCELLED)

    def close_idle(self, agent: str) -> None:
        """Close the working copies that stayed open for an agent."""
        self._memory.close_idle_of(agent)

    def reconfigure(self, limits: EngineLimits) -> None:
        """Use other limits from the next step on."""
        self._scheduler.limits = limits

    def guess_with(self, planner: DraftPlanner) -> None:
        """Let another decide which rows carry guesses."""
        self._planner = self._scheduler.planner = planner

    def step(self) -> bool:
        """One turn of the loop; returns whether the device was given or gave anything."""
        now = self._clock()
        self._expire(now)
        if self._flights and self._scheduler.wants_tokens():
            self._collect_all()
        rows = self._schedule(now)
        if rows:
            self._launch(rows)
        is_busy = bool(rows or self._flights or self._embeddings) or self._is_restoring()
        num_requests, flights = len(self._generations), self._flights
        is_awaited = not rows or not flights or flights[-1].is_awaited(num_requests)
        self._collect_all(but=0 if is_awaited else self._backend.traits.pipeline_depth)
        if self._embeddings:
            self._events += self._embeddings.step(self._backend, is_alone=not self._generations)
        self._hand_out()
        return is_busy

    def end_all(self, error: SemanticError) -> int:
        """Fail every request, keeping what was computed, and close all; returns how many."""
        self._collect_all()
        for generation in (running := list(self._generations.values())):
            self._fail(generation, error)
        self.abandon(error)
        return len(running)

    def abandon(self, error: SemanticError) -> None:
        """Fail every request and forget all sequences: at the end, or after a defect of ours."""
        self._flights.clear()
        self._memory.close_all()
        for generation in list(self._generations.values()):
            generation.end_restore()
            generation.num_rows = 0
            if not generation.is_done:
                self._scheduler.remove(generation)
                generation.final = Failed(error)
            self._events.append((generation.job.id, generation.final or Failed(error)))
        self._generations.clear()
        self._events += self._embeddings.fail(error, self._backend)
        self._hand_out()

    def resize(self, nbytes: int) -> None:
        """Use another budget of memory; see `WorkingMemory.resize_budget`."""
        self._memory.resize_budget(nbytes)

    def check_integrity(self) -> None:
        """Check the engine's parts against each other, between steps.

        Raises:
            AssertionError: they do not agree.
        """
        self._store.check_integrity()
        self._scheduler.check_integrity()
        running = {g.seq for g in self._scheduler.running}
        lingering = {g.seq for g in self._generations.values() if g.is_done and g.num_rows}
        idle = {copy.seq for copy in self._memory.idle}
        if self._memory.sequences != running | lingering | idle:
            raise AssertionError("memory is reserved for other sequences than those that run")

    # -- schedule -------------------------------------------------------------------------------

    def _schedule(self, now: float) -> list[tuple[Generation, Chunk]]:
        if not self._make_room():
            return []
        self._short_of_memory = None
        self._restore()
        for candidate in self._scheduler.candidates(now):
            if self._sharing.should_wait(candidate, self._scheduler.running):
                continue
            if not self._admit(candidate):
                self._short_of_memory = candidate
                break
        rows: list[tuple[Generation, Chunk]] = []
        for portion in self._scheduler.plan(now):
            generation = portion.generation
            try:
                rows.append((generation, generation.next_chunk(portion.num_tokens, portion.draft)))
            except Exception as error:  # noqa: BLE001 - a broken constraint ends one request
                self._fail(generation, as_backend_error(error))
        return rows

    def _make_room(self) -> bool:
        """Let running sequences grow by what a step may add, preempting others if need be.

        False if rows must be collected, or blocks read or written, before anyone gives way.
        """
        for generation in list(self._scheduler.running):
            while not self._memory.grow(generation):
                if self._memory.close_oldest_idle():
                    continue
                victim = self._scheduler.victim()
                # The only one ends when nothing more will make room for it.
                if self._flights or (victim is None and self._store.is_busy):
                    return False
                self._preempt(victim or generation)
        return True

    def _preempt(self, generation: Generation) -> None:
        """Seal, close and requeue a sequence; the only one ends instead."""
        if len(self._scheduler.running) == 1:
            text = f"memory for the KV cache is full after {len(generation.tokens)} tokens."
            self._fail(generation, PoolExhaustedError(text))
            return
        self._watch.counts.preemptions += 1
        self._sharing.seal_tail(generation)
        self._close(generation)
        self._scheduler.requeue(generation)

    # -- open and close -------------------------------------------------------------------------

    def _admit(self, generation: Generation) -> bool:
        """Open a waiting request in the backend; False if memory is short."""
        while True:
            source = self._sharing.choose(generation, self._scheduler.running)
            taken = source.seq if source and source.is_taken_over else None
            seq = SequenceId(next(self._sequence_ids)) if taken is None else taken
            if self._memory.admit(seq, len(generation.tokens)):
                break
            if not self._memory.close_oldest_idle(spared=taken):
                return False
        generation.seq = seq
        self._scheduler.admit(generation)
        self._attempt(generation, lambda it: self._sharing.open(it, source))
        self._advance(generation, self._restore_bytes())
        if generation.is_starved and len(self._scheduler.running) > 1:
            self._close(generation)
            self._scheduler.requeue(generation)
            return False
        return True

    def _close(self, generation: Generation) -> None:
        self._memory.close(generation.seq)
        generation.rewind()

    # -- restore --------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Load more of what running requests are waiting for, one after the other."""
        restoring = [g for g in self._scheduler.running if g.restore is not None]
        max_bytes = self._restore_bytes() * len(restoring)
        for generation in restoring:
            max_bytes -= self._advance(generation, max_bytes)
        if restoring:
            self._relieve()

    def _relieve(self) -> None:
        """See to sequences that find no room for their next part, and for which none will come."""
        while starved := [g for g in self._scheduler.running if g.is_starved]:
            if self._store.is_busy:
                return
            # While one is tried alone after a failure, nobody else goes on and makes room.
            retried = next((g for g in starved if g.retry_until is not None), None)
            if retried is None and len(starved) < len(self._scheduler.running):
                return
            if retried is None and len(starved) > 1:
                self._preempt(self._scheduler.victim() or starved[0])
            elif not self._memory.tighten(retried or starved[0]):
                self._attempt(retried or starved[0], self._sharing.settle_for_loaded)
            for generation in starved:
                self._advance(generation, self._restore_bytes())

    def _advance(self, generation: Generation, max_bytes: int) -> int:
        """Load more of a sequence; working copies give way if its next part finds no room."""
        if (restore := generation.restore) is None:
            return 0
        before = restore.num_bytes
        self._attempt(generation, lambda it: self._sharing.advance(it, max_bytes))
        while generation.is_starved and self._memory.close_oldest_idle():
            self._attempt(generation, lambda it: self._sharing.advance(it, max_bytes))
        return restore.num_bytes - before

    def _attempt(self, generation: Generation, work: Callable[[Generation], None]) -> None:
        """Do something for a request that ends it if it fails."""
        try:
            work(generation)
        except Exception as error:  # noqa: BLE001 - whatever the backend raises ends one request
            self._fail(generation, as_backend_error(error))

    def _restore_bytes(self) -> int:
        """How much may be loaded in a step: little while others decode."""
        others = [g for g in self._scheduler.running if g.restore is None and not g.is_prefilling]
        return self._sharing.pace.bytes_per_step if others else sys.maxsize

    def _is_restoring(self) -> bool:
        """Whether the next step can go on with a restore at once."""
        return any(g.restore is not None and g.restore.is_ready for g in self._scheduler.running)

    # -- launch and collect ---------------------------------------------------------------------

    def _launch(self, rows: Sequence[tuple[Generation, Chunk]]) -> None:
        started = self._clock()
        try:
            ticket = self._backend.launch(Step(tuple([chunk for _, chunk in rows])))
        except Exception as error:  # noqa: BLE001 - isolated below, never lost
            self._isolate(rows, error)
            return
        num_prompt = num_drafted = 0
        for generation, chunk in rows:
            if not generation.is_reuse_reported:
                generation.is_reuse_reported = True
                generation.job.trace.prefilled = started
                self._say(generation, generation.report_progress())
            generation.count_launched(chunk)
            num_drafted += len(chunk.draft)
            if chunk.start + 1 < generation.num_prompt:
                num_prompt += chunk.num_tokens
        self._flights.append(Flight(tuple(rows), ticket, started, num_prompt, num_drafted))

    def _collect_all(self, but: int = 0) -> None:
        while len(self._flights) > but:
            self._collect()

    def _collect(self) -> None:
        flight = self._flights.popleft()
        try:
            output = self._backend.collect(flight.ticket)
        except Exception as error:  # noqa: BLE001 - isolated below, never lost
            self._isolate(flight.rows, error)
            return
        now = self._clock()
        begun = max(flight.launched_at, self._last_collect)
        if self._scheduler.limits.draft_tokens and flight.follows(self._last_flight):
            self._planner.observe(len(flight.rows), flight.num_drafted, now - self._last_collect)
        self._last_collect, self._last_flight = now, flight
        self._scheduler.budget.observe(flight.num_prompt_tokens, now - begun)
        self._watch.note_step(now - begun, len(flight.rows), flight.num_prompt_tokens)
        for (generation, chunk), row in zip(flight.rows, output.rows, strict=True):
            try:
                self._apply(generation, chunk, row)
            except Exception as error:  # noqa: BLE001 - one request's defect ends that request
                if not isinstance(error, InvalidRequestError):
                    _log.exception("a row could not be handled")
                if not generation.is_done:
                    self._fail(generation, as_backend_error(error))

    def _isolate(self, rows: Sequence[tuple[Generation, Chunk]], error: Exception) -> None:
        """After a failed step: reopen its sequences and try each alone, once."""
        _log.error("a step of %d rows failed", len(rows), exc_info=error)
        failed = {generation.seq: (generation, chunk) for generation, chunk in rows}
        for flight in self._flights:
            failed.update({g.seq: (g, c) for g, c in flight.rows if g.seq not in failed})
        self._flights.clear()
        for generation, chunk in failed.values():
            self._isolate_one(generation, chunk, error)

    def _isolate_one(self, generation: Generation, chunk: Chunk, error: Exception) -> None:
        was_retried = generation.retry_until is not None
        generation.num_rows = 0
        generation.is_sealing = False  # what a failed step left behind is not to be trusted
        if generation.is_done:
            self._retire(generation, is_sound=False)
        elif was_retried:
            self._fail(generation, as_backend_error(error))
        else:
            self._close(generation)
            generation.retry_until = chunk.start + chunk.num_tokens
            self._scheduler.requeue(generation)

    # -- what came of it ------------------------------------------------------------------------

    def _apply(self, generation: Generation, chunk: Chunk, row: Row) -> None:
        generation.num_rows -= 1
        generation.num_draws -= chunk.draw is not None
        if generation.is_done:
            # A row that was under way when the reply ended computed the state of its last token.
            end = chunk.start + chunk.num_tokens
            if not isinstance(row, RowFailed) and end <= len(generation.tokens):
                generation.num_computed = end
            if not generation.num_rows:
                self._retire(generation)
            return
        if isinstance(row, RowFailed):
            self._fail(generation, BackendError(row.reason))
            return
        generation.num_computed = chunk.start + chunk.num_tokens
        if generation.retry_until is not None and generation.num_computed >= generation.retry_until:
            generation.retry_until = None
        self._sharing.seal(generation)
        if isinstance(row, Computed):
            self._say(generation, generation.report_progress())
        else:
            self._accept_all(generation, row)

    def _accept_all(self, generation: Generation, row: Sampled) -> None:
        """Take the guesses that proved right, whose state is there, and the token after them."""
        before = len(generation.tokens)
        for guess, drawn in enumerate(row.accepted):
            self._accept(generation, drawn, guess)
            if generation.is_done:
                break
            generation.num_launched += 1
            generation.num_computed += 1
            self._sharing.seal(generation)
        else:
            self._accept(generation, row)
        num_tokens = len(generation.tokens) - before
        self._watch.note_row(generation.job.trace, self._last_collect, num_tokens)

    def _accept(self, generation: Generation, row: Sampled, guess: int | None = None) -> None:
        """Take a sampled token: show its text, and see whether it ends the reply."""
        self._say(generation, generation.take(row, guess, self._tokenizer.eos_ids))
        if (reason := generation.ending(self._backend.spec.max_context)) is not None:
            self._finish(generation, reason)

    def _say(self, generation: Generation, event: EngineEvent | None) -> None:
        if event is not None:
            self._events.append((generation.job.id, event))

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        self._say(generation, generation.assembler.finish())
        if (stop := generation.assembler.stop) is not None:
            reason = FinishReason.STOP_SEQUENCE
        self._end(generation, Finished(reason, generation.final_usage, stop))

    def _fail(self, generation: Generation, error: SemanticError) -> None:
        self._end(generation, Failed(error))

    def _end(self, generation: Generation, event: Finished | Failed) -> None:
        """Note the final event; it is given when nothing of the request is on the device."""
        generation.is_done = True
        generation.final = event
        self._scheduler.remove(generation)
        if not generation.num_rows:
            self._retire(generation)

    def _retire(self, generation: Generation, *, is_sound: bool = True) -> None:
        """Put a request away that ended, keeping its state if it is sound; give its final event."""
        del self._generations[generation.job.id]
        self._planner.forget(generation)
        self._watch.note_end(generation)
        if generation.seq in self._memory.sequences:
            self._sharing.seal_tail(generation)
            is_finished = isinstance(generation.final, Finished)
            if is_sound and is_finished and generation.num_computed:
                self._memory.go_idle(generation, self._scheduler.limits.max_idle)
            else:
                self._close(generation)
        if isinstance(generation.final, Finished):
            self._say(generation, generation.reply_state)
        self._say(generation, generation.final)

    def _expire(self, now: float) -> None:
        for generation in [g for g in self._generations.values() if g.is_late(now)]:
            error: SemanticError = GenerationTimeoutError("the request's deadline passed.")
            if generation is self._short_of_memory:
                error = PoolExhaustedError("no memory became free in time.", retry_after_s=5)
            self._fail(generation, error)

    def _hand_out(self) -> None:
        self._backend.flush()  # what is kept of a step may be waited for from here on
        if self._events:
            events, self._events = self._events, []
            self._emit(events)
