"""Downloads beside the served model: progress, stop, failure, and what is listed."""

import threading
from collections.abc import Iterator

import pytest

from semantic.adapters.outbound.backends.fake import FakeBackend, FakeModels, FakeTokenizer
from semantic.application.engine.model import LoadedModel
from semantic.application.models.downloads import Download, DownloadState, ModelDownloads
from semantic.application.models.registry import ModelRegistry
from semantic.domain.errors import ModelNotFoundError
from semantic.ports.models import FetchProgress, ModelEntry, OnProgress
from tests.unit.application.device_rig import ready_device
from tests.waiting import await_that

pytestmark = pytest.mark.unit

NAME = FakeModels.REMOTE.source


class HeldModels(FakeModels):
    """Counts half of a download, and goes on when told to."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.error: Exception | None = None

    def fetch(
        self, entry: ModelEntry, on_progress: OnProgress, transfer: FetchProgress | None = None
    ) -> ModelEntry:
        assert transfer is not None
        on_progress("downloading")
        transfer.num_done, transfer.num_total = 5, 10
        assert self.may_go_on.wait(60)
        if self.error is not None or transfer.is_stopped:
            raise self.error or ModelNotFoundError("it was stopped.")
        return entry


@pytest.fixture
def source() -> HeldModels:
    return HeldModels()


@pytest.fixture
def downloads(source: HeldModels) -> Iterator[ModelDownloads]:
    with ready_device(LoadedModel("fake", FakeBackend(), FakeTokenizer())) as (device, _):

        def load(entry: ModelEntry, _: OnProgress) -> LoadedModel:
            return LoadedModel(entry.id, FakeBackend(), FakeTokenizer())

        first = source.find_model("fake")
        yield ModelDownloads(ModelRegistry(device, source, load, first, backend_name="fake"))


def ended(download: Download) -> DownloadState:
    await_that(lambda: download.state is not DownloadState.RUNNING)
    return download.state


def test_a_download_is_counted_and_not_started_twice(
    downloads: ModelDownloads, source: HeldModels
) -> None:
    started = downloads.start(NAME)
    await_that(lambda: started.transfer.num_total == 10)
    assert (started.transfer.num_done, started.detail) == (5, "downloading")
    assert downloads.start(NAME) is started
    source.may_go_on.set()
    assert ended(started) is DownloadState.DONE
    assert downloads.start(NAME) is not started


def test_a_stopped_download_ends_and_is_forgotten_when_asked(
    downloads: ModelDownloads, source: HeldModels
) -> None:
    started = downloads.start(NAME)
    downloads.stop(NAME)
    source.may_go_on.set()
    assert ended(started) is DownloadState.STOPPED
    assert downloads.downloads() == [started]
    downloads.stop(NAME)
    assert downloads.downloads() == []
    with pytest.raises(ModelNotFoundError, match="is not being downloaded"):
        downloads.stop(NAME)


@pytest.mark.parametrize("error", [ModelNotFoundError("the hub is away."), OSError("disk full")])
def test_a_download_that_fails_says_why(
    downloads: ModelDownloads, source: HeldModels, error: Exception
) -> None:
    source.error = error
    source.may_go_on.set()
    started = downloads.start(NAME)
    assert ended(started) is DownloadState.FAILED
    assert str(error) in started.detail


def test_an_unknown_model_is_refused(downloads: ModelDownloads) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no model 'nowhere'"):
        downloads.start("nowhere")
    assert downloads.downloads() == []
