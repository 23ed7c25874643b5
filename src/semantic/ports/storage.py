"""Interfaces of persistent storage: KV cache files, and a ledger of everything else.

Both belong to one directory and one process. The KV cache may be lost at any time without harm,
since it can be recomputed; the agents and turns of the ledger must not be lost.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from semantic.domain.agents import Agent, Pointer, Turn
from semantic.domain.blocks import BlockName, BlockOrigin, BlockPart, PartKey
from semantic.ports.backend import KVPayload


class BlockFilesPort(Protocol):
    """Stores payloads in files, one per part of a block. Thread-safe."""

    def write(self, part: BlockPart, payload: KVPayload, *, is_synced: bool) -> BlockPart:
        """Write a payload atomically; returns the part with its size.

        With `is_synced` it returns only when the file would survive a power failure.

        Raises:
            CachePersistenceError: the file cannot be written, e.g. no space or no permission.
        """

    def read(self, part: BlockPart) -> KVPayload:
        """Read a payload and check it.

        Raises:
            CacheCorruptionError: the file is missing, damaged, or does not match `part`.
        """

    def content(self, part: BlockPart) -> memoryview:
        """Read the raw bytes of a file.

        Raises:
            CacheCorruptionError: the file is missing, or its size differs from that in `part`.
        """

    def parse(self, part: BlockPart, content: memoryview) -> KVPayload:
        """Parse the raw bytes of a file to a payload, and check it.

        Raises:
            CacheCorruptionError: the bytes are damaged, or do not match `part`.
        """

    def room_for(self, part: BlockPart) -> int:
        """Return the maximum memory, in bytes, that reading a part needs; does no I/O."""

    def delete(self, part: BlockPart) -> None:
        """Delete a file; a missing one is ignored.

        Raises:
            CachePersistenceError: the file exists and cannot be deleted.
        """

    def quarantine(self, part: BlockPart) -> None:
        """Move a damaged file to quarantine; a missing one is ignored.

        Raises:
            CachePersistenceError: the file exists and cannot be moved.
        """

    def empty_quarantine(self, *, before: float) -> int:
        """Delete files quarantined up to a time; returns the bytes freed."""

    def scan(self) -> Iterator[BlockPart]:
        """Yield the part described in the header of every file; quarantines incomplete files."""

    def origins(self, parts: Sequence[BlockPart] | None = None) -> Sequence[BlockOrigin]:
        """Return what computed the blocks of each root, those with the most files first.

        Args:
            parts: All parts, if they are known; None lists the directories, which may take long.
        """

    def used_bytes(self) -> int:
        """Return the size of the directory, with other models' files, quarantine and the ledger.

        As the index tells it, until all files were counted.
        """

    def count(self, pause: Callable[[], bool]) -> None:
        """Count the bytes of all files, while they may change.

        Calls `pause` after each directory, and ends without a result if it returns True.
        """

    def other_bytes(self) -> int:
        """Return the part of `used_bytes` taken by the ledger and its backup."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """An owner of agents and blocks; see `Principal`."""

    id: str
    salt: bytes


@dataclass(frozen=True, slots=True)
class LedgerState:
    """Content of the ledger that a server needs at its start.

    Attributes:
        is_index_lost: Whether `parts` may be incomplete, so that `BlockFilesPort.scan` must find
            the parts. True for a new ledger, and at every start until a `MarkIndexWhole`.
        problem: Human-readable description of damage to the ledger; empty if there is none.
    """

    tenants: tuple[Tenant, ...]
    agents: tuple[Agent, ...]
    parts: tuple[BlockPart, ...]
    is_index_lost: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PutTenant:
    """Add a tenant. If it exists, nothing changes: its salt stays."""

    tenant: Tenant


@dataclass(frozen=True, slots=True)
class PutAgent:
    """Add an agent, or replace it as a whole."""

    agent: Agent


@dataclass(frozen=True, slots=True)
class AdvanceHead:
    """Replace an agent if its head has not moved; else all changes fail with `ConflictError`.

    Attributes:
        before: The agent as the writer read it, whose head must be unchanged. None adds an agent
            that must not exist.
        epoch: Epoch of the writer's lease. The lease must not be taken over, and ends with this
            change. None requires no lease.
    """

    agent: Agent
    before: Agent | None
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class DropAgent:
    """Delete an agent; garbage collection deletes its turns if no other agent reaches them."""

    tenant: str
    agent_id: str


@dataclass(frozen=True, slots=True)
class PutTurn:
    """Add a turn, or replace it.

    Deletes the images that only the replaced turn referred to.
    """

    tenant: str
    turn: Turn


@dataclass(frozen=True, slots=True)
class MarkDurable:
    """Record that a turn's KV cache is on disk."""

    turn_id: str


@dataclass(frozen=True, slots=True)
class Repoint:
    """Repoint every turn from block `old` to `new`, whose tokens begin with those of `old`."""

    old: BlockName
    new: BlockName


@dataclass(frozen=True, slots=True)
class PutPart:
    """Add a written file to the index."""

    part: BlockPart


@dataclass(frozen=True, slots=True)
class DropPart:
    """Remove a deleted file from the index."""

    key: PartKey


@dataclass(frozen=True, slots=True)
class TouchParts:
    """Record when parts were last used."""

    keys: tuple[PartKey, ...]
    at: float


@dataclass(frozen=True, slots=True)
class MarkIndexWhole:
    """Record that the index contains every file again; see `LedgerState.is_index_lost`."""


@dataclass(frozen=True, slots=True)
class PutReplay:
    """Store the token ids of a reply under a key of the tenant."""

    tenant: str
    key: bytes
    tokens: tuple[int, ...]
    at: float


