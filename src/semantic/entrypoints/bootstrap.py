"""Wires the application: the only module that constructs and connects its parts.

`persistence` builds the storage and `loading` loads models.
"""

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import structlog

from semantic import __version__
from semantic.adapters.config.keys import MARKER_FILE, load_key_ring
from semantic.adapters.config.logging import set_log_level
from semantic.adapters.config.repairs import load_repairs
from semantic.adapters.config.settings import Settings
from semantic.adapters.extras import install_command, missing_extra
from semantic.adapters.images.files import ImageLimits, read_image
from semantic.adapters.images.ocr import RapidOcr, is_ocr_installed
from semantic.adapters.outbound.blocks.agent_archive import AgentFile, ExportKeys, own_key
from semantic.adapters.outbound.blocks.directory import keep_private
from semantic.adapters.outbound.blocks.listing import BLOCKS
from semantic.adapters.outbound.blocks.pack_archive import PackFile
from semantic.adapters.outbound.blocks.pack_keys import PackKeys
from semantic.adapters.outbound.telemetry.metrics import Metrics, MetricsHistory
from semantic.adapters.outbound.telemetry.tracing import RequestTracer
from semantic.application.agents.cache_admin import CacheService
from semantic.application.agents.feed import EventFeed
from semantic.application.agents.running_turns import TurnLanes, TurnWatch
from semantic.application.agents.service import AgentService
from semantic.application.agents.transfer import AgentTransfer
from semantic.application.agents.volatile import VolatilePrompts
from semantic.application.engine.device_thread import DeviceThread
from semantic.application.engine.request import AheadJob, EventSink
from semantic.application.models.gate import ModelGate
from semantic.application.models.registry import ModelRegistry
from semantic.application.models.runtime import Runtime
from semantic.application.packs.service import PackService
from semantic.application.requests.access import Access
from semantic.application.requests.compaction.successor import AgentCompaction
from semantic.application.requests.compaction.summary import (
    INSTRUCTIONS,
    CompactionPolicy,
    Summariser,
)
from semantic.application.requests.reply import ReplyHub
from semantic.application.requests.rewriting.repairs import PromptRepairs
from semantic.application.requests.service import InferenceService
from semantic.application.requests.stateful import StatefulChat
from semantic.domain.access import KeyRing
from semantic.domain.agents import Agent
from semantic.domain.blocks import BlockName
from semantic.domain.errors import InvalidRequestError
from semantic.entrypoints.loading import BackendName, ModelLoader, choose_backend
from semantic.entrypoints.persistence import AgentMemory
from semantic.ports.telemetry import TelemetryPort
from semantic.ports.text import TokenizerPort

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Server:
    """The wired application, without HTTP.

    Attributes:
        repairs: Names of the rules that repair prompts; empty if none is switched on.
    """

    settings: Settings
    access: Access
    backend_name: BackendName
    model_id: str
    device: DeviceThread
    inference: InferenceService
    chat: StatefulChat
    summariser: Summariser
    compaction: AgentCompaction
    models: ModelRegistry
    runtime: Runtime
    memory: AgentMemory
    agents: AgentService
    lanes: TurnLanes
    cache: CacheService
    transfer: AgentTransfer
    packs: PackService
    volatile: VolatilePrompts
    repairs: tuple[str, ...]
    feed: EventFeed
    metrics: Metrics
    history: MetricsHistory

    def problems(self) -> list[str]:
        """Problems that do not stop the server from answering requests, for `/health`."""
        known = [self.memory.problem, self.inference.problem]
        return [problem for problem in known if problem]

    def pressure(self) -> float:
        """The share of the KV cache's memory budget that is in use and cannot be evicted."""
        return self.cache.use().memory.needed_share

    def start(self) -> None:
        """Start loading the model in the background; returns at once."""
        self.device.start()
        self.models.start()

    def request_stop(self) -> None:
        """Begin to end running requests, model swaps and event streams; returns at once."""
        self.feed.close()
        self.models.request_stop()
        self.device.request_stop()


