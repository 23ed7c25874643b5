"""Wires the agents and blocks that several servers share."""

from collections.abc import Callable
from concurrent.futures import Future

import structlog

from semantic.adapters.config.settings import Settings
from semantic.cluster.adapters.objects import ObjectBlocks, open_store
from semantic.cluster.adapters.postgres import PostgresLedger
from semantic.cluster.adapters.shared_parts import SharedParts
from semantic.cluster.application.leases import AgentLeases
from semantic.cluster.application.object_tier import ObjectTier
from semantic.cluster.application.shared_agents import SharedAgents
from semantic.domain.errors import CachePersistenceError
from semantic.entrypoints.cluster_loader import SharedStore
from semantic.ports.storage import (
    BlockFilesPort,
    LedgerChange,
    LedgerPort,
    MarkDurable,
    PutReplay,
    Repoint,
    WriteChanges,
)

_log = structlog.get_logger(__name__)


def open_shared_store(settings: Settings, local: LedgerPort) -> SharedStore:
    """Open the database and the object store of the settings, without connecting to them."""
    return ClusterStore(settings, local)


class ClusterStore:
    """`SharedStore` in a PostgreSQL database and an object store."""

    def __init__(self, settings: Settings, local: LedgerPort) -> None:
        assert settings.database_url and settings.objects_url  # noqa: S101, PT018 - checked
        self._objects_url = settings.objects_url
        self._database = PostgresLedger(settings.database_url, local)
        self.ledger: LedgerPort = self._database
        self.agents = SharedAgents(self._database)
        self.leases = AgentLeases(self._database, settings.lease_s)

    def open_blocks(self, files: BlockFilesPort) -> ObjectTier:
        objects = ObjectBlocks(open_store(self._objects_url))
        return ObjectTier(files, objects, SharedParts(self._database))

    def writer(self, queue: WriteChanges) -> WriteChanges:
        """Return a function that applies changes before it returns.

        Other servers must see a turn when its reply ends. Changes that only move pointers or mark
        durability go to `queue`.
        """

        def write(*changes: LedgerChange) -> Future[None]:
            if all(isinstance(change, Repoint | MarkDurable) for change in changes):
                return queue(*changes)
            # The synchronous commit of the turn that follows a replay makes the replay durable too.
            is_synced = not all(isinstance(change, PutReplay) for change in changes)
            self.ledger.apply(changes, is_synced=is_synced)
            done: Future[None] = Future()
            done.set_result(None)
            return done

        return write

    def listen(self, hear: Callable[[str, str, str], None]) -> None:
        def on_moved(tenant: str, agent_id: str, turn_id: str) -> None:
            self.agents.forget(tenant, agent_id)
            try:
                hear(tenant, agent_id, turn_id)
            except CachePersistenceError as error:
                _log.warning("missed notifications from another server", problem=error.message)

        self._database.listen(on_moved)
