"""The ledger's SQL. This module opens no connections and no transactions.

SQLite and PostgreSQL share all queries, with a question mark for each value. Changes differ where
the rows differ; `shared_change` returns the statements that are the same for both.
"""

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, LiteralString, TypeAlias, TypeVar, assert_never

from semantic.adapters.outbound.ledger.encryption import WrongKeyError, from_stored, to_stored
from semantic.adapters.outbound.ledger.schema import (
    AGENTS,
    IMAGE_LINKS,
    IMAGES,
    OLDEST_FIRST,
    PARTS,
    REPLAYS,
    TENANTS,
    TURNS,
    DamagedLedgerError,
    Row,
    Table,
    agent_row,
    part_row,
    read_agent,
    read_parts,
    read_pointer,
    read_turn,
    turn_row,
)
from semantic.domain.agents import Agent, Pointer, Turn
from semantic.domain.blocks import pack_tokens, unpack_tokens
from semantic.domain.chat import images_in
from semantic.domain.errors import ConflictError
from semantic.ports.storage import (
    AdvanceHead,
    DropAgent,
    DropPart,
    LedgerChange,
    LedgerState,
    MarkDurable,
    MarkIndexWhole,
    PutAgent,
    PutImage,
    PutPart,
    PutReplay,
    PutTenant,
    PutTurn,
    Repoint,
    Tenant,
    TouchParts,
    TurnPlace,
)

_T = TypeVar("_T")
_PLACES = "SELECT id, num_tokens, root, block, pointer_tokens FROM turns WHERE tenant = ? AND id IN"
_MAX_IDS = 512  # in one query; SQLite accepts at least 999 values
_ROW_BYTES = 256  # approximate size of a row's ids, times, checksum and index entries
_IndexChange: TypeAlias = PutPart | DropPart | TouchParts | MarkIndexWhole
_LoggedChange: TypeAlias = PutTenant | PutAgent | AdvanceHead | DropAgent | PutTurn
# UNION drops known rows, so the walk ends even if a damaged ledger contains a cycle.
_WALK = """
WITH RECURSIVE walk (id, parent) AS (
    SELECT id, parent FROM turns WHERE id = ? AND tenant = ?
    UNION SELECT turns.id, turns.parent FROM walk
        JOIN turns ON turns.id = walk.parent AND turns.tenant = ?
        WHERE walk.id <> ?
)
"""
_HEADS: LiteralString = """
WITH RECURSIVE reached (id, tenant) AS (
    SELECT head, tenant FROM agents WHERE head IS NOT NULL
"""
_PARENTS: LiteralString = """
    UNION SELECT turns.parent, turns.tenant FROM reached
        JOIN turns ON turns.id = reached.id AND turns.tenant = reached.tenant
        WHERE turns.parent IS NOT NULL
)
"""
REACHED: LiteralString = _HEADS + _PARENTS
# A new turn keeps its ancestors: a client may still continue from it.
REACHED_OR_NEW = " ".join(
    (_HEADS, "UNION SELECT id, tenant FROM turns WHERE created_at >= ?", _PARENTS)
)
_POINTERS = " ".join(
    (
        REACHED,
        "SELECT DISTINCT root, block, pointer_tokens FROM reached",
        "JOIN turns ON turns.id = reached.id AND turns.tenant = reached.tenant",
        "WHERE block IS NOT NULL",
    )
)
_FORGET_TURNS = " ".join(
    (
        "DELETE FROM turns WHERE (id, tenant) NOT IN (",
        REACHED_OR_NEW,
        "SELECT id, tenant FROM reached)",
    )
)
_FORGET_LINKS = (
    "DELETE FROM image_links WHERE NOT EXISTS (SELECT 1 FROM turns"
    " WHERE turns.id = image_links.turn AND turns.tenant = image_links.tenant)"
)
_IS_UNLINKED = (
    "NOT EXISTS (SELECT 1 FROM image_links AS links"
    " WHERE links.tenant = images.tenant AND links.digest = images.digest)"
)
_FORGET_IMAGES = f"DELETE FROM images WHERE at < ? AND {_IS_UNLINKED}"  # noqa: S608 - a constant
_FORGET_IMAGE = f"DELETE FROM images WHERE tenant = ? AND digest = ? AND {_IS_UNLINKED}"  # noqa: S608
# Runs a statement with a question mark for each value.
Execute: TypeAlias = Callable[[str, Row], Any]


