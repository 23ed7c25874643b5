"""Downloads of models that run beside the served one, with their progress."""

import enum
import logging
import threading
from dataclasses import dataclass

from semantic.application.models.registry import FetchModel, ModelRegistry
from semantic.domain.errors import ModelNotFoundError, SemanticError
from semantic.ports.models import FetchProgress

_log = logging.getLogger(__name__)


class DownloadState(enum.Enum):
    """How far a download is."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(slots=True)
class Download:
    """One download; its thread changes it.

    Attributes:
        detail: The current step, or why it failed.
    """

    model: str
    transfer: FetchProgress
    state: DownloadState = DownloadState.RUNNING
    detail: str = ""


class ModelDownloads:
    """Downloads since the start of the server, each on a thread of its own. Thread-safe."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models
        self._lock = threading.Lock()
        self._downloads: dict[str, Download] = {}

    def downloads(self) -> list[Download]:
        """Return all downloads, the latest first."""
        with self._lock:
            return [*self._downloads.values()][::-1]

    def start(self, model: str) -> Download:
        """Start a download, or return the one that runs. Reads the disk.

        Raises:
            ModelNotFoundError: no model has this name.
        """
        fetch = self._models.fetch(model)
        with self._lock:
            running = self._downloads.pop(model, None)
            if running is None or running.state is not DownloadState.RUNNING:
                running = Download(model, FetchProgress())
                threading.Thread(
                    target=self._run, args=(fetch, running), name="semantic-download", daemon=True
                ).start()
            self._downloads[model] = running
            return running

    def stop(self, model: str) -> None:
        """Stop a download, of which complete files stay on disk; forget one that has ended.

        Raises:
            ModelNotFoundError: there is no such download.
        """
        with self._lock:
            found = self._downloads.get(model)
            if found is None:
                raise ModelNotFoundError(f"{model!r} is not being downloaded.")
            if found.state is DownloadState.RUNNING:
                found.transfer.is_stopped = True
            else:
                del self._downloads[model]

    @staticmethod
    def _run(fetch: FetchModel, download: Download) -> None:
        def on_progress(step: str) -> None:
            download.detail = step

        try:
            fetch(on_progress, download.transfer)
        except Exception as error:  # noqa: BLE001 - shown with the download
            if download.transfer.is_stopped:
                download.detail, download.state = "", DownloadState.STOPPED
                return
            if not isinstance(error, SemanticError):
                _log.exception("failed to download %s", download.model)
            download.detail = error.message if isinstance(error, SemanticError) else repr(error)
            download.state = DownloadState.FAILED
        else:
            download.detail, download.state = "", DownloadState.DONE
