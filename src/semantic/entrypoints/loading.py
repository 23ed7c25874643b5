"""Finding and loading models: the choice of the backend, and the model's files.

Heavy imports (torch, mlx, transformers) happen on the device thread, after the socket is open.
"""

import contextlib
import ctypes
import functools
import gc
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import structlog

from semantic.adapters.config.settings import STARTER_MODEL, Settings
from semantic.adapters.extras import install_command, missing_extra
from semantic.adapters.outbound import host_memory
from semantic.adapters.outbound.backends.mlx import runtime as mlx_runtime
from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild
from semantic.adapters.outbound.models.compute_choices import ComputeChoices, cpu_name
from semantic.adapters.outbound.models.known import short_names
from semantic.adapters.outbound.models.usage import ModelUsage
from semantic.application.engine.model import DraftModel, LoadedModel
from semantic.application.prompt.format_probe import probe_reply_format
from semantic.domain.blocks import BlockOrigin
from semantic.domain.errors import InvalidRequestError
from semantic.domain.model_names import ModelNames, Suggestion, served_id
from semantic.domain.spec import DEFAULT_BLOCK_TOKENS, ComputeHint, ModelCacheSpec
from semantic.entrypoints.cluster_loader import load_sharded
from semantic.ports.backend import ModelBackendPort
from semantic.ports.models import FetchProgress, ModelEntry, ModelFacts, ModelSourcePort, OnProgress
from semantic.ports.telemetry import Measure, TelemetryPort

if TYPE_CHECKING:
    from semantic.adapters.outbound.models.catalogue import ModelCatalogue

_log = structlog.get_logger(__name__)

MakeBackend: TypeAlias = Callable[[Path, ModelCacheSpec, ComputeHint], ModelBackendPort]
BackendName = Literal["torch", "mlx", "fake"]
_NO_CUT = "its state cannot be cut back to the last correct token"
_PACKAGES = {"torch": ("torch", "transformers"), "mlx": ("mlx", "mlx_lm")}


def choose_backend(settings: Settings) -> BackendName:
    """The backend of the settings; `auto` is mlx where this machine prefers it, else torch."""
    if settings.backend != "auto":
        return settings.backend
    return "mlx" if mlx_runtime.is_preferred() and settings.device != "cpu" else "torch"


def local_models(
    settings: Settings, backend_name: BackendName, growth: Callable[[], int] = lambda: 1
) -> "ModelCatalogue":
    """The models on this machine; imports large libraries.

    Args:
        growth: Returns the factor by which 16-bit weights grow when loaded.
    """
    from semantic.adapters.outbound.models.catalogue import ModelCatalogue
    from semantic.adapters.outbound.models.machine import machine_memory
    from semantic.adapters.outbound.models.source import LocalModelSource

    def room() -> int:
        if settings.model_budget_mb:
            return settings.model_budget_mb * 2**20
        return machine_memory() - settings.runtime.memory_bytes

    return ModelCatalogue(
        LocalModelSource(settings.home_dir / "models", STARTER_MODEL),
        settings.model_dirs,
        starter_model=STARTER_MODEL,
        room=room,
        growth=growth,
        is_on_gpu=backend_name == "mlx" and not mlx_runtime.is_apple_silicon(),
    )


