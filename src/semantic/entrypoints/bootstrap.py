"""The only place where the parts are put together.

Heavy imports (torch, mlx, transformers) happen on the device's thread, after the socket is open.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import structlog

from semantic.adapters.config.keys import load_key_ring
from semantic.adapters.config.settings import STARTER_MODEL, Settings
from semantic.adapters.outbound.backends.mlx import runtime as mlx_runtime
from semantic.adapters.outbound.blocks.agent_archive import AgentFile, ExportKeys, own_key
from semantic.adapters.outbound.blocks.directory import keep_private
from semantic.adapters.outbound.blocks.tree import BLOCKS
from semantic.adapters.outbound.telemetry.metrics import Metrics
from semantic.application.agents.cache_admin import CacheBudgets, CacheService
from semantic.application.agents.feed import EventFeed
from semantic.application.agents.service import AgentService
from semantic.application.agents.transfer import AgentTransfer
from semantic.application.agents.turns import TurnLanes, TurnWatch
from semantic.application.engine.device_thread import (
    DeviceThread,
    LoadedModel,
    Loader,
    ModelRegistry,
)
from semantic.application.engine.request import EventSink
from semantic.application.engine.scheduler import EngineLimits
from semantic.application.requests.access import Access
from semantic.application.requests.limits import RateLimits
from semantic.application.requests.reply import ReplyHub
from semantic.application.requests.service import InferenceService
from semantic.application.requests.stateful import StatefulChat
from semantic.domain.access import KeyRing
from semantic.domain.errors import InvalidRequestError
from semantic.domain.reply_format import detect_reply_format
from semantic.domain.spec import DEFAULT_BLOCK_TOKENS, ModelCacheSpec
from semantic.entrypoints.persistence import AgentMemory
from semantic.ports.backend import ModelBackendPort
from semantic.ports.telemetry import Measure, TelemetryPort

_log = structlog.get_logger(__name__)

MakeBackend: TypeAlias = Callable[[Path, ModelCacheSpec], ModelBackendPort]
BackendName = Literal["torch", "mlx", "fake"]


@dataclass(frozen=True, slots=True)
class Server:
    """The wired application, ready for an HTTP front."""

    settings: Settings
    access: Access
    backend_name: BackendName
    model_id: str
    device: DeviceThread
    inference: InferenceService
    models: ModelRegistry
    memory: AgentMemory
    agents: AgentService
    lanes: TurnLanes
    cache: CacheService
    transfer: AgentTransfer
    feed: EventFeed
    metrics: Metrics

    def problems(self) -> list[str]:
        """What is wrong although requests are answered, for `/health`."""
        known = [self.memory.problem, self.inference.problem]
        return [problem for problem in known if problem]

    def request_stop(self) -> None:
        """End what runs and those who watch; returns at once."""
        self.feed.close()
        self.device.request_stop()


def bootstrap(settings: Settings) -> Server:
    """Wire the application; starts nothing.

    Raises:
        InvalidRequestError: a directory cannot be made or written, or another server has it.
        CachePersistenceError: what is in the directory cannot be opened.
    """
    _prepare_directories(settings)
    metrics = Metrics()
    _require_key(settings, _key_ring(settings))
    memory = AgentMemory(settings, lambda tenant: access.ring.policy(tenant).disk_bytes, metrics)
    access = Access(lambda: _key_ring(settings), memory.agents.principal)
    backend_name = _choose_backend(settings)
    model_id = _served_id(settings, backend_name)
    hub = ReplyHub()
    device = _make_device(settings, memory, backend_name, hub.emit, metrics)
    feed = EventFeed()
    watch = TurnWatch(feed, metrics)
    inference = InferenceService(
        device,
        hub,
        memory.agents,
        memory.replays,
        request_timeout_s=settings.request_timeout_s,
        is_durable=memory.is_durable if settings.durability == "sync" else None,
        watch=watch,
    )
    inference.limits = RateLimits(lambda: access.ring)
    models = ModelRegistry(device, model_id, backend_name, settings.model_aliases)
    budgets = CacheBudgets(settings.disk_budget_mb * 2**20, settings.write_queue_mb * 2**20)
    cache = CacheService(
        lambda: memory.cache, memory.agents, device, watch, feed, memory.disk, budgets
    )
    metrics.read(cache, watch, lambda: device.state)
    lanes = TurnLanes(max_waiting=settings.max_queue, timeout_s=settings.request_timeout_s)
    chat = StatefulChat(memory.agents, lanes, inference)
    return Server(
        settings=settings,
        access=access,
        backend_name=backend_name,
        model_id=model_id,
        device=device,
        inference=inference,
        models=models,
        memory=memory,
        agents=AgentService(memory.agents, lanes, chat.generate, cache, feed, device),
        lanes=lanes,
        cache=cache,
        transfer=AgentTransfer(
            *(memory.agents, lambda: memory.cache, device, memory.disk),
            *(AgentFile(memory.codec, _export_keys(settings)), feed),
        ),
        feed=feed,
        metrics=metrics,
    )


def _make_device(
    settings: Settings,
    memory: AgentMemory,
    backend_name: BackendName,
    emit: EventSink,
    telemetry: TelemetryPort,
) -> DeviceThread:
    return DeviceThread(
        load=_measured(
            lambda on_progress: _load(settings, memory.codec.kv_format, backend_name, on_progress),
            telemetry,
        ),
        make_engine=memory.make_engine,
        limits=_limits(settings),
        emit=emit,
        hang_timeout_s=settings.hang_timeout_s,
        telemetry=telemetry,
    )


def _key_ring(settings: Settings) -> KeyRing:
    return load_key_ring(settings.effective_key_file, settings.api_key, settings.admin_key)


def _require_key(settings: Settings, ring: KeyRing) -> None:
    """Refuse to let other machines in without a key.

    Raises:
        InvalidRequestError: they could reach the address, and there is no key.
    """
    if settings.is_remote and not ring.is_guarded:
        raise InvalidRequestError(
            f"host {settings.host} can be reached from other machines, and there are no keys. Make "
            "one for each user: semantic keys add --tenant NAME; or set SEMANTIC_API_KEY. Without "
            "keys the server listens on 127.0.0.1 only.",
            param="host",
        )


def _measured(load: Loader, telemetry: TelemetryPort) -> Loader:
    """Count and time the loading of a model."""

    def measured(on_progress: Callable[[str], None]) -> LoadedModel:
        started = time.monotonic()
        try:
            model = load(on_progress)
        except BaseException:
            telemetry.counts.engine.swaps["failed"] += 1
            raise
        telemetry.counts.engine.swaps["ok"] += 1
        telemetry.observe(Measure.SWAP, time.monotonic() - started)
        return model

    return measured


def _export_keys(settings: Settings) -> ExportKeys:
    trusted = {n: bytes.fromhex(key) for n, key in settings.trusted_export_keys.items()}
    return ExportKeys(own_key(settings.export_key_file), trusted)


def _choose_backend(settings: Settings) -> BackendName:
    if settings.backend != "auto":
        return settings.backend
    return "mlx" if mlx_runtime.is_preferred() and settings.device != "cpu" else "torch"


def _prepare_directories(settings: Settings) -> None:
    """Make the directories; what earlier versions left readable to others is so no more."""
    places = {"home": settings.home_dir / "models", "cache_dir": settings.effective_cache_dir}
    for param, directory in places.items():
        flag = "--home" if settings.cache_dir is None else f"--{param.replace('_', '-')}"
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except FileExistsError as error:
            raise InvalidRequestError(
                f"{directory} is no directory; choose another {flag}", param=param
            ) from error
        except OSError as error:
            raise InvalidRequestError(
                f"cannot make {directory}: {error.strerror}; choose another {flag}", param=param
            ) from error
    if _is_own_home(settings.home_dir):
        keep_private(settings.home_dir.resolve(), skip=BLOCKS)


def _is_own_home(home: Path) -> bool:
    """Whether nobody keeps anything else there; the usual home is ours by its name."""
    try:
        names = {path.name for path in home.iterdir()}
    except OSError:
        return False
    return home.name == ".semantic" or names <= {
        "cache",
        "export.key",
        "keys.json",
        "logs",
        "models",
    }


def _limits(settings: Settings) -> EngineLimits:
    return EngineLimits(
        max_batch_size=settings.max_batch_size,
        prefill_step_size=settings.prefill_step_size,
        target_step_ms=settings.target_step_ms,
        batch_window_ms=settings.batch_window_ms,
        max_queue=settings.max_queue,
        default_max_tokens=settings.default_max_tokens,
        ageing_s=settings.ageing_s,
        max_idle=settings.max_idle,
    )


def _served_id(settings: Settings, backend_name: BackendName) -> str:
    if backend_name == "fake":
        return "fake"
    return Path(settings.model).expanduser().name.removesuffix(".gguf")


def _load(
    settings: Settings,
    kv_format: str,
    backend_name: BackendName,
    on_progress: Callable[[str], None],
) -> LoadedModel:
    if backend_name == "fake":
        from semantic.adapters.outbound.backends.fake import FakeBackend, FakeTokenizer, fake_spec

        spec = fake_spec(block_tokens=DEFAULT_BLOCK_TOKENS)  # as all models
        model = LoadedModel("fake", FakeBackend(spec), FakeTokenizer(), "fake", kv_format)
    else:
        model = _load_files(settings, kv_format, backend_name, on_progress)
    from semantic.adapters.outbound.grammar.compiler import LLGuidanceGrammar

    tokenizer = model.tokenizer
    return replace(
        model,
        reply_format=detect_reply_format(tokenizer.chat_template, tokenizer.special_ids),
        grammar=LLGuidanceGrammar(tokenizer),
        aliases=tuple(settings.model_aliases),
    )


def _load_files(
    settings: Settings,
    kv_format: str,
    backend_name: Literal["torch", "mlx"],
    on_progress: Callable[[str], None],
) -> LoadedModel:
    from semantic.adapters.outbound.models.fingerprint import fingerprint
    from semantic.adapters.outbound.models.generation_config import read_generation_config
    from semantic.adapters.outbound.models.source import LocalModelSource
    from semantic.adapters.outbound.models.tokenizer import HFTokenizer

    source = LocalModelSource(settings.home_dir / "models", STARTER_MODEL)
    directory = source.resolve(settings.model, on_progress)
    on_progress(f"importing {backend_name}")
    make = {"torch": _import_torch, "mlx": _import_mlx}[backend_name](settings)
    on_progress(f"loading {directory.name}")
    config = json.loads((directory / "config.json").read_text("utf-8"))
    backend = make(directory, ModelCacheSpec.from_config(config))
    if backend.traits.compute is not None:
        _log.info("model loaded", model=directory.name, **asdict(backend.traits.compute))
    return LoadedModel(
        id=_served_id(settings, backend_name),
        backend=backend,
        tokenizer=HFTokenizer(directory),
        fingerprint=fingerprint(directory, settings.home_dir / "models" / "fingerprints.json"),
        kv_format=kv_format,
        defaults=read_generation_config(directory),
    )


def _import_torch(settings: Settings) -> MakeBackend:
    _calm_openmp()
    try:
        from semantic.adapters.outbound.backends.torch.backend import TorchBackend
        from semantic.adapters.outbound.backends.torch.loading import TorchOptions
    except ModuleNotFoundError as error:
        raise _missing(error, "torch") from error
    options = TorchOptions(settings.dtype, settings.device, settings.weights, settings.threads)
    return lambda directory, spec: TorchBackend(directory, spec, options)


def _import_mlx(settings: Settings) -> MakeBackend:
    if settings.weights not in ("auto", "full"):
        raise InvalidRequestError(
            f"weights {settings.weights}: mlx runs models as they are; "
            "take one that is quantised, such as mlx-community's",
            param="weights",
        )
    mlx_runtime.prepare(settings.threads)
    try:
        from semantic.adapters.outbound.backends.mlx.backend import MlxBackend
        from semantic.adapters.outbound.backends.mlx.loading import MlxOptions
    except ModuleNotFoundError as error:
        raise _missing(error, "mlx") from error
    options = MlxOptions(settings.dtype, settings.device, settings.weights)
    return lambda directory, spec: MlxBackend.from_directory(directory, spec, options)


def _missing(error: ModuleNotFoundError, backend_name: BackendName) -> InvalidRequestError:
    return InvalidRequestError(
        f"the {backend_name} backend needs {error.name}; in the directory of the checkout run: "
        f"{sys.executable} -m pip install -c constraints.txt -e '.[{backend_name}]'",
        param="backend",
    )


def _calm_openmp() -> None:
    """Let OpenMP's threads spin between the operations of a step, and sleep after it.

    The default spins for milliseconds: beside one busy process a decode step took fifteen times as
    long. Never spinning made quiet steps a quarter slower. Must run before torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