@dataclass(frozen=True, slots=True)
class PutImage:
    """Store an image file of a tenant, unless it is stored.

    Attributes:
        digest: SHA-256 of `data` in hexadecimal.
        at: When it was sent. It is kept from then on for as long as a turn without messages would
            be, and longer if a turn refers to it.
    """

    tenant: str
    digest: str
    data: bytes
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
    | PutImage
)
# Writes changes in order in the background; the future resolves when they are written.
WriteChanges: TypeAlias = Callable[..., Future[None]]


@dataclass(frozen=True, slots=True)
class TurnPlace:
    """Length of the conversation after a turn in tokens, and where its KV cache ends."""

    num_tokens: int
    pointer: Pointer | None


class LedgerPort(Protocol):
    """Stores agents, turns and their images, tenants, replays and the index of parts.

    One thread calls `apply` and `close`; methods that read, and `back_up`, are thread-safe.
    Methods that read raise CachePersistenceError if the ledger cannot be read.
    """

    def load(self) -> LedgerState:
        """Open the ledger and read its state.

        A damaged ledger is restored from its backup as far as possible.

        Raises:
            CachePersistenceError: the ledger cannot be opened for writing, another program has
                locked it, or a newer server wrote it. The ledger is unchanged.
        """

    def apply(self, changes: Sequence[LedgerChange], *, is_synced: bool) -> None:
        """Write changes in order, in one transaction.

        With `is_synced` it returns only when the changes would survive a power failure.

        Raises:
            CachePersistenceError: the changes cannot be written now; a retry may succeed.
            ConflictError: an agent does not match the `before` of its `AdvanceHead`.
            ValueError: a change can never be stored; a retry does not help.
        """

    def tenant(self, tenant_id: str) -> Tenant | None:
        """Read a tenant; None if it does not exist."""

    def agent(self, tenant: str, agent_id: str) -> Agent | None:
        """Read an agent; None if it does not exist."""

    def agents(self, tenant: str) -> tuple[Agent, ...]:
        """Read all agents of a tenant."""

    def turn(self, tenant: str, turn_id: str) -> Turn | None:
        """Read a turn; None if it does not exist."""

    def place(self, tenant: str, turn_id: str) -> TurnPlace | None:
        """Read where a turn ended, without its messages and tokens; None if it does not exist."""

    def places(self, tenant: str, turn_ids: Sequence[str]) -> dict[str, TurnPlace]:
        """Read where many turns ended, by id; leaves out those that do not exist."""

    def turns(self, tenant: str, head: str, *, limit: int) -> tuple[Turn, ...]:
        """Read up to `limit` turns that lead to `head`, latest first."""

    def ancestry(self, tenant: str, head: str, *, until: str = "") -> tuple[str, ...]:
        """Read the ids of the turns that lead to `head`, latest first, ending with `until`.

        Messages and tokens are not read.
        """

    def pointers(self) -> tuple[Pointer, ...]:
        """Return the pointers of all turns that agents reach.

        Blocks that none of them reaches are garbage.
        """

    def replay(self, tenant: str, key: bytes) -> tuple[int, ...] | None:
        """Read the token ids of a reply; None if the key is unknown."""

    def image(self, tenant: str, digest: str) -> bytes | None:
        """Read an image file by its digest; None if it is not stored."""

    def stored_bytes(self, tenant: str) -> int:
        """Return the bytes of all agents, turns and images of a tenant, reachable or not.

        Reads all of the tenant's rows.
        """

    def size_of(self, *changes: PutAgent | PutTurn | PutImage) -> int:
        """Return the bytes that changes would add to `stored_bytes`; does no I/O.

        A turn counts with the images that its messages contain.
        """

    def forget_unreachable(self, *, before: float, replays_before: float) -> int:
        """Delete old turns that no agent reaches, old replays, and images that no turn refers to.

        Returns how many rows are deleted. The ancestors of a newer turn are kept.

        Args:
            before: Turns created, and images stored, before this time are old.
            replays_before: Replays stored before this time are old.

        Raises:
            CachePersistenceError: the rows cannot be deleted now.
        """

    def back_up(self) -> None:
        """Write a backup of agents, turns and tenants.

        Raises:
            CachePersistenceError: the backup cannot be written, or the ledger is damaged; the
                previous backup is kept.
        """

    def close(self) -> None:
        """Write pending changes and close the ledger; no call may follow."""


@dataclass(frozen=True, slots=True)
class ExportHead:
    """First item of an agent's file.

    Attributes:
        model: The model's name, for display.
        fingerprint: Identifies the model that computed the tokens and the KV cache.
        abi: Layout of the KV cache; see `Traits.kv_abi`.
    """

    agent: Agent
    model: str
    fingerprint: str
    abi: str


@dataclass(frozen=True, slots=True)
class ExportPart:
    """One part of a block in an agent's file."""

    part: BlockPart
    payload: KVPayload


@dataclass(frozen=True, slots=True)
class ExportImage:
    """An image file that turns in an agent's file refer to by its digest."""

    digest: str
    data: bytes


ExportItem: TypeAlias = ExportHead | Turn | ExportImage | ExportPart


class AgentFilePort(Protocol):
    """Reads and writes files with one agent: the head, turns, images and parts, each in order."""

    def write(self, items: Iterable[ExportItem]) -> Iterator[bytes]:
        """Yield the content of a file in pieces."""

    def check(self, pieces: Iterable[bytes]) -> str:
        """Read a file to its end and verify it; returns its signer, empty if it is not trusted.

        Raises:
            InvalidRequestError: the file is damaged, truncated, or of another type.
        """

    def read(self, pieces: Iterable[bytes], *, has_parts: bool) -> Iterator[ExportItem]:
        """Yield the items of a checked file, without its parts unless `has_parts`.

        Raises:
            InvalidRequestError: an item is malformed.
        """