# -- queries ------------------------------------------------------------------------------------


class LedgerReadings(ABC):
    """The read methods of `LedgerPort`. Thread-safe if `_read` is."""

    # SQL for the size of a column in bytes; older versions of SQLite lack octet_length.
    _NUM_BYTES: ClassVar[str] = "length(CAST({} AS BLOB))"

    @abstractmethod
    def _read(
        self, query: str, values: Row, decode: Callable[[Row], _T], table: Table | None = None
    ) -> list[_T]:
        """Run a query, with a question mark for each value, and decode its rows.

        Args:
            decode: Converts a row; may raise `DamagedLedgerError`.
            table: Table that the rows belong to, if the query selects whole rows. Their checksums
                are then checked, and they are decrypted.

        Raises:
            CachePersistenceError: the database cannot be read.
        """

    def tenant(self, tenant_id: str) -> Tenant | None:
        query = TENANTS.select("WHERE id = ?")
        return _first(self._read(query, (tenant_id,), lambda row: Tenant(*row), TENANTS))

    def agent(self, tenant: str, agent_id: str) -> Agent | None:
        query = AGENTS.select("WHERE tenant = ? AND id = ?")
        return _first(self._read(query, (tenant, agent_id), read_agent, AGENTS))

    def agents(self, tenant: str) -> tuple[Agent, ...]:
        return tuple(self._read(AGENTS.select("WHERE tenant = ?"), (tenant,), read_agent, AGENTS))

    def stored_bytes(self, tenant: str) -> int:
        num_bytes = self._NUM_BYTES.format
        sizes = {
            AGENTS: num_bytes("body"),
            TURNS: f"{num_bytes('body')} + {num_bytes('tokens')}",
            IMAGES: num_bytes("data"),
        }
        total = 0
        for table, size in sizes.items():
            row = f"sum({size} + {_ROW_BYTES})"
            query = " ".join(("SELECT", row, "FROM", table.name, "WHERE tenant = ?"))
            total += sum(self._read(query, (tenant,), lambda row: int(row[0] or 0)))
        return total

    def size_of(self, *changes: PutAgent | PutTurn | PutImage) -> int:
        total = 0
        for change in changes:
            match change:
                case PutAgent(agent):
                    total += len(agent_row(agent)[-1].encode()) + _ROW_BYTES
                case PutImage():
                    total += len(change.data) + _ROW_BYTES
                case PutTurn(tenant, turn):
                    *_, tokens, body = turn_row(tenant, turn)
                    total += len(tokens) + len(body.encode()) + _ROW_BYTES
                    files = {image.digest: image.data for image in images_in(turn.messages)}
                    total += sum(len(data) + _ROW_BYTES for data in files.values() if data)
        return total

    def turn(self, tenant: str, turn_id: str) -> Turn | None:
        query = TURNS.select("WHERE id = ? AND tenant = ?")
        return _first(self._read(query, (turn_id, tenant), read_turn, TURNS))

    def place(self, tenant: str, turn_id: str) -> TurnPlace | None:
        query = (
            "SELECT num_tokens, root, block, pointer_tokens FROM turns WHERE id = ? AND tenant = ?"
        )
        return _first(self._read(query, (turn_id, tenant), _read_place))

    def places(self, tenant: str, turn_ids: Sequence[str]) -> dict[str, TurnPlace]:
        found: dict[str, TurnPlace] = {}
        for first in range(0, len(turn_ids), _MAX_IDS):
            some = turn_ids[first : first + _MAX_IDS]
            # Connections cache prepared statements, of 65 kB with 300 ids: as many as numbers of
            # agents would take megabytes each. So the number of ids is a power of two.
            size = 1 << (len(some) - 1).bit_length()
            query = " ".join((_PLACES, "(", ", ".join("?" * size), ")"))
            values = (tenant, *some, *[some[0]] * (size - len(some)))
            found.update(self._read(query, values, lambda row: (row[0], _read_place(row[1:]))))
        return found

    def turns(self, tenant: str, head: str, *, limit: int) -> tuple[Turn, ...]:
        if limit <= 0:
            return ()
        query = _WALK + TURNS.select("WHERE tenant = ? AND id IN (SELECT id FROM walk LIMIT ?)")
        values = (head, tenant, tenant, "", tenant, limit)
        turns = {turn.id: turn for turn in self._read(query, values, read_turn, TURNS)}
        log = _in_order(head, {turn.id: turn.parent for turn in turns.values()})
        return tuple(turns[turn_id] for turn_id in log)

    def ancestry(self, tenant: str, head: str, *, until: str = "") -> tuple[str, ...]:
        query = " ".join((_WALK, "SELECT id, parent FROM walk"))
        rows = self._read(query, (head, tenant, tenant, until), tuple[str, str | None])
        return tuple(_in_order(head, dict(rows)))

    def pointers(self) -> tuple[Pointer, ...]:
        return tuple(self._read(_POINTERS, (), read_pointer))

    def replay(self, tenant: str, key: bytes) -> tuple[int, ...] | None:
        query = REPLAYS.select("WHERE tenant = ? AND key = ?")
        return _first(self._read(query, (tenant, key), lambda row: unpack_tokens(row[2]), REPLAYS))

    def image(self, tenant: str, digest: str) -> bytes | None:
        query = IMAGES.select("WHERE tenant = ? AND digest = ?")
        return _first(self._read(query, (tenant, digest), lambda row: bytes(row[2]), IMAGES))


