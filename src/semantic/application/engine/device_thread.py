"""The thread that owns the device, and the queues that connect it to other threads.

Other threads send commands through one queue; the engine's events leave through the sink passed to
the constructor. This thread loads, runs and unloads models, one at a time; `exchange` replaces the
loaded model. A watchdog thread detects a device call that does not return: it fails all live
requests and reports the model as hung until the call returns. Every command's future is resolved,
also after a crash.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from typing import TypeAlias, assert_never

from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.model import (
    STARTING,
    Call,
    Command,
    Exchange,
    LiveRequests,
    LoadedModel,
    Loader,
    ModelLifecycle,
    Stop,
    T,
    fail,
    shut_down,
)
from semantic.application.engine.request import AheadJob, EmbeddingJob, EventSink, Job
from semantic.application.settings import EngineLimits
from semantic.domain.errors import (
    BackendError,
    DeviceLostError,
    DrainingError,
    ModelSwapError,
    OverloadedError,
    PoolExhaustedError,
    SemanticError,
)
from semantic.ports.inbound import ModelState
from semantic.ports.telemetry import NoTelemetry, TelemetryPort

_log = logging.getLogger(__name__)
_IDLE_POLL_S = 0.05


# The engine calls the last argument, from any thread, when a read it waits for completes.
EngineFactory: TypeAlias = Callable[
    [LoadedModel, EngineLimits, EventSink, Callable[[], None]], BlockPoolBatchEngine
]


class DeviceThread:
    """Runs an engine on a dedicated thread. All public methods are thread-safe.

    Attributes:
        is_draining: Set to True to refuse new requests while running requests finish.
    """

    def __init__(
        self,
        load: Loader,
        make_engine: EngineFactory,
        limits: EngineLimits,
        emit: EventSink,
        *,
        hang_timeout_s: float,
        telemetry: TelemetryPort | None = None,
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the threads without starting them; see `start`.

        Args:
            load: Loads the first model on the device thread and reports human-readable progress.
            make_engine: Builds the engine; called on the device thread after each `load`.
            emit: Receives batches of events on the device thread or, if the device hangs, on the
                watchdog thread.
            hang_timeout_s: A step that takes longer counts as hung.
            flush: Flushes sealed blocks to disk and drops them from memory. Called on the device
                thread during an exchange, after the engine has ended.
        """
        self._make_engine = make_engine
        self.limits = limits
        self._hang_timeout_s = hang_timeout_s
        self._counts = (telemetry or NoTelemetry()).counts.engine
        self._flush = flush
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._taken: deque[Command] = deque()
        self.lifecycle = ModelLifecycle()
        self._load, self.lifecycle.loading = load, Exchange(load)
        self._lock = self.lifecycle.lock
        self._live = LiveRequests(self._lock, emit)
        self._num_expected = 0
        self._busy_since: float | None = None
        self._exchange: Exchange | None = None  # device thread only: the swap it drains for
        self._drain_until = 0.0
        self._num_cut = 0
        self.is_draining = False
        self._has_ended = False
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="semantic-device", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="semantic-watchdog", daemon=True)

    # -- any thread -----------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def idle_s(self) -> float:
        """Seconds without a waiting or running request; 0 while there is one."""
        return self._live.idle_s

    @property
    def is_idle(self) -> bool:
        """Whether no request waits, runs or is being prepared."""
        return not self._live and not self._num_expected

    def start(self) -> None:
        self._thread.start()
        self._watchdog.start()

    @property
    def state(self) -> ModelState:
        return self.lifecycle.state

    @property
    def detail(self) -> str:
        return self.lifecycle.detail

    @property
    def model(self) -> LoadedModel | None:
        return self.lifecycle.model

    @property
    def longest_sequence(self) -> int:
        return self.lifecycle.longest_sequence

    def ready_model(self) -> LoadedModel:
        return self.lifecycle.ready_model()

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """Announce a request in preparation; an idle engine waits for it to batch it with others.

        The wait is at most `EngineLimits.batch_window_ms`.
        """
        with self._lock:
            self._num_expected += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_expected -= 1

    def submit(self, job: Job | EmbeddingJob, model: LoadedModel | None = None) -> None:
        """Queue a job; the sink receives its events, ending with a final one.

        Raises:
            ModelSwapError: no model is ready, or the loaded one is not `model` (None accepts any).
            DrainingError: the server is shutting down.
            OverloadedError: the queue is full.
        """
        limit = self.limits.max_batch_size + self.limits.max_queue
        with self._lock:
            if self.ready_model() is not (model or self.model):
                raise ModelSwapError(
                    "the model was swapped while the request was prepared.", retry_after_s=1
                )
            if self.is_draining:
                raise DrainingError(
                    "the server is draining and accepts no new requests.", retry_after_s=5
                )
            if len(self._live) >= limit:
                reason = f"the queue is full with {len(self._live)} requests; try again."
                raise OverloadedError(reason, retry_after_s=2)
            self._live.add(job)
            # Queued under the lock, so that a `cancel` for this job cannot overtake its submit.
            self._call_engine(lambda engine: engine.submit(job))

    def cancel(self, job_id: str) -> None:
        """End a request early; an unknown id is ignored."""
        self._call_engine(lambda engine: engine.cancel(job_id))

    def compute_ahead(self, job: AheadJob) -> None:
        """Compute the beginning of a prompt in steps during which no request runs.

        Requests run as if there were no such job: it pauses from the preparation of a request to
        its end, and uses only memory that is free.
        """
        self._call_engine(lambda engine: engine.compute_ahead(job))

    def close_idle(self, agent: str) -> Future[None]:
        return self._call_engine(lambda engine: engine.close_idle(agent))

    def reconfigure(self, limits: EngineLimits) -> None:
        """Replace the limits, effective from the next step."""
        self.limits = limits
        self._call_engine(lambda engine: engine.reconfigure(limits))

    def resize(self, nbytes: int) -> Future[None]:
        """Change the KV cache's budget; fails with `PoolExhaustedError` if requests need more."""
        return self._call_engine(lambda engine: self._resize(engine, nbytes))

    def exchange(self, load: Loader | None, *, drain_s: float) -> Future[int]:
        """Unload the model and load another, or none; `submit` is refused from this call on.

        Running requests have `drain_s` seconds to finish. Requests still running after that fail;
        their computed KV cache is sealed. The caller must not run two exchanges at a time.

        Returns:
            A future with the number of requests cut short, resolved once the new model is ready.
            It fails with the error that `load` raised; no model is loaded in that case.

        Raises:
            DrainingError: the server is shutting down.
            ModelSwapError: the thread ended because of an error.
        """
        exchange = Exchange(load, drain_s)
        with self._lock:
            if self.state is ModelState.STOPPED:
                raise DrainingError("the server is shutting down.", retry_after_s=5)
            if self._has_ended:
                raise ModelSwapError(f"{self.detail}; restart the server")
            detail = f"waiting for {len(self._live)} requests to end" if self.model else STARTING
            self.lifecycle.begin_exchange(exchange, detail)
            self._commands.put(exchange)
        return exchange.done

    def request_stop(self) -> None:
        """Refuse new requests and end running ones; returns immediately."""
        self.lifecycle.stop()
        self._is_stopping.set()
        if self.lifecycle.loading is not None:  # the thread cannot: nothing interrupts a load
            self._end()
        self._commands.put(Stop())

    def join(self, timeout_s: float) -> bool:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def run_between_steps(self, work: Callable[[BlockPoolBatchEngine], T]) -> T:
        """Run `work` on the device thread between two steps, and wait for its result.

        What `work` raises is raised here; running requests continue.

        Raises:
            ModelSwapError: no model is loaded.
            DrainingError: the server is shutting down.
        """
        result: Future[T] = Future()

        def run(engine: BlockPoolBatchEngine) -> None:
            try:
                result.set_result(work(engine))
            except DeviceLostError as error:
                result.set_exception(ModelSwapError(error.message, retry_after_s=10))
                raise  # the device thread loads the model again
            except Exception as error:  # noqa: BLE001 - raised in the calling thread
                result.set_exception(error)

        self._call_engine(run).result()
        if not result.done():
            raise ModelSwapError("no model is loaded.", retry_after_s=2)
        return result.result()

    def _call_engine(self, work: Callable[[BlockPoolBatchEngine], None]) -> Future[None]:
        call = Call(work)
        with self._lock:
            if not self._has_ended:
                self._commands.put(call)
                return call.done
        call.done.set_exception(self._last_error())
        return call.done

    def _wake(self) -> None:
        self._call_engine(lambda _: None)  # an empty command ends the thread's wait on its queue

    def _end(self) -> None:
        """Refuse further commands and fail every queued command and live request."""
        with self._lock:
            self._has_ended = True
        error = self._last_error()
        late = [*self._taken, *filter(None, (self._exchange, self.lifecycle.loading))]
        with contextlib.suppress(queue.Empty):
            while True:
                late.append(self._commands.get_nowait())
        for command in late:
            if not isinstance(command, Stop):
                fail(command.done, error)
        self._live.fail(error)

    def _last_error(self) -> SemanticError:
        if self.state is ModelState.STOPPED:
            return DrainingError("the server is shutting down.", retry_after_s=5)
        return BackendError(f"{self.detail}; restart the server.")

    # -- device thread --------------------------------------------------------------------------

    def _run(self) -> None:
        exchange = self.lifecycle.loading
        try:
            while exchange is not None and not self._is_stopping.is_set():
                exchange = self._serve(self._open(exchange))
        except BaseException as error:  # noqa: BLE001 - `_end` fails every open request
            _log.exception("the device thread failed")
            self.lifecycle.fail(f"the engine failed: {error!r}")
        self._end()

    def _open(self, exchange: Exchange) -> BlockPoolBatchEngine | None:
        self._exchange = exchange
        if exchange.load is None:
            self.lifecycle.set_unloaded(exchange)
            exchange.done.set_result(self._num_cut)
            return None
        if not self.lifecycle.begin_load(exchange):
            fail(exchange.done, self._last_error())
            return None
        try:
            model = exchange.load(self.lifecycle.note_loading)
            try:
                engine = self._make_engine(model, self.limits, self._live.emit, self._wake)
            except BaseException:
                shut_down(model.backends)
                raise
        except Exception as error:  # noqa: BLE001 - /health and clients' errors report it
            if not isinstance(error, SemanticError):
                _log.exception("failed to load the model")
                error = ModelSwapError(repr(error))
            self.lifecycle.fail(error.message)
            fail(exchange.done, error)
            return None
        self._load = exchange.load
        self._live.reset_idle()
        self.lifecycle.set_ready(exchange, model, engine.longest_sequence)
        with contextlib.suppress(InvalidStateError):  # a stop has failed it
            exchange.done.set_result(self._num_cut)
        return engine

    def _serve(self, engine: BlockPoolBatchEngine | None) -> Exchange | None:
        """Run the engine, if any, until the next exchange; returns None at shutdown."""
        self._exchange = None
        if engine is None or (model := self.model) is None:
            return self._await_exchange()
        backends = model.backends
        while self._step(engine) and not self._is_drained(engine):
            pass
        self._close(engine)
        self.lifecycle.drop_model()
        del engine, model  # drops the last references, so that `shutdown` can free their memory
        shut_down(backends)
        return self._exchange

    def _is_drained(self, engine: BlockPoolBatchEngine) -> bool:
        is_late = time.monotonic() >= self._drain_until
        return self._exchange is not None and (is_late or not engine.has_work)

    def _close(self, engine: BlockPoolBatchEngine) -> None:
        """End running requests; before a swap, also seal and flush what they computed."""
        if self._exchange is None:
            engine.abandon(DrainingError("the server is shutting down.", retry_after_s=5))
            return
        self._num_cut = engine.end_all(
            ModelSwapError("the model is being swapped; try again.", retry_after_s=5)
        )
        self.lifecycle.note_swapping("flushing the KV cache to disk")
        self._flush()
        self.lifecycle.note_swapping("unloading")

    def _await_exchange(self) -> Exchange | None:
        self._num_cut = 0
        while True:
            match self._taken.popleft() if self._taken else self._commands.get():
                case Exchange() as exchange:
                    return exchange
                case Call(_, done):
                    done.set_result(None)
                case Stop():
                    return None

    def _step(self, engine: BlockPoolBatchEngine) -> bool:
        """Run queued commands and one engine step; returns False after `Stop`."""
        is_busy = True
        try:
            if not self._take_commands(engine):
                return False
            if engine.has_work or not engine.has_ahead:
                is_busy = engine.step()
            elif not self._num_expected:
                engine.step_ahead()
        except Exception as error:  # noqa: BLE001 - a defect must not leave requests waiting
            _log.exception("the engine failed")
            failure = self._failure_of(error)
            affected = self._live.ids  # excludes requests submitted from here on
            engine.abandon(failure)
            for name in self._live.fail(failure, affected):
                self.cancel(name)  # its submit may still be queued; a failed request must not run
        finally:
            with self._lock:
                self._busy_since = None
        if self.lifecycle.end_hang():
            _log.warning("the device responds again")
        if not is_busy and engine.has_work:
            self._await_command(_IDLE_POLL_S)
        return True

    def _failure_of(self, error: BaseException) -> SemanticError:
        """Return the error for all requests; a lost device also schedules a reload of the model."""
        if not isinstance(error, DeviceLostError):
            return BackendError(f"the engine failed: {type(error).__name__}: {error}")
        self._exchange = self._exchange or Exchange(self._load)
        self.lifecycle.note_swapping(error.message)
        return ModelSwapError(f"{error.message} Reloading the model; try again.", retry_after_s=10)

    def _take_commands(self, engine: BlockPoolBatchEngine) -> bool:
        """Run queued commands, blocking while the engine is idle; returns False after `Stop`."""
        if not engine.has_work:
            if not self._taken:
                self._await_command(self._idle_wait(engine))
            self._await_batch()
        with contextlib.suppress(queue.Empty):
            while True:
                self._taken.append(self._commands.get_nowait())
        self._busy_since = time.monotonic()  # the watchdog's timer: device calls start here
        while self._taken:
            if not self._execute(engine, self._taken.popleft()):
                return False
        return True

    def _idle_wait(self, engine: BlockPoolBatchEngine) -> float | None:
        """Return how long to wait for a command; None waits for one without a limit."""
        if not engine.has_ahead:
            return None
        return _IDLE_POLL_S if self._num_expected else 0.0

    def _execute(self, engine: BlockPoolBatchEngine, command: Command) -> bool:
        match command:
            case Call(work, done):
                try:
                    work(engine)
                except PoolExhaustedError as error:
                    done.set_exception(error)
                except BaseException as error:
                    done.set_exception(self._failure_of(error))
                    raise
                else:
                    done.set_result(None)
            case Exchange(_, drain_s):
                self._exchange = command
                self._drain_until = time.monotonic() + drain_s
            case Stop():
                return False
            case _:
                assert_never(command)
        return True

    def _resize(self, engine: BlockPoolBatchEngine, nbytes: int) -> None:
        engine.resize(nbytes)
        with self._lock:
            self.lifecycle.longest_sequence = engine.longest_sequence

    def _await_batch(self) -> None:
        """Wait up to the batch window, so that requests sent together share their first step."""
        until = time.monotonic() + self.limits.batch_window_ms / 1000
        while self._num_expected and (left := until - time.monotonic()) > 0:
            self._await_command(left)

    def _await_command(self, timeout_s: float | None) -> None:
        with contextlib.suppress(queue.Empty):
            self._taken.append(self._commands.get(timeout=timeout_s))

    # -- watchdog thread ------------------------------------------------------------------------

    def _watch(self) -> None:
        interval_s = min(1.0, self._hang_timeout_s / 4)
        while not self._is_stopping.wait(interval_s):
            since = self._busy_since
            if since is not None and time.monotonic() - since > self._hang_timeout_s:
                self._report_hang(since)

    def _report_hang(self, since: float) -> None:
        problem = f"the device has not responded for {self._hang_timeout_s:g} s"
        with self._lock:
            if self._busy_since != since:
                return  # the device call returned in the meantime
            self._counts.hangs += self.lifecycle.set_hung(problem)
        failed = self._live.fail(BackendError(f"{problem}."))
        if failed:
            _log.error("%s; failed %d requests", problem, len(failed))
        for name in failed:
            self.cancel(name)