def bootstrap(settings: Settings) -> Server:
    """Wire the application; starts only the threads of the ledger, and loads no model.

    Raises:
        InvalidRequestError: a directory cannot be written or is in use, or keys are required.
        CachePersistenceError: the ledger or its files cannot be opened.
    """
    _prepare_directories(settings)
    metrics = Metrics()
    metrics.tracer = _make_tracer(settings)
    _require_key(settings, _key_ring(settings))
    memory = AgentMemory(settings, metrics)
    access = Access(
        functools.partial(_key_ring, settings), memory.agents.principal, memory.limit_storage
    )
    backend_name = choose_backend(settings)
    loader = ModelLoader(settings, backend_name, memory.codec.kv_format, metrics, memory.origins)
    hub = ReplyHub()
    device = _make_device(settings, memory, loader, hub.emit, metrics)
    feed = EventFeed()
    models = _registry(settings, loader, device, backend_name, feed)
    max_waiting, timeout_s = settings.runtime.max_queue, settings.request_timeout_s
    gate = ModelGate(models, max_waiting=max_waiting, timeout_s=timeout_s)
    watch = TurnWatch(feed, metrics)
    inference = _make_inference(settings, memory, device, hub, gate, watch)
    inference.limits = access.limits
    memory.listen(inference.note_remote_turn)
    cache = CacheService(memory.served.get, memory.agents, device, watch, feed, memory.disk)
    memory.survey, memory.reopen = cache.count_sharing, functools.partial(_reopen, device)
    metrics.register_server(cache, watch, functools.partial(getattr, device, "state"))
    lanes = TurnLanes(max_waiting=max_waiting, timeout_s=timeout_s)
    runtime = Runtime(settings.runtime, device, models, memory.disk, memory.resize, set_log_level)
    summariser = Summariser(inference, _compaction_policy(settings))
    agents = AgentService(memory.agents, lanes, cache, feed, device)
    return Server(
        settings=settings,
        access=access,
        backend_name=backend_name,
        model_id=loader.first.id,
        device=device,
        inference=inference,
        chat=StatefulChat(memory.agents, lanes, inference, summariser),
        summariser=summariser,
        compaction=AgentCompaction(memory.agents, agents, lanes, inference, summariser),
        models=models,
        runtime=runtime,
        memory=memory,
        agents=agents,
        lanes=lanes,
        cache=cache,
        transfer=_make_transfer(settings, memory, device, feed),
        packs=_make_packs(settings, memory, device),
        volatile=_make_volatile(settings, memory, device),
        repairs=_repair_prompts(settings, memory, inference),
        feed=feed,
        metrics=metrics,
        history=MetricsHistory(functools.partial(metrics.plotted, watch)),
    )


def _reopen(device: DeviceThread, agent: Agent, root: BlockName, tokens: tuple[int, ...]) -> None:
    name = f"{agent.tenant}/{agent.id}"
    device.compute_ahead(AheadJob(name, root, tokens, is_stored=True))


def image_limits(settings: Settings) -> ImageLimits:
    """The limits of images that clients send or import."""
    return ImageLimits(
        max_bytes=int(settings.max_image_mb * 2**20),
        max_pixels=int(settings.max_image_mpixels * 1e6),
        max_images=settings.max_images,
    )


def _make_transfer(
    settings: Settings, memory: AgentMemory, device: DeviceThread, feed: EventFeed
) -> AgentTransfer:
    files = AgentFile(memory.codec, _export_keys(settings, has_agents=memory.num_agents > 0))
    transfer = AgentTransfer(
        memory.agents, memory.served.get, device, memory.disk, files, feed, memory.replays
    )
    transfer.check_image = functools.partial(read_image, limits=image_limits(settings))
    return transfer


def _make_packs(settings: Settings, memory: AgentMemory, device: DeviceThread) -> PackService:
    files = PackFile(memory.codec, PackKeys(*settings.pack_key_files))
    return PackService(memory.agents, memory.served.get, device, memory.disk, files)


def _compaction_policy(settings: Settings) -> CompactionPolicy:
    return CompactionPolicy(
        instructions=settings.compaction_instructions or INSTRUCTIONS,
        keep_turns=settings.compaction_keep_turns,
        max_tokens=settings.compaction_max_tokens,
    )


def _make_inference(
    settings: Settings,
    memory: AgentMemory,
    device: DeviceThread,
    hub: ReplyHub,
    gate: ModelGate,
    watch: TurnWatch,
) -> InferenceService:
    inference = InferenceService(
        device,
        hub,
        memory.agents,
        memory.replays,
        gate=gate,
        is_durable=memory.agents.log.is_durable if settings.durability == "sync" else None,
        watch=watch,
    )
    inference.learn = memory.learn
    if _has_ocr(settings):
        inference.image_texts.ocr = RapidOcr()
    elif settings.ocr == "auto":
        inference.image_texts.hint = (
            "send text, serve a model that accepts images, or let the server recognise the text in "
            f"them: {install_command('ocr')}"
        )
    return inference


def _has_ocr(settings: Settings) -> bool:
    return settings.ocr == "auto" and is_ocr_installed()