class ModelLoader:
    """Finds and loads models according to the settings; a `ModelSourcePort`."""

    def __init__(
        self,
        settings: Settings,
        backend_name: BackendName,
        kv_format: str,
        telemetry: TelemetryPort,
        origins: Callable[[], Sequence[BlockOrigin]] = lambda: (),
    ) -> None:
        """Resolve the names of models, load none.

        Raises:
            InvalidRequestError: an alias is not valid, or the backend cannot use the device.
        """
        self._settings = settings
        self._backend_name = backend_name
        self._kv_format = kv_format
        self._telemetry = telemetry
        self._origins = origins
        self._is_float32 = settings.dtype == "float32"  # updated to the loaded model's dtype
        if backend_name == "torch" and settings.device == "cuda":
            raise InvalidRequestError(
                "device cuda: the torch backend runs on the CPU. For an NVIDIA GPU, install MLX "
                f"({install_command('cuda')}) and omit --backend torch",
                param="device",
            )
        known = short_names(is_four_bit=True)
        self.names = ModelNames.of(settings.model_aliases, {"starter": STARTER_MODEL, **known})
        self._in_use, self._draft_in_use = ModelUsage(), ModelUsage()  # of the models loaded last
        model = self.names.source(settings.model)
        if backend_name == "fake" and model == STARTER_MODEL:
            model = "fake"
        self.first = ModelEntry(served_id(model), model)

    def entries(self) -> Sequence[ModelEntry]:
        return self._source.entries()

    def find_model(self, source: str) -> ModelEntry:
        return self._source.find_model(source)

    def fetch(
        self, entry: ModelEntry, on_progress: OnProgress, transfer: FetchProgress | None = None
    ) -> ModelEntry:
        return self._source.fetch(entry, on_progress, transfer)

    def draft_for(self, entry: ModelEntry) -> ModelEntry | None:
        return self._source.draft_for(entry)

    def suggestions(self) -> Sequence[Suggestion]:
        return self._source.suggestions()

    def remove(self, entry: ModelEntry) -> int:
        return self._source.remove(entry)

    def facts(self, entry: ModelEntry) -> ModelFacts:
        return self._source.facts(entry)

    def load(self, entry: ModelEntry, on_progress: OnProgress) -> LoadedModel:
        """Load a model; call it on the device thread.

        Raises:
            ModelNotFoundError: there is no such model.
            InvalidRequestError: this machine or backend cannot run it.
        """
        started = time.monotonic()
        gc.disable()  # imports make a million live objects; scanning them costs 1 s
        try:
            model = self._load(entry, on_progress)
        except BaseException:
            self._telemetry.counts.engine.swaps["failed"] += 1
            raise
        finally:
            gc.enable()
        self._telemetry.counts.engine.swaps["ok"] += 1
        self._telemetry.observe(Measure.SWAP, time.monotonic() - started)
        return model

    def _check(self, entry: ModelEntry) -> None:
        """Refuse a missing model and a missing backend, before anything is downloaded or imported.

        Raises:
            ModelNotFoundError: there is no such model.
            InvalidRequestError: the backend is not installed, or the model's files are damaged.
        """
        if self._backend_name == "fake":
            self._source.find_model(entry.source)
            return
        for package in _PACKAGES[self._backend_name]:
            if importlib.util.find_spec(package) is None:
                raise _missing(package, self._backend_name)
        from semantic.adapters.outbound.models.source import LocalModelSource

        LocalModelSource(self._settings.home_dir / "models", STARTER_MODEL).check(entry.source)

    def _load(self, entry: ModelEntry, on_progress: OnProgress) -> LoadedModel:
        self._check(entry)
        on_progress(f"looking for {entry.id}")
        model = (self._load_fake if self._backend_name == "fake" else self._load_files)(
            entry, on_progress
        )
        from semantic.adapters.outbound.grammar.compiler import LLGuidanceGrammar

        tokenizer = model.tokenizer
        return replace(
            model,
            reply_format=probe_reply_format(tokenizer),
            grammar=LLGuidanceGrammar(tokenizer),
        )

    @functools.cached_property
    def _source(self) -> ModelSourcePort:
        """Finds models; created on first use, because it imports large libraries."""
        if self._backend_name == "fake":
            from semantic.adapters.outbound.backends.fake import FakeModels

            return FakeModels()
        return local_models(self._settings, self._backend_name, growth=lambda: 1 + self._is_float32)

    def _importer(self) -> Callable[[Settings], MakeBackend]:
        name = self._backend_name
        if self._settings.shards > 1 and name != "fake":
            return functools.partial(_import_shards, name)
        return _import_mlx if name == "mlx" else _import_torch

    def _load_fake(self, entry: ModelEntry, on_progress: OnProgress) -> LoadedModel:
        from semantic.adapters.outbound.backends import fake
        from semantic.adapters.outbound.backends.fake_vision import FakeVision, VisionKind

        name = self._source.fetch(entry, on_progress).id
        has_vision = name == fake.FakeModels.VISION
        tokenizer = fake.FakeVisionTokenizer() if has_vision else fake.FakeTokenizer()
        # Blocks are as long as those of all models.
        spec = fake.fake_spec(block_tokens=DEFAULT_BLOCK_TOKENS, vocab_size=tokenizer.vocab_size)
        backend = fake.FakeBackend(
            spec,
            weights=0 if name in ("fake", fake.FakeModels.SLOW) else 1,
            vision=VisionKind.CAUSAL if has_vision else None,
            is_slow=name == fake.FakeModels.SLOW,
        )
        drafting = self._draft_entry(entry, on_progress)
        draft = None
        if drafting is not None:
            weights = 0 if drafting.id == "fake" else 1
            draft = DraftModel(drafting.id, fake.FakeBackend(spec, weights=weights))
        return LoadedModel(
            name,
            backend,
            tokenizer,
            name,
            self._kv_format,
            vision=FakeVision(fake.IMAGE_TOKEN) if has_vision else None,
            draft=draft,
        )

    def _load_files(self, entry: ModelEntry, on_progress: OnProgress) -> LoadedModel:
        from semantic.adapters.outbound.models.generation_config import read_generation_config
        from semantic.adapters.outbound.models.source import LocalModelSource
        from semantic.adapters.outbound.models.tokenizer import HFTokenizer
        from semantic.adapters.outbound.vision.preparing import load_vision

        settings = self._settings
        models_dir = settings.home_dir / "models"
        directory = LocalModelSource(models_dir, STARTER_MODEL).resolve(entry.source, on_progress)
        has_head, draft_note = self._find_head(directory)
        drafting = None if has_head else self._draft_entry(entry, on_progress)
        on_progress(f"importing {self._backend_name}")
        make = self._importer()(settings)
        host_memory.freeze_libraries()
        # The served model is loaded last: what the process has once is set up for it.
        draft = self._load_draft(entry, drafting, directory, make, on_progress)
        with contextlib.ExitStack() as on_failure:
            if draft is not None:
                on_failure.callback(draft.backend.shutdown)
            on_progress(f"loading {directory.name}")
            self._in_use.share(directory)
            backend, identity = self._make_backend(directory, make)
            on_failure.callback(backend.shutdown)
            if draft is not None and not backend.traits.max_draft:
                self._refuse_draft(entry, f"{entry.id} cannot verify draft tokens: {_NO_CUT}")
                draft.backend.shutdown()
                draft = None
            on_failure.pop_all()
        if backend.traits.compute is not None:
            self._is_float32 = backend.traits.compute.dtype == "float32"
        if has_head and backend.head is None:
            draft_note = "its MTP head cannot be used; the log has the details"
        tokenizer = HFTokenizer(directory)
        has_tower = backend.traits.accepts_images
        return LoadedModel(
            id=entry.id,
            backend=backend,
            tokenizer=tokenizer,
            fingerprint=identity,
            kv_format=self._kv_format,
            defaults=read_generation_config(directory),
            draft=draft,
            draft_note=draft_note,
            vision=load_vision(directory, tokenizer) if has_tower else None,
        )

    def _make_backend(self, directory: Path, make: MakeBackend) -> tuple[ModelBackendPort, str]:
        """Load a model's files; returns the backend and the model's fingerprint."""
        from semantic.adapters.outbound.models.fingerprint import fingerprint
        from semantic.adapters.outbound.models.source import read_config

        models_dir = self._settings.home_dir / "models"
        identity = fingerprint(directory, models_dir / "fingerprints.json")
        choices = ComputeChoices(models_dir / "compute.json", compute_basis(self._settings))
        hint = self._hint(identity, choices)
        backend = make(directory, ModelCacheSpec.from_config(read_config(directory)), hint)
        compute = backend.traits.compute
        if compute is not None:
            _log.info("model loaded", model=directory.name, **asdict(compute))
            known = hint.known
            if known is None or (known.device, known.dtype) != (compute.device, compute.dtype):
                choices.keep(identity, compute)
        return backend, identity

    # -- draft models ---------------------------------------------------------------------------

    def _find_head(self, directory: Path) -> tuple[bool, str]:
        """Whether a model has an MTP head, which `auto` prefers to a second model; else why not."""
        settings, library = self._settings, self._backend_name
        if settings.draft_model != "auto" or library == "fake" or settings.shards > 1:
            return False, ""
        from semantic.adapters.outbound.backends.mtp.names import find_head, why_no_head
        from semantic.adapters.outbound.models.source import read_config

        config = read_config(directory)
        if find_head(directory, config, library) is not None:
            return True, ""
        if note := why_no_head(config):
            _log.info("model drafts without a head", model=directory.name, reason=note)
        return False, note

    def _draft_entry(self, entry: ModelEntry, on_progress: OnProgress) -> ModelEntry | None:
        """Return the draft model that the settings want for a model; fetches it if needed.

        Raises:
            ModelNotFoundError: there is no such model.
            InvalidRequestError: the settings exclude each other.
        """
        settings = self._settings
        wanted = settings.draft_model
        if wanted == "off" or (wanted == "auto" and settings.shards > 1):
            return None
        if wanted == "auto":
            found = self._source.draft_for(entry)
            chosen = "none on this machine fits and pays" if found is None else found.id
            _log.info("chose a draft model", model=entry.id, draft_model=chosen)
            return found
        if settings.shards > 1:
            raise InvalidRequestError(
                "a draft model cannot draft for shards; set draft_model = off or shards = 1.",
                param="draft_model",
            )
        on_progress(f"looking for {wanted}")
        return self._source.fetch(self._source.find_model(self.names.source(wanted)), on_progress)

    def _load_draft(
        self,
        entry: ModelEntry,
        drafting: ModelEntry | None,
        directory: Path,
        make: MakeBackend,
        on_progress: OnProgress,
    ) -> DraftModel | None:
        """Load the draft model of `entry`, whose files are in `directory`."""
        from semantic.adapters.outbound.models.source import LocalModelSource
        from semantic.adapters.outbound.models.tokenizer import have_same_tokens

        self._draft_in_use.release()
        if drafting is None:
            return None
        source = LocalModelSource(self._settings.home_dir / "models", STARTER_MODEL)
        place = source.resolve(drafting.source, on_progress)
        if not have_same_tokens(place, directory):
            self._refuse_draft(entry, f"{drafting.id} and {entry.id} have different tokenizers")
            return None
        on_progress(f"loading {place.name}, which drafts")
        self._draft_in_use.share(place)
        backend, _ = self._make_backend(place, make)
        if not backend.traits.max_draft or backend.spec.num_state:
            backend.shutdown()
            self._refuse_draft(entry, f"{drafting.id} cannot draft: {_NO_CUT}")
            return None
        return DraftModel(drafting.id, backend)

    def _refuse_draft(self, entry: ModelEntry, reason: str) -> None:
        """Report a draft model that cannot draft for `entry`, which is served without one.

        Raises:
            InvalidRequestError: the settings name it for the model that the server starts with.
        """
        self._draft_in_use.release()
        if entry.source == self.first.source and self._settings.draft_model != "auto":
            raise InvalidRequestError(
                f"{reason}; choose another draft_model, or off.", param="draft_model"
            )
        _log.warning("serving without a draft model", model=entry.id, reason=reason)

    def _hint(self, identity: str, choices: ComputeChoices) -> ComputeHint:
        """The dtype that an earlier start chose for a model, else the dtypes of stored blocks."""
        known = choices.recall(identity)
        if known is not None:
            return ComputeHint(replace(known, reason=f"{known.reason}, at an earlier start"))
        if self._settings.dtype != "auto":
            return ComputeHint()
        return ComputeHint(stored_dtypes=stored_dtypes(self._origins(), identity))


