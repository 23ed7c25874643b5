"""The thread that owns the device, and the two queues by which everyone else talks to it.

Commands go in through one queue; events come out through the sink the engine was given. Models are
loaded, run and dropped on this thread, one at a time: `exchange` puts another in the place of the
one that runs. A watchdog notices when a device call does not come back: it answers everyone who
waits, and the model counts as hung until it does.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeAlias, assert_never

from semantic.application.engine.embedding import EmbeddingJob
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.model import Call, Command, Exchange, LoadedModel, Loader, Stop
from semantic.application.engine.request import EventBatch, EventSink, Job
from semantic.application.engine.scheduler import EngineLimits
from semantic.domain.errors import (
    BackendError,
    DeviceLostError,
    DrainingError,
    ModelSwapError,
    OverloadedError,
    PoolExhaustedError,
    SemanticError,
)
from semantic.domain.events import Failed, Finished
from semantic.ports.inbound import ModelState
from semantic.ports.telemetry import NoTelemetry, TelemetryPort

_log = logging.getLogger(__name__)
_IDLE_POLL_S = 0.05


# The last argument wakes the thread when something the engine waits for has come.
EngineFactory: TypeAlias = Callable[
    [LoadedModel, EngineLimits, EventSink, Callable[[], None]], BlockPoolBatchEngine
]


class DeviceThread:
    """Runs an engine on a thread of its own. All public methods are safe on any thread.

    Attributes:
        limits: Those in force; see `reconfigure`.
        state: Where the model is.
        detail: What is being loaded, or why it failed.
        model: The loaded one; None until it is ready.
        longest_sequence: Tokens of prompt and reply that fit in memory; 0 until a model is ready.
        is_draining: Whoever sets it has new work refused, while what runs may end.
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
        put_away: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; nothing runs before `start`.

        Args:
            load: Loads the first model, on the thread; reports its steps for people.
            make_engine: Called on the thread after each `load`.
            limits: The engine's limits; see `reconfigure`.
            emit: Gets batches of events, from the thread and, if the device hangs, the watchdog.
            hang_timeout_s: A step that takes longer counts as hung.
            telemetry: Counts that; None is nobody.
            put_away: Called on the thread when an engine has ended and another model may follow:
                writes what it sealed and drops it from memory.
        """
        self._load = load
        self._make_engine = make_engine
        self.limits = limits
        self._emit = emit
        self._hang_timeout_s = hang_timeout_s
        self._counts = (telemetry or NoTelemetry()).counts.engine
        self._put_away = put_away
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._taken: deque[Command] = deque()
        self._lock = threading.RLock()  # a signal's handler may run inside it
        self._live: set[str] = set()
        self._num_expected = 0
        self.state = ModelState.LOADING
        self.detail = "starting"
        self.model: LoadedModel | None = None
        self.longest_sequence = 0
        self._busy_since: float | None = None
        self._idle_since = time.monotonic()
        self._exchange: Exchange | None = None  # the thread's own: what it drains for
        self._drain_until = 0.0
        self._num_cut = 0
        self._state_before_hang = ModelState.READY
        self.is_draining = False
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="semantic-device", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="semantic-watchdog", daemon=True)

    # -- any thread -----------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Requests that have not got their final event."""
        with self._lock:
            return len(self._live)

    @property
    def idle_s(self) -> float:
        """For how long nobody has asked for anything; 0 while a request waits or runs."""
        with self._lock:
            return 0.0 if self._live else time.monotonic() - self._idle_since

    def start(self) -> None:
        """Begin loading; returns at once."""
        self._thread.start()
        self._watchdog.start()

    def ready_model(self) -> LoadedModel:
        """Return the model.

        Raises:
            ModelSwapError: it is loading, failed to load, or hangs.
            DrainingError: the server is shutting down.
        """
        with self._lock:
            if self.model is not None and self.state is ModelState.READY:
                return self.model
            if self.state is ModelState.STOPPED:
                raise DrainingError("the server is shutting down.", retry_after_s=5)
            if self.state is ModelState.FAILED:
                raise ModelSwapError(f"no model is served: {self.detail}")
            if self.state is ModelState.HUNG:
                raise ModelSwapError("the device does not answer.", retry_after_s=30)
            if self.state is ModelState.UNLOADED:
                raise ModelSwapError("no model is loaded.", retry_after_s=2)
            raise ModelSwapError(f"the model is loading: {self.detail}.", retry_after_s=2)

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """Say that a request is being prepared; those who are submitted meanwhile wait for it."""
        with self._lock:
            self._num_expected += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_expected -= 1

    def submit(self, job: Job | EmbeddingJob, model: LoadedModel | None = None) -> None:
        """Queue a job; its events, the last of them final, go to the sink.

        Args:
            job: What to compute.
            model: The model it was made for; None takes whichever is loaded.

        Raises:
            ModelSwapError: no model is ready, or it is another one by now.
            DrainingError: the server is shutting down.
            OverloadedError: the queue is full.
        """
        limit = self.limits.max_batch_size + self.limits.max_queue
        with self._lock:
            if self.ready_model() is not (model or self.model):
                raise ModelSwapError("the model was swapped meanwhile.", retry_after_s=1)
            if self.is_draining:
                raise DrainingError("the server takes no new work.", retry_after_s=5)
            if len(self._live) >= limit:
                reason = f"{len(self._live)} requests are waiting or running; try again."
                raise OverloadedError(reason, retry_after_s=2)
            self._live.add(job.id)
            # Within the lock: who is answered from here on is cancelled after this, not before.
            self._ask(lambda engine: engine.submit(job))

    def cancel(self, job_id: str) -> None:
        """End a request early; unknown ones are ignored."""
        self._ask(lambda engine: engine.cancel(job_id))

    def close_idle(self, agent: str) -> Future[None]:
        """Close an agent's idle working copies; the future tells when they are closed."""
        return self._ask(lambda engine: engine.close_idle(agent))

    def reconfigure(self, limits: EngineLimits) -> None:
        """Use other limits from the next step on."""
        self.limits = limits
        self._ask(lambda engine: engine.reconfigure(limits))

    def resize(self, nbytes: int) -> Future[None]:
        """Give the KV cache another budget of memory; idle copies and blocks make way.

        The future fails with `PoolExhaustedError` if running requests need more.
        """
        return self._ask(lambda engine: self._resize(engine, nbytes))

    def exchange(self, load: Loader | None, *, drain_s: float) -> Future[int]:
        """Drop the model and load another, or none; submits are refused from now on.

        Requests that run may end within `drain_s`; those left then are answered with an error,
        what they have computed is kept. One exchange at a time: the caller sees to that.

        Returns:
            How many requests were cut, once the other model is ready. Fails with what `load`
            raised; no model is loaded then.

        Raises:
            DrainingError: the server is shutting down.
        """
        exchange = Exchange(load, drain_s)
        with self._lock:
            if self.state is ModelState.STOPPED:
                raise DrainingError("the server is shutting down.", retry_after_s=5)
            if self.model is not None:
                self._set_state(ModelState.SWAPPING, f"{len(self._live)} requests are ending")
            self._commands.put(exchange)
        return exchange.done

    def request_stop(self) -> None:
        """Refuse new work and end what runs; returns at once."""
        self._set_state(ModelState.STOPPED, "stopped")
        self._is_stopping.set()
        self._commands.put(Stop())

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to drop the model and end, after `request_stop`.

        Returns:
            Whether it ended in time; it is a daemon if not.
        """
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _ask(self, work: Callable[[BlockPoolBatchEngine], None]) -> Future[None]:
        call = Call(work)
        self._commands.put(call)
        return call.done

    def _wake(self) -> None:
        """See whether something that the engine waits for has come."""
        self._ask(lambda _: None)

    # -- the device's thread --------------------------------------------------------------------

    def _run(self) -> None:
        exchange: Exchange | None = Exchange(self._load)
        while exchange is not None:
            exchange = self._serve(self._open(exchange))
        self._fail_live(BackendError("the device's thread has ended."))
        self._refuse_exchanges()

    def _open(self, exchange: Exchange) -> BlockPoolBatchEngine | None:
        """Load a model; None if there is none to load, or it could not be loaded."""
        if exchange.load is None:
            self._set_state(ModelState.UNLOADED, "unloaded")
            exchange.done.set_result(self._num_cut)
            return None
        self._set_state(ModelState.LOADING, "starting")
        try:
            model = exchange.load(lambda step: self._set_state(ModelState.LOADING, step))
            try:
                engine = self._make_engine(model, self.limits, self._hand_out, self._wake)
            except BaseException:
                model.backend.shutdown()
                raise
        except Exception as error:  # noqa: BLE001 - whatever it was, health and clients hear of it
            if not isinstance(error, SemanticError):
                _log.exception("the model could not be loaded")
                error = ModelSwapError(repr(error))
            self._set_state(ModelState.FAILED, error.message)
            exchange.done.set_exception(error)
            return None
        self._load = exchange.load
        with self._lock:
            self.model, self.longest_sequence = model, engine.longest_sequence
            self._idle_since = time.monotonic()
        self._set_state(ModelState.READY, "ready")
        exchange.done.set_result(self._num_cut)
        return engine

    def _serve(self, engine: BlockPoolBatchEngine | None) -> Exchange | None:
        """Run an engine, if there is one, until its model is exchanged; None at the end."""
        if engine is None or (model := self.model) is None:
            return self._await_exchange()
        self._exchange, backend = None, model.backend
        try:
            while self._turn(engine) and not self._is_drained(engine):
                pass
            self._close(engine)
            with self._lock:
                self.model = None
            del engine, model  # so that the backend can return what only they referred to
            backend.shutdown()
        except Exception as error:  # noqa: BLE001 - the thread ends, and everyone is answered
            _log.exception("the device's thread ended")
            self._set_state(ModelState.FAILED, f"the engine failed: {error!r}")
            return None
        return self._exchange

    def _is_drained(self, engine: BlockPoolBatchEngine) -> bool:
        """Whether a model that is to go has done what it still may."""
        is_late = time.monotonic() >= self._drain_until
        return self._exchange is not None and (is_late or not engine.has_work)

    def _close(self, engine: BlockPoolBatchEngine) -> None:
        """End what still runs, and keep what it has computed if another model follows."""
        if self._exchange is None:
            engine.abandon(DrainingError("the server is shutting down.", retry_after_s=5))
            return
        self._num_cut = engine.end_all(
            ModelSwapError("the model is swapped for another; try again.", retry_after_s=5)
        )
        self._set_state(ModelState.SWAPPING, "writing what agents left behind")
        self._put_away()
        self._set_state(ModelState.SWAPPING, "unloading")

    def _await_exchange(self) -> Exchange | None:
        """Wait, without a model, for one to load; None at the end of the server."""
        self._num_cut = 0
        while True:
            match self._taken.popleft() if self._taken else self._commands.get():
                case Exchange() as exchange:
                    return exchange
                case Call(_, done):
                    done.set_result(None)
                case Stop():
                    return None  # others are about somebody who has been answered

    def _refuse_exchanges(self) -> None:
        """Answer those whose models will never be loaded."""
        late = [*self._taken, *([self._exchange] if self._exchange else [])]
        with contextlib.suppress(queue.Empty):
            while True:
                late.append(self._commands.get_nowait())
        for command in late:
            if not isinstance(command, Stop) and not command.done.done():
                command.done.set_exception(DrainingError("the server is shutting down."))

    def _turn(self, engine: BlockPoolBatchEngine) -> bool:
        """Take commands and do one step; False once told to stop."""
        is_busy = True
        try:
            if not self._take_commands(engine):
                return False
            is_busy = engine.step()
        except Exception as error:  # noqa: BLE001 - nobody may wait forever because of our defect
            _log.exception("the engine failed")
            failure = self._failure_of(error)
            with self._lock:
                affected = set(self._live)  # and not those who are sent while these are answered
            engine.abandon(failure)
            for name in self._fail_live(failure, affected):
                self.cancel(name)  # a request that was answered must not run later
        finally:
            with self._lock:
                self._busy_since = None
        self._recover()
        if not is_busy and engine.has_work:
            self._await_command(_IDLE_POLL_S)
        return True

    def _failure_of(self, error: Exception) -> SemanticError:
        """What everyone is answered; a model whose device is lost is loaded again."""
        if not isinstance(error, DeviceLostError):
            return BackendError(f"the engine failed: {type(error).__name__}: {error}")
        self._exchange = self._exchange or Exchange(self._load)
        self._set_state(ModelState.SWAPPING, error.message)
        return ModelSwapError(f"{error.message} Loading it again; try again.", retry_after_s=10)

    def _take_commands(self, engine: BlockPoolBatchEngine) -> bool:
        """Take what has come in, waiting for it if there is nothing to do; False means stop."""
        if not engine.has_work:
            if not self._taken:
                self._await_command(None)
            self._await_company()
        with contextlib.suppress(queue.Empty):
            while True:
                self._taken.append(self._commands.get_nowait())
        self._busy_since = time.monotonic()  # from here on the device may be called
        while self._taken:
            if not self._carry_out(engine, self._taken.popleft()):
                return False
        return True

    def _carry_out(self, engine: BlockPoolBatchEngine, command: Command) -> bool:
        match command:
            case Call(work, done):
                try:
                    work(engine)
                    done.set_result(None)
                except PoolExhaustedError as error:
                    done.set_exception(error)
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
            self.longest_sequence = engine.longest_sequence

    def _await_company(self) -> None:
        """Let requests that are sent together start together, unless that takes too long."""
        until = time.monotonic() + self.limits.batch_window_ms / 1000
        while self._num_expected and (left := until - time.monotonic()) > 0:
            self._await_command(left)

    def _await_command(self, timeout_s: float | None) -> None:
        with contextlib.suppress(queue.Empty):
            self._taken.append(self._commands.get(timeout=timeout_s))

    def _hand_out(self, events: EventBatch) -> None:
        ended = {name for name, event in events if isinstance(event, Finished | Failed)}
        with self._lock:
            # A request that was answered already, because the device hung, gets nothing more.
            wanted = [item for item in events if item[0] in self._live]
            self._live -= ended
            self._idle_since = time.monotonic()
        if wanted:
            self._emit(wanted)

    def _fail_live(self, error: SemanticError, affected: set[str] | None = None) -> set[str]:
        """Answer everyone who waits, or those of them who are affected; returns who that was."""
        with self._lock:
            waiting = self._live if affected is None else self._live & affected
            self._live = self._live - waiting
        if waiting:
            self._emit([(name, Failed(error)) for name in waiting])
        return waiting

    def _set_state(self, state: ModelState, detail: str) -> None:
        with self._lock:
            if self.state is not ModelState.STOPPED:
                self.state, self.detail = state, detail

    def _recover(self) -> None:
        if self.state is ModelState.HUNG:
            _log.warning("the device answers again")
            self._set_state(self._state_before_hang, "ready")

    # -- the watchdog's thread ------------------------------------------------------------------

    def _watch(self) -> None:
        interval_s = min(1.0, self._hang_timeout_s / 4)
        while not self._is_stopping.wait(interval_s):
            since = self._busy_since
            if since is not None and time.monotonic() - since > self._hang_timeout_s:
                self._report_hang(since)

    def _report_hang(self, since: float) -> None:
        problem = f"the device did not answer for {self._hang_timeout_s:g} s"
        with self._lock:
            if self._busy_since != since:
                return  # it answered just now
            if self.state is not ModelState.HUNG:
                self._counts.hangs += 1
                self._state_before_hang = self.state
            self._set_state(ModelState.HUNG, problem)
        waiting = self._fail_live(BackendError(f"{problem}."))
        if waiting:
            _log.error("%s; %d requests are failed", problem, len(waiting))
        for name in waiting:
            self.cancel(name)
