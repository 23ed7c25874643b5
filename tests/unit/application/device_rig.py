"""A real device thread over a fake model, for tests of what stands above it."""

import contextlib
from collections.abc import Iterator

from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.device_thread import DeviceThread, LoadedModel
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.scheduler import EngineLimits
from semantic.application.requests.reply import ReplyHub
from semantic.domain.pool import BlockPool
from semantic.ports.inbound import ModelState


@contextlib.contextmanager
def running_device(model: LoadedModel) -> Iterator[tuple[DeviceThread, ReplyHub]]:
    """Run until the block ends; replies that say no length have nine tokens."""
    hub = ReplyHub()
    thread = DeviceThread(
        lambda _: model,
        lambda model, limits, emit, wake: BlockPoolBatchEngine(
            model.backend,
            model.tokenizer,
            AgentCacheStore(BlockPool(model.backend.spec, 10**7)),
            limits,
            emit,
            on_ready=wake,
        ),
        EngineLimits(default_max_tokens=9, batch_window_ms=0),
        hub.emit,
        hang_timeout_s=30,
    )
    thread.start()
    while thread.state is ModelState.LOADING:
        thread.join(0.01)
    yield thread, hub
    thread.request_stop()
    thread.join(10)