def _repair_prompts(
    settings: Settings, memory: AgentMemory, inference: InferenceService
) -> tuple[str, ...]:
    """Switch on the rules of the settings; returns their names."""
    rules = load_repairs(settings.repairs) if settings.repairs is not None else ()
    names = tuple(rule.name for rule in rules if rule.is_enabled)
    if names:
        inference.repair_prompts(PromptRepairs(rules, memory.replays))
        _log.info("rules change prompts before they are computed", rules=names)
    return names


def _make_volatile(
    settings: Settings, memory: AgentMemory, device: DeviceThread
) -> VolatilePrompts:
    return VolatilePrompts(
        memory.agents,
        functools.partial(_find_tokenizer, device),
        functools.cache(functools.partial(load_repairs, settings.repairs)),
    )


def _find_tokenizer(device: DeviceThread, model_id: str) -> TokenizerPort | None:
    """Return the tokenizer of a model; None unless the model is loaded."""
    loaded = device.model
    return loaded.tokenizer if loaded is not None and model_id in ("", loaded.id) else None


def _make_device(
    settings: Settings,
    memory: AgentMemory,
    loader: ModelLoader,
    emit: EventSink,
    telemetry: TelemetryPort,
) -> DeviceThread:
    return DeviceThread(
        load=functools.partial(loader.load, loader.first),
        make_engine=memory.make_engine,
        limits=settings.runtime,
        emit=emit,
        hang_timeout_s=settings.hang_timeout_s,
        telemetry=telemetry,
        flush=memory.put_away,
    )


def _make_tracer(settings: Settings) -> RequestTracer | None:
    if settings.otel_endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            missing_extra("otel_endpoint", error.name, "otel"), param="otel_endpoint"
        ) from error
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.otel_sample_ratio)),
        resource=Resource.create({"service.name": "semantic", "service.version": __version__}),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(endpoint=f"{settings.otel_endpoint.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return RequestTracer(provider, provider.shutdown)


def _key_ring(settings: Settings) -> KeyRing:
    marker = settings.home_dir / MARKER_FILE
    return load_key_ring(settings.effective_key_file, marker, settings.api_key, settings.admin_key)


def _require_key(settings: Settings, ring: KeyRing) -> None:
    """Refuse to start a server that other machines can use without a key."""
    if settings.is_remote and not ring.is_guarded:
        raise InvalidRequestError(
            f"host {settings.host} can be reached from other machines, and there are no keys. "
            "Create one for each user: semantic keys add --tenant NAME; or set SEMANTIC_API_KEY. "
            "Without keys, the server listens on 127.0.0.1 only.",
            param="host",
        )


def _export_keys(settings: Settings, *, has_agents: bool) -> ExportKeys:
    trusted = {n: bytes.fromhex(key) for n, key in settings.trusted_export_keys.items()}
    path = settings.export_key_file
    is_new = not os.path.lexists(path)
    key = own_key(path)
    if is_new and has_agents:
        _log.warning(
            "the key that signs exported agents was missing; created another one. Files that were "
            "signed with the old one are imported without their KV cache. Restore it from a "
            "backup, if there is one",
            file=str(path),
        )
    return ExportKeys(key, trusted)


def _prepare_directories(settings: Settings) -> None:
    """Create the directories, and remove the access of other users that older versions left."""
    places = {"home": settings.home_dir / "models", "cache_dir": settings.effective_cache_dir}
    for param, directory in places.items():
        flag = "--home" if settings.cache_dir is None else f"--{param.replace('_', '-')}"
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except FileExistsError as error:
            raise InvalidRequestError(
                f"{directory} is not a directory; choose another {flag}", param=param
            ) from error
        except OSError as error:
            raise InvalidRequestError(
                f"cannot make {directory}: {error.strerror}; choose another {flag}", param=param
            ) from error
    if _is_own_home(settings.home_dir):
        keep_private(settings.home_dir.resolve(), skip=BLOCKS)


def _is_own_home(home: Path) -> bool:
    try:
        names = {path.name for path in home.iterdir()}
    except OSError:
        return False
    return home.name == ".semantic" or names <= {
        "cache",
        "export.key",
        "keys.json",
        MARKER_FILE,
        "logs",
        "models",
        "native",
        "pack.key",
        "pack_keys",
        "repairs.toml",
        "replicas",
    }


def _registry(
    settings: Settings,
    loader: ModelLoader,
    device: DeviceThread,
    backend_name: BackendName,
    feed: EventFeed,
) -> ModelRegistry:
    models = ModelRegistry(
        device,
        loader,
        loader.load,
        loader.first,
        backend_name=backend_name,
        names=loader.names,
        feed=feed,
    )
    models.policy = settings.runtime
    models.has_ocr = _has_ocr(settings)
    return models
