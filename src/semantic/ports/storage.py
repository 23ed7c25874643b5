"""What the core asks of the disk: KV cache files, and a ledger of everything else.

Both belong to one directory and to one process. The KV cache may be lost at any time without
harm; the ledger's agents and turns may not. A ledger that several processes share leases agents to
them: heads move only from where the writer saw them, and not by one whose lease was taken over.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from semantic.domain.agents import Agent, Pointer, Turn
from semantic.domain.blocks import BlockName, BlockPart, PartKey
from semantic.ports.backend import KVPayload


class BlockFilesPort(Protocol):
    """Payloads in files, one for each part of a block. Safe on any thread."""

    def write(self, part: BlockPart, payload: KVPayload, *, is_synced: bool) -> BlockPart:
        """Write a payload whole or not at all; returns the part with its size.

        With `is_synced` it comes back only when the file would survive a power failure.

        Raises:
            CachePersistenceError: it cannot be written: no space, no permission.
        """

    def read(self, part: BlockPart) -> KVPayload:
        """Read a payload and check it.

        Raises:
            CacheCorruptionError: the file is missing, damaged, or not what `part` says.
        """

    def content(self, part: BlockPart) -> memoryview:
        """Read the bytes of a file as they are.

        Raises:
            CacheCorruptionError: the file is missing, or not of the size that `part` says.
        """

    def parse(self, part: BlockPart, content: memoryview) -> KVPayload:
        """Make a payload of the bytes of a file, and check it.

        Raises:
            CacheCorruptionError: they are damaged, or not what `part` says.
        """

    def room_for(self, part: BlockPart) -> int:
        """Say how many bytes of memory reading a part takes at most; does not look at the file."""

    def delete(self, part: BlockPart) -> None:
        """Remove a file; a missing one is ignored.

        Raises:
            CachePersistenceError: it is there and cannot be removed.
        """

    def quarantine(self, part: BlockPart) -> None:
        """Move a bad file to quarantine; a missing one is ignored.

        Raises:
            CachePersistenceError: it is there and cannot be moved.
        """

    def empty_quarantine(self, *, before: float) -> int:
        """Remove files that were quarantined up to a time; returns the bytes freed."""

    def scan(self) -> Iterator[BlockPart]:
        """Read what every file says of itself; moves what is not a whole part to quarantine."""

    def used_bytes(self) -> int:
        """Bytes of everything in the directory: other models' files, quarantine, the ledger."""

    def other_bytes(self) -> int:
        """Of these, bytes of what is neither block nor quarantine: the ledger and its backup."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """An owner of agents and blocks; see `Principal`."""

    id: str
    salt: bytes


@dataclass(frozen=True, slots=True)
class LedgerState:
    """What a server must know from the start.

    Attributes:
        is_index_lost: Not all parts are known: `BlockFilesPort.scan` finds them. So
            in a new ledger too, and at every start until a `MarkIndexWhole`.
        problem: What was wrong with the ledger, for people; empty if nothing was.
    """

    tenants: tuple[Tenant, ...]
    agents: tuple[Agent, ...]
    parts: tuple[BlockPart, ...]
    is_index_lost: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PutTenant:
    """Add a tenant, unless there is one of its name: its salt stays."""

    tenant: Tenant


@dataclass(frozen=True, slots=True)
class PutAgent:
    """Add an agent, or replace it as a whole."""

    agent: Agent


@dataclass(frozen=True, slots=True)
class AdvanceHead:
    """Replace an agent if it is as the writer saw it; else all changes fail with `ConflictError`.

    Attributes:
        before: What it was: its head must still be there. None adds an agent that is not there.
        epoch: Of the writer's lease, which must not be another's by now, and ends with this
            change; None needs no lease.
    """

    agent: Agent
    before: Agent | None
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class DropAgent:
    """Remove an agent; its turns go when no agent reaches them."""

    tenant: str
    agent_id: str


@dataclass(frozen=True, slots=True)
class PutTurn:
    """Add a turn, or replace it."""

    tenant: str
    turn: Turn


@dataclass(frozen=True, slots=True)
class MarkDurable:
    """Note that a turn's KV cache is on disk."""

    turn_id: str


