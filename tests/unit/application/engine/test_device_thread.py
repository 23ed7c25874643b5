"""The device's thread with a real engine on a fake backend, and with things that go wrong."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from semantic.adapters.outbound.backends.fake import FakeTokenizer, fake_spec
from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.device_thread import (
    Command,
    DeviceThread,
    LoadedModel,
    ModelRegistry,
)
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.request import EngineEvent, EventBatch
from semantic.application.engine.scheduler import EngineLimits
from semantic.domain.errors import (
    BackendError,
    DrainingError,
    ModelNotFoundError,
    ModelSwapError,
    OverloadedError,
)
from semantic.domain.events import Failed, Finished
from semantic.domain.pool import BlockPool
from semantic.domain.sampling import FinishReason
from semantic.ports.backend import StepOutput, Ticket
from semantic.ports.inbound import ModelState
from tests.unit.application.engine_rig import FaultyBackend, make_job

pytestmark = pytest.mark.unit


class StallingBackend(FaultyBackend):
    """Its device calls wait while the gate is closed."""

    def __init__(self) -> None:
        super().__init__(fake_spec(block_tokens=8))
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def collect(self, ticket: Ticket) -> StepOutput:
        self.entered.set()
        self.gate.wait(20)
        return super().collect(ticket)


class BrokenBackend(FaultyBackend):
    """Fails where the engine does not expect it."""

    is_broken = False

    def bytes_for(self, lengths: Sequence[int]) -> int:
        if self.is_broken:
            raise SystemError("not an error of the device")
        return super().bytes_for(lengths)


class FaltersOnce(StallingBackend):
    """Stalls, and fails once where the engine does not expect it."""

    is_broken = False

    def bytes_for(self, lengths: Sequence[int]) -> int:
        if self.is_broken:
            self.is_broken = False
            raise SystemError("not an error of the device")
        return super().bytes_for(lengths)


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether the condition comes to hold within some seconds."""
    pause = threading.Event()
    for _ in range(1000):
        if condition():
            return True
        pause.wait(0.01)
    return False


class Device:
    """A started device thread and what it said."""

    def __init__(
        self,
        backend: FaultyBackend,
        limits: EngineLimits,
        hang_timeout_s: float,
        load: Callable[[Callable[[str], None]], LoadedModel] | None,
    ) -> None:
        self.events: queue.SimpleQueue[tuple[str, EngineEvent]] = queue.SimpleQueue()
        self.finals: dict[str, Finished | Failed] = {}
        self.on_failure: Callable[[], None] = lambda: None

        def emit(batch: EventBatch) -> None:
            for item in batch:
                self.events.put(item)
            if any(isinstance(event, Failed) for _, event in batch):
                self.on_failure()

        def make(
            model: LoadedModel,
            limits: EngineLimits,
            sink: Callable[[EventBatch], None],
            wake: Callable[[], None],
        ) -> BlockPoolBatchEngine:
            store = AgentCacheStore(BlockPool(backend.spec, 10**6))
            return BlockPoolBatchEngine(
                model.backend, model.tokenizer, store, limits, sink, on_ready=wake
            )

        self.thread = DeviceThread(
            load or (lambda _: LoadedModel("fake", backend, FakeTokenizer())),
            make,
            limits,
            emit,
            hang_timeout_s=hang_timeout_s,
        )

    def await_state(self, state: ModelState) -> None:
        assert eventually(lambda: self.thread.state is state), (
            f"never {state}: {self.thread.state} {self.thread.detail}"
        )

    def final(self, job_id: str) -> Finished | Failed:
        while job_id not in self.finals:
            name, event = self.events.get(timeout=20)
            if isinstance(event, Finished | Failed):
                assert name not in self.finals, "a second final event"
                self.finals[name] = event
        return self.finals[job_id]


@contextmanager
def device(
    backend: FaultyBackend | None = None,
    *,
    limits: EngineLimits | None = None,
    hang_timeout_s: float = 30,
    load: Callable[[Callable[[str], None]], LoadedModel] | None = None,
) -> Iterator[Device]:
    limits = limits or EngineLimits(batch_window_ms=0, max_idle=0)
    made = Device(backend or FaultyBackend(fake_spec(block_tokens=8)), limits, hang_timeout_s, load)
    made.thread.start()
    try:
        yield made
    finally:
        made.thread.request_stop()
        assert made.thread.join(20)


def test_a_job_runs_and_ends() -> None:
    with device() as made:
        made.await_state(ModelState.READY)
        made.thread.submit(make_job("a"))
        final = made.final("a")
        assert isinstance(final, Finished)
        assert final.reason is FinishReason.MAX_TOKENS
        assert made.thread.num_live == 0


