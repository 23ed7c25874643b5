"""A real device thread over a fake model, for tests of what stands above it."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator

from semantic.adapters.outbound.backends.fake import FakeModels
from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.device_thread import DeviceThread
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.model import LoadedModel
from semantic.application.engine.request import EventBatch
from semantic.application.models.gate import ModelGate
from semantic.application.models.registry import ModelRegistry
from semantic.application.requests.reply import ReplyHub
from semantic.application.settings import EngineLimits
from semantic.domain.pool import BlockPool
from semantic.ports.backend import Step, Ticket
from semantic.ports.inbound import ModelState
from tests.waiting import await_that


def gate_to(device: DeviceThread, timeout_s: float = 60) -> ModelGate:
    """Lets requests through to the one model of a device."""
    source = FakeModels()
    registry = ModelRegistry(
        device, source, lambda *_: no_load(), source.find_model("fake"), backend_name="fake"
    )
    return ModelGate(registry, max_waiting=8, timeout_s=timeout_s)


def hold(device: DeviceThread, num_steps: int = 0) -> threading.Event:
    """Let a device compute no more than some steps until what is returned is set."""
    backend, may_go_on = device.ready_model().backend, threading.Event()
    launch, steps = backend.launch, itertools.count()

    def launch_later(step: Step) -> Ticket:
        assert next(steps) < num_steps or may_go_on.wait(60)
        return launch(step)

    backend.launch = launch_later  # type: ignore[method-assign]
    return may_go_on


def no_load() -> LoadedModel:
    raise AssertionError("nothing else is loaded")


@contextlib.contextmanager
def running_device(
    load: Callable[[Callable[[str], None]], LoadedModel],
    emit: Callable[[EventBatch], None],
    limits: EngineLimits,
    *,
    hang_timeout_s: float = 30,
) -> Iterator[DeviceThread]:
    """Run until the block ends."""
    thread = DeviceThread(
        load,
        lambda model, limits, emit, wake: BlockPoolBatchEngine(
            model.backend,
            model.tokenizer,
            AgentCacheStore(BlockPool(model.backend.spec, 10**7)),
            limits,
            emit,
            on_ready=wake,
        ),
        limits,
        emit,
        hang_timeout_s=hang_timeout_s,
    )
    thread.start()
    try:
        yield thread
    finally:
        thread.request_stop()
        assert thread.join(60)


@contextlib.contextmanager
def ready_device(model: LoadedModel) -> Iterator[tuple[DeviceThread, ReplyHub]]:
    """A device that has loaded; replies that say no length have nine tokens."""
    hub = ReplyHub()
    limits = EngineLimits(default_max_tokens=9, batch_window_ms=0)
    with running_device(lambda _: model, hub.emit, limits) as thread:
        await_that(lambda: thread.state is not ModelState.LOADING)
        yield thread, hub
