"""The device's thread with a real engine on a fake backend, and with things that go wrong."""

import gc
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from semantic.adapters.outbound.backends.fake import FakeTokenizer, fake_spec
from semantic.application.engine.device_thread import DeviceThread
from semantic.application.engine.model import Command, LoadedModel
from semantic.application.engine.request import AheadJob, EmbeddingJob, EngineEvent, EventBatch
from semantic.application.settings import EngineLimits
from semantic.domain.errors import (
    BackendError,
    DeviceLostError,
    DrainingError,
    ModelNotFoundError,
    ModelSwapError,
    OverloadedError,
    PoolExhaustedError,
    SemanticError,
)
from semantic.domain.events import Failed, Finished
from semantic.domain.sampling import FinishReason
from semantic.ports.backend import Step, StepOutput, Ticket
from semantic.ports.inbound import ModelState
from tests.unit.application.device_rig import running_device
from tests.unit.application.engine_rig import FaultyBackend, make_job
from tests.waiting import eventually

pytestmark = pytest.mark.unit


class StallingBackend(FaultyBackend):
    """Its device calls wait while the gate is closed; it fails where the engine does not expect it.

    Attributes:
        num_defects: So many calls fail.
    """

    def __init__(self) -> None:
        super().__init__(fake_spec(block_tokens=8))
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.num_defects = 0

    def collect(self, ticket: Ticket) -> StepOutput:
        self.entered.set()
        self.gate.wait(60)
        return super().collect(ticket)

    def bytes_for(self, lengths: Sequence[int]) -> int:
        if self.num_defects:
            self.num_defects -= 1
            raise SystemError("not an error of the device")
        return super().bytes_for(lengths)


def load_fake(_: Callable[[str], None]) -> LoadedModel:
    return LoadedModel("fake", StallingBackend(), FakeTokenizer())


class Device:
    """A started device thread and what it said."""

    def __init__(self) -> None:
        self.thread: DeviceThread
        self.backend = StallingBackend()
        self.events: queue.SimpleQueue[tuple[str, EngineEvent]] = queue.SimpleQueue()
        self.finals: dict[str, Finished | Failed] = {}
        self.on_failure: Callable[[], None] = lambda: None

    def emit(self, batch: EventBatch) -> None:
        for item in batch:
            self.events.put(item)
        if any(isinstance(event, Failed) for _, event in batch):
            self.on_failure()

    def await_state(self, state: ModelState) -> None:
        assert eventually(lambda: self.thread.state is state), (
            f"never {state}: {self.thread.state} {self.thread.detail}"
        )

    def submit(self, name: str, prompt: str = "hello", max_tokens: int = 12) -> None:
        self.thread.submit(make_job(name, prompt, max_tokens=max_tokens))

    def stall(self, name: str, max_tokens: int = 12) -> None:
        """Submit a job that hangs on the device."""
        self.backend.gate.clear()
        self.submit(name, max_tokens=max_tokens)
        self.backend.entered.wait(60)

    def final(self, job_id: str) -> Finished | Failed:
        while job_id not in self.finals:
            name, event = self.events.get(timeout=60)
            if isinstance(event, Finished | Failed):
                assert name not in self.finals, "a second final event"
                self.finals[name] = event
        return self.finals[job_id]

    def reason(self, job_id: str) -> FinishReason:
        """Why a job ended that must not have failed."""
        final = self.final(job_id)
        assert isinstance(final, Finished), final
        return final.reason

    def error(self, job_id: str) -> SemanticError:
        """How a job failed that must have failed."""
        final = self.final(job_id)
        assert isinstance(final, Failed), final
        return final.error

    @property
    def num_sequences(self) -> int:
        """How many sequences ever had a row."""
        return len({chunk.seq for step in self.backend.steps for chunk in step.chunks})


@contextmanager
def device(
    *,
    limits: EngineLimits | None = None,
    hang_timeout_s: float = 30,
    load: Callable[[Callable[[str], None]], LoadedModel] | None = None,
) -> Iterator[Device]:
    """A device that is ready, unless the test says how it is loaded."""
    made = Device()
    with running_device(
        load or (lambda _: LoadedModel("fake", made.backend, FakeTokenizer())),
        made.emit,
        limits or EngineLimits(batch_window_ms=0, max_idle=0),
        hang_timeout_s=hang_timeout_s,
    ) as made.thread:
        if load is None:
            made.await_state(ModelState.READY)
        yield made