def test_commands_keep_their_order() -> None:
    with device() as made:
        made.await_state(ModelState.READY)
        for i in range(50):
            made.thread.submit(make_job(f"j{i}", max_tokens=100_000))
            made.thread.cancel(f"j{i}")
        for i in range(50):
            final = made.final(f"j{i}")
            assert isinstance(final, Finished)
            assert final.reason is FinishReason.CANCELLED


def test_a_prompt_is_cancelled_within_a_step() -> None:
    backend = StallingBackend()
    with device(backend, limits=EngineLimits(prefill_step_size=8, batch_window_ms=0)) as made:
        made.await_state(ModelState.READY)
        backend.gate.clear()
        made.thread.submit(make_job("a", "p" * 800))
        backend.entered.wait(20)
        made.thread.cancel("a")
        backend.gate.set()
        final = made.final("a")
        assert isinstance(final, Finished)
        assert final.reason is FinishReason.CANCELLED
        assert len(backend.steps) == 1


def test_a_load_that_fails_is_reported_and_refuses_work() -> None:
    def load(_: Callable[[str], None]) -> LoadedModel:
        raise ModelNotFoundError("there is no such model")

    with device(load=load) as made:
        made.await_state(ModelState.FAILED)
        assert made.thread.detail == "there is no such model"
        with pytest.raises(ModelSwapError, match="no such model"):
            made.thread.submit(make_job("a"))


def test_requests_while_loading_are_told_to_come_back() -> None:
    loaded = threading.Event()

    def load(on_progress: Callable[[str], None]) -> LoadedModel:
        on_progress("reading weights")
        loaded.wait(20)
        backend = FaultyBackend(fake_spec(block_tokens=8))
        return LoadedModel("fake", backend, FakeTokenizer())

    with device(load=load) as made:
        with pytest.raises(ModelSwapError, match="loading") as caught:
            made.thread.submit(make_job("a"))
        assert caught.value.retry_after_s
        loaded.set()
        made.await_state(ModelState.READY)


def test_the_queue_is_bounded() -> None:
    backend = StallingBackend()
    backend.gate.clear()
    with device(
        backend, limits=EngineLimits(max_batch_size=1, max_queue=2, batch_window_ms=0)
    ) as made:
        made.await_state(ModelState.READY)
        for i in range(3):
            made.thread.submit(make_job(f"j{i}"))
        with pytest.raises(OverloadedError) as caught:
            made.thread.submit(make_job("one too many"))
        assert caught.value.retry_after_s
        backend.gate.set()
        for i in range(3):
            assert isinstance(made.final(f"j{i}"), Finished)


def test_stopping_answers_everyone() -> None:
    with device() as made:
        made.await_state(ModelState.READY)
        made.thread.submit(make_job("a", max_tokens=1_000_000))
        made.thread.request_stop()
        final = made.final("a")
        assert isinstance(final, Failed)
        assert isinstance(final.error, DrainingError)
        with pytest.raises(DrainingError):
            made.thread.submit(make_job("b"))


def test_a_hung_device_is_noticed_answered_for_and_forgiven() -> None:
    backend = StallingBackend()
    with device(backend, hang_timeout_s=0.5) as made:
        made.await_state(ModelState.READY)
        backend.gate.clear()
        made.thread.submit(make_job("running"))
        backend.entered.wait(20)
        made.thread.submit(make_job("waiting"))
        for name in ("running", "waiting"):
            final = made.final(name)
            assert isinstance(final, Failed)
            assert isinstance(final.error, BackendError)
        made.await_state(ModelState.HUNG)
        with pytest.raises(ModelSwapError, match="does not answer"):
            made.thread.submit(make_job("late"))
        backend.gate.set()
        made.await_state(ModelState.READY)
        made.thread.submit(make_job("after"))
        assert isinstance(made.final("after"), Finished)
        assert made.thread.num_live == 0


def test_who_was_failed_by_the_watchdog_does_not_run_on() -> None:
    backend = StallingBackend()
    with device(backend, hang_timeout_s=0.5) as made:
        made.await_state(ModelState.READY)
        backend.gate.clear()
        made.thread.submit(make_job("long", max_tokens=100_000))
        assert isinstance(made.final("long"), Failed)
        backend.gate.set()
        made.await_state(ModelState.READY)
        assert eventually(lambda: backend.num_open == 0)


