"""Puts together what keeps agents: the ledger, the disk behind the pool, and its upkeep.

The ledger opens at once, so that a directory in use is refused before anything else; the store is
made when the model's geometry is known.
"""

from collections.abc import Callable
from typing import Literal

import structlog

from semantic.adapters.config.settings import Settings
from semantic.adapters.outbound.directory_lock import DirectoryLock
from semantic.adapters.outbound.kv_codec import KVCodec
from semantic.adapters.outbound.memory_ledger import MemoryLedger
from semantic.adapters.outbound.safetensors_cache import SafetensorsCache
from semantic.adapters.outbound.sqlite_ledger import SqliteLedger
from semantic.application.agent_ledger import AgentLedger, write_at_once
from semantic.application.agent_store import AgentCacheStore
from semantic.application.batch_engine import BlockPoolBatchEngine, EventSink
from semantic.application.cache_service import OpenCache
from semantic.application.device_thread import LoadedModel
from semantic.application.disk_tier import DiskTier
from semantic.application.housekeeping import Housekeeping
from semantic.application.scheduler import EngineLimits
from semantic.domain.block_pool import BlockPool
from semantic.domain.errors import CachePersistenceError
from semantic.ports.persistence import LedgerPort

_log = structlog.get_logger(__name__)

_FORMATS: dict[int, Literal["raw", "q8g64", "q4g64"]] = {16: "raw", 8: "q8g64", 4: "q4g64"}


class AgentMemory:
    """One directory's agents and blocks.

    Attributes:
        agents: All agents and their turns.
        store: The blocks; None until a model is loaded.
        housekeeping: Looks after both; None until a model is loaded.
    """

    def __init__(self, settings: Settings) -> None:
        """Open the directory, if anything is to be kept there.

        Raises:
            InvalidRequestError: another server has it.
            CachePersistenceError: what is there cannot be opened.
        """
        self._settings = settings
        self._codec = KVCodec(_FORMATS[settings.kv_bits])
        self._lock: DirectoryLock | None = None
        self._files: SafetensorsCache | None = None
        self.disk: DiskTier | None = None
        self.store: AgentCacheStore | None = None
        self.housekeeping: Housekeeping | None = None
        self.ledger: LedgerPort = MemoryLedger()
        if settings.durability != "none":
            self._lock = DirectoryLock(settings.effective_cache_dir)
            self.ledger = SqliteLedger(settings.effective_cache_dir)
        try:
            self._state = self.ledger.load()
        except CachePersistenceError:
            self._unlock()
            raise
        if self._state.problem:
            _log.warning("the ledger was restored", problem=self._state.problem)
        if settings.durability != "none":
            self._files = SafetensorsCache(settings.effective_cache_dir, self._codec)
            self.disk = DiskTier(
                self._files,
                self.ledger,
                budget_bytes=settings.disk_budget_mb * 2**20,
                queue_bytes=settings.write_queue_mb * 2**20,
                is_synced=settings.durability == "sync",
            )
        write = self.disk.change if self.disk else write_at_once(self.ledger)
        self.agents = AgentLedger(self.ledger, self._state, write)

    @property
    def codec(self) -> KVCodec:
        """How attention state is written."""
        return self._codec

    def opened(self) -> OpenCache | None:
        """The blocks and who looks after them; None until a model is loaded."""
        if self.store is None or self.housekeeping is None:
            return None
        return OpenCache(self.store, self.housekeeping)

    @property
    def kv_format(self) -> str:
        """How attention state rests; part of the names of blocks."""
        return self._codec.kv_format

    @property
    def summary(self) -> str:
        """What was found, for people."""
        if self._lock is None:
            return "kept in memory only (durability none)"
        where = self._settings.effective_cache_dir
        return f"{len(self._state.agents)} known, {len(self._state.parts)} block files in {where}"

    def make_engine(
        self,
        model: LoadedModel,
        limits: EngineLimits,
        emit: EventSink,
        on_ready: Callable[[], None],
    ) -> BlockPoolBatchEngine:
        """Make the engine of a loaded model, over all that is known."""
        settings = self._settings
        pool = BlockPool(model.backend.spec, settings.memory_budget_mb * 2**20)
        self.store = AgentCacheStore(pool, self.disk)
        self.store.restore_index(self._state.parts)
        if self.disk is not None and self._files is not None:
            self._files.announce(model.root(self.agents.principal()), model.fingerprint)
            self.disk.start(self.store)
        self.housekeeping = Housekeeping(
            self.store,
            self.agents,
            self.ledger,
            self.disk,
            files=self._files,
            orphan_ttl_s=settings.orphan_ttl_h * 3600,
        )
        self.housekeeping.start(settings.upkeep_interval_s, is_index_lost=self._state.is_index_lost)
        return BlockPoolBatchEngine(
            model.backend, model.tokenizer, self.store, limits, emit, on_ready=on_ready
        )

    def close(self, timeout_s: float) -> bool:
        """Write what is queued and let the directory go; False if that took too long."""
        if self.housekeeping is not None:
            self.housekeeping.stop(timeout_s)
        is_written = True
        if self.disk is not None and self.store is not None:
            is_written = self.disk.close(timeout_s)
        elif self.disk is not None:
            self.ledger.close()
        if is_written:
            self._unlock()
        return is_written

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
