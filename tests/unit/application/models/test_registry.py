"""The reported state of models, and which requests are admitted, during a swap."""

import threading
from collections.abc import Iterator

import pytest

from semantic.adapters.outbound.backends.fake import FakeBackend, FakeModels, FakeTokenizer
from semantic.application.engine.device_thread import DeviceThread
from semantic.application.engine.model import LoadedModel, SwapReport
from semantic.application.models.gate import ModelGate
from semantic.application.models.registry import ModelRegistry
from semantic.application.settings import EngineLimits, SwapPolicy
from semantic.domain.errors import (
    ConflictError,
    DrainingError,
    ModelNotFoundError,
    ModelSwapError,
)
from semantic.domain.events import Event, Failed, ModelProgress
from semantic.ports.inbound import ModelState, Reply
from semantic.ports.models import FetchProgress, ModelEntry, OnProgress
from tests.unit.application.device_rig import ready_device, running_device

pytestmark = pytest.mark.unit


class SlowModels(FakeModels):
    """Fetches when told to."""

    def __init__(self) -> None:
        self.is_there = threading.Event()

    def fetch(
        self, entry: ModelEntry, on_progress: OnProgress, transfer: FetchProgress | None = None
    ) -> ModelEntry:
        assert self.is_there.wait(60)
        return super().fetch(entry, on_progress, transfer)


class WatchedModels(FakeModels):
    """Notes which thread looks for models, and asks the registry on another one meanwhile."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.registry: ModelRegistry | None = None

    def entries(self) -> list[ModelEntry]:
        self.threads.append(threading.current_thread())
        if self.registry is not None:
            other = threading.Thread(target=self.registry.current, daemon=True)
            other.start()
            other.join(60)
            assert not other.is_alive(), "the registry is locked while models are looked for"
        return super().entries()


def loaded(entry: ModelEntry, _: OnProgress) -> LoadedModel:
    return LoadedModel(entry.id, FakeBackend(), FakeTokenizer())


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    with ready_device(LoadedModel("fake", FakeBackend(), FakeTokenizer())) as (device, _):
        yield device


@pytest.fixture
def source() -> SlowModels:
    return SlowModels()


@pytest.fixture
def models(device: DeviceThread, source: SlowModels) -> Iterator[ModelRegistry]:
    registry = ModelRegistry(device, source, loaded, source.find_model("fake"), backend_name="fake")
    registry.start()
    yield registry
    registry.request_stop()


def test_a_model_serves_until_the_next_one_is_fetched(
    models: ModelRegistry, source: SlowModels
) -> None:
    swapped = models.swap("fake-2")
    assert (models.current().id, models.current().state) == ("fake", ModelState.READY)
    for name in ("", "fake"):
        assert isinstance(models.admit(name), LoadedModel)
    assert isinstance(models.admit("fake-2"), str)
    source.is_there.set()
    assert swapped.result(60).model == "fake-2"
    assert isinstance(models.admit("fake-2"), LoadedModel)


def test_a_swap_ends_when_its_model_is_ready(
    models: ModelRegistry, source: SlowModels, device: DeviceThread
) -> None:
    swap = device.lifecycle.begin_swap(source.find_model("fake-2"), drain_s=0)
    assert (models.current().id, models.current().state) == ("fake", ModelState.READY)
    swap.served_after = source.find_model("fake-2")
    is_loading, may_load = threading.Event(), threading.Event()

    def load(on_progress: OnProgress) -> LoadedModel:
        is_loading.set()
        assert may_load.wait(60)
        return loaded(source.find_model("fake-2"), on_progress)

    exchanged = device.exchange(load, drain_s=0)
    assert is_loading.wait(60)
    assert (models.current().id, models.current().state) == ("fake-2", ModelState.SWAPPING)
    assert device.state is ModelState.LOADING
    with pytest.raises(ConflictError, match="in progress"):
        models.unload()
    may_load.set()
    assert exchanged.result(60) == 0
    assert (models.current().id, models.current().state) == ("fake-2", ModelState.READY)
    assert models.unload().result(60).previous == "fake-2"


@pytest.mark.parametrize("ending", ["loaded", "failed", "stopped"])
def test_the_load_of_the_first_model_can_be_awaited(source: SlowModels, ending: str) -> None:
    may_go_on = threading.Event()
    first, last = source.find_model("fake"), source.find_model("fake-2")

    def load(on_progress: OnProgress) -> LoadedModel:
        assert may_go_on.wait(60)
        if ending == "failed":
            raise ModelNotFoundError("there is no such model")
        return loaded(first, on_progress)

    with running_device(load, lambda _: None, EngineLimits()) as device:
        models = ModelRegistry(device, source, loaded, first, backend_name="fake")
        waits = [models.running_load(), models.swap("fake"), models.load(""), models.load("fake")]
        with pytest.raises(ModelSwapError, match="loading"):
            models.swap(last.id)
        work = device.close_idle("an agent")
        assert not any(wait is None or wait.done() for wait in [*waits, work])
        if ending == "stopped":
            device.request_stop()  # nobody waits for the load any more
        else:
            may_go_on.set()
        found = [wait.exception(60) or wait.result() for wait in waits if wait is not None]
        expected = {
            "loaded": (SwapReport(None, "fake"), type(None)),
            "failed": (ModelNotFoundError, type(None)),
            "stopped": (DrainingError, DrainingError),
        }
        reason, of_work = expected[ending]
        for one in found:
            assert one == reason if isinstance(reason, SwapReport) else type(one) is reason
        assert type(work.exception(60)) is of_work
        if ending != "stopped":
            assert models.running_load() is None
        may_go_on.set()


async def test_a_waiting_reply_that_cannot_start_for_a_defect_ends_with_an_error(
    models: ModelRegistry, source: SlowModels, caplog: pytest.LogCaptureFixture
) -> None:
    async def start() -> Reply:
        raise RuntimeError("a defect")

    models.swap("fake-2")
    events: list[Event] = []
    async for event in await ModelGate(models, max_waiting=8, timeout_s=60).reply("fake-2", start):
        source.is_there.set()
        events.append(event)
    assert {type(event) for event in events[:-1]} == {ModelProgress}
    assert isinstance(events[-1], Failed)
    assert "a defect" in caplog.text


async def test_models_are_looked_for_neither_on_the_event_loop_nor_within_the_lock(
    device: DeviceThread,
) -> None:
    source = WatchedModels()
    models = ModelRegistry(device, source, loaded, source.find_model("fake"), backend_name="fake")
    models.start()
    source.registry = models
    source.threads.clear()
    gate = ModelGate(models, max_waiting=8, timeout_s=60)
    assert (await gate.model("fake")).id == "fake"
    assert not source.threads
    for name, words in (("fake-2", "not loaded"), ("none", "not served here")):
        with pytest.raises(ModelNotFoundError, match=words):
            await gate.model(name)
    models.policy = SwapPolicy(swap_on_request=True, min_residence_s=0)
    assert (await gate.model("fake-2")).id == "fake-2"
    assert source.threads
    assert threading.current_thread() not in source.threads
    with pytest.raises(ConflictError):
        models.load("fake")
    models.request_stop()
