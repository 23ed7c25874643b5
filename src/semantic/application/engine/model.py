"""A loaded model and its lifecycle, and what other threads send to its thread."""

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.request import EmbeddingJob, EventBatch, EventSink, Job
from semantic.domain.agents import Principal
from semantic.domain.blocks import BlockName, BlockNamespace
from semantic.domain.errors import ConflictError, DrainingError, ModelSwapError, SemanticError
from semantic.domain.events import DraftOrigin, Failed, Finished
from semantic.domain.reply_format import ReplyFormat
from semantic.domain.sampling import SamplingDefaults
from semantic.ports.backend import ModelBackendPort
from semantic.ports.inbound import ModelState
from semantic.ports.models import ModelEntry
from semantic.ports.text import GrammarPort, TokenizerPort
from semantic.ports.vision import VisionPort

T = TypeVar("T")
STARTING = "starting"  # the loading step before the model was checked


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A smaller model with the same tokenizer, which drafts tokens for the served one."""

    id: str
    backend: ModelBackendPort


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to serve requests.

    Attributes:
        fingerprint: Identifies the model; if empty, `id` does.
        grammar: Constrains replies to a schema or grammar; None disables this.
        draft: Loaded and unloaded with the model; None if there is none.
        draft_note: Why the model does not draft with a head of its own; empty if it need not.
        vision: Prepares images; None if the model does not accept images.
    """

    id: str
    backend: ModelBackendPort
    tokenizer: TokenizerPort
    fingerprint: str = ""
    kv_format: str = "raw"
    reply_format: ReplyFormat = field(default_factory=ReplyFormat)
    grammar: GrammarPort | None = None
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    vision: VisionPort | None = None
    draft: DraftModel | None = None
    draft_note: str = ""

    @property
    def drafts_by(self) -> str:
        """What drafts tokens beside memory: a model's id, `mtp` for the own head, or nothing."""
        if self.draft is not None:
            return self.draft.id
        return "" if self.backend.head is None else str(DraftOrigin.HEAD)

    @property
    def backends(self) -> tuple[ModelBackendPort, ...]:
        """The backends to shut down, in this order."""
        return (self.backend,) if self.draft is None else (self.draft.backend, self.backend)

    @property
    def system_fingerprint(self) -> str:
        """A short hash of the model and the backend's KV ABI, for clients to compare."""
        name = f"{self.fingerprint or self.id}/{self.backend.traits.kv_abi}"
        return f"fp_{hashlib.sha256(name.encode()).hexdigest()[:10]}"

    @property
    def naming(self) -> tuple[str, str]:
        """The model's identity and KV format; both are part of every block name."""
        return self.fingerprint or self.id, f"{self.backend.traits.kv_abi}/{self.kv_format}"

    def root(self, principal: Principal) -> BlockName:
        return BlockNamespace(*self.naming, principal.salt).root()

    def text_root(self, principal: Principal) -> BlockName:
        """Independent of the KV format, since token ids are the same in every dtype."""
        return BlockNamespace(self.naming[0], "", principal.salt).root()


def shut_down(backends: Sequence[ModelBackendPort]) -> None:
    """Free the memory of a model and of its draft model."""
    for backend in backends:
        backend.shutdown()


# Loads a model on the device thread; its argument receives human-readable progress messages.
Loader: TypeAlias = Callable[[Callable[[str], None]], LoadedModel]


def _uncancellable() -> Future[T]:
    """Return a running future: asyncio would cancel a pending one whose waiter is cancelled."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


def fail(future: Future[None] | Future[int], error: BaseException) -> None:
    """Resolve a future with an error, unless another thread has resolved it."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


@dataclass(frozen=True, slots=True)
class Call:
    """Runs `work` on the engine between two steps; without an engine it does nothing."""

    work: Callable[[BlockPoolBatchEngine], None]
    done: Future[None] = field(default_factory=_uncancellable)


@dataclass(frozen=True, slots=True)
class SwapReport:
    """Result of a swap.

    Attributes:
        seconds: Time during which requests had to wait.
        num_cut: Number of requests that were ended early.
    """

    previous: str | None
    model: str | None
    seconds: float = 0.0
    num_cut: int = 0

    def resolved(self) -> "Future[SwapReport]":
        done: Future[SwapReport] = Future()
        done.set_result(self)
        return done


