"""Interfaces where servers that share agents and blocks differ from a single server.

A single server keeps its agents in a table in memory. It needs no leases and has no shared blocks.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from semantic.domain.agents import Agent
from semantic.domain.blocks import BlockName, BlockPart
from semantic.ports.backend import KVPayload
from semantic.ports.storage import LedgerChange


class AgentTablePort(Protocol):
    """The latest state of every agent. Thread-safe.

    A single server keeps all agents in memory. Servers that share a ledger read agents from it, so
    a call may block. Methods then raise CachePersistenceError if the ledger cannot be read.
    """

    @property
    def is_shared(self) -> bool:
        """Whether other processes use the same agents."""

    def find_agent(self, tenant: str, agent_id: str) -> Agent | None:
        """Return an agent; None if it does not exist."""

    def of_tenant(self, tenant: str) -> list[Agent]:
        """Return all agents of a tenant."""

    def known(self) -> list[Agent]:
        """Return the agents whose KV cache this process may hold."""

    def put(self, agent: Agent, before: Agent | None, epoch: int | None) -> LedgerChange:
        """Store an agent; returns the ledger change that the caller must write.

        Args:
            agent: The new state.
            before: The state that it replaces; None for a new agent.
            epoch: Epoch of the caller's lease; None if it has none.
        """

    def drop(self, agent: Agent) -> None:
        """Forget an agent."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to move an agent's head, identified by its epoch."""

    tenant: str
    agent_id: str
    epoch: int


class AgentLeasesPort(Protocol):
    """Leases each agent to one request at a time, across all servers. Thread-safe.

    A single server has none: it counts the requests of its agents in memory.
    """

    def acquire(self, tenant: str, agent_id: str, *, patience_s: float = 0.0) -> Lease | None:
        """Acquire a lease; None if another request still holds it after `patience_s`. Blocks."""

    async def wait(self, tenant: str, agent_id: str, timeout_s: float) -> Lease:
        """Acquire a lease, waiting until the requests that hold it have released it.

        Raises:
            GenerationTimeoutError: the lease was not available within `timeout_s`.
        """

    def release(self, lease: Lease) -> None:
        """Release a lease; returns at once."""

    def close(self) -> None:
        """Release all leases and wait until they are released."""


class SharedBlocksPort(Protocol):
    """Block parts that several servers share: the tier below the disk. Thread-safe.

    A single server has none.
    """

    @property
    def problem(self) -> str:
        """Why the latest upload failed; empty if it succeeded."""

    def seconds_to_read(self, nbytes: int) -> float:
        """Estimate how long reading `nbytes` takes; 0 before the first read."""

    def offer(self, part: BlockPart, on_end: Callable[[BlockPart], None]) -> None:
        """Queue the upload of a part from its file; `on_end` is called after a successful upload.

        The part is skipped if the queue is full or closed: an upload is only an optimization.
        """

    def read(self, part: BlockPart) -> Future[KVPayload]:
        """Download a part; the future may fail with `CacheCorruptionError` or `DrainingError`."""

    def follow(self, root: BlockName, tokens: bytes) -> list[BlockPart]:
        """Look up the stored parts of a prompt; empty if the index does not respond. Blocks."""

    def collect(self, *, unused_s: float) -> int:
        """Delete parts that no agent reaches; returns the bytes freed.

        Does nothing while another server collects.

        Raises:
            CachePersistenceError: the store or its index does not respond.
        """

    def close(self, timeout_s: float) -> None:
        """Stop downloads, and wait up to `timeout_s` seconds for queued uploads."""