@dataclass(frozen=True, slots=True)
class Repoint:
    """Let every turn that points at `old` point into `new`, which begins with its tokens."""

    old: BlockName
    new: BlockName


@dataclass(frozen=True, slots=True)
class PutPart:
    """Note a file that is in its place."""

    part: BlockPart


@dataclass(frozen=True, slots=True)
class DropPart:
    """Note that a file is gone."""

    key: PartKey


@dataclass(frozen=True, slots=True)
class TouchParts:
    """Note when parts were last used."""

    keys: tuple[PartKey, ...]
    at: float


@dataclass(frozen=True, slots=True)
class MarkIndexWhole:
    """Note that every file is in the index again; see `LedgerState.is_index_lost`."""


@dataclass(frozen=True, slots=True)
class PutReplay:
    """Keep the token ids of a reply under its key, per tenant."""

    tenant: str
    key: bytes
    tokens: tuple[int, ...]
    at: float


LedgerChange: TypeAlias = (
    PutTenant
    | PutAgent
    | AdvanceHead
    | DropAgent
    | PutTurn
    | MarkDurable
    | Repoint
    | PutPart
    | DropPart
    | TouchParts
    | MarkIndexWhole
    | PutReplay
)
# Makes changes in order, behind the caller's back; the future tells when they are written.
WriteChanges: TypeAlias = Callable[..., Future[None]]


@dataclass(frozen=True, slots=True)
class TurnPlace:
    """How long the conversation is after a turn, and where its KV cache ends."""

    num_tokens: int
    pointer: Pointer | None


class LedgerPort(Protocol):
    """Agents, turns, tenants, replays and the index of parts.

    `apply` and `close` are called by one thread; the readings and `back_up` are safe on any.
    Readings raise CachePersistenceError where the ledger cannot be read.
    """

    def load(self) -> LedgerState:
        """Read what is there; a damaged ledger is restored from its backup as far as it goes.

        Raises:
            CachePersistenceError: it cannot be opened for writing, another program has it locked,
                or a newer server wrote it. It is as it was.
        """

    def apply(self, changes: Sequence[LedgerChange], *, is_synced: bool) -> None:
        """Make changes in their order, all or none of them.

        Raises:
            CachePersistenceError: they cannot be written now; trying again may help.
            ConflictError: an agent is not what an `AdvanceHead` says it was.
            ValueError: one of them cannot be stored at all, now or later.
        """

    def tenant(self, tenant_id: str) -> Tenant | None:
        """Read a tenant."""

    def agent(self, tenant: str, agent_id: str) -> Agent | None:
        """Read an agent."""

    def agents(self, tenant: str) -> tuple[Agent, ...]:
        """Read all agents of a tenant."""

    def turn(self, tenant: str, turn_id: str) -> Turn | None:
        """Read one turn."""

    def place(self, tenant: str, turn_id: str) -> TurnPlace | None:
        """Read where a turn ended, without what was said in it."""

    def turns(self, tenant: str, head: str, *, limit: int) -> tuple[Turn, ...]:
        """Read the turns that led to `head`, the latest first, at most `limit`."""

    def ancestry(self, tenant: str, head: str, *, until: str = "") -> tuple[str, ...]:
        """Read the ids of the turns that led to `head`, the latest first, no further than `until`.

        What was said in them is not read.
        """

    def pointers(self) -> tuple[Pointer, ...]:
        """Where all turns that an agent reaches end; what these do not reach is garbage."""

    def replay(self, tenant: str, key: bytes) -> tuple[int, ...] | None:
        """Read the ids of a reply."""

    def forget_unreachable(self, *, before: float, replays_before: float) -> int:
        """Remove turns that no agent reaches, and replays, that are older; returns how many.

        What a newer turn follows is kept.

        Raises:
            CachePersistenceError: they cannot be removed now.
        """

    def back_up(self) -> None:
        """Write a copy of agents, turns and tenants that survives damage to the ledger.

        Raises:
            CachePersistenceError: it cannot be written, or the ledger is damaged; the copy before
                is kept.
        """

    def close(self) -> None:
        """Write what is pending and let go; the last call."""


