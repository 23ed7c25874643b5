"""The served model, the available models, and swaps between them.

A swap has these steps:

1. Fetch and check the new model. The old one still serves, so a failure here affects no request.
2. Stop admitting: new requests wait at the gate.
3. Drain for up to `drain_s`; then seal the KV cache of the remaining requests and fail them.
4. Flush the KV cache to disk, drop it from memory, and drop the weights.
5. Load the new model. If that fails, load the old one again and report the reason.
6. Admit requests.
"""

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from semantic.application.agents.feed import EventFeed, ModelChanged
from semantic.application.engine.device_thread import DeviceThread
from semantic.application.engine.model import LoadedModel
from semantic.application.settings import SwapPolicy
from semantic.domain.errors import (
    ConflictError,
    InvalidRequestError,
    ModelNotFoundError,
    ModelSwapError,
    SemanticError,
)
from semantic.domain.model_names import ModelNames
from semantic.ports.backend import ModelEntry, ModelSourcePort, OnProgress
from semantic.ports.inbound import ModelState, ModelStatus

_log = logging.getLogger(__name__)
_POLL_S = 0.05
_TICK_S = 0.5  # interval of the check for an idle model

LoadModel: TypeAlias = Callable[[ModelEntry, OnProgress], LoadedModel]


@dataclass(frozen=True, slots=True)
class SwapReport:
    """Result of a swap.

    Attributes:
        previous: Id of the model served before; None if none was loaded.
        model: Id of the model served now; None after an unload.
        seconds: Time during which requests had to wait.
        num_cut: Number of requests that were ended early.
    """

    previous: str | None
    model: str | None
    seconds: float = 0.0
    num_cut: int = 0


@dataclass(slots=True, eq=False)
class _Job:
    """A requested swap; `target` is None for an unload.

    Until `is_exchanging` is set, the new model is fetched and checked while the old one serves.
    """

    target: ModelEntry | None
    drain_s: float
    is_exchanging: bool = False
    told: tuple[str, str] = ("", "")
    done: Future[SwapReport] = field(default_factory=Future)