class PausingQueue(queue.SimpleQueue[Command]):
    """What the test's thread puts into it comes after two of others, if they come soon."""

    def put(self, item: Command, block: bool = True, timeout: float | None = None) -> None:
        if threading.current_thread() is threading.main_thread():
            pause = threading.Event()
            for _ in range(100):
                if self.qsize() >= 2:
                    break
                pause.wait(0.01)
        super().put(item, block, timeout)


def test_who_is_failed_by_the_watchdog_while_being_submitted_does_not_run() -> None:
    backend, commands = StallingBackend(), PausingQueue()
    with device(backend, hang_timeout_s=0.3) as made:
        made.await_state(ModelState.READY)
        backend.gate.clear()
        made.thread.submit(make_job("running", max_tokens=100_000))
        backend.entered.wait(20)
        made.thread._commands = commands  # the watchdog cancels both requests
        made.thread.submit(make_job("late", max_tokens=100_000))
        assert isinstance(made.final("late"), Failed)
        backend.gate.set()
        made.await_state(ModelState.READY)
        assert eventually(lambda: backend.num_open == 0 and commands.empty())
        assert len({chunk.seq for step in backend.steps for chunk in step.chunks}) == 1


def test_a_defect_of_the_engine_ends_requests_and_not_the_thread() -> None:
    backend = BrokenBackend(fake_spec(block_tokens=8))
    with device(backend) as made:
        made.await_state(ModelState.READY)
        backend.is_broken = True
        made.thread.submit(make_job("a"))
        final = made.final("a")
        assert isinstance(final, Failed)
        backend.is_broken = False
        made.thread.submit(make_job("b"))
        assert isinstance(made.final("b"), Finished)


def test_a_request_sent_when_a_defect_is_told_is_not_failed_by_it() -> None:
    backend = BrokenBackend(fake_spec(block_tokens=8))
    with device(backend) as made:
        made.await_state(ModelState.READY)
        backend.is_broken = True

        def send_another() -> None:
            backend.is_broken = False
            made.thread.submit(make_job("b"))

        made.on_failure = send_another
        made.thread.submit(make_job("a"))
        assert isinstance(made.final("a"), Failed)
        assert isinstance(made.final("b"), Finished)


def test_a_defect_answers_also_those_whose_commands_were_not_taken() -> None:
    backend = FaltersOnce()
    with device(backend) as made:
        made.await_state(ModelState.READY)
        backend.gate.clear()
        made.thread.submit(make_job("running", max_tokens=5))
        backend.entered.wait(20)
        waiting = [f"w{i}" for i in range(3)]
        for name in waiting:
            made.thread.submit(make_job(name, name, max_tokens=100_000))
        backend.is_broken = True
        backend.gate.set()
        for name in waiting:
            assert isinstance(made.final(name), Failed)
        before = len(backend.steps)
        made.thread.submit(make_job("next", max_tokens=2))
        made.final("next")
        rows = [chunk.seq for step in backend.steps[before:] for chunk in step.chunks]
        assert len(set(rows)) == 1, "requests that were answered ran on"


def test_requests_sent_together_start_together() -> None:
    backend = FaultyBackend(fake_spec(block_tokens=8))
    with device(backend, limits=EngineLimits(batch_window_ms=400)) as made:
        made.await_state(ModelState.READY)
        made.thread.submit(make_job("a"))
        threading.Event().wait(0.05)
        made.thread.submit(make_job("b", "other"))
        for name in ("a", "b"):
            made.final(name)
        assert len(backend.steps[0].chunks) == 2


def test_a_stop_while_loading_stays_a_stop() -> None:
    go_on = threading.Event()

    def load(_: Callable[[str], None]) -> LoadedModel:
        go_on.wait(20)
        return LoadedModel("fake", FaultyBackend(fake_spec(block_tokens=8)), FakeTokenizer())

    with device(load=load) as made:
        made.thread.request_stop()
        go_on.set()
        assert made.thread.join(20)
        assert made.thread.state is ModelState.STOPPED


def test_limits_can_be_changed() -> None:
    with device() as made:
        made.await_state(ModelState.READY)
        new = EngineLimits(default_max_tokens=7, batch_window_ms=0)
        made.thread.reconfigure(new)
        assert made.thread.limits == new
        made.thread.submit(make_job("a"))
        assert isinstance(made.final("a"), Finished)


def test_the_registry_reports_the_model() -> None:
    with device() as made:
        made.await_state(ModelState.READY)
        (status,) = ModelRegistry(made.thread, "fake", "fake").models()
    assert (status.id, status.state, status.max_context) == ("fake", ModelState.READY, 131_072)
