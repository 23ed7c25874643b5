"""Loads `semantic.cluster`, the optional package of servers that share agents, and of shards.

No other module outside that package reaches it, and this one only by name: a single server on one
device never imports it. The architecture test checks both.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Literal, Protocol

from semantic.adapters.config.settings import Settings
from semantic.adapters.extras import missing_extra
from semantic.domain.errors import InvalidRequestError
from semantic.domain.spec import ComputeHint, ModelCacheSpec
from semantic.ports.backend import ModelBackendPort
from semantic.ports.sharing import AgentLeasesPort, AgentTablePort, SharedBlocksPort
from semantic.ports.storage import BlockFilesPort, LedgerPort, WriteChanges

_PACKAGE = "semantic.cluster.entrypoints"


class SharedStore(Protocol):
    """Agents and blocks that several servers share."""

    @property
    def ledger(self) -> LedgerPort:
        """The shared ledger; it keeps the index of this machine's files in the local one."""

    @property
    def agents(self) -> AgentTablePort: ...

    @property
    def leases(self) -> AgentLeasesPort: ...

    def open_blocks(self, files: BlockFilesPort) -> SharedBlocksPort:
        """Open the store of shared blocks; this machine's `files` are uploaded to it.

        Raises:
            InvalidRequestError: the settings do not name an object store.
        """

    def writer(self, queue: WriteChanges) -> WriteChanges:
        """Return a function that writes changes; `queue` gets those that need not be immediate."""

    def listen(self, hear: Callable[[str, str, str], None]) -> None:
        """Call `hear` with tenant, agent id and turn id of agents that other servers change.

        The call comes on a thread of the ledger.
        """


def open_shared_store(settings: Settings, local: LedgerPort) -> SharedStore:
    """Open what `store = shared` names; `local` keeps the index of this machine's files.

    Raises:
        InvalidRequestError: an optional package is not installed.
    """
    try:
        module = _load("shared_store")
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            missing_extra("store = shared", error.name, "cluster"), param="store"
        ) from error
    store: SharedStore = module.open_shared_store(settings, local)
    return store


def load_sharded(
    directory: Path,
    spec: ModelCacheSpec,
    settings: Settings,
    backend: Literal["torch", "mlx"],
    hint: ComputeHint,
) -> ModelBackendPort:
    """Load a model that is split over `settings.shards` processes."""
    model: ModelBackendPort = _load("shards").load_sharded(directory, spec, settings, backend, hint)
    return model


def join_server(address: str) -> int:
    """Run as a rank of the server at `address` (HOST:PORT); returns an exit status."""
    status: int = _load("shards").join(address)
    return status


def run_cluster(settings: Settings) -> int:
    """Run servers as replicas on Ray until a signal arrives; returns an exit status."""
    status: int = _load("supervisor").run_cluster(settings)
    return status


def _load(module: str) -> ModuleType:
    return importlib.import_module(f"{_PACKAGE}.{module}")