class ModelRegistry:
    """The models of one device. Thread-safe; swaps run on the registry's own thread."""

    def __init__(
        self,
        device: DeviceThread,
        source: ModelSourcePort,
        load: LoadModel,
        first: ModelEntry,
        *,
        backend_name: str,
        names: ModelNames | None = None,
        feed: EventFeed | None = None,
    ) -> None:
        """Create the registry; `start` starts its thread.

        Args:
            device: Runs the models; it loads the first one by itself.
            source: Finds and fetches models.
            load: Loads a model; called on the device thread.
            first: The model that the device loads at its start.
            backend_name: Name of the backend that runs the models.
            names: Model aliases; None for the default ones.
            feed: Receives an event for every step of a swap; None disables the events.
        """
        self.policy = SwapPolicy()
        self._device = device
        self._source = source
        self._load = load
        self._backend_name = backend_name
        self._names = names or ModelNames()
        self._feed = feed
        self._lock = threading.RLock()
        self._current = first
        self._on_disk: tuple[ModelEntry, ...] = ()  # what `refresh` found last
        self._since = time.monotonic()
        self._created_at = time.time()
        self._job: _Job | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="semantic-models", daemon=True)

    def start(self) -> None:
        """Start the thread that performs swaps and unloads idle models."""
        self._thread.start()

    def request_stop(self) -> None:
        """Ask the thread to end; a swap in progress fails when the device stops."""
        self._jobs.put(None)

    # -- models ---------------------------------------------------------------------------------

    def current(self) -> ModelStatus:
        """Return the model that is served, is being loaded, or was served last."""
        with self._lock:
            job, entry, state = self._job, self._current, self._device.state
            if job is None or self._is_serving():
                return self._status(entry, state, self._device.detail)
            model, target = self._device.model, job.target
            if target is not None and (model is None or model.id == target.id):
                entry = target
            # Not LOADING: requests and the next swap wait, unlike while the first model loads.
            return self._status(entry, ModelState.SWAPPING, self._device.detail)

    def models(self) -> tuple[ModelStatus, ...]:
        """Return the current model, the one being loaded, and those on disk. Reads the disk."""
        current = self.current()
        self.refresh()
        found = {entry.id: entry for entry in self._on_disk}
        with self._lock:
            target = self._job.target if self._job else None
        if target is not None:
            found.setdefault(target.id, target)
        if known := found.pop(current.id, None):
            family = current.family or known.family
            current = replace(current, family=family, num_bytes=known.num_bytes, fits=known.fits)
        statuses = [current]
        statuses += [self._status(entry, ModelState.ON_DISK, "") for entry in found.values()]
        return tuple(
            replace(status, state=ModelState.LOADING, detail=self._progress())
            if target and status.id == target.id
            else status
            for status in statuses
        )

    def find(self, name: str) -> ModelStatus:
        """Return the model with this id or alias; an empty name is the current model.

        Reads the disk.

        Raises:
            ModelNotFoundError: no model has this name.
        """
        current = self.current()
        if self._names.is_any(name) or name == current.id:
            return current
        self.refresh()
        wanted = self._entry(name).id
        return next(status for status in self.models() if status.id == wanted)

    def _status(self, entry: ModelEntry, state: ModelState, detail: str) -> ModelStatus:
        model = self._device.model
        if model is None or model.id != entry.id:
            model = None
        return ModelStatus(
            id=entry.id,
            backend=self._backend_name,
            state=state,
            detail=detail,
            max_context=model.backend.spec.max_context if model else 0,
            created_at=self._created_at,
            compute=model.backend.traits.compute if model else None,
            family=entry.family or (model.backend.spec.model_type if model else ""),
            num_bytes=entry.num_bytes,
            fits=entry.fits,
        )

    def refresh(self) -> None:
        """Read the list of models on disk; slow, and holds no lock meanwhile."""
        self._on_disk = tuple(self._source.entries())

    # -- admission ------------------------------------------------------------------------------

    def is_known(self, name: str) -> bool:
        """Whether `admit` can resolve a name without another `refresh`."""
        with self._lock:
            target = self._job.target if self._job else None
            entries = [entry for entry in (self._current, target, *self._on_disk) if entry]
        source = self._names.source(name)
        if not name or any(source in (entry.id, entry.source) for entry in entries):
            return True
        return self._names.is_any(name) and not self.policy.swap_on_request

    def admit(self, name: str) -> LoadedModel | str:
        """Return the model for a request, or a description of what the request waits for.

        May start a swap. Reads no disk: it knows the models that `refresh` found last.

        Raises:
            ModelNotFoundError: the model does not exist, or requests may not load it.
            ModelSwapError: no model is served: the first one is loading, or the device failed.
            DrainingError: the server is shutting down.
        """
        with self._lock:
            job, state = self._job, self._device.state
            if job is None and state not in (ModelState.READY, ModelState.UNLOADED):
                return self._device.ready_model()  # raises the reason
            wanted = self._wanted(name)
            if self._is_serving() and wanted.id == self._current.id:
                return self._device.ready_model()
            if job is not None:
                return self._progress()
            if state is ModelState.READY:
                stays_s = self.policy.min_residence_s - (time.monotonic() - self._since)
                if stays_s > 0:
                    return f"{self._current.id} stays for {stays_s:.0f} s before {wanted.id} comes"
            self._begin(wanted)
            return self._progress()

    def model_for(self, name: str) -> LoadedModel:
        """Return the model for a request that cannot wait.

        Raises:
            ModelSwapError: the model is not loaded now.
            ModelNotFoundError, DrainingError: as for `admit`.
        """
        admitted = self.admit(name)
        if isinstance(admitted, str):
            raise ModelSwapError(f"{admitted}.", retry_after_s=2)
        return admitted

    def _is_serving(self) -> bool:
        is_leaving = self._job is not None and self._job.is_exchanging
        return self._device.state is ModelState.READY and not is_leaving

    def _wanted(self, name: str) -> ModelEntry:
        current = self._current
        if not name or self._names.source(name) in (current.id, current.source):
            return current
        target = self._job.target if self._job else None
        if target is not None and self._names.source(name) in (target.id, target.source):
            return target
        if self._names.is_any(name) and not self.policy.swap_on_request:
            return current
        try:
            entry = self._entry(name)
        except ModelNotFoundError:
            if self._names.is_any(name):
                return current
            raise
        if not self.policy.swap_on_request:
            raise ModelNotFoundError(
                f"the model {entry.id!r} is on this machine but not loaded; this server serves "
                f"{current.id!r}. Load it with POST /admin/models/swap, or set swap_on_request."
            )
        return entry

    def _entry(self, name: str) -> ModelEntry:
        source = self._names.source(name)
        for entry in (self._current, *self._on_disk):
            if source in (entry.id, entry.source):
                return entry
        raise ModelNotFoundError(
            f"the model {name!r} is not served here; this server serves {self._current.id!r}, "
            f"also as {', '.join(map(repr, self._names.patterns))}. Use one of these names or "
            "none, or add yours to the setting model_aliases."
        )

    # -- swaps ----------------------------------------------------------------------------------

    def swap(self, name: str, drain_s: float | None = None) -> Future[SwapReport]:
        """Start a swap to another model, which is fetched first if it is not on this machine.

        Returns the future of a swap to the same model if one is in progress.

        Raises:
            ModelNotFoundError: no model has this name.
            ConflictError: a swap to another model is in progress.
            ModelSwapError: the first model is still loading, or the device hangs.
            DrainingError: the server is shutting down.
        """
        entry = self._fetchable(name)
        with self._lock:
            job = self._job
            if job is not None and job.target is not None and job.target.id == entry.id:
                return job.done
            self._require_settled()
            if self._device.state is ModelState.READY and entry.id == self._current.id:
                return _done(SwapReport(entry.id, entry.id))
            return self._begin(entry, drain_s).done

    def load(self, name: str) -> Future[SwapReport]:
        """Load a model while none is loaded; an empty name is the one served last.

        Raises:
            ConflictError: another model is loaded, or a swap is in progress.
            ModelNotFoundError, ModelSwapError, DrainingError: as for `swap`.
        """
        wanted = self._fetchable(name)
        with self._lock:
            loaded = self._device.model
            if loaded is not None and wanted.id != loaded.id:
                raise ConflictError(
                    f"{loaded.id!r} is loaded, and there is one model at a time; "
                    "use /admin/models/swap.",
                    param="model",
                )
            return self.swap(name)

    def unload(self, drain_s: float | None = None) -> Future[SwapReport]:
        """Unload the model; the next request for it loads it again.

        Raises:
            ConflictError: a swap is in progress.
            ModelSwapError, DrainingError: as for `swap`.
        """
        with self._lock:
            self._require_settled()
            if self._device.state is ModelState.UNLOADED:
                return _done(SwapReport(None, None))
            return self._begin(None, drain_s).done

    def _fetchable(self, name: str) -> ModelEntry:
        if self._names.is_any(name) or name == self._current.id:
            return self._current
        self.refresh()
        try:
            return self._entry(name)
        except ModelNotFoundError:
            return self._source.find(self._names.source(name))

    def _require_settled(self) -> None:
        if self._job is not None:
            raise ConflictError(f"a swap is in progress: {self._progress()}.", param="model")
        if self._device.state in (ModelState.LOADING, ModelState.HUNG, ModelState.STOPPED):
            self._device.ready_model()

    def _begin(self, target: ModelEntry | None, drain_s: float | None = None) -> _Job:
        job = _Job(target, self.policy.drain_timeout_s if drain_s is None else drain_s)
        self._job = job
        self._jobs.put(job)
        return job

    def _progress(self) -> str:
        with self._lock:
            job = self._job
            if job is None:
                return self._device.detail
            name = job.target.id if job.target else self._current.id
            state, detail = job.told
            return f"model {name}: {detail or state or 'queued'}"

    # -- swap thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_TICK_S)
            except queue.Empty:
                self._unload_if_idle()
                continue
            if job is None:
                return
            self._perform(job)

    def _unload_if_idle(self) -> None:
        limit_s = self.policy.model_keep_alive_s
        with self._lock:
            is_ready = self._job is None and self._device.state is ModelState.READY
            if limit_s and is_ready and self._device.idle_s > limit_s:
                self._begin(None)

    def _perform(self, job: _Job) -> None:
        try:
            report = self._exchange(job)
        except Exception as error:  # noqa: BLE001 - goes to the job's future; the thread continues
            if not isinstance(error, SemanticError):
                _log.exception("a swap failed")
                error = ModelSwapError(f"the swap failed: {error!r}")
            self._tell(job, "failed", error.message)
            _log.warning("a model was not swapped: %s", error.message)
            self._settle(job, self._current)
            job.done.set_exception(error)
            return
        _log.info("model swapped: %s for %s", report.model, report.previous)
        job.done.set_result(report)

    def _exchange(self, job: _Job) -> SwapReport:
        previous = self._current if self._device.model is not None else None
        target = job.target
        if target is not None:
            self._tell(job, "fetching", "looking for its files")
            target = self._source.fetch(target, lambda step: self._tell(job, "fetching", step))
            _require_fitting(target)
        started = time.monotonic()
        load = functools.partial(self._load, target) if target else None
        with self._lock:
            job.is_exchanging = True
        try:
            num_cut = self._follow(job, self._device.exchange(load, drain_s=job.drain_s))
        except SemanticError as error:
            raise self._bring_back(job, previous, error) from error
        seconds = time.monotonic() - started
        self._settle(job, target or self._current)
        self._tell(job, "ready" if target else "unloaded", "")
        return SwapReport(
            previous.id if previous else None, target.id if target else None, seconds, num_cut
        )

    def _bring_back(
        self, job: _Job, previous: ModelEntry | None, error: SemanticError
    ) -> SemanticError:
        """Load the previous model again; returns the error to report for the failed swap."""
        name = job.target.id if job.target else "the model"
        message = f"{name} could not be loaded: {error.message.rstrip('.')}"
        load = functools.partial(self._load, previous) if previous else None
        try:
            self._follow(job, self._device.exchange(load, drain_s=0))
        except SemanticError as second:
            return ModelSwapError(f"{message}; nor could the one before it: {second.message}")
        message += f"; {previous.id} is served again." if previous else "."
        if isinstance(error, InvalidRequestError | ModelNotFoundError):
            return InvalidRequestError(message, param="model")
        return ModelSwapError(message)

    def _follow(self, job: _Job, done: Future[int]) -> int:
        """Wait for the device, publishing its progress."""
        while True:
            try:
                return done.result(_POLL_S)
            except FutureTimeoutError:
                state, detail = self._device.state, self._device.detail
                if state in (ModelState.SWAPPING, ModelState.LOADING):
                    self._tell(job, state.value, detail)

    def _settle(self, job: _Job, current: ModelEntry) -> None:
        with self._lock:
            if self._job is job:
                self._job = None
                self._current, self._since = current, time.monotonic()

    def _tell(self, job: _Job, state: str, detail: str) -> None:
        if job.told == (state, detail):
            return
        job.told = (state, detail)
        if self._feed is not None:
            name = job.target.id if job.target else self._current.id
            self._feed.publish(ModelChanged(name, state, detail))


def _require_fitting(entry: ModelEntry) -> None:
    if entry.fits is False:
        raise InvalidRequestError(
            f"{entry.id} does not fit: its weights take {entry.num_bytes / 2**20:,.0f} MB on disk, "
            "more than this machine has for them beside memory_budget_mb. Take a smaller or a "
            "quantised one, or change model_budget_mb.",
            param="model",
        )


def _done(report: SwapReport) -> Future[SwapReport]:
    done: Future[SwapReport] = Future()
    done.set_result(report)
    return done
