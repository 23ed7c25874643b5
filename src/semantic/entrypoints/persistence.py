"""Persistence of agents across restarts: the ledger, the disk tier and its upkeep.

The ledger opens first, so that a directory in use is refused before anything else happens. The
block store is created later, when the model's geometry is known.
"""

import functools
import gc
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from semantic.adapters.config.settings import Settings
from semantic.adapters.outbound import host_memory
from semantic.adapters.outbound.blocks.directory import DirectoryLock, claim
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.blocks.format import FORMATS, KVCodec
from semantic.adapters.outbound.cipher import Cipher, load_cipher
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.agents.block_owners import BlockOwners
from semantic.application.agents.cache_admin import ModelCache, ServedCache
from semantic.application.agents.ledger import AgentLedger, write_at_once
from semantic.application.agents.storage_quota import StorageQuota, TenantQuotas
from semantic.application.agents.upkeep import Upkeep
from semantic.application.cache.formats import ServedFormat, StoredFormats
from semantic.application.cache.index import BlockIndex
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskLimits, DiskTier
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.model import LoadedModel
from semantic.application.engine.request import EventSink
from semantic.application.engine.speculative import drafts as draft_memory
from semantic.application.prompt.replay import LedgerReplayStore
from semantic.application.settings import EngineLimits
from semantic.domain.access import KeyRing
from semantic.domain.agents import Agent
from semantic.domain.blocks import BlockName, BlockOrigin
from semantic.domain.errors import (
    CachePersistenceError,
    DrainingError,
)
from semantic.domain.pool import BlockPool
from semantic.domain.spec import ModelCacheSpec
from semantic.entrypoints.cluster_loader import open_shared_store
from semantic.ports.sharing import SharedBlocksPort
from semantic.ports.storage import LedgerPort, LedgerState, WriteChanges
from semantic.ports.telemetry import TelemetryPort

_DRAFT_SHARE = 64  # a budget below this many times the draft memory does not reserve it
_log = structlog.get_logger(__name__)
_FLUSH_S = 0.5
_MANY = 10_000  # agents and blocks that garbage collection takes 50 ms to scan


