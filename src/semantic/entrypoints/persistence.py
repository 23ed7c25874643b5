"""What keeps agents across restarts: the ledger, the disk behind the pool, and its upkeep.

The ledger opens at once, so that a directory in use is refused before anything else; the store is
made when the model's geometry is known.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import structlog

from semantic.adapters.config.settings import Settings
from semantic.adapters.outbound import host_memory
from semantic.adapters.outbound.blocks.codec import FORMATS, KVCodec
from semantic.adapters.outbound.blocks.directory import DirectoryLock, claim
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.cipher import load_cipher
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.agents.cache_admin import ModelCache
from semantic.application.agents.ledger import AgentLedger, write_at_once
from semantic.application.agents.sharing import AgentLeases, SharedAgents
from semantic.application.agents.upkeep import Upkeep
from semantic.application.cache.remote import RemoteTier
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskLimits, DiskTier
from semantic.application.engine import drafts as draft_memory
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.model import LoadedModel
from semantic.application.engine.request import EventSink
from semantic.application.engine.scheduler import EngineLimits
from semantic.application.prompt.replay import LedgerReplayStore
from semantic.domain.blocks import BlockName, BlockNamespace, pack_tokens
from semantic.domain.errors import (
    CachePersistenceError,
    DrainingError,
    InvalidRequestError,
    ModelSwapError,
)
from semantic.domain.pool import BlockPool
from semantic.domain.spec import ModelCacheSpec
from semantic.ports.storage import (
    LedgerChange,
    LedgerPort,
    LedgerState,
    MarkDurable,
    PutReplay,
    Repoint,
)
from semantic.ports.telemetry import TelemetryPort

if TYPE_CHECKING:
    from semantic.adapters.outbound.ledger.postgres import PostgresLedger

_DRAFT_SHARE = 64  # of a smaller budget, the memory for guesses is not taken off
_log = structlog.get_logger(__name__)
_FLUSH_S = 0.5


class AgentMemory:
    """One directory's agents and blocks.

    Attributes:
        agents: All agents and their turns.
        replays: The tokens of their replies.
        codec: How the KV cache is written.
        disk: Writes and reads blocks; None if nothing is kept there.
    """

    def __init__(
        self,
        settings: Settings,
        disk_quota: Callable[[str], int | None] = lambda _: None,
        telemetry: TelemetryPort | None = None,
    ) -> None:
        """Open the directory, if anything is to be kept there.

        Args:
            settings: Where it is, and how much it may hold.
            disk_quota: Says how many bytes a tenant may have there; None is the settings' number.
            telemetry: Who is told what happens; None is nobody.

        Raises:
            InvalidRequestError: it is not a cache, or another server has it.
            CachePersistenceError: what is there cannot be opened.
        """
        self._settings = settings
        self._memory_bytes = settings.memory_budget_mb * 2**20
        self._disk_quota = disk_quota
        self._namings: set[tuple[str, str]] = set()  # of the models that were loaded
        self._telemetry = telemetry
        self.codec = KVCodec(FORMATS[settings.kv_bits])
        self._closing = threading.Lock()
        self._is_closed = False
        self._lock: DirectoryLock | None = None
        self._files: SafetensorsCache | None = None
        self.disk: DiskTier | None = None
        self._cache: ModelCache | None = None
        directory = settings.effective_cache_dir if settings.durability != "none" else None
        cipher = load_cipher(settings.encryption_key_file, settings.encryption_key_command)
        if directory is not None:
            claim(directory)
            self._lock = DirectoryLock(directory)
        own = SqliteLedger(directory, cipher=cipher)
        self._shared = _shared_ledger(settings, own) if settings.store == "shared" else None
        self.ledger: LedgerPort = self._shared or own
        try:
            state = self.ledger.load()
        except CachePersistenceError:
            self._unlock()
            raise
        self._loss = state.problem
        if self._loss:
            _log.warning("the ledger is damaged or incomplete", problem=self._loss)
        self._num_agents, self._num_parts = len(state.agents), len(state.parts)
        self._parts = state.parts  # until the store has them
        self._is_index_lost = state.is_index_lost
        if directory is not None:
            self._files = SafetensorsCache(directory, self.codec, cipher)
            self.disk = self._make_disk(self._files)
        self._remote: RemoteTier | None = None
        write = self.disk.change if self.disk else write_at_once(self.ledger)
        if self._shared is None:
            self.agents = AgentLedger(self.ledger, state, write)
        else:
            write = self._write_shared
            self.agents = self._join(self._shared, state)
        self.replays = LedgerReplayStore(self.ledger, write)

    def _make_disk(self, files: SafetensorsCache) -> DiskTier:
        return DiskTier(
            *(files, self.ledger, self._disk_limits()),
            is_synced=self._settings.durability == "sync",
            telemetry=self._telemetry,
        )

    def _join(self, ledger: "PostgresLedger", state: LedgerState) -> AgentLedger:
        """Have agents and blocks in common with other servers."""
        settings = self._settings
        self._remote = self._make_remote(ledger)
        self._seen = SharedAgents(ledger)
        leases = AgentLeases(ledger, settings.lease_s)
        return AgentLedger(ledger, state, self._write_shared, table=self._seen, leases=leases)

    def _make_remote(self, ledger: "PostgresLedger") -> RemoteTier:
        """Open the object store behind this machine's files."""
        from semantic.adapters.outbound.blocks.objects import ObjectBlocks, open_store
        from semantic.adapters.outbound.ledger.shared_parts import SharedParts

        assert self._files is not None and self._settings.objects_url  # noqa: S101, PT018 - checked
        objects = ObjectBlocks(open_store(self._settings.objects_url))
        return RemoteTier(self._files, objects, SharedParts(ledger))

    def _write_shared(self, *changes: LedgerChange) -> Future[None]:
        """Write what must be there before a reply ends; what only moves pointers follows behind."""
        assert self.disk is not None  # noqa: S101 - checked by the settings
        if all(isinstance(change, Repoint | MarkDurable) for change in changes):
            return self.disk.change(*changes)
        # Replays are there when the turn that follows them is.
        is_synced = not all(isinstance(change, PutReplay) for change in changes)
        self.ledger.apply(changes, is_synced=is_synced)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def listen(self, hear: Callable[[str, str, str], None]) -> None:
        """Let what other servers do to agents be heard, on a thread of its own."""
        if self._shared is None:
            return

        def on_moved(tenant: str, agent_id: str, turn_id: str) -> None:
            self._seen.forget(tenant, agent_id)
            try:
                hear(tenant, agent_id, turn_id)
            except CachePersistenceError as error:
                _log.warning("notifications from another server were missed", problem=error.message)

        self._shared.listen(on_moved)

    @property
    def learn(self) -> Callable[[BlockName, Sequence[int]], None] | None:
        """Finds out what other servers computed of a prompt; None if there are none."""
        return self._learn if self._remote is not None else None

    def _learn(self, root: BlockName, tokens: Sequence[int]) -> None:
        store = self.cache.store
        store.loader.learn(root, pack_tokens(tokens), store.spec.block_tokens)

    @property
    def cache(self) -> ModelCache:
        """The blocks of the model, and who looks after them.

        Raises:
            ModelSwapError: the model is not loaded yet.
        """
        if self._cache is None:
            raise ModelSwapError("the model is loading.", retry_after_s=2)
        return self._cache

    @property
    def summary(self) -> str:
        """What was found, for people."""
        if self._lock is None:
            return "kept in memory only (durability none)"
        where = self._settings.effective_cache_dir
        return f"{self._num_agents} known, {self._num_parts} block files in {where}"

    def make_engine(
        self,
        model: LoadedModel,
        limits: EngineLimits,
        emit: EventSink,
        on_ready: Callable[[], None],
    ) -> BlockPoolBatchEngine:
        """Make the engine of a loaded model, over all that is known.

        Raises:
            DrainingError: `close` came first.
        """
        self._namings.add(model.naming)
        roots = [model.root(principal) for principal in self.agents.principals()]
        if self._files is not None:
            self._files.announce(model.root(self.agents.principal()), model.fingerprint)
        if self._cache is None:
            self._open_cache(model.backend.spec, roots)
        else:
            self._cache.store.serve(model.backend.spec, roots)
            self._cache.upkeep.begin_warm_up()
        store = self.cache.store
        return BlockPoolBatchEngine(
            model.backend, model.tokenizer, store, limits, emit, on_ready=on_ready
        )

    def _open_cache(self, spec: ModelCacheSpec, roots: Sequence[BlockName]) -> None:
        """Make the store, which outlives the model whose geometry it is made with."""
        settings = self._settings
        pool = BlockPool(spec, self._memory_bytes)
        store = AgentCacheStore(
            *(pool, self.disk),
            on_moved=self.agents.log.move,
            telemetry=self._telemetry,
            remote=self._remote,
        )
        store.serve(spec, roots)
        if settings.draft_tokens and self._memory_bytes >= _DRAFT_SHARE * draft_memory.MEMORY_BYTES:
            store.reserve(draft_memory.MEMORY_BYTES)  # what guesses are made from is part of it
        store.restore_index(self._parts)
        self._parts = ()
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
            upkeep.remote = self._remote
            upkeep.trim_memory = host_memory.trim
            self._cache = ModelCache(store, upkeep)
            if self.disk is not None:
                self.disk.start(store.is_on_disk)
        upkeep.start(settings.upkeep_interval_s, is_index_lost=self._is_index_lost)

    def resize(self, nbytes: int) -> None:
        """Give the KV cache another budget of memory."""
        self._memory_bytes = nbytes
        if self._cache is not None:
            self._cache.store.resize(nbytes)

    def put_away(self) -> None:
        """Write what a model that is unloaded left in memory, and drop it there."""
        if self._cache is None:
            return
        store = self._cache.store
        end = time.monotonic() + self._settings.drain_timeout_s
        while self.disk is not None and store.offer_again() and time.monotonic() < end:
            self.disk.flush(_FLUSH_S)
        store.drop_memory()

    def is_durable(self, tenant: str, turn_id: str) -> bool:
        """Whether a turn that was written is on disk with its KV cache."""
        turn = self.ledger.turn(tenant, turn_id)
        return turn is not None and turn.is_durable

    @property
    def problem(self) -> str:
        """What is wrong with what agents leave behind; empty while all is well.

        That the ledger was restored, or lacks something, is told until the next start.
        """
        disk, cache = self.disk, self._cache
        upkeep = cache.upkeep.problem if cache else ""
        remote = self._remote.problem if self._remote else ""
        known = (self._loss, disk.problem if disk else "", remote, upkeep)
        return "; ".join(filter(None, known))

    def close(self, timeout_s: float) -> bool:
        """Write what is queued and let the directory go; False if that took too long.

        A second call does nothing.
        """
        with self._closing:
            if self._is_closed:
                return True
            self._is_closed = True
        if self._cache is not None:
            self._cache.upkeep.stop(timeout_s)
        if self._remote is not None:
            if self.disk is not None:  # what it writes is then uploaded
                self.disk.flush(timeout_s / 2)
            self._remote.close(timeout_s / 2)
        self.agents.leases.close()
        if self.disk is None or self._cache is None:
            self._close_ledger()
            self._unlock()
            return True
        is_written = self.disk.close(timeout_s)
        if self.disk.is_closed:
            self._unlock()
        return is_written

    def _close_ledger(self) -> None:
        """Close what no writer was started for: no model was loaded."""
        try:
            self.ledger.back_up()
            self.ledger.close()
        except CachePersistenceError as error:
            _log.warning("the ledger could not be backed up", problem=error.message)

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def _disk_limits(self) -> DiskLimits:
        settings = self._settings
        return DiskLimits(
            budget_bytes=settings.disk_budget_mb * 2**20,
            queue_bytes=settings.write_queue_mb * 2**20,
            tenant_bytes=self._tenant_bytes,
        )

    def _tenant_bytes(self, root: BlockName) -> int | None:
        """How much the tenant of a root may have on disk below it."""
        settings = self._settings
        usual = settings.tenant_disk_quota_mb * 2**20 or None
        for principal in self.agents.principals():
            spaces = [BlockNamespace(*naming, principal.salt) for naming in tuple(self._namings)]
            if any(space.root() == root for space in spaces):
                return self._disk_quota(principal.tenant) or usual
        return usual


def _shared_ledger(settings: Settings, own: SqliteLedger) -> "PostgresLedger":
    """The ledger that all servers have, over the index of this machine's files.

    Raises:
        InvalidRequestError: what it needs is not installed.
    """
    try:
        import obstore as _  # noqa: F401 - what is missing is told here, once

        from semantic.adapters.outbound.ledger.postgres import PostgresLedger
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            f"store = shared needs {error.name}: pip install 'semantic-server[cluster]'",
            param="store",
        ) from error
    assert settings.database_url is not None  # noqa: S101 - checked by the settings
    return PostgresLedger(settings.database_url, own)