class LeasePort(Protocol):
    """Agents, each leased to one request at a time among all processes. Safe on any thread.

    An epoch names a lease, and the later one is the greater. All methods raise
    CachePersistenceError where the ledger cannot be reached.
    """

    def acquire(self, tenant: str, agent_id: str, *, ttl_s: float) -> int | None:
        """Lease an agent, which need not be there yet; returns the epoch, None if another has it.

        A lease that was neither renewed nor released for `ttl_s` may be taken over.
        """

    def renew(self, tenant: str, agent_id: str, epoch: int, *, ttl_s: float) -> bool:
        """Make a lease last on; False if it is over: released, or taken over."""

    def release(self, tenant: str, agent_id: str, epoch: int) -> None:
        """End a lease; one that is over stays so."""


class ObjectsPort(Protocol):
    """Bytes of block parts where all servers find them. Safe on any thread.

    Methods raise CachePersistenceError where the store does not answer.
    """

    def put(self, key: PartKey, content: memoryview) -> None:
        """Write an object, unless it is there."""

    def get(self, key: PartKey) -> memoryview:
        """Read an object.

        Raises:
            CacheCorruptionError: there is none.
        """

    def delete(self, key: PartKey) -> None:
        """Remove an object; a missing one is ignored."""

    def older_than(self, age_s: float) -> Iterator[list[PartKey]]:
        """Name the objects that are older, by the store's own clock, many at a time."""


class SharedPartsPort(Protocol):
    """The index of what is in the object store. Safe on any thread; all times are its own.

    A part is there, then dead, then deleted, then unknown; a dead one can be revived. Methods raise
    CachePersistenceError where the index does not answer.
    """

    def revive(self, key: PartKey) -> bool | None:
        """Say whether a part is there, and mark it as used: None if not, False if deleted."""

    def add(self, part: BlockPart) -> bool:
        """Note a part whose object is there; False if it is deleted."""

    def follow(self, root: BlockName, tokens: bytes) -> list[BlockPart]:
        """Find the parts of blocks that a prompt begins with, and mark them as used."""

    def lose(self, key: PartKey) -> None:
        """Delete a part whose object is missing or bad."""

    def sole_collector(self) -> AbstractContextManager[bool]:
        """Say whether nobody else collects while this lasts."""

    def mark(self, *, unused_s: float) -> None:
        """Note what no agent reaches and nobody used for so long as dead; others live again."""

    def condemn(self, *, grace_s: float) -> list[tuple[PartKey, int]]:
        """Delete what was dead for so long; returns all whose objects must go, and their bytes."""

    def condemn_unknown(self, keys: Sequence[PartKey]) -> list[PartKey]:
        """Delete those of the parts that are unknown; returns them."""

    def forget(self, *, grace_s: float) -> None:
        """No longer know what was deleted for so long."""


@dataclass(frozen=True, slots=True)
class ExportHead:
    """What comes first in an agent's file.

    Attributes:
        model: The model's name, for people.
        fingerprint: Tells the model that made tokens and KV cache from every other.
        abi: How the KV cache is laid out.
    """

    agent: Agent
    model: str
    fingerprint: str
    abi: str


@dataclass(frozen=True, slots=True)
class ExportPart:
    """One part of a block on an agent's way."""

    part: BlockPart
    payload: KVPayload


ExportItem: TypeAlias = ExportHead | Turn | ExportPart


class AgentFilePort(Protocol):
    """One agent as one file: its head, then turns and parts of blocks, each in order."""

    def write(self, items: Iterable[ExportItem]) -> Iterator[bytes]:
        """Write a file, piece by piece."""

    def check(self, pieces: Iterable[bytes]) -> str:
        """Read a file to its end; returns who signed it, empty if nobody who is trusted here.

        Raises:
            InvalidRequestError: it is damaged, cut off, or no such file.
        """

    def read(self, pieces: Iterable[bytes], *, has_parts: bool) -> Iterator[ExportItem]:
        """Read a file that was checked; its parts are skipped unless `has_parts`.

        Raises:
            InvalidRequestError: something in it is not what it should be.
        """
