"""The ledger's tables and their versions, and how their rows stand for values of the domain.

Rows that cannot be made again from anything else are written with a checksum: SQLite notices a page
that is no page, but not a page whose text has changed. It knows no files and no transactions.
"""

import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeAlias

from semantic.adapters.outbound.ledger import codec as ledger_json
from semantic.domain.agents import Agent, Pointer, Turn
from semantic.domain.blocks import BlockName, BlockPart, pack_tokens, unpack_tokens
from semantic.domain.spec import LayerKind

Row: TypeAlias = tuple[Any, ...]

APPLICATION_ID = 0x53454D41
_FIRST = """
CREATE TABLE tenants (
    id TEXT NOT NULL, salt BLOB NOT NULL, crc INTEGER NOT NULL, PRIMARY KEY (id)
);
CREATE TABLE agents (
    tenant TEXT NOT NULL, id TEXT NOT NULL, head TEXT, last_used REAL NOT NULL,
    body TEXT NOT NULL, crc INTEGER NOT NULL, PRIMARY KEY (tenant, id)
);
CREATE TABLE turns (
    id TEXT NOT NULL, tenant TEXT NOT NULL, parent TEXT, agent TEXT NOT NULL,
    num_tokens INTEGER NOT NULL, created_at REAL NOT NULL,
    root BLOB, block BLOB, pointer_tokens INTEGER, is_durable INTEGER NOT NULL,
    tokens BLOB NOT NULL, body TEXT NOT NULL, crc INTEGER NOT NULL, PRIMARY KEY (id, tenant)
);
CREATE INDEX turns_by_block ON turns (block, tenant) WHERE block IS NOT NULL;
CREATE TABLE replays (
    tenant TEXT NOT NULL, key BLOB NOT NULL, tokens BLOB NOT NULL, at REAL NOT NULL,
    crc INTEGER NOT NULL, PRIMARY KEY (tenant, key)
);
CREATE TABLE parts (
    name BLOB NOT NULL, kind TEXT NOT NULL, root BLOB NOT NULL, parent BLOB NOT NULL,
    start INTEGER NOT NULL, tokens BLOB NOT NULL, nbytes INTEGER NOT NULL,
    last_used REAL NOT NULL, PRIMARY KEY (name, kind)
);
CREATE TABLE facts (name TEXT NOT NULL, value INTEGER NOT NULL, PRIMARY KEY (name));
INSERT INTO facts VALUES ('is_index_lost', 1), ('num_synced', 0);
"""
# Each brings a ledger to the version that is its place in the row, counted from one. One is due
# whenever an older server could not read what a newer one writes, be it inside of a body.
MIGRATIONS: tuple[str, ...] = (_FIRST,)


def latest_version() -> int:
    """The version that this server reads and writes."""
    return len(MIGRATIONS)


class NewerLedgerError(Exception):
    """The ledger was written by a server that knows more than this one."""


class DamagedLedgerError(Exception):
    """The file, or a row in it, does not match its checksum."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table; the rows of most are the truth, and end with their checksum.

    Attributes:
        columns: All of them, in a row's order; the first `num_keys` are the key.
        secret: Those that may be encrypted, by number.
        mutable: Those that change after the row is written; the checksum leaves them out.
    """

    name: str
    columns: tuple[str, ...]
    num_keys: int
    secret: tuple[int, ...]
    mutable: range = range(0)

    @property
    def has_checksum(self) -> bool:
        """Whether rows end with one."""
        return self.columns[-1] == "crc"

    @property
    def put(self) -> str:
        """Writes a row, in place of the one with its key."""
        changed = ", ".join(f"{name} = EXCLUDED.{name}" for name in self.columns[self.num_keys :])
        key = ", ".join(self.columns[: self.num_keys])
        return f"{self._insert} ON CONFLICT ({key}) DO UPDATE SET {changed}"

    @property
    def fill(self) -> str:
        """Writes a row, unless there is one with its key."""
        return f"{self._insert} ON CONFLICT DO NOTHING"

    def select(self, rest: str) -> str:
        """Reads rows."""
        return " ".join(("SELECT", ", ".join(self.columns), "FROM", self.name, rest))

    @property
    def _insert(self) -> str:
        names, marks = ", ".join(self.columns), ", ".join("?" * len(self.columns))
        return " ".join(("INSERT INTO", self.name, f"({names}) VALUES ({marks})"))


TENANTS = Table("tenants", ("id", "salt", "crc"), 1, (1,))
AGENTS = Table("agents", ("tenant", "id", "head", "last_used", "body", "crc"), 2, (4,))
TURNS = Table(
    "turns",
    (
        *("id", "tenant", "parent", "agent", "num_tokens", "created_at"),
        *("root", "block", "pointer_tokens", "is_durable", "tokens", "body", "crc"),
    ),
    2,
    (10, 11),
    mutable=range(6, 10),
)
REPLAYS = Table("replays", ("tenant", "key", "tokens", "at", "crc"), 2, (2,))
# It needs no checksums, since its files say it all again.
PARTS = Table(
    "parts", ("name", "kind", "root", "parent", "start", "tokens", "nbytes", "last_used"), 2, (5,)
)
# Turns before agents: an agent is judged by the turns that are there.
CHECKED_TABLES = (TENANTS, TURNS, AGENTS, REPLAYS)
OLDEST_FIRST = "ORDER BY rowid"


