"""The thread that owns the device, and the two queues by which everyone else talks to it.

Commands go in through one queue; events come out through the sink the engine was given. The
model is loaded, run and dropped on this thread. A watchdog notices when a device call does not
come back: it answers everyone who waits, and the model counts as hung until it does.
"""

import contextlib
import hashlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.request import EventBatch, EventSink, Job
from semantic.application.engine.scheduler import EngineLimits
from semantic.domain.agents import Principal
from semantic.domain.blocks import BlockName, BlockNamespace
from semantic.domain.errors import (
    BackendError,
    DrainingError,
    ModelSwapError,
    OverloadedError,
    SemanticError,
)
from semantic.domain.events import Failed, Finished
from semantic.domain.model_names import require_served
from semantic.domain.reply_format import ReplyFormat
from semantic.domain.sampling import SamplingDefaults
from semantic.ports.backend import ModelBackendPort
from semantic.ports.inbound import ModelState, ModelStatus
from semantic.ports.telemetry import NoTelemetry, TelemetryPort
from semantic.ports.text import GrammarPort, TokenizerPort

_log = logging.getLogger(__name__)
_IDLE_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that can answer.

    Attributes:
        fingerprint: Tells it from every other model.
        kv_format: How its attention state rests.
        reply_format: How it writes thinking and tool calls.
        grammar: Enforces the form of its replies; None enforces nothing.
        defaults: How it is sampled where a request does not say.
        aliases: Other names it answers to; see `require_served`.
    """

    id: str
    backend: ModelBackendPort
    tokenizer: TokenizerPort
    fingerprint: str = ""
    kv_format: str = "raw"
    reply_format: ReplyFormat = field(default_factory=ReplyFormat)
    grammar: GrammarPort | None = None
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    aliases: tuple[str, ...] = ()

    @property
    def system_fingerprint(self) -> str:
        """A short name of the model's files and what computes them, for clients to compare."""
        name = f"{self.fingerprint or self.id}/{self.backend.traits.kv_abi}"
        return f"fp_{hashlib.sha256(name.encode()).hexdigest()[:10]}"

    def root(self, principal: Principal) -> BlockName:
        """Where the block names of a tenant begin for this model."""
        kv_format = f"{self.backend.traits.kv_abi}/{self.kv_format}"
        return BlockNamespace(self.fingerprint or self.id, kv_format, principal.salt).root()


@dataclass(frozen=True, slots=True)
class _Submit:
    job: Job


@dataclass(frozen=True, slots=True)
class _Cancel:
    job_id: str


@dataclass(frozen=True, slots=True)
class _Reconfigure:
    limits: EngineLimits


@dataclass(frozen=True, slots=True)
class _CloseIdle:
    agent: str
    done: Future[None]


@dataclass(frozen=True, slots=True)
class _Wake:
    pass


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


Command: TypeAlias = _Submit | _Cancel | _CloseIdle | _Reconfigure | _Wake | _Stop
Loader: TypeAlias = Callable[[Callable[[str], None]], LoadedModel]
# The last argument wakes the thread when something the engine waits for has come.
EngineFactory: TypeAlias = Callable[
    [LoadedModel, EngineLimits, EventSink, Callable[[], None]], BlockPoolBatchEngine
]