def compute_basis(settings: Settings) -> dict[str, str]:
    """The inputs of the dtype choice; a change of any of them invalidates remembered choices."""
    with contextlib.suppress(PackageNotFoundError):
        names = ("dtype", "device", "weights", "native")
        chosen = {name: str(getattr(settings, name)) for name in names}
        chosen["backend"] = choose_backend(settings)
        return {**chosen, "torch": version("torch"), "cpu": cpu_name()}
    return {}


def stored_dtypes(origins: Sequence[BlockOrigin], fingerprint: str) -> tuple[str, ...]:
    """The dtypes of a model's stored KV cache written by torch, in the order of `origins`."""
    abis = [origin.abi.split(".") for origin in origins if origin.fingerprint == fingerprint]
    return tuple(abi[2] for abi in abis if abi[0] == "torch" and len(abi) > 2)


def _import_torch(settings: Settings) -> MakeBackend:
    _limit_openmp_spinning()
    # Prepares the native library in the background, while torch is imported.
    native = NativeBuild(settings.home_dir / "native", settings.native)
    # Loader threads would keep the memory of weights that are freed after the threads end.
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
    try:
        from semantic.adapters.outbound.backends.torch.backend import TorchBackend
        from semantic.adapters.outbound.backends.torch.loading import TorchOptions
    except ModuleNotFoundError as error:
        raise _missing(error.name, "torch") from error
    options = TorchOptions(
        dtype=settings.dtype,
        weights=settings.weights,
        num_threads=settings.threads,
        native=native,
        has_head=settings.draft_model == "auto",
    )
    return lambda directory, spec, hint: TorchBackend(directory, spec, replace(options, hint=hint))