def _first(found: list[_T]) -> _T | None:
    return found[0] if found else None


def _read_place(row: Row) -> TurnPlace:
    num_tokens, *place = row
    return TurnPlace(num_tokens, None if place[1] is None else read_pointer(tuple(place)))


def _in_order(head: str, parents: dict[str, str | None]) -> list[str]:
    """The ids from `head` back; SQL guarantees no order."""
    log: list[str] = []
    next_id: str | None = head
    while next_id is not None and next_id in parents:
        log.append(next_id)
        next_id = parents.pop(next_id)
    return log


def read_state(connection: sqlite3.Connection, problem: str) -> LedgerState:
    """Read the state that a server needs at start; raises `DamagedLedgerError`."""

    def rows(table: Table) -> Iterator[Row]:
        for row in connection.execute(table.select(OLDEST_FIRST)):
            try:
                yield from_stored(connection, table, row)
            except WrongKeyError as error:
                if table.has_checksum:
                    raise
                # The key is right, since it decrypted other rows.
                raise DamagedLedgerError(f"a row of {table.name} is damaged") from error

    is_lost = connection.execute("SELECT value FROM facts WHERE name = 'is_index_lost'").fetchone()
    return LedgerState(
        tenants=tuple(Tenant(*row) for row in rows(TENANTS)),
        agents=tuple(map(read_agent, rows(AGENTS))),
        parts=tuple(read_parts(rows(PARTS))),
        is_index_lost=is_lost != (0,),
        problem=problem,
    )


# -- changes ------------------------------------------------------------------------------------


def shared_change(
    change: PutTenant | DropAgent | PutTurn | MarkDurable | Repoint | PutReplay | PutImage,
) -> tuple[str, Row, Table | None]:
    """Return SQL that works in both databases, its values, and their table if they form a row."""
    match change:
        case PutTenant(tenant):
            return TENANTS.fill, (tenant.id, tenant.salt), TENANTS
        case PutTurn(tenant_id, turn):
            return TURNS.put, turn_row(tenant_id, turn), TURNS
        case PutReplay(tenant_id, key, tokens, at):
            return REPLAYS.put, (tenant_id, key, pack_tokens(tokens), float(at)), REPLAYS
        case PutImage(tenant_id, digest, data, at):
            return IMAGES.renew, (tenant_id, digest, data, float(at)), IMAGES
        case DropAgent(tenant_id, agent_id):
            return "DELETE FROM agents WHERE tenant = ? AND id = ?", (tenant_id, agent_id), None
        case MarkDurable(turn_id):
            return "UPDATE turns SET is_durable = 1 WHERE id = ?", (turn_id,), None
        case Repoint(old, new):
            return "UPDATE turns SET block = ? WHERE block = ?", (new, old), None