def test_commands_keep_their_order() -> None:
    with device() as made:
        for i in range(50):
            made.submit(f"j{i}", max_tokens=100_000)
            made.thread.cancel(f"j{i}")
        assert {made.reason(f"j{i}") for i in range(50)} == {FinishReason.CANCELLED}


def test_a_load_that_fails_is_reported_and_refuses_work() -> None:
    def load(_: Callable[[str], None]) -> LoadedModel:
        raise ModelNotFoundError("there is no such model")

    with device(load=load) as made:
        made.await_state(ModelState.FAILED)
        assert made.thread.detail == "there is no such model"
        with pytest.raises(ModelSwapError, match="no such model"):
            made.submit("a")


@pytest.mark.parametrize("is_stopped", [False, True])
def test_requests_while_loading_are_refused_with_retry_and_a_stop_is_kept(
    is_stopped: bool,
) -> None:
    go_on = threading.Event()

    def load(on_progress: Callable[[str], None]) -> LoadedModel:
        on_progress("reading weights")
        go_on.wait(60)
        return load_fake(on_progress)

    with device(load=load) as made:
        with pytest.raises(ModelSwapError, match="loading") as caught:
            made.submit("a")
        assert caught.value.retry_after_s
        if is_stopped:
            made.thread.request_stop()
        go_on.set()
        made.await_state(ModelState.STOPPED if is_stopped else ModelState.READY)


def test_the_queue_is_bounded() -> None:
    with device(limits=EngineLimits(max_batch_size=1, max_queue=2, batch_window_ms=0)) as made:
        made.backend.gate.clear()
        for i in range(3):
            made.submit(f"j{i}")
        with pytest.raises(OverloadedError) as caught:
            made.submit("one too many")
        assert caught.value.retry_after_s
        made.backend.gate.set()
        assert {made.reason(f"j{i}") for i in range(3)} == {FinishReason.MAX_TOKENS}


def test_stopping_answers_every_request() -> None:
    with device() as made:
        made.submit("a", max_tokens=1_000_000)
        made.thread.request_stop()
        assert isinstance(made.error("a"), DrainingError)
        with pytest.raises(DrainingError):
            made.submit("b")


def test_a_hung_device_is_noticed_answered_for_and_forgiven() -> None:
    with device(hang_timeout_s=1.5) as made:
        made.stall("running", max_tokens=100_000)
        made.submit("waiting")
        for name in ("running", "waiting"):
            assert isinstance(made.error(name), BackendError)
        made.await_state(ModelState.HUNG)
        with pytest.raises(ModelSwapError, match="does not respond"):
            made.submit("late")
        made.backend.gate.set()
        made.await_state(ModelState.READY)
        assert eventually(lambda: made.backend.num_open == 0)  # a failed request does not run on
        made.submit("after")
        assert made.reason("after") is FinishReason.MAX_TOKENS
        assert made.thread.num_live == 0


class PausingQueue(queue.SimpleQueue[Command]):
    """What the test's thread puts into it comes after two of others, if they come soon."""

    def put(self, item: Command, block: bool = True, timeout: float | None = None) -> None:
        if threading.current_thread() is threading.main_thread():
            pause = threading.Event()
            for _ in range(150):
                if self.qsize() >= 2:
                    break
                pause.wait(0.01)
        super().put(item, block, timeout)


def test_a_request_failed_by_the_watchdog_during_submission_does_not_run() -> None:
    commands = PausingQueue()
    with device(hang_timeout_s=1) as made:
        made.stall("running", max_tokens=100_000)
        made.thread._commands = commands  # the watchdog cancels both requests
        made.submit("late", max_tokens=100_000)
        made.error("late")
        made.backend.gate.set()
        made.await_state(ModelState.READY)
        assert eventually(lambda: made.backend.num_open == 0 and commands.empty())
        assert made.num_sequences == 1