class AgentMemory:
    """The agents and blocks of one cache directory.

    Attributes:
        disk: Writes and reads blocks; None with durability `none`.
        num_agents: Agents that the directory held at the start.
        served: The block store of the served model and its upkeep.
        survey: See `Upkeep`; `reopen` likewise.
    """

    def __init__(self, settings: Settings, telemetry: TelemetryPort | None = None) -> None:
        """Open the cache directory, unless durability is `none`.

        Raises:
            InvalidRequestError: the directory is not a cache, or another server uses it.
            CachePersistenceError: the ledger or its files cannot be opened.
        """
        self._settings = settings
        self._memory_bytes = settings.runtime.memory_bytes
        self._quotas = TenantQuotas(settings.tenant_disk_quota_mb * 2**20)
        self._telemetry = telemetry
        self.codec = KVCodec(FORMATS[settings.kv_bits])
        self._closing = threading.Lock()
        self._is_closed = False
        self._lock: DirectoryLock | None = None
        self._files: SafetensorsCache | None = None
        self.disk: DiskTier | None = None
        self.served = ServedCache()
        self.survey: Callable[[], None] = lambda: None
        self.reopen: Callable[[Agent, BlockName, tuple[int, ...]], None] = lambda *_: None
        self._formats = StoredFormats()
        directory = settings.effective_cache_dir if settings.durability != "none" else None
        cipher = load_cipher(settings.encryption_key_file, settings.encryption_key_command)
        if directory is not None:
            claim(directory)
            self._lock = DirectoryLock(directory)
        self._own = own = SqliteLedger(directory, cipher=cipher)
        is_shared = settings.store == "shared"
        self._shared = open_shared_store(settings, own) if is_shared else None
        self.ledger: LedgerPort = own if self._shared is None else self._shared.ledger
        self._index = BlockIndex()
        state = self._load()
        self._loss = state.problem
        for problem in filter(None, (self._loss, own.problem)):
            _log.warning("ledger problem", problem=problem)
        self.num_agents, self._num_parts = len(state.agents), len(state.parts)
        self._is_index_lost = state.is_index_lost
        if directory is not None:
            self._files = _open_files(directory, self.codec, cipher, state)
            # Listing the directories of a million files may take longer than all else.
            known = self._files.origins(None if state.is_index_lost else state.parts)
            self._formats = StoredFormats(known)
            self.disk = self._make_disk(self._files)
        write = self.disk.change if self.disk else write_at_once(self.ledger)
        self._shared_blocks: SharedBlocksPort | None = None
        if self._shared is not None:
            assert self._files is not None  # noqa: S101 - checked by the settings
            self._shared_blocks = self._shared.open_blocks(self._files)
            write = self._shared.writer(write)
        self.agents = self._make_agents(state, write)
        self.limit_storage(self._quotas.ring)
        self._owners = BlockOwners(self.agents, self._quotas)
        self.replays = LedgerReplayStore(self.ledger, write)
        if self._files is not None and self.disk is not None:
            self._files.fingerprint_of = self._owners.fingerprint
            self.disk.limits = replace(self.disk.limits, tenant_bytes=self._owners.max_bytes)
            self.disk.start(self.served.is_on_disk)  # agents may change before a model is loaded

    def _load(self) -> LedgerState:
        """Read the ledger, and restore the index from it."""
        with host_memory.without_collection():
            try:
                state = self.ledger.load()
            except CachePersistenceError:
                self._unlock(is_refused=True)
                raise
            self._index.restore(state.parts)
            if len(state.agents) + len(state.parts) >= _MANY:
                gc.freeze()  # they stay; scanning a million blocks would halt all turns for seconds
        return state

    def _make_agents(self, state: LedgerState, write: WriteChanges) -> AgentLedger:
        settings, shared = self._settings, self._shared
        if shared is None:
            settle_s = settings.request_timeout_s if settings.durability == "sync" else None
            agents = AgentLedger(self.ledger, state, write, settle_s=settle_s)
        else:
            agents = AgentLedger(
                self.ledger, state, write, table=shared.agents, leases=shared.leases
            )
        return agents

    def limit_storage(self, ring: KeyRing) -> None:
        """Apply the disk quotas of a key ring; nothing is counted until there is one."""
        self._quotas.ring = ring
        if self.agents.storage is None and self._quotas.has_any:
            self.agents.storage = StorageQuota(self.ledger, self._quotas.of)

    def _make_disk(self, files: SafetensorsCache) -> DiskTier:
        runtime = self._settings.runtime
        return DiskTier(
            files,
            self.ledger,
            DiskLimits(runtime.disk_bytes, runtime.write_queue_bytes),
            is_synced=self._settings.durability == "sync",
            telemetry=self._telemetry,
        )

    def listen(self, hear: Callable[[str, str, str], None]) -> None:
        """Report agents that other servers move or delete; does nothing without a shared store."""
        if self._shared is not None:
            self._shared.listen(hear)

    @property
    def learn(self) -> Callable[[BlockName, Sequence[int]], None] | None:
        """Looks up blocks of a prompt that other servers stored; None without a shared store."""
        return self.served.learn if self._shared_blocks is not None else None

    def origins(self) -> Sequence[BlockOrigin]:
        """The models and formats that wrote the stored blocks, those with the most files first."""
        return self._files.origins() if self._files is not None else ()

    @property
    def cache(self) -> ModelCache:
        """The cache of the served model; raises ModelSwapError until one is loaded."""
        return self.served.get()

    @property
    def summary(self) -> str:
        """What the directory held at the start, as one line for the banner."""
        if self._lock is None:
            return "kept in memory only (durability none)"
        where = self._settings.effective_cache_dir
        found = f"{self.num_agents} known, {self._num_parts} block files in {where}"
        return f"{found}; {problem}" if (problem := self._own.problem) else found

    def announce(self, url: str) -> None:
        """Name the server's address in the cache directory, for commands on the directory."""
        if self._lock is not None:
            self._lock.announce(url)

    def make_engine(
        self,
        model: LoadedModel,
        limits: EngineLimits,
        emit: EventSink,
        on_ready: Callable[[], None],
    ) -> BlockPoolBatchEngine:
        """Make the engine of a loaded model on top of the stored agents and blocks.

        The first call creates the block store; later calls (model swaps) reuse it.

        Raises:
            DrainingError: `close` was called first.
        """
        self._owners.serve(model.naming)
        roots = [model.root(principal) for principal in self.agents.principals()]
        self._serve_format(model)
        if self.served.loaded is None:
            self._open_cache(model.backend.spec, roots)
        else:
            self.served.loaded.store.serve(model.backend.spec, roots)
            self.served.loaded.upkeep.begin_warm_up()
        store = self.cache.store
        if note := self.note:
            _log.warning(f"{note} Recomputing.", model=model.id)
        engine = BlockPoolBatchEngine(
            model.backend, model.tokenizer, store, limits, emit, on_ready=on_ready
        )
        if model.draft is not None:
            engine.add_draft_model(model.draft.backend)
        return engine

    def _serve_format(self, model: LoadedModel) -> None:
        naming, abi, kv_format = model.naming, model.backend.traits.kv_abi, model.kv_format
        # Must not refer to the model, to free it after a swap.
        root_of = functools.cache(functools.partial(self._owners.root, naming))
        served = ServedFormat(naming[0], abi, kv_format, root_of)
        self._formats.serve(served, [principal.tenant for principal in self.agents.principals()])

    def _open_cache(self, spec: ModelCacheSpec, roots: Sequence[BlockName]) -> None:
        """Create the block store, which outlives the model whose geometry it starts with."""
        settings = self._settings
        pool = BlockPool(spec, self._memory_bytes)
        store = AgentCacheStore(
            pool,
            self.disk,
            on_moved=self.agents.log.move,
            telemetry=self._telemetry,
            shared=self._shared_blocks,
            index=self._index,
        )
        store.serve(spec, roots)
        drafts_bytes = draft_memory.MEMORY_BYTES
        if settings.runtime.draft_tokens and self._memory_bytes >= _DRAFT_SHARE * drafts_bytes:
            store.reserve(drafts_bytes)  # counts against the KV cache's budget
        with self._closing:
            if self._is_closed:
                raise DrainingError("the server is shutting down.")
            upkeep = Upkeep(
                store,
                self.agents,
                self.ledger,
                self.disk,
                files=self._files,
                orphan_ttl_s=settings.orphan_ttl_h * 3600,
            )
            upkeep.shared, upkeep.survey = self._shared_blocks, self.survey
            upkeep.reopen, upkeep.trim_memory = self.reopen, host_memory.trim
            upkeep.formats = self._formats
            self.served.loaded = ModelCache(store, upkeep)
        upkeep.start(settings.upkeep_interval_s, is_index_lost=self._is_index_lost)

    def resize(self, nbytes: int) -> None:
        self._memory_bytes = nbytes
        if self.served.loaded is not None:
            self.served.loaded.store.resize(nbytes)

    def put_away(self) -> None:
        """Flush the dirty blocks of an unloaded model to disk, then drop its blocks from memory.

        Flushing stops after `drain_timeout_s`.
        """
        if self.served.loaded is None:
            return
        store = self.served.loaded.store
        end = time.monotonic() + self._settings.runtime.drain_timeout_s
        while self.disk is not None and store.offer_again() and time.monotonic() < end:
            self.disk.flush(_FLUSH_S)
        store.drop_memory()

    @property
    def note(self) -> str:
        """Which stored blocks of the served model cannot be used, and why; empty if all can."""
        cache = self.served.loaded
        return self._formats.summary(cache.store.disk_bytes) if cache else ""

    @property
    def problem(self) -> str:
        """Current problems of the ledger, disk, object store and upkeep; empty if there are none.

        A loss in the ledger that was found at the start is reported until the next start.
        """
        disk, cache = self.disk, self.served.loaded
        upkeep = cache.upkeep.problem if cache else ""
        shared = self._shared_blocks.problem if self._shared_blocks else ""
        known = (self._loss, self._own.problem, disk.problem if disk else "", shared, upkeep)
        return "; ".join(filter(None, known))

    def close(self, timeout_s: float) -> bool:
        """Flush queued writes and release the directory; False if that exceeded `timeout_s`.

        Further calls do nothing and return True.
        """
        with self._closing:
            if self._is_closed:
                return True
            self._is_closed = True
        if self.served.loaded is not None:
            self.served.loaded.upkeep.stop(timeout_s)
        if self._shared_blocks is not None:
            if self.disk is not None:  # first, so that `close` uploads these blocks too
                self.disk.flush(timeout_s / 2)
            self._shared_blocks.close(timeout_s / 2)
        if self.agents.leases is not None:
            self.agents.leases.close()
        if self.disk is None:
            self._close_ledger()
            return True
        is_written = self.disk.close(timeout_s)
        cache = self.served.loaded
        if cache is not None and (nbytes := cache.store.tiers.unwritten_bytes):
            _log.warning(
                "stopped before all KV cache was written to disk; the next turns compute the rest "
                "again. Raise shutdown_timeout_s to write more.",
                unwritten_mb=-(-nbytes >> 20),
            )
        if self.disk.is_closed:
            self._unlock()
        return is_written

    def _close_ledger(self) -> None:
        """Close the in-memory ledger, which has no disk tier that closes it."""
        try:
            self.ledger.back_up()
            self.ledger.close()
        except CachePersistenceError as error:
            _log.warning("ledger backup failed", problem=error.message)

    def _unlock(self, *, is_refused: bool = False) -> None:
        if self._lock is not None:
            self._lock.close(is_refused=is_refused)


def _open_files(
    directory: Path, codec: KVCodec, cipher: Cipher | None, state: LedgerState
) -> SafetensorsCache:
    """Open the block files; an index that is whole tells their bytes until they are counted."""
    files = SafetensorsCache(directory, codec, cipher)
    if not state.is_index_lost:
        files.expect(sum([part.nbytes for part in state.parts]))
    return files