class DeviceThread:
    """Runs an engine on a thread of its own. All public methods are safe on any thread."""

    def __init__(
        self,
        load: Loader,
        make_engine: EngineFactory,
        limits: EngineLimits,
        emit: EventSink,
        *,
        hang_timeout_s: float,
        telemetry: TelemetryPort | None = None,
    ) -> None:
        """Prepare; nothing runs before `start`.

        Args:
            load: Called once on the thread; reports its steps for people.
            make_engine: Called once on the thread, after `load`.
            limits: The engine's limits; see `reconfigure`.
            emit: Gets batches of events, from the thread and, if the device hangs, the watchdog.
            hang_timeout_s: A step that takes longer counts as hung.
            telemetry: Counts that; None is nobody.
        """
        self._load = load
        self._make_engine = make_engine
        self._limits = limits
        self._emit = emit
        self._hang_timeout_s = hang_timeout_s
        self._counts = (telemetry or NoTelemetry()).counts.engine
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._taken: deque[Command] = deque()
        self._lock = threading.RLock()  # a signal's handler may run inside it
        self._live: set[str] = set()
        self._state = ModelState.LOADING
        self._detail = "starting"
        self._model: LoadedModel | None = None
        self._longest_sequence = 0
        self._busy_since: float | None = None
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="semantic-device", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="semantic-watchdog", daemon=True)

    # -- any thread -----------------------------------------------------------------------------

    @property
    def limits(self) -> EngineLimits:
        """The limits in force."""
        return self._limits

    @property
    def state(self) -> ModelState:
        """Where the model is."""
        with self._lock:
            return self._state

    @property
    def detail(self) -> str:
        """What is being loaded, or why it failed."""
        with self._lock:
            return self._detail

    @property
    def model(self) -> LoadedModel | None:
        """The loaded model; None until it is ready."""
        with self._lock:
            return self._model

    @property
    def longest_sequence(self) -> int:
        """Tokens of prompt and reply that fit in memory; 0 until the model is ready."""
        with self._lock:
            return self._longest_sequence

    @property
    def num_live(self) -> int:
        """Requests that have not got their final event."""
        with self._lock:
            return len(self._live)

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
            if self._model is not None and self._state is ModelState.READY:
                return self._model
            if self._state is ModelState.STOPPED:
                raise DrainingError("the server is shutting down.", retry_after_s=5)
            if self._state is ModelState.FAILED:
                raise ModelSwapError(f"no model is served: {self._detail}")
            if self._state is ModelState.HUNG:
                raise ModelSwapError("the device does not answer.", retry_after_s=30)
            raise ModelSwapError(f"the model is loading: {self._detail}.", retry_after_s=2)

    def submit(self, job: Job) -> None:
        """Queue a job; its events, the last of them final, go to the sink.

        Raises:
            ModelSwapError: no model is ready.
            DrainingError: the server is shutting down.
            OverloadedError: the queue is full.
        """
        limit = self._limits.max_batch_size + self._limits.max_queue
        with self._lock:
            self.ready_model()
            if len(self._live) >= limit:
                raise OverloadedError(
                    f"{len(self._live)} requests are waiting or running; try again.",
                    retry_after_s=2,
                )
            self._live.add(job.id)
            # Within the lock: who is answered from here on is cancelled after this, not before.
            self._commands.put(_Submit(job))

    def cancel(self, job_id: str) -> None:
        """End a request early; unknown ones are passed over."""
        self._commands.put(_Cancel(job_id))

    def close_idle(self, agent: str) -> Future[None]:
        """Close an agent's idle working copies; the future tells when they are closed."""
        done: Future[None] = Future()
        self._commands.put(_CloseIdle(agent, done))
        return done

    def reconfigure(self, limits: EngineLimits) -> None:
        """Use other limits from the next step on."""
        self._limits = limits
        self._commands.put(_Reconfigure(limits))

    def _wake(self) -> None:
        self._commands.put(_Wake())

    def request_stop(self) -> None:
        """Refuse new work and end what runs; returns at once."""
        self._set_state(ModelState.STOPPED, "stopped")
        self._is_stopping.set()
        self._commands.put(_Stop())

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to drop the model and end, after `request_stop`.

        Returns:
            Whether it ended in time; it is a daemon if not.
        """
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- the device's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            model = self._load(lambda step: self._set_state(ModelState.LOADING, step))
            engine = self._make_engine(model, self._limits, self._hand_out, self._wake)
        except SemanticError as error:
            self._set_state(ModelState.FAILED, error.message)
            return
        except Exception as error:  # noqa: BLE001 - whatever it was, health and clients hear of it
            _log.exception("the model could not be loaded")
            self._set_state(ModelState.FAILED, repr(error))
            return
        with self._lock:
            self._model, self._longest_sequence = model, engine.longest_sequence
        self._set_state(ModelState.READY, "ready")
        try:
            while self._turn(engine):
                pass
            engine.abandon(DrainingError("the server is shutting down.", retry_after_s=5))
            model.backend.shutdown()
        except Exception as error:  # noqa: BLE001 - the thread ends, and everyone hears of it
            _log.exception("the device's thread ended")
            self._set_state(ModelState.FAILED, f"the engine failed: {error!r}")
        self._fail_live(BackendError("the device's thread has ended."))

    def _turn(self, engine: BlockPoolBatchEngine) -> bool:
        """Take commands and do one step; False once told to stop."""
        is_busy = True
        try:
            if not self._take_commands(engine):
                return False
            is_busy = engine.step()
        except Exception as error:  # noqa: BLE001 - nobody may wait for ever for our defect
            _log.exception("the engine failed")
            failure = BackendError(f"the engine failed: {type(error).__name__}: {error}")
            with self._lock:
                affected = set(self._live)  # and not those who are sent while these are answered
            engine.abandon(failure)
            for name in self._fail_live(failure, affected):
                self._commands.put(_Cancel(name))  # whoever is answered must not run later
        finally:
            with self._lock:
                self._busy_since = None
        self._recover()
        if not is_busy and engine.has_work:
            self._await_command(_IDLE_POLL_S)
        return True

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
            case _Submit(job):
                engine.submit(job)
            case _Cancel(job_id):
                engine.cancel(job_id)
            case _CloseIdle(agent, done):
                engine.close_idle(agent)
                done.set_result(None)
            case _Reconfigure(limits):
                engine.reconfigure(limits)
            case _Wake():
                pass
            case _Stop():
                return False
            case _:
                assert_never(command)
        return True

    def _await_command(self, timeout_s: float | None) -> None:
        with contextlib.suppress(queue.Empty):
            self._taken.append(self._commands.get(timeout=timeout_s))

    def _await_company(self) -> None:
        """An idle engine waits a moment, so that requests sent together start together."""
        self._is_stopping.wait(self._limits.batch_window_ms / 1000)

    def _hand_out(self, events: EventBatch) -> None:
        ended = {name for name, event in events if isinstance(event, Finished | Failed)}
        with self._lock:
            # Whoever was answered already, because the device hung, hears no more.
            wanted = [item for item in events if item[0] in self._live]
            self._live -= ended
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
            if self._state is not ModelState.STOPPED:
                self._state, self._detail = state, detail

    def _recover(self) -> None:
        if self._state is ModelState.HUNG:
            _log.warning("the device answers again")
            self._set_state(ModelState.READY, "ready")

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
            self._counts.hangs += self._state is not ModelState.HUNG
            self._set_state(ModelState.HUNG, problem)
        waiting = self._fail_live(BackendError(f"{problem}."))
        if waiting:
            _log.error("%s; %d requests are failed", problem, len(waiting))
        for name in waiting:
            self._commands.put(_Cancel(name))


class ModelRegistry:
    """`ModelManagementPort` over the device's one model. Safe on any thread."""

    def __init__(
        self,
        device: DeviceThread,
        model_id: str,
        backend_name: str,
        aliases: Sequence[str] = (),
    ) -> None:
        self._device = device
        self._model_id = model_id
        self._backend_name = backend_name
        self._aliases = tuple(aliases)
        self._created_at = time.time()

    def models(self) -> tuple[ModelStatus, ...]:
        """The model this server serves or is loading."""
        model = self._device.model
        return (
            ModelStatus(
                id=self._model_id,
                backend=self._backend_name,
                state=self._device.state,
                detail=self._device.detail,
                max_context=model.backend.spec.max_context if model else 0,
                created_at=self._created_at,
                compute=model.backend.traits.compute if model else None,
            ),
        )

    def find(self, name: str) -> ModelStatus:
        """The model that a name stands for."""
        require_served(name, self._model_id, self._aliases)
        return self.models()[0]
