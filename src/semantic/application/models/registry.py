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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeAlias

from semantic.application.agents.feed import EventFeed, ModelChanged
from semantic.application.engine.device_thread import DeviceThread
from semantic.application.engine.model import LoadedModel, ModelSwap, SwapReport
from semantic.application.settings import SwapPolicy
from semantic.domain.errors import (
    ConflictError,
    InvalidRequestError,
    ModelNotFoundError,
    ModelSwapError,
    SemanticError,
)
from semantic.domain.model_names import ModelNames, Suggestion
from semantic.ports.inbound import ImageSupport, ModelState, ModelStatus
from semantic.ports.models import FetchProgress, ModelEntry, ModelFacts, ModelSourcePort, OnProgress

_log = logging.getLogger(__name__)
_TICK_S = 0.5  # interval of the check for an idle model

LoadModel: TypeAlias = Callable[[ModelEntry, OnProgress], LoadedModel]
FetchModel: TypeAlias = Callable[[OnProgress, FetchProgress], None]


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
        """`load` is called on the device thread, which loads `first` by itself."""
        self.policy = SwapPolicy()
        self.has_ocr = False  # whether models that accept only text get the text in images
        self._device = device
        self._lifecycle = device.lifecycle
        self._lifecycle.served, self._lifecycle.on_step = first, self._publish_step
        self._first = first
        self._source = source
        self._load = load
        self._backend_name = backend_name
        self._names = names or ModelNames()
        self._feed = feed
        self._on_disk: tuple[ModelEntry, ...] = ()  # what `refresh` found last
        self._created_at = time.time()
        self._keep_s: float | None = None  # a client's choice for the loaded model
        self._swaps: queue.SimpleQueue[ModelSwap | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="semantic-models", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def request_stop(self) -> None:
        """Ask the thread to end; a swap in progress fails when the device stops."""
        self._swaps.put(None)

    # -- models ---------------------------------------------------------------------------------

    def current(self) -> ModelStatus:
        """Return the model that is served, is being loaded, or was served last."""
        lifecycle = self._lifecycle
        with lifecycle.lock:
            entry, model, state = self._current, lifecycle.model, lifecycle.public_state
            target = lifecycle.swap.target if lifecycle.swap else None
            if state is ModelState.SWAPPING and target is not None and model is None:
                entry = target
            return self._status(entry, state, lifecycle.detail)

    def models(self) -> tuple[ModelStatus, ...]:
        """Return the current model, the one being loaded, and those on disk. Reads the disk."""
        current = self.current()
        self.refresh()
        found = {entry.id: entry for entry in self._on_disk}
        target = self._target
        if target is not None:
            found.setdefault(target.id, target)
        if known := found.pop(current.id, None):
            family = current.family or known.family
            current = replace(current, family=family, num_bytes=known.num_bytes, fits=known.fits)
        statuses = [current]
        statuses += [self._status(entry, ModelState.ON_DISK, "") for entry in found.values()]
        return tuple(
            replace(status, state=ModelState.LOADING, detail=self._lifecycle.progress)
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
        model = self._lifecycle.model
        if model is None or model.id != entry.id:
            model = None
        own_context = model.backend.spec.max_context if model else 0
        return ModelStatus(
            id=entry.id,
            backend=self._backend_name,
            state=state,
            detail=detail,
            max_context=min(own_context, self._lifecycle.longest_sequence),
            created_at=self._created_at,
            compute=model.backend.traits.compute if model else None,
            family=entry.family or (model.backend.spec.model_type if model else ""),
            num_bytes=entry.num_bytes,
            fits=entry.fits,
            draft_model=model.drafts_by if model else "",
            draft_note=model.draft_note if model else "",
            images=ImageSupport.of(model.vision, has_ocr=self.has_ocr) if model else None,
        )

    def facts(self, name: str) -> ModelFacts:
        """Return what the files of a model on this machine say about it. Reads the disk.

        Raises:
            ModelNotFoundError: no model has this name.
        """
        known = {entry.id: entry for entry in (*self._on_disk, self._current)}
        return self._source.facts(known.get(name) or self._entry(name))

    def refresh(self) -> None:
        """Read the list of models on disk; slow, and holds no lock meanwhile."""
        self._on_disk = tuple(self._source.entries())

    def suggestions(self) -> Sequence[tuple[Suggestion, bool]]:
        """Judge known models for this machine, each with whether it is on it. Reads the disk."""
        self.refresh()
        here = {entry.source for entry in self._on_disk}
        return [
            (one, not here.isdisjoint((one.model.published, one.model.four_bit)))
            for one in self._source.suggestions()
        ]

    def remove(self, name: str) -> int:
        """Delete a model from this machine and return how many bytes this freed.

        Raises:
            ModelNotFoundError: the model is not on this machine.
            ConflictError: the model is served or being loaded, here or by another server.
            InvalidRequestError: its files belong to another program.
        """
        self.refresh()
        entry = self._entry(name)
        target = self._target
        if entry.id == self._current.id or (target is not None and entry.id == target.id):
            raise ConflictError(
                f"{entry.id} is the model that this server serves; serve another one first.",
                param="model",
            )
        return self._source.remove(entry)

    # -- admission ------------------------------------------------------------------------------

    def is_known(self, name: str) -> bool:
        """Whether `admit` can resolve a name without another `refresh`."""
        entries = [entry for entry in (self._current, self._target, *self._on_disk) if entry]
        source = self._names.source(name)
        if not name or any(source in (entry.id, entry.source) for entry in entries):
            return True
        return self._names.is_any(name) and not self.policy.swap_on_request

    def admit(self, name: str) -> LoadedModel | str:
        """Return the model for a request, or a description of what the request waits for.

        May start a swap. Reads no disk: it knows the models that `refresh` found last.

        Raises:
            ModelNotFoundError: the model does not exist, or requests may not load it.
            ModelSwapError: the model could not be loaded, or the device hangs.
            DrainingError: the server is shutting down.
        """
        lifecycle = self._lifecycle
        with lifecycle.lock:
            swap, state = lifecycle.swap, lifecycle.state
            if swap is None and state in (ModelState.FAILED, ModelState.HUNG, ModelState.STOPPED):
                return lifecycle.ready_model()  # raises the reason
            wanted = self._wanted(name)
            if state is ModelState.READY and wanted.id == self._current.id:
                return lifecycle.ready_model()
            if swap is not None or state in (ModelState.LOADING, ModelState.SWAPPING):
                return lifecycle.progress
            if state is ModelState.READY:
                served_s = time.monotonic() - lifecycle.served_since
                reserved_s = self.policy.min_residence_s - served_s
                if reserved_s > 0:
                    current = self._current.id
                    return f"{current} is reserved for {reserved_s:.0f} s; {wanted.id} is queued"
            self._begin(wanted)
            return lifecycle.progress

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

    @property
    def _current(self) -> ModelEntry:
        return self._lifecycle.served or self._first

    @property
    def _target(self) -> ModelEntry | None:
        swap = self._lifecycle.swap
        return swap.target if swap else None

    def _wanted(self, name: str) -> ModelEntry:
        current = self._current
        if not name or self._names.source(name) in (current.id, current.source):
            return current
        target = self._target
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
            "none, or add an alias to the setting model_aliases."
        )

    # -- swaps ----------------------------------------------------------------------------------

    def running_load(self) -> Future[SwapReport] | None:
        """Return the swap or load in progress, that of the first model included; None if none is.

        The model is served, or the reason of a failure known, when the future resolves.
        """
        with self._lifecycle.lock:
            if (swap := self._lifecycle.swap) is not None:
                return swap.done
            loading = self._lifecycle.loading
            return None if loading is None else loading.reported(self._current.id)

    def swap(self, name: str, drain_s: float | None = None) -> Future[SwapReport]:
        """Start a swap to another model, which is fetched first if it is not on this machine.

        Returns the future of the load of the same model if one is in progress.

        Raises:
            ModelNotFoundError: no model has this name.
            ConflictError: a swap to another model is in progress.
            ModelSwapError: the first model is still loading, or the device hangs.
            DrainingError: the server is shutting down.
        """
        entry = self._fetchable(name)
        with self._lifecycle.lock:
            swap = self._lifecycle.swap
            target = swap.target if swap else self._current
            is_same = target is not None and target.id == entry.id
            if is_same and (running := self.running_load()) is not None:
                return running
            self._require_settled()
            if self._lifecycle.state is ModelState.READY and entry.id == self._current.id:
                return SwapReport(entry.id, entry.id).resolved()
            return self._begin(entry, drain_s).done

    def load(self, name: str) -> Future[SwapReport]:
        """Load a model while none is loaded; an empty name is the one served last.

        Raises:
            ConflictError: another model is loaded, or a swap is in progress.
            ModelNotFoundError, ModelSwapError, DrainingError: as for `swap`.
        """
        wanted = self._fetchable(name)
        with self._lifecycle.lock:
            loaded = self._lifecycle.model
            if loaded is not None and wanted.id != loaded.id:
                raise ConflictError(
                    f"{loaded.id!r} is loaded, and only one model can be loaded at a time; "
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
        with self._lifecycle.lock:
            self._require_settled()
            if self._lifecycle.state is ModelState.UNLOADED:
                return SwapReport(None, None).resolved()
            return self._begin(None, drain_s).done

    @property
    def unloads_in_s(self) -> float | None:
        """Seconds until the model is unloaded if no request comes; None if it stays loaded."""
        limit_s = self._idle_limit_s
        return None if limit_s is None else max(0.0, limit_s - self._device.idle_s)

    @property
    def _idle_limit_s(self) -> float | None:
        limit_s = self._keep_s
        if limit_s is None:
            return self.policy.model_keep_alive_s or None
        return None if limit_s < 0 else limit_s

    def keep_loaded(self, seconds: float) -> Future[SwapReport] | None:
        """Replace `model_keep_alive_s` until the next swap; a negative number keeps the model.

        Returns the unloading that this starts at once: with 0, if no request runs.
        """
        with self._lifecycle.lock:
            self._keep_s = seconds
            return self._unload_if_idle()

    def fetch(self, name: str) -> FetchModel:
        """Find a model; the function that this returns downloads it if needed, which takes long.

        Raises:
            ModelNotFoundError: no model has this name.
        """
        entry = self._fetchable(name)

        def fetch(on_progress: OnProgress, transfer: FetchProgress) -> None:
            self._source.fetch(entry, on_progress, transfer)

        return fetch

    def _fetchable(self, name: str) -> ModelEntry:
        if self._names.is_any(name) or name == self._current.id:
            return self._current
        self.refresh()
        try:
            return self._entry(name)
        except ModelNotFoundError:
            return self._source.find_model(self._names.source(name))

    def _require_settled(self) -> None:
        lifecycle = self._lifecycle
        if lifecycle.swap is not None:
            raise ConflictError(f"a swap is in progress: {lifecycle.progress}.", param="model")
        if lifecycle.state in (ModelState.LOADING, ModelState.HUNG, ModelState.STOPPED):
            lifecycle.ready_model()

    def _begin(self, target: ModelEntry | None, drain_s: float | None = None) -> ModelSwap:
        self._keep_s = None
        swap = self._lifecycle.begin_swap(
            target, self.policy.drain_timeout_s if drain_s is None else drain_s
        )
        self._swaps.put(swap)
        return swap

    # -- swap thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                swap = self._swaps.get(timeout=_TICK_S)
            except queue.Empty:
                self._unload_if_idle()
                continue
            if swap is None:
                return
            self._perform(swap)

    def _unload_if_idle(self) -> Future[SwapReport] | None:
        lifecycle = self._lifecycle
        with lifecycle.lock:
            limit_s = self._idle_limit_s
            is_ready = lifecycle.swap is None and lifecycle.state is ModelState.READY
            if limit_s is None or not is_ready or self._device.idle_s <= limit_s:
                return None
            return self._begin(None).done

    def _perform(self, swap: ModelSwap) -> None:
        try:
            report = self._exchange(swap)
        except Exception as error:  # noqa: BLE001 - goes to the swap's future; the thread continues
            if not isinstance(error, SemanticError):
                _log.exception("failed to swap the model")
                error = ModelSwapError(f"the swap failed: {error!r}")
            self._publish(swap, "failed", error.message)
            _log.warning("model not swapped: %s", error.message)
            self._lifecycle.end_swap(swap)
            swap.done.set_exception(error)
            return
        _log.info("model swapped: %s for %s", report.model, report.previous)
        swap.done.set_result(report)

    def _exchange(self, swap: ModelSwap) -> SwapReport:
        previous = self._current if self._lifecycle.model is not None else None
        target = swap.target
        if target is not None:
            self._note_fetching(swap, "looking for its files")
            target = self._source.fetch(target, functools.partial(self._note_fetching, swap))
            target.require_fitting()
        started = time.monotonic()
        load = functools.partial(self._load, target) if target else None
        swap.served_after = target or self._current
        try:
            num_cut = self._device.exchange(load, drain_s=swap.drain_s).result()
        except SemanticError as error:
            raise self._bring_back(swap, previous, error) from error
        seconds = time.monotonic() - started
        self._publish(swap, "ready" if target else "unloaded", "")
        return SwapReport(
            previous.id if previous else None, target.id if target else None, seconds, num_cut
        )

    def _bring_back(
        self, swap: ModelSwap, previous: ModelEntry | None, error: SemanticError
    ) -> SemanticError:
        """Load the previous model again; returns the error to report for the failed swap."""
        name = swap.target.id if swap.target else "the model"
        message = f"{name} could not be loaded: {error.message.rstrip('.')}"
        load = functools.partial(self._load, previous) if previous else None
        swap.served_after = self._current
        try:
            self._device.exchange(load, drain_s=0).result()
        except SemanticError as second:
            return ModelSwapError(f"{message}; nor could the previous model: {second.message}")
        message += f"; {previous.id} is served again." if previous else "."
        if isinstance(error, InvalidRequestError | ModelNotFoundError):
            return InvalidRequestError(message, param="model")
        return ModelSwapError(message)

    def _note_fetching(self, swap: ModelSwap, step: str) -> None:
        if swap.step != step:
            swap.step = step
            self._publish(swap, "fetching", step)

    def _publish_step(self, swap: ModelSwap, state: ModelState, step: str) -> None:
        self._publish(swap, state.value, step)

    def _publish(self, swap: ModelSwap, state: str, detail: str) -> None:
        if self._feed is not None:
            entry = swap.target or self._current
            self._feed.publish(ModelChanged(entry.id, state, detail))