@dataclass(frozen=True, slots=True)
class Exchange:
    """Unloads the model after at most `drain_s` seconds and loads another; None loads none.

    Attributes:
        done: Resolves to the number of requests cut short.
    """

    load: Loader | None
    drain_s: float = 0.0
    done: Future[int] = field(default_factory=_uncancellable)

    def reported(self, model: str) -> Future[SwapReport]:
        """Return a future that resolves after `done`, for a load that belongs to no swap."""
        reported: Future[SwapReport] = _uncancellable()

        def report(loaded: Future[int]) -> None:
            if (error := loaded.exception()) is not None:
                reported.set_exception(error)
            else:
                reported.set_result(SwapReport(None, model, num_cut=loaded.result()))

        self.done.add_done_callback(report)
        return reported


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the device thread."""


Command: TypeAlias = Call | Exchange | Stop


class LiveRequests:
    """Jobs whose final event has not been emitted. Thread-safe."""

    def __init__(self, lock: threading.RLock, emit: EventSink) -> None:
        """Callers hold `lock` to check and add in one piece."""
        self._lock, self._emit = lock, emit
        self._jobs: dict[str, Job | EmbeddingJob] = {}
        self._idle_since = time.monotonic()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def ids(self) -> set[str]:
        with self._lock:
            return set(self._jobs)

    @property
    def idle_s(self) -> float:
        with self._lock:
            return 0.0 if self._jobs else time.monotonic() - self._idle_since

    def reset_idle(self) -> None:
        self._idle_since = time.monotonic()

    def add(self, job: Job | EmbeddingJob) -> None:
        """Add a job; its final event or `fail` removes it."""
        with self._lock:
            self._jobs[job.id] = job

    def emit(self, events: EventBatch) -> None:
        """Emit the events of live requests; drop those of requests that `fail` has ended."""
        ended = {name for name, event in events if isinstance(event, Finished | Failed)}
        with self._lock:
            wanted = [item for item in events if item[0] in self._jobs]
            for name in ended:
                self._jobs.pop(name, None)
            self._idle_since = time.monotonic()
        if wanted:
            self._emit(wanted)

    def fail(self, error: SemanticError, affected: set[str] | None = None) -> set[str]:
        """Fail all live requests, or only the affected ones; returns their ids."""
        with self._lock:
            failed = set(self._jobs) if affected is None else set(self._jobs) & affected
            jobs = [self._jobs.pop(name) for name in failed]
        for job in jobs:
            if isinstance(job, EmbeddingJob):
                job.fail(error)
        if failed:
            self._emit([(name, Failed(error)) for name in failed])
        return failed


@dataclass(slots=True, eq=False)
class ModelSwap:
    """A requested swap; `target` is None for an unload.

    Attributes:
        step: Human-readable step of the fetch, while the previous model still serves.
        served_after: The model that is served once the exchange has succeeded.
        exchange: The exchange on the device; None while the new model is fetched.
    """

    target: ModelEntry | None
    drain_s: float
    step: str = "queued"
    served_after: ModelEntry | None = None
    exchange: Exchange | None = None
    done: Future[SwapReport] = field(default_factory=Future)


_NEXT_STATES = {
    ModelState.LOADING: {ModelState.LOADING, ModelState.READY, ModelState.SWAPPING},
    ModelState.READY: {ModelState.SWAPPING, ModelState.HUNG},
    ModelState.SWAPPING: {
        ModelState.SWAPPING,
        ModelState.LOADING,
        ModelState.UNLOADED,
        ModelState.HUNG,
    },
    ModelState.UNLOADED: {ModelState.SWAPPING},
    ModelState.FAILED: {ModelState.SWAPPING},
    ModelState.HUNG: {ModelState.READY, ModelState.SWAPPING},
}


class ModelLifecycle:
    """The state of the served model, and the swap in progress. Thread-safe.

    The device thread and the registry change the state only here. One model passes through these
    states; from each of them it can also become FAILED, or STOPPED, which is final::

        LOADING -> READY <-> HUNG
        READY -> SWAPPING -> LOADING (the next model)
                          -> UNLOADED -> SWAPPING (the next request)

    A swap begins while the previous model is READY or UNLOADED, and the new one is fetched. The
    exchange begins with SWAPPING and ends, with the swap, when a model is READY or UNLOADED. If the
    new model fails to load, a second exchange of the same swap loads the previous one again.

    Attributes:
        lock: Held by callers that must read and change the state in one piece.
        detail: The current loading step, or the reason for a failure.
        model: The loaded model; None until it is ready.
        longest_sequence: Tokens of prompt and reply that fit in memory; 0 until a model is ready.
        loading: The exchange whose model is being loaded; None while no model is.
        served: The model that is served, or was served last; None before the registry sets it.
        on_step: Called within the lock for every step of an exchange that belongs to a swap.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # reentrant: a signal handler may run while it is held
        self.state = ModelState.LOADING
        self.detail = STARTING
        self.model: LoadedModel | None = None
        self.longest_sequence = 0
        self.loading: Exchange | None = None
        self.served: ModelEntry | None = None
        self.served_since = time.monotonic()
        self.swap: ModelSwap | None = None
        self.on_step: Callable[[ModelSwap, ModelState, str], None] = lambda *_: None
        self._before_hang = (ModelState.READY, "ready")

    @property
    def public_state(self) -> ModelState:
        """The state that clients see: SWAPPING from the end of the old model to the end of a swap.

        Not LOADING, which says that the first model loads.
        """
        with self.lock:
            is_served = self.swap is None or self.state is ModelState.READY
            return self.state if is_served else ModelState.SWAPPING

    def ready_model(self) -> LoadedModel:
        """Return the loaded model.

        Raises:
            ModelSwapError: the model is loading, unloaded, hung, or failed to load.
            DrainingError: the server is shutting down.
        """
        with self.lock:
            if self.model is not None and self.state is ModelState.READY:
                return self.model
            if self.state is ModelState.STOPPED:
                raise DrainingError("the server is shutting down.", retry_after_s=5)
            if self.state is ModelState.FAILED:
                raise ModelSwapError(f"no model is served: {self.detail}")
            if self.state is ModelState.HUNG:
                raise ModelSwapError("the device does not respond.", retry_after_s=30)
            if self.state is ModelState.UNLOADED:
                raise ModelSwapError("no model is loaded.", retry_after_s=2)
            raise ModelSwapError(f"the model is loading: {self.detail}.", retry_after_s=2)

    # -- swaps ----------------------------------------------------------------------------------

    def begin_swap(self, target: ModelEntry | None, drain_s: float) -> ModelSwap:
        """Record a swap; the loaded model still serves. `ConflictError` during another swap."""
        with self.lock:
            if self.swap is not None:
                raise ConflictError(f"a swap is in progress: {self.progress}.", param="model")
            self.swap = ModelSwap(target, drain_s)
            return self.swap

    @property
    def progress(self) -> str:
        with self.lock:
            if (swap := self.swap) is None:
                return f"the model is loading: {self.detail}"
            entry = swap.target or self.served
            step = swap.step if swap.exchange is None else self.detail
            return f"model {entry.id}: {step}" if entry else step

    def begin_exchange(self, exchange: Exchange, detail: str) -> None:
        """End the service of the loaded model; the exchange belongs to the swap in progress."""
        with self.lock:
            if self.swap is not None:
                self.swap.exchange = exchange
            if self.state is not ModelState.LOADING:  # else it is exchanged once it is loaded
                self._set(ModelState.SWAPPING, detail)

    def end_swap(self, swap: ModelSwap) -> None:
        """End a swap that failed; the state of the model stays as it is."""
        with self.lock:
            if self.swap is swap:
                self.swap, self.served_since = None, time.monotonic()

    # -- the device -----------------------------------------------------------------------------

    def note_swapping(self, step: str) -> None:
        self._set(ModelState.SWAPPING, step)

    def begin_load(self, exchange: Exchange) -> bool:
        """Record that a model is being loaded; returns False after `stop`: then none is."""
        with self.lock:
            if self.state is ModelState.STOPPED:
                return False
            self.loading = exchange
            self.note_loading(STARTING)
            return True

    def note_loading(self, step: str) -> None:
        self._set(ModelState.LOADING, step)

    def set_ready(self, exchange: Exchange, model: LoadedModel, longest_sequence: int) -> None:
        """Serve a model; ends the swap that the exchange belongs to."""
        with self.lock:
            self.model, self.longest_sequence, self.loading = model, longest_sequence, None
            if self.swap is not None and self.swap.exchange not in (None, exchange):
                self._set(ModelState.SWAPPING, "another swap is queued")
                return
            self._set(ModelState.READY, "ready")
            self._complete(exchange)

    def set_unloaded(self, exchange: Exchange) -> None:
        """Serve no model until the next swap; ends the swap that the exchange belongs to."""
        with self.lock:
            self._set(ModelState.UNLOADED, "unloaded")
            self._complete(exchange)

    def drop_model(self) -> None:
        with self.lock:
            self.model = None

    def fail(self, reason: str) -> None:
        with self.lock:
            self.loading = None
            self._set(ModelState.FAILED, reason)

    def stop(self) -> None:
        self._set(ModelState.STOPPED, "stopped")

    def set_hung(self, problem: str) -> bool:
        """Record that the device does not respond; returns False if it was hung before."""
        with self.lock:
            if self.state is ModelState.HUNG:
                return False
            self._before_hang = (self.state, self.detail)
            self._set(ModelState.HUNG, problem)
            return True

    def end_hang(self) -> bool:
        """Return to the state before a hang, if any; returns whether there was one."""
        with self.lock:
            if self.state is not ModelState.HUNG:
                return False
            self._set(*self._before_hang)
            return True

    def _complete(self, exchange: Exchange) -> None:
        if self.swap is not None and self.swap.exchange is exchange:
            self.served = self.swap.served_after
            self.swap, self.served_since = None, time.monotonic()

    def _set(self, state: ModelState, detail: str) -> None:
        with self.lock:
            if self.state is ModelState.STOPPED or (self.state, self.detail) == (state, detail):
                return
            is_end = state in (ModelState.FAILED, ModelState.STOPPED)
            if not is_end and state not in _NEXT_STATES[self.state]:
                raise AssertionError(f"a model that is {self.state.value} became {state.value}")
            self.state, self.detail = state, detail
            is_step = state in (ModelState.SWAPPING, ModelState.LOADING)
            if is_step and self.swap is not None and self.swap.exchange is not None:
                self.on_step(self.swap, state, detail)