@pytest.mark.parametrize("is_sent_at_once", [False, True])
def test_a_defect_of_the_engine_ends_requests_and_neither_the_thread_nor_later_ones(
    is_sent_at_once: bool,
) -> None:
    with device() as made:
        if is_sent_at_once:  # while the defect is told to the first
            made.on_failure = lambda: made.submit("b")
        made.backend.num_defects = 1
        made.submit("a")
        made.error("a")
        if not is_sent_at_once:
            made.submit("b")
        assert made.reason("b") is FinishReason.MAX_TOKENS


def test_a_crash_also_fails_requests_that_were_still_queued() -> None:
    with device() as made:
        made.stall("running", max_tokens=5)
        waiting = [f"w{i}" for i in range(3)]
        for name in waiting:
            made.submit(name, name, max_tokens=100_000)
        made.backend.num_defects = 1
        made.backend.gate.set()
        for name in waiting:
            made.error(name)
        before = made.num_sequences
        made.submit("next", max_tokens=2)
        made.final("next")
        assert made.num_sequences == before + 1, "requests that were answered ran on"


@pytest.mark.parametrize("where", ["launch", "open_sequence"])
def test_a_model_whose_device_is_lost_is_loaded_again(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends: list[StallingBackend] = []

    def load(_: Callable[[str], None]) -> LoadedModel:
        backends.append(StallingBackend())
        return LoadedModel("fake", backends[-1], FakeTokenizer())

    def fail(*_: object) -> None:
        raise DeviceLostError("a shard has ended.")

    with device(load=load) as made:
        made.await_state(ModelState.READY)
        monkeypatch.setattr(backends[0], where, fail)
        made.submit("a")
        error = made.error("a")
        assert isinstance(error, ModelSwapError)
        assert error.message == "a shard has ended. Reloading the model; try again."
        made.await_state(ModelState.READY)
        made.submit("b")
        assert made.reason("b") is FinishReason.MAX_TOKENS
        assert len(backends) == 2
        assert backends[0].num_open == 0


def test_a_failed_call_fails_its_future_and_later_calls_run() -> None:
    with device() as made:
        made.stall("a")
        made.backend.num_defects = 1
        resized, closed = made.thread.resize(10**6), made.thread.close_idle("a")
        made.backend.gate.set()
        assert isinstance(resized.exception(60), BackendError)
        assert closed.result(60) is None
        made.submit("b")
        assert made.reason("b") is FinishReason.MAX_TOKENS


def test_a_waiter_that_leaves_cannot_cancel_a_call() -> None:
    """The thread would fail all requests when it settles the future."""
    with device() as made:
        made.stall("a")
        closed = made.thread.close_idle("a")
        assert not closed.cancel()
        made.backend.gate.set()
        assert closed.result(60) is None
        assert made.reason("a") is FinishReason.MAX_TOKENS


def test_what_is_asked_for_after_a_stop_is_refused() -> None:
    with device() as made:
        made.thread.request_stop()
        assert made.thread.join(60)
        for late in (made.thread.resize(10**6), made.thread.close_idle("a")):
            assert isinstance(late.exception(60), DrainingError)
        with pytest.raises(DrainingError):
            made.thread.exchange(None, drain_s=0)


def test_a_text_that_waits_for_a_device_that_hangs_is_answered() -> None:
    with device(hang_timeout_s=1.5) as made:
        made.stall("running", max_tokens=100_000)
        hung = EmbeddingJob((1, 2, 3))
        made.thread.submit(hung)
        assert isinstance(hung.result.exception(60), BackendError)
        made.backend.gate.set()


def test_a_thread_that_crashes_in_a_step_answers_requests_and_texts() -> None:
    with device() as made:
        made.stall("running", max_tokens=100_000)
        text = EmbeddingJob((1, 2, 3))
        made.thread.submit(text)

        def crash(_: Step) -> bool:
            raise SystemExit("no driver")

        made.backend.fail_launch = crash
        made.backend.gate.set()
        assert isinstance(made.error("running"), BackendError)
        assert isinstance(text.result.exception(60), BackendError)
        made.await_state(ModelState.FAILED)


def test_a_thread_that_crashes_answers_what_waits_and_refuses_the_rest() -> None:
    """Some libraries call `sys.exit` where they could raise."""
    is_asked, go_on = threading.Event(), threading.Event()

    def load(_: Callable[[str], None]) -> LoadedModel:
        is_asked.set()
        go_on.wait(60)
        raise SystemExit("no driver")

    with device(load=load) as made:
        assert is_asked.wait(60)
        waiting = made.thread.close_idle("a")
        swapped = made.thread.exchange(None, drain_s=0)
        go_on.set()
        for future in (waiting, swapped):
            assert isinstance(future.exception(60), BackendError)
        made.await_state(ModelState.FAILED)
        assert isinstance(made.thread.resize(1).exception(60), BackendError)
        with pytest.raises(ModelSwapError, match="no driver"):
            made.thread.exchange(None, drain_s=0)
        with pytest.raises(ModelSwapError, match="no driver"):
            made.submit("a")


def test_a_backend_is_shut_down_when_all_else_of_its_model_is_gone() -> None:
    """So that it can return the memory of tokenizer and engine too."""
    tokenizers: list[weakref.ref[FakeTokenizer]] = []
    left: list[object] = []

    class LastBackend(StallingBackend):
        def shutdown(self) -> None:
            gc.collect()
            left.extend(ref() for ref in tokenizers)
            super().shutdown()

    def load(_: Callable[[str], None]) -> LoadedModel:
        tokenizer = FakeTokenizer()
        tokenizers.append(weakref.ref(tokenizer))
        return LoadedModel("fake", LastBackend(), tokenizer)

    with device(load=load) as made:
        made.await_state(ModelState.READY)
        made.submit("a")
        made.final("a")
        made.thread.exchange(None, drain_s=1).result(60)
        assert left == [None]


def test_requests_sent_together_start_together() -> None:
    with device(limits=EngineLimits(batch_window_ms=60000)) as made:
        with made.thread.expecting():
            made.submit("a")
            assert eventually(lambda: made.thread._taken)
            assert not eventually(lambda: made.backend.steps, 0.1)
        made.submit("b", "other")
        for name in ("a", "b"):
            made.final(name)
        assert len(made.backend.steps[0].chunks) == 2


def test_a_request_waits_for_another_no_longer_than_it_may_and_alone_not_at_all() -> None:
    with device(limits=EngineLimits(batch_window_ms=60000)) as made:
        made.submit("a")
        made.final("a")
        made.thread.reconfigure(EngineLimits(batch_window_ms=20))
        with made.thread.expecting():
            made.submit("b")
            made.final("b")


def test_memory_can_be_reduced_to_what_running_requests_use() -> None:
    with device() as made:
        longest = made.thread.longest_sequence
        made.stall("a")
        refused = made.thread.resize(1)
        made.backend.gate.set()
        with pytest.raises(PoolExhaustedError):
            refused.result(60)
        made.reason("a")
        made.thread.resize(1000).result(60)
        assert made.thread.longest_sequence < longest


def test_work_ahead_pauses_from_the_preparation_of_a_request_to_its_end() -> None:
    with device(limits=EngineLimits(batch_window_ms=0)) as made:
        first = make_job("first", "read the file", agent="coder", max_tokens=1)
        made.thread.submit(first)
        made.final("first")
        num_steps = len(made.backend.steps)
        made.backend.entered.clear()
        made.backend.gate.clear()
        tokens = (*first.tokens, *b"x" * 1000)
        made.thread.compute_ahead(AheadJob("coder", first.root, tokens))
        assert made.backend.entered.wait(60)  # a step of it is in progress
        with made.thread.expecting():
            made.backend.gate.set()
            made.submit("other", max_tokens=20)
            made.reason("other")
            starts = [step.chunks[0].start for step in made.backend.steps[num_steps:]]
        # One step ahead, then the request's alone, to its end.
        assert starts[:2] == [len(first.tokens), 0]
        assert starts[2:21] == [len(b"hello") + n for n in range(19)]
        assert len(starts) == 21
        # Afterwards it goes on.
        assert eventually(lambda: sum(s.num_tokens for s in made.backend.steps) > 1000)
        made.thread.submit(make_job("next", "read the file" + "x" * 999, agent="coder"))
        assert isinstance(final := made.final("next"), Finished)
        assert final.usage.cache_read_tokens == len(first.tokens) + 999 - 1