def _import_mlx(settings: Settings) -> MakeBackend:
    if settings.weights not in ("auto", "full"):
        raise InvalidRequestError(
            f"weights {settings.weights}: mlx does not quantise models; "
            "use a quantised one, such as those of mlx-community",
            param="weights",
        )
    mlx_runtime.prepare(settings.threads)
    try:
        from semantic.adapters.outbound.backends.mlx.backend import MlxBackend
        from semantic.adapters.outbound.backends.mlx.loading import MlxOptions
    except ModuleNotFoundError as error:
        raise _missing(error.name, "mlx") from error
    options = MlxOptions(
        dtype=settings.dtype,
        device=settings.device,
        weights=settings.weights,
        pinned_bytes=settings.runtime.memory_bytes if settings.pinned_copies else 0,
        device_bytes=settings.device_memory_mb * 2**20,
        kv_bytes=settings.runtime.memory_bytes,
        has_head=settings.draft_model == "auto",
    )
    return lambda directory, spec, _: MlxBackend.from_directory(directory, spec, options)


def _import_shards(name: Literal["torch", "mlx"], settings: Settings) -> MakeBackend:
    return lambda directory, spec, hint: load_sharded(directory, spec, settings, name, hint)


def _missing(package: str | None, backend_name: BackendName) -> InvalidRequestError:
    return InvalidRequestError(
        missing_extra(f"the {backend_name} backend", package, backend_name), param="backend"
    )


def preload_torch(settings: Settings) -> None:
    """Shorten the start: disable garbage collection and link PyTorch's library in a thread.

    `ModelLoader.load` enables garbage collection again. Linking takes 0.4 s and runs on another
    core, because ctypes releases the GIL during the call; a later import of torch finds the library
    linked. Links nothing where PyTorch does not run the model in this process, or off Linux.
    """
    gc.disable()
    if choose_backend(settings) != "torch" or settings.shards > 1 or sys.platform != "linux":
        return
    _limit_openmp_spinning()
    found = importlib.util.find_spec("torch")
    for place in (found and found.submodule_search_locations) or ():
        library = str(Path(place, "lib", "libtorch_cpu.so")).encode()
        link = (library, os.RTLD_NOW)
        threading.Thread(target=ctypes.CDLL(None).dlopen, args=link, daemon=True).start()


def _limit_openmp_spinning() -> None:
    """Let OpenMP threads spin between the operations of a decode step, and sleep after it.

    By default they spin for milliseconds: beside one busy process, a decode step took fifteen times
    as long. Without any spinning, steps on an idle machine were a quarter slower. Must run before
    torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
