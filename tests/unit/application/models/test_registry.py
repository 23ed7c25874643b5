"""What is said of models, and who may pass, at each moment of a swap."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from semantic.adapters.outbound.backends.fake import FakeBackend, FakeModels, FakeTokenizer
from semantic.application.engine.device_thread import DeviceThread
from semantic.application.engine.model import LoadedModel, Loader
from semantic.application.models.registry import ModelRegistry
from semantic.domain.errors import ConflictError
from semantic.ports.backend import ModelEntry, OnProgress
from semantic.ports.inbound import ModelState
from tests.unit.application.device_rig import ready_device
from tests.waiting import await_that

pytestmark = pytest.mark.unit


class SlowModels(FakeModels):
    """Fetches when told to."""

    def __init__(self) -> None:
        self.is_there = threading.Event()

    def fetch(self, entry: ModelEntry, on_progress: OnProgress) -> ModelEntry:
        assert self.is_there.wait(60)
        return super().fetch(entry, on_progress)


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
    registry = ModelRegistry(device, source, loaded, source.find("fake"), backend_name="fake")
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


def test_a_model_that_is_ready_may_be_unloaded(
    models: ModelRegistry,
    source: SlowModels,
    device: DeviceThread,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device has the other model a moment before it is known that the swap is over."""
    source.is_there.set()
    known, exchange = Future[int](), device.exchange

    def exchange_unseen(load: Loader | None, *, drain_s: float) -> Future[int]:
        exchange(load, drain_s=drain_s)
        return known

    monkeypatch.setattr(device, "exchange", exchange_unseen)
    swapped = models.swap("fake-2")
    await_that(lambda: device.model is not None and device.model.id == "fake-2")
    await_that(lambda: device.state is ModelState.READY)
    assert (models.current().id, models.current().state) == ("fake-2", ModelState.SWAPPING)
    with pytest.raises(ConflictError, match="in progress"):
        models.unload()
    monkeypatch.undo()
    known.set_result(0)
    swapped.result(60)
    assert (models.current().id, models.current().state) == ("fake-2", ModelState.READY)
    assert models.unload().result(60).previous == "fake-2"
