"""A real device thread over a fake model, for tests of what stands above it."""

import contextlib
from collections.abc import Callable, Iterator

from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.device_thread import DeviceThread, LoadedModel
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.request import EventBatch
from semantic.application.engine.scheduler import EngineLimits
from semantic.application.requests.reply import ReplyHub
from semantic.domain.pool import BlockPool
from semantic.ports.inbound import ModelState


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
        assert thread.join(20)


@contextlib.contextmanager
def ready_device(model: LoadedModel) -> Iterator[tuple[DeviceThread, ReplyHub]]:
    """A device that has loaded; replies that say no length have nine tokens."""
    hub = ReplyHub()
    limits = EngineLimits(default_max_tokens=9, batch_window_ms=0)
    with running_device(lambda _: model, hub.emit, limits) as thread:
        while thread.state is ModelState.LOADING:
            thread.join(0.01)
        yield thread, hub
