"""The device loop: batches many requests on one device.

Batching does not change results: each request gets the tokens it would get alone. One iteration
admits requests, schedules and launches a step, collects the previous step (or this one, without
pipelining), and emits the events. Runs on the device thread only; `device_thread.py` owns the
thread and the queues.
"""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence

from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.admission import SequenceAdmission
from semantic.application.engine.embedding import EmbeddingQueue
from semantic.application.engine.generation import Generation
from semantic.application.engine.kv_reuse import PrefixSharing
from semantic.application.engine.memory import WorkingMemory
from semantic.application.engine.request import (
    AheadJob,
    Clock,
    EmbeddingJob,
    EngineEvent,
    EventBatch,
    EventSink,
    GuestSequence,
    Job,
    as_backend_error,
    monotonic,
)
from semantic.application.engine.scheduler import ConcurrentScheduler
from semantic.application.engine.speculative.ahead import AheadQueue
from semantic.application.engine.speculative.head_source import HeadDrafts
from semantic.application.engine.speculative.model_source import ModelDrafts
from semantic.application.engine.speculative.planner import AdaptiveDraftPlanner, DraftPlanner
from semantic.application.engine.steps import EngineWatch, LaunchedStep
from semantic.application.parsing import TextAssembler
from semantic.application.settings import EngineLimits
from semantic.domain.errors import (
    BackendError,
    DeviceLostError,
    GenerationTimeoutError,
    InvalidRequestError,
    ModelSwapError,
    PoolExhaustedError,
    SemanticError,
)
from semantic.domain.events import Failed, Finished
from semantic.domain.sampling import FinishReason
from semantic.domain.spec import LayerKind
from semantic.ports.backend import (
    Chunk,
    Computed,
    KVPayload,
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
    """Continuous batching over a backend, with the KV cache in a block pool."""

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
        """Make the engine the backend's only user.

        `on_ready` is called on any thread when a pending read completes and a step can proceed.
        """
        self._backend, self._tokenizer, self._store = backend, tokenizer, store
        self._emit, self._clock = emit, clock
        self._memory = WorkingMemory(backend, store)
        self._scheduler = ConcurrentScheduler(
            limits,
            window=backend.spec.window,
            has_state=backend.spec.num_state > 0,
            needs_whole_images=backend.traits.needs_whole_images,
            max_step_tokens=backend.traits.max_step_tokens,
        )
        budget = self._scheduler.budget
        self._sharing = PrefixSharing(backend, store, self._memory.idle, budget, on_ready)
        own = None if backend.head is None else HeadDrafts(backend.head, clock)
        self.draft_with(AdaptiveDraftPlanner(backend.traits, tokenizer.eos_ids, own))
        self._generations: dict[str, Generation] = {}
        self._launched: deque[LaunchedStep] = deque()
        self._last_collect = 0.0
        self._last_step: LaunchedStep | None = None
        self._events: EventBatch = []
        self._orders, self._sequence_ids = itertools.count(), itertools.count()
        self._embeddings = EmbeddingQueue(backend, self._memory, self._sequence_ids)
        self._watch = EngineWatch(store.telemetry)
        ids = self._sequence_ids
        self._ahead = AheadQueue(backend, self._memory, store, ids, budget, on_ready)
        self._admission = SequenceAdmission(
            self._memory,
            self._scheduler,
            self._sharing,
            self._sequence_ids,
            counts=self._watch.counts,
            is_room_coming=lambda: (
                store.is_busy or bool(self._embeddings.sequences or self._guests)
            ),
            fail=self._fail,
        )
        self._short_of_memory: Generation | None = None
        self._guests: set[GuestSequence] = set()

    # -- called by the device thread ------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._generations or self._launched or self._events or self._embeddings.jobs)

    @property
    def has_ahead(self) -> bool:
        """Whether there are prompts to compute ahead, with `step_ahead` while there is no work."""
        return self._ahead.can_step

    def submit(self, job: Job | EmbeddingJob) -> None:
        """Queue a job; a prompt too long to run even alone fails immediately."""
        if isinstance(job, EmbeddingJob):
            self._ahead.interrupt()
            self._embeddings.jobs.append(job)
            return
        self._ahead.interrupt(None if job.is_ephemeral else job.agent)
        token_bytes = self._tokenizer.token_bytes
        assembler = TextAssembler(token_bytes, job.stop.strings, job.visible, job.spelled)
        block_tokens = self._backend.spec.block_tokens
        generation = Generation(job, next(self._orders), assembler, self._clock(), block_tokens)
        self._generations[job.id] = generation
        self._scheduler.enqueue(generation)
        room = min(job.max_tokens, 1)
        if len(job.tokens) + room > self.longest_sequence:
            most = max(self.longest_sequence - room, 0)
            what = f"a prompt of {len(job.tokens)} tokens does not fit this server's memory"
            self._fail(generation, PoolExhaustedError(f"{what}; the limit is {most} tokens."))
            return
        self._sharing.prefetch(generation)

    @property
    def longest_sequence(self) -> int:
        """Tokens of prompt and reply that fit the memory budget if nothing else runs."""
        return self._memory.longest_that_fits()

    def cancel(self, job_id: str) -> None:
        """End a request; its sequence closes once the device has no row of it in progress."""
        generation = self._generations.get(job_id)
        if generation is not None and not generation.is_done:
            self._finish(generation, FinishReason.CANCELLED)

    def close_idle(self, agent: str) -> None:
        self._ahead.interrupt(agent)
        self._memory.close_idle_of(agent)

    def compute_ahead(self, job: AheadJob) -> None:
        self._ahead.add(job)

    def step_ahead(self) -> None:
        """Compute a piece of a prompt ahead; does nothing if there is work."""
        if self.has_ahead and not self.has_work:
            self._ahead.step(self._scheduler.limits)

    def reconfigure(self, limits: EngineLimits) -> None:
        self._scheduler.limits = limits

    def draft_with(self, planner: DraftPlanner) -> None:
        self._planner = self._scheduler.planner = planner

    def add_draft_model(self, backend: ModelBackendPort) -> None:
        """Draft with a second model, not with a head; its sequences share the memory budget."""
        vocab_size = self._backend.spec.vocab_size
        drafts = ModelDrafts(backend, self._store, self._clock, vocab_size)
        self._memory.release_drafts = drafts.release
        self.draft_with(AdaptiveDraftPlanner(self._backend.traits, self._tokenizer.eos_ids, drafts))

    def step(self) -> bool:
        """Run one iteration; returns whether there was work to launch, collect, embed or load."""
        now = self._clock()
        self._expire(now)
        if self._launched and self._scheduler.wants_tokens():
            self._collect_all()
        rows = self._schedule(now)
        if rows:
            self._launch(rows)
        embeddings, launched = self._embeddings, self._launched
        is_embedding = bool(embeddings.jobs) and not embeddings.is_waiting
        is_busy = bool(rows or launched or is_embedding) or self._admission.can_restore
        is_awaited = not rows or not launched or launched[-1].is_awaited(len(self._generations))
        is_awaited = is_awaited or self._scheduler.is_exclusive
        self._collect_all(but=0 if is_awaited else self._backend.traits.pipeline_depth)
        if embeddings.jobs:
            may_wait = bool(self._scheduler.running or launched) or self._store.is_busy
            is_alone = not self._generations
            self._events += embeddings.step(is_alone=is_alone, may_wait=may_wait)
        self._emit_events()
        return is_busy

    def end_all(self, error: SemanticError) -> int:
        """Fail every request, seal its computed state and close all sequences; returns how many."""
        self._collect_all()
        for generation in (running := list(self._generations.values())):
            self._fail(generation, error)
        self.abandon(error)
        return len(running)

    def abandon(self, error: SemanticError) -> None:
        """Fail every request and close all sequences unsealed: at shutdown or an internal error."""
        self._launched.clear()
        self._ahead.clear()
        self._memory.close_all()
        for generation in list(self._generations.values()):
            self._planner.forget(generation)
            generation.prefix.end_restore()
            generation.progress.num_rows = 0
            if not generation.is_done:
                self._scheduler.remove(generation)
                generation.final = Failed(error)
            self._events.append((generation.job.id, generation.final or Failed(error)))
        self._generations.clear()
        self._events += self._embeddings.fail(error)
        self._guests.clear()
        self._emit_events()

    def resize(self, nbytes: int) -> None:
        self._ahead.interrupt()
        self._memory.resize_budget(nbytes)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the engine's parts disagree; call it between steps."""
        self._store.check_integrity()
        self._scheduler.check_integrity()
        running = {g.seq for g in self._scheduler.running}
        lingering = {g.seq for g in self._generations.values() if g.is_done and g.progress.num_rows}
        idle = {copy.seq for copy in self._memory.idle}
        others = self._embeddings.sequences | self._ahead.sequences
        others |= {guest.seq for guest in self._guests}
        if self._memory.sequences != running | lingering | idle | others:
            raise AssertionError("memory is reserved for sequences that are not open")

    # -- sequences of other parts of the server -------------------------------------------------

    def open_guest(self, tokens: Sequence[int]) -> GuestSequence:
        """Open a sequence that belongs to no request; `close_guest` must follow.

        Raises:
            PoolExhaustedError: the sequence does not fit beside the running requests.
        """
        guest = GuestSequence(SequenceId(next(self._sequence_ids)))
        while not self._memory.resize(guest.seq, len(tokens)):
            if not self._memory.make_room():
                what = f"a sequence of {len(tokens)} tokens does not fit this server's memory now"
                raise PoolExhaustedError(f"{what}; try again.", retry_after_s=5)
        self._guests.add(guest)
        self._backend.open_sequence(guest.seq, tokens)
        return guest

    def load_guest(self, guest: GuestSequence, parts: Sequence[KVPayload]) -> None:
        """Extend a guest with stored KV cache; `CacheCorruptionError` if that is malformed."""
        self._require_guest(guest)
        self._backend.load(guest.seq, parts, parts[-1].end)

    def compute_guest(
        self, guest: GuestSequence, start: int, tokens: Sequence[int], kinds: Sequence[LayerKind]
    ) -> list[KVPayload]:
        """Compute the next tokens of a guest; returns their KV cache for some kinds of layers."""
        self._require_guest(guest)
        self._collect_all()
        step = Step((Chunk(guest.seq, start, tuple(tokens)),))
        (row,) = self._backend.collect(self._backend.launch(step)).rows
        if isinstance(row, RowFailed):
            raise BackendError(row.reason)
        end = start + len(tokens)
        tickets = [self._backend.snapshot(guest.seq, start, end, kind) for kind in kinds]
        payloads = [self._backend.payload(ticket) for ticket in tickets]
        self._backend.flush()
        return payloads

    def close_guest(self, guest: GuestSequence) -> None:
        if guest in self._guests:
            self._guests.remove(guest)
            self._memory.close_sequence(guest.seq)

    def _require_guest(self, guest: GuestSequence) -> None:
        if guest not in self._guests:
            raise ModelSwapError("the model was swapped or has failed; try again.")

    # -- schedule -------------------------------------------------------------------------------

    def _schedule(self, now: float) -> list[tuple[Generation, Chunk]]:
        if not self._admission.make_room(may_preempt=not self._launched):
            return []
        self._short_of_memory = None
        self._admission.advance_restores()
        for candidate in () if self._embeddings.is_waiting else self._scheduler.candidates(now):
            if self._sharing.should_wait(candidate, self._scheduler.running):
                continue
            if not self._admission.admit(candidate):
                self._short_of_memory = candidate
                break
        rows: list[tuple[Generation, Chunk]] = []
        for portion in self._scheduler.plan_step(now):
            generation = portion.generation
            try:
                rows.append((generation, generation.next_chunk(portion.num_tokens, portion.draft)))
            except Exception as error:  # noqa: BLE001 - a broken constraint fails one request
                self._fail(generation, as_backend_error(error))
        return rows

    # -- launch and collect ---------------------------------------------------------------------

    def _launch(self, rows: Sequence[tuple[Generation, Chunk]]) -> None:
        started = self._clock()
        try:
            ticket = self._backend.launch(Step(tuple([chunk for _, chunk in rows])))
        except Exception as error:  # noqa: BLE001 - `_isolate` retries each row alone
            self._isolate(rows, error)
            return
        for generation, chunk in rows:
            if not generation.progress.is_started:
                generation.job.trace.prefilled = started
                self._queue_event(generation, generation.report_progress())
            generation.count_launched(chunk)
        step = LaunchedStep(tuple(rows), ticket, started)
        self._launched.append(step)
        if step.num_drafted and not step.prompts.num_tokens:
            self._planner.draft_ahead([generation for generation, _ in rows], ticket)

    def _collect_all(self, but: int = 0) -> None:
        while len(self._launched) > but:
            self._collect()

    def _collect(self) -> None:
        step = self._launched.popleft()
        try:
            output = self._backend.collect(step.ticket)
        except Exception as error:  # noqa: BLE001 - `_isolate` retries each row alone
            self._isolate(step.rows, error)
            return
        now = self._clock()
        begun = max(step.launched_at, self._last_collect)
        if self._scheduler.limits.draft_tokens and step.follows(self._last_step):
            self._planner.observe(len(step.rows), step.num_drafted, now - self._last_collect)
        self._last_collect, self._last_step = now, step
        self._scheduler.budget.observe(step.prompts, now - begun)
        self._watch.note_step(now - begun, len(step.rows), step.prompts.num_tokens)
        for (generation, chunk), row in zip(step.rows, output.rows, strict=True):
            try:
                self._apply(generation, chunk, row)
            except Exception as error:  # noqa: BLE001 - a defect in one row fails one request
                if not isinstance(error, InvalidRequestError):
                    _log.exception("failed to process a row; its request fails")
                if not generation.is_done:
                    self._fail(generation, as_backend_error(error))

    def _isolate(self, rows: Sequence[tuple[Generation, Chunk]], error: Exception) -> None:
        """After a failed step: close its sequences and retry each alone, once."""
        _log.error("a step of %d rows failed; retrying each row alone", len(rows), exc_info=error)
        failed = {generation.seq: (generation, chunk) for generation, chunk in rows}
        for step in self._launched:
            failed.update({g.seq: (g, c) for g, c in step.rows if g.seq not in failed})
        self._launched.clear()
        for generation, chunk in failed.values():
            self._isolate_one(generation, chunk, error)

    def _isolate_one(self, generation: Generation, chunk: Chunk, error: Exception) -> None:
        was_retried = generation.progress.retry_until is not None
        generation.progress.num_rows = 0
        generation.sealing.stop()
        if generation.is_done:
            self._retire(generation, is_sound=False)
        elif was_retried:
            self._fail(generation, as_backend_error(error))
        else:
            self._admission.close_sequence(generation)
            generation.progress.retry_until = chunk.start + chunk.num_tokens
            self._scheduler.requeue(generation)

    # -- apply results --------------------------------------------------------------------------

    def _apply(self, generation: Generation, chunk: Chunk, row: Row) -> None:
        progress, end = generation.progress, chunk.start + chunk.num_tokens
        progress.count_collected(chunk)
        if generation.is_done:
            # A row launched before the reply ended has computed the state of its last token.
            if not isinstance(row, RowFailed) and end <= len(generation.tokens):
                progress.count_computed(end)
            if not progress.num_rows:
                self._retire(generation)
            return
        if isinstance(row, RowFailed):
            self._fail(generation, BackendError(row.reason))
            return
        progress.count_computed(end)
        self._sharing.seal(generation)
        self._queue_event(generation, generation.take_scores(chunk, row))
        if isinstance(row, Computed):
            self._queue_event(generation, generation.report_progress())
            if generation.is_prompt_done:
                self._finish(generation, FinishReason.MAX_TOKENS)
        else:
            self._accept_all(generation, row)

    def _accept_all(self, generation: Generation, row: Sampled) -> None:
        """Take the accepted draft tokens, whose state is computed, and the token after them."""
        before = len(generation.tokens)
        for index, drawn in enumerate(row.accepted):
            self._accept(generation, drawn, index)
            if generation.is_done:
                break
            generation.progress.count_accepted()
            self._sharing.seal(generation)
        else:
            self._accept(generation, row)
        num_tokens = len(generation.tokens) - before
        self._watch.note_row(generation.job.trace, self._last_collect, num_tokens)

    def _accept(self, generation: Generation, row: Sampled, draft_index: int | None = None) -> None:
        self._queue_event(generation, generation.append(row, draft_index, self._tokenizer.eos_ids))
        if (reason := generation.finish_reason(self._backend.spec.max_context)) is not None:
            self._finish(generation, reason)

    def _queue_event(self, generation: Generation, event: EngineEvent | None) -> None:
        if event is not None:
            self._events.append((generation.job.id, event))

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        self._queue_event(generation, generation.assembler.finish())
        if (stop := generation.assembler.stop) is not None:
            reason = FinishReason.STOP_SEQUENCE
        self._end(generation, Finished(reason, generation.usage, stop))

    def _fail(self, generation: Generation, error: SemanticError) -> None:
        self._end(generation, Failed(error))

    def _end(self, generation: Generation, event: Finished | Failed) -> None:
        """Set the final event; it is emitted once the device has no row of the request."""
        generation.final = event
        self._scheduler.remove(generation)
        if not generation.progress.num_rows:
            self._retire(generation)

    def _retire(self, generation: Generation, *, is_sound: bool = True) -> None:
        """Seal an ended request, keep it as an idle copy or close it, and emit its final event."""
        del self._generations[generation.job.id]
        self._planner.forget(generation)
        self._watch.note_end(generation)
        if generation.seq in self._memory.sequences:
            is_sound = is_sound and self._cut_state(generation)
            self._sharing.seal_tail(generation)
            is_kept = isinstance(generation.final, Finished) and not generation.job.is_ephemeral
            if is_sound and is_kept and generation.progress.num_computed:
                self._memory.go_idle(generation, self._scheduler.limits.max_idle)
            else:
                self._admission.close_sequence(generation)
        if isinstance(generation.final, Finished):
            self._queue_event(generation, generation.reply_state)
        self._queue_event(generation, generation.final)

    def _cut_state(self, generation: Generation) -> bool:
        """Cut recurrent state at a reply's end, which may be inside a draft; False if it fails."""
        try:
            if self._backend.spec.num_state:
                self._backend.truncate(generation.seq, generation.progress.num_computed)
        except DeviceLostError:
            raise
        except Exception:  # noqa: BLE001 - caching never fails a request
            _log.exception("cannot cut the state at the end of a reply; it is not kept")
            generation.sealing.stop()
            return False
        return True

    def _expire(self, now: float) -> None:
        for generation in [g for g in self._generations.values() if g.is_late(now)]:
            error: SemanticError = GenerationTimeoutError("the request exceeded its deadline.")
            if generation is self._short_of_memory:
                error = PoolExhaustedError(
                    "no memory became free before the request's deadline.", retry_after_s=5
                )
            self._fail(generation, error)

    def _emit_events(self) -> None:
        self._backend.flush()  # starts deferred snapshot copies: other threads may wait for them
        if self._events:
            events, self._events = self._events, []
            self._emit(events)
