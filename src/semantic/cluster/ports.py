"""Interfaces of what several servers share: leases, objects, and the index of the objects."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from semantic.domain.blocks import BlockName, BlockPart, PartKey


class LeaseStorePort(Protocol):
    """Leases each agent to one request at a time, across all processes. Thread-safe.

    An epoch identifies a lease; a later lease of an agent has a greater epoch. All methods raise
    CachePersistenceError if the ledger cannot be reached.
    """

    def acquire(self, tenant: str, agent_id: str, *, ttl_s: float) -> int | None:
        """Acquire the lease of an agent; returns its epoch, None if another request holds it.

        The agent need not exist yet. A lease that is neither renewed nor released for `ttl_s` may
        be taken over.
        """

    def renew(self, tenant: str, agent_id: str, epoch: int, *, ttl_s: float) -> bool:
        """Extend a lease by `ttl_s` from now; False if it was released or taken over."""

    def release(self, tenant: str, agent_id: str, epoch: int) -> None:
        """Release a lease; does nothing if it was released or taken over."""


class ObjectsPort(Protocol):
    """Object store for block parts, shared by all servers. Thread-safe.

    Methods raise CachePersistenceError if the store does not respond.
    """

    def put(self, key: PartKey, content: memoryview) -> None:
        """Write an object; does nothing if it exists."""

    def get(self, key: PartKey) -> memoryview:
        """Read an object.

        Raises:
            CacheCorruptionError: the object does not exist.
        """

    def delete(self, key: PartKey) -> None:
        """Delete an object; a missing one is ignored."""

    def older_than(self, age_s: float) -> Iterator[list[PartKey]]:
        """Yield batches of keys of objects older than `age_s`, by the store's own clock."""


class SharedPartsPort(Protocol):
    """The index of parts in the object store, shared by all servers. Thread-safe.

    A part goes through the states live, dead, deleted and unknown. Dead: no agent reaches it, and
    it can be revived. Deleted: its object is to be removed, and it cannot be added until its row is
    removed too. Unknown: it has no row. All times are those of the index's own clock. Methods raise
    CachePersistenceError if the index does not respond.
    """

    def revive(self, key: PartKey) -> bool | None:
        """Mark a live or dead part as live and used.

        Returns:
            True if it is live now, False if it is deleted, None if it is unknown.
        """

    def add(self, part: BlockPart) -> bool:
        """Add a part whose object is stored, or revive it; False if it is deleted."""

    def follow(self, root: BlockName, tokens: bytes) -> list[BlockPart]:
        """Return the parts of blocks that match a prefix of a prompt, and mark them as used.

        A block whose first token matches is included, since a block may be used in part.
        """

    def lose(self, key: PartKey) -> None:
        """Mark a part as deleted because its object is missing or damaged."""

    def sole_collector(self) -> AbstractContextManager[bool]:
        """Try to acquire the lock of the garbage collection; yields whether this succeeded."""

    def mark(self, *, unused_s: float) -> None:
        """Mark parts unused for `unused_s` as dead if no agent reaches them, else as live."""

    def condemn(self, *, grace_s: float) -> list[tuple[PartKey, int]]:
        """Mark parts that were dead for `grace_s` as deleted.

        Returns:
            Keys and sizes of all deleted parts, whose objects the caller must remove. They include
            parts that an interrupted collection left behind.
        """

    def condemn_unknown(self, keys: Sequence[PartKey]) -> list[PartKey]:
        """Mark those of the parts that are unknown as deleted; returns them."""

    def forget(self, *, grace_s: float) -> None:
        """Remove the rows of parts that were deleted for `grace_s`."""