def check_tables(connection: sqlite3.Connection) -> None:
    """Compare the tables of a ledger of the latest version with those it should have.

    Raises:
        DamagedLedgerError: one is missing or different.
    """
    query = "SELECT name, sql FROM sqlite_master"
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as ideal:
        migrate(ideal, 0)
        expected = set(ideal.execute(query))
    missing = expected.difference(connection.execute(query))
    if missing:
        raise DamagedLedgerError(f"the table {min(missing)[0]} is missing or different")


def num_logged(connection: sqlite3.Connection) -> int:
    """Read how many changes of agents and turns a ledger has seen; 0 in those of older servers."""
    row = connection.execute("SELECT value FROM facts WHERE name = 'num_logged'").fetchone()
    return int(row[0]) if row else 0


def set_num_logged(connection: sqlite3.Connection, number: int) -> None:
    """Write it; mutates the ledger."""
    connection.execute("INSERT OR REPLACE INTO facts VALUES ('num_logged', ?)", (number,))


def version_of(connection: sqlite3.Connection) -> int:
    """Read which migrations a ledger has seen; 0 is a file without tables.

    Raises:
        NewerLedgerError: more than this server knows.
        DamagedLedgerError: it is something else than a ledger.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application != APPLICATION_ID and (num_tables or version):
        raise DamagedLedgerError("it is not a ledger")
    if version > latest_version():
        raise NewerLedgerError(f"format {version}, this one knows {latest_version()}")
    return int(version)


def migrate(connection: sqlite3.Connection, version: int) -> None:
    """Bring a ledger from a version to the latest, in one transaction; mutates the file."""
    scripts = "".join(MIGRATIONS[version:])
    connection.executescript(
        f"BEGIN IMMEDIATE; {scripts} PRAGMA application_id = {APPLICATION_ID};"
        f"PRAGMA user_version = {latest_version()}; COMMIT;"
    )


# -- rows ---------------------------------------------------------------------------------------


def agent_row(agent: Agent) -> Row:
    """Stand for an agent."""
    body = ledger_json.encode_agent(agent)
    return agent.tenant, agent.id, agent.head, float(agent.last_used), body


def read_agent(row: Row) -> Agent:
    """Undo `agent_row`; raises `DamagedLedgerError`."""
    tenant, name, _, _, body = row
    try:
        return ledger_json.decode_agent(tenant, name, body)
    except ValueError as error:
        raise DamagedLedgerError(f"the row of agent {name}: {error}") from error


def turn_row(tenant: str, turn: Turn) -> Row:
    """Stand for a turn of a tenant."""
    body = ledger_json.encode_turn(ledger_json.TurnBody.of(turn))
    pointer = turn.pointer
    place = (pointer.root, pointer.block, pointer.num_tokens) if pointer else (None, None, None)
    return (
        *(turn.id, tenant, turn.parent, turn.agent_id),
        *(turn.num_tokens, float(turn.created_at), *place, int(turn.is_durable)),
        *(pack_tokens(turn.tokens), body),
    )


def read_turn(row: Row) -> Turn:
    """Undo `turn_row`; raises `DamagedLedgerError`."""
    name, _, parent, agent, num_tokens, created_at, *place, is_durable, tokens, body = row
    try:
        turn_body = ledger_json.decode_turn(body)
    except ValueError as error:
        raise DamagedLedgerError(f"the row of turn {name}: {error}") from error
    return turn_body.turn(
        id=name,
        parent=parent,
        agent_id=agent,
        tokens=unpack_tokens(tokens),
        num_tokens=num_tokens,
        pointer=None if place[1] is None else read_pointer(tuple(place)),
        created_at=created_at,
        is_durable=bool(is_durable),
    )


def read_pointer(row: Row) -> Pointer:
    """Make a pointer of root, block and number of tokens."""
    root, block, num_tokens = row
    return Pointer(BlockName(root), BlockName(block), num_tokens)


def part_row(part: BlockPart) -> Row:
    """Stand for a part."""
    return (
        *(part.name, part.kind.value, part.root, part.parent),
        *(part.start, part.tokens, part.nbytes, float(part.last_used)),
    )


_KINDS = {kind.value: kind for kind in LayerKind}


def read_parts(rows: Iterable[Row]) -> list[BlockPart]:
    """Undo `part_row` of many; raises `DamagedLedgerError`."""
    try:
        return [
            BlockPart(
                *(BlockName(root), BlockName(name), BlockName(parent), _KINDS[kind]),
                *(start, tokens, nbytes, last_used),
            )
            for name, kind, root, parent, start, tokens, nbytes, last_used in rows
        ]
    except (KeyError, TypeError) as error:
        raise DamagedLedgerError(f"the row of a part: {error!r}") from error


def with_checksum(table: Table, values: Row) -> Row:
    """A row as it is to be written."""
    return (*values, _checksum(table, values)) if table.has_checksum else values


def without_checksum(table: Table, row: Row) -> Row:
    """Undo `with_checksum`.

    Raises:
        DamagedLedgerError: the row is not as it was written.
    """
    if not table.has_checksum:
        return row
    *values, checksum = row
    if checksum != _checksum(table, values):
        raise DamagedLedgerError(f"a row of {table.name} does not match its checksum")
    return tuple(values)


def _checksum(table: Table, values: Sequence[Any]) -> int:
    crc = 0
    for index, value in enumerate(values):
        if index not in table.mutable:
            data = value if isinstance(value, bytes) else str(value).encode()
            # Lengths keep ("ab", "c") and ("a", "bc") apart.
            crc = zlib.crc32(data, zlib.crc32(b"%d:" % len(data), crc))
    return crc