def make_change(connection: sqlite3.Connection, change: LedgerChange) -> None:
    """Apply one change in SQLite; mutates the ledger.

    Raises:
        ConflictError: the agent's head is not the expected one.
        ValueError: the change contains a value that cannot be stored.
    """
    match change:
        case PutPart() | DropPart() | TouchParts() | MarkIndexWhole():
            _change_index(connection, change)
        case PutAgent(agent):
            connection.execute(AGENTS.put, to_stored(connection, AGENTS, agent_row(agent)))
        case AdvanceHead(agent, before):
            key = (agent.tenant, agent.id)
            query = "SELECT head FROM agents WHERE tenant = ? AND id = ?"
            if connection.execute(query, key).fetchone() != (before and (before.head,)):
                raise ConflictError(f"another request moved agent {agent.id!r} to another turn.")
            make_change(connection, PutAgent(agent))
        case _:
            statement, row, table = shared_change(change)
            connection.execute(statement, to_stored(connection, table, row) if table else row)
            if isinstance(change, PutTurn):
                link_images(connection.execute, change)


def link_images(execute: Execute, change: PutTurn) -> None:
    """Record which images a turn refers to; deletes those that only its former version did."""
    tenant, turn_id = change.tenant, change.turn.id
    query = "SELECT digest FROM image_links WHERE tenant = ? AND turn = ?"
    before = {digest for (digest,) in execute(query, (tenant, turn_id))}
    now = {image.digest for image in images_in(change.turn.messages)}
    for digest in sorted(now - before):
        execute(IMAGE_LINKS.fill, (tenant, turn_id, digest))
    for digest in sorted(before - now):
        link = (tenant, turn_id, digest)
        execute("DELETE FROM image_links WHERE tenant = ? AND turn = ? AND digest = ?", link)
        execute(_FORGET_IMAGE, (tenant, digest))


def forget_images(execute: Execute, before: float) -> int:
    """Delete the images stored before a time that no turn refers to; returns their number."""
    execute(_FORGET_LINKS, ())
    return int(execute(_FORGET_IMAGES, (before,)).rowcount)


def is_of_index(change: LedgerChange) -> bool:
    """Whether a change belongs to the index, which can be rebuilt from the KV cache files."""
    return isinstance(change, _IndexChange)


def is_logged(change: LedgerChange) -> bool:
    """Whether a change counts in `num_logged`, which reveals lost changes."""
    return isinstance(change, _LoggedChange)


def forget_unreachable(connection: sqlite3.Connection, before: float, replays_before: float) -> int:
    """Remove and count old replays, and old turns that no agent and no new turn descends from.

    Also removes the images that no turn refers to.
    """
    turns = connection.execute(_FORGET_TURNS, (before,))
    replays = connection.execute("DELETE FROM replays WHERE at < ?", (replays_before,))
    num_images = forget_images(connection.execute, before)
    return turns.rowcount + replays.rowcount + num_images


def _change_index(connection: sqlite3.Connection, change: _IndexChange) -> None:
    match change:
        case PutPart(part):
            connection.execute(PARTS.put, to_stored(connection, PARTS, part_row(part)))
        case DropPart((name, kind)):
            key = (name, kind.value)
            connection.execute("DELETE FROM parts WHERE name = ? AND kind = ?", key)
        case TouchParts(keys, at):
            connection.executemany(
                "UPDATE parts SET last_used = ? WHERE name = ? AND kind = ?",
                ((at, name, kind.value) for name, kind in keys),
            )
        case MarkIndexWhole():
            connection.execute("UPDATE facts SET value = 0 WHERE name = 'is_index_lost'")
        case _:
            assert_never(change)
