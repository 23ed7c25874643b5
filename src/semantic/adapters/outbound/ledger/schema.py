"""The ledger's tables, their versions, and the conversion between rows and domain values.

Rows that cannot be rebuilt from other data carry a checksum: SQLite detects a malformed page, but
not a page whose content has changed. This module opens no files and no transactions.
"""

import functools
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
_IMAGES = """
CREATE TABLE images (
    tenant TEXT NOT NULL, digest TEXT NOT NULL, data BLOB NOT NULL, at REAL NOT NULL,
    crc INTEGER NOT NULL, PRIMARY KEY (tenant, digest)
);
CREATE TABLE image_links (
    tenant TEXT NOT NULL, turn TEXT NOT NULL, digest TEXT NOT NULL,
    PRIMARY KEY (tenant, turn, digest)
);
CREATE INDEX image_links_by_digest ON image_links (tenant, digest);
"""
# Script number n, counted from one, brings a ledger to version n. A new script is needed whenever
# an older server could not read what a newer one writes, even if only a body's JSON changes.
MIGRATIONS: tuple[str, ...] = (_FIRST, _IMAGES)


def latest_version() -> int:
    """The version that this server reads and writes."""
    return len(MIGRATIONS)


class NewerLedgerError(Exception):
    """A newer version of Semantic wrote the ledger; this one cannot read it."""


class DamagedLedgerError(Exception):
    """The file is not a sound ledger, or a row of it does not match its checksum."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table and the SQL that reads and writes its rows.

    The rows of all tables except `PARTS` and `IMAGE_LINKS` end with a checksum.

    Attributes:
        columns: Names of all columns, in order; the first `num_keys` form the primary key.
        secret: Indices of the columns that are encrypted if a key is set.
        mutable: Indices of the columns that change after the row is written; the checksum
            excludes them.
    """

    name: str
    columns: tuple[str, ...]
    num_keys: int
    secret: tuple[int, ...]
    mutable: range = range(0)

    @property
    def has_checksum(self) -> bool:
        return self.columns[-1] == "crc"

    @property
    def put(self) -> str:
        """SQL that inserts a row, or replaces the row with the same key."""
        changed = ", ".join(f"{name} = EXCLUDED.{name}" for name in self.columns[self.num_keys :])
        key = ", ".join(self.columns[: self.num_keys])
        return f"{self._insert} ON CONFLICT ({key}) DO UPDATE SET {changed}"

    @property
    def renew(self) -> str:
        """SQL that inserts a row, or sets the mutable columns of the row with the same key."""
        changed = ", ".join(f"{name} = EXCLUDED.{name}" for name in self._mutable_names)
        key = ", ".join(self.columns[: self.num_keys])
        return f"{self._insert} ON CONFLICT ({key}) DO UPDATE SET {changed}"

    @property
    def _mutable_names(self) -> list[str]:
        return [self.columns[index] for index in self.mutable]

    @property
    def fill(self) -> str:
        """SQL that inserts a row unless one with the same key exists."""
        return f"{self._insert} ON CONFLICT DO NOTHING"

    @property
    def find(self) -> str:
        keys = " AND ".join(f"{name} = ?" for name in self.columns[: self.num_keys])
        return self.select(f"WHERE {keys}")

    def select(self, rest: str) -> str:
        """Build SQL that reads whole rows; `rest` is what follows the table name."""
        return " ".join(("SELECT", ", ".join(self.columns), "FROM", self.name, rest))

    @property
    def _insert(self) -> str:
        names, marks = ", ".join(self.columns), ", ".join("?" * len(self.columns))
        return " ".join(("INSERT INTO", self.name, f"({names}) VALUES ({marks})"))


class DamagedRowError(DamagedLedgerError):
    """A row does not match its checksum; `key` is its primary key as stored in the file."""

    def __init__(self, table: Table, row: Sequence[Any]) -> None:
        super().__init__(f"{_row_name(table, row)} does not match its checksum")
        self.table = table
        self.key: Row = tuple(row[: table.num_keys])


def _row_name(table: Table, row: Sequence[Any]) -> str:
    if table is TURNS:
        return f"turn {row[0]} of agent {row[3]}"
    if table is AGENTS:
        return f"agent {row[1]}"
    return f"a row of {table.name}"


TENANTS = Table("tenants", ("id", "salt", "crc"), 1, (1,))
AGENTS = Table("agents", ("tenant", "id", "head", "last_used", "body", "crc"), 2, (4,))
TURNS = Table(
    "turns",
    (
        "id",
        "tenant",
        "parent",
        "agent",
        "num_tokens",
        "created_at",
        "root",
        "block",
        "pointer_tokens",
        "is_durable",
        "tokens",
        "body",
        "crc",
    ),
    2,
    (10, 11),
    mutable=range(6, 10),
)
REPLAYS = Table("replays", ("tenant", "key", "tokens", "at", "crc"), 2, (2,))
IMAGES = Table("images", ("tenant", "digest", "data", "at", "crc"), 2, (2,), mutable=range(3, 4))
# Which turns refer to which images: their messages may be encrypted.
IMAGE_LINKS = Table("image_links", ("tenant", "turn", "digest"), 3, ())
# No checksums: the index can be rebuilt from the block files.
PARTS = Table(
    "parts", ("name", "kind", "root", "parent", "start", "tokens", "nbytes", "last_used"), 2, (5,)
)
# Turns come before agents: an agent is sound only if its turns exist.
CHECKED_TABLES = (TENANTS, TURNS, AGENTS, REPLAYS)
# Images are too large to check all of them at each start; a damaged one is found when it is read.
RESCUED_TABLES = (*CHECKED_TABLES, IMAGES, IMAGE_LINKS)
OLDEST_FIRST = "ORDER BY rowid"


def check_tables(connection: sqlite3.Connection) -> None:
    """Check the tables of a ledger of the latest version; `DamagedLedgerError` if they differ."""
    query = "SELECT name, sql FROM sqlite_master"
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as ideal:
        migrate(ideal, 0)
        expected = set(ideal.execute(query))
    missing = expected.difference(connection.execute(query))
    if missing:
        raise DamagedLedgerError(f"the table {min(missing)[0]} is missing or different")


def num_logged(connection: sqlite3.Connection) -> int:
    """Read the number of logged changes to agents and turns; 0 if an older server wrote it."""
    row = connection.execute("SELECT value FROM facts WHERE name = 'num_logged'").fetchone()
    return int(row[0]) if row else 0


def set_num_logged(connection: sqlite3.Connection, number: int) -> None:
    """Write the number that `num_logged` reads."""
    connection.execute("INSERT OR REPLACE INTO facts VALUES ('num_logged', ?)", (number,))


def version_of(connection: sqlite3.Connection) -> int:
    """Read the version of a ledger; 0 is a file without tables.

    Raises:
        NewerLedgerError: the version is newer than this server's.
        DamagedLedgerError: the file is not a ledger.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application != APPLICATION_ID and (num_tables or version):
        raise DamagedLedgerError("it is not a ledger")
    if version > latest_version():
        raise NewerLedgerError(f"format {version}; this version supports {latest_version()}")
    return int(version)


def migrate(connection: sqlite3.Connection, version: int) -> None:
    """Bring a ledger from `version` to the latest in one transaction; mutates the file."""
    scripts = "".join(MIGRATIONS[version:])
    connection.executescript(
        f"BEGIN IMMEDIATE; {scripts} PRAGMA application_id = {APPLICATION_ID};"
        f"PRAGMA user_version = {latest_version()}; COMMIT;"
    )


# -- rows ---------------------------------------------------------------------------------------


def agent_row(agent: Agent) -> Row:
    """Convert an agent to a row, without checksum."""
    body = ledger_json.encode_agent(agent)
    return agent.tenant, agent.id, agent.head, float(agent.last_used), body


def read_agent(row: Row) -> Agent:
    """Convert a row to an agent; raises `DamagedLedgerError` if its body is invalid."""
    tenant, name, _, _, body = row
    try:
        return ledger_json.decode_agent(tenant, name, body)
    except ValueError as error:
        raise DamagedLedgerError(f"the row of agent {name}: {error}") from error


def turn_row(tenant: str, turn: Turn) -> Row:
    """Convert a turn to a row, without checksum."""
    body = ledger_json.encode_turn(ledger_json.TurnBody.of(turn))
    pointer = turn.pointer
    place = (pointer.root, pointer.block, pointer.num_tokens) if pointer else (None, None, None)
    return (
        turn.id,
        tenant,
        turn.parent,
        turn.agent_id,
        turn.num_tokens,
        float(turn.created_at),
        *place,
        int(turn.is_durable),
        pack_tokens(turn.tokens),
        body,
    )


def read_turn(row: Row) -> Turn:
    """Convert a row to a turn; raises `DamagedLedgerError` if its body is invalid."""
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
    """Convert the columns root, block and number of tokens to a pointer."""
    root, block, num_tokens = row
    return Pointer(BlockName(root), BlockName(block), num_tokens)


def part_row(part: BlockPart) -> Row:
    """Convert a block part to a row."""
    return (
        part.name,
        part.kind.value,
        part.root,
        part.parent,
        part.start,
        part.tokens,
        part.nbytes,
        float(part.last_used),
    )


_NAMES_KEPT = 256
_KINDS = {kind.value: kind for kind in LayerKind}


def read_parts(rows: Iterable[Row]) -> list[BlockPart]:
    """Convert rows to block parts; raises `DamagedLedgerError` if one is invalid."""
    # Rows share roots, and a block's parent usually is in the row before.
    named = functools.lru_cache(_NAMES_KEPT)(BlockName)
    try:
        return [
            # Keyword arguments would cost a tenth of the time.
            BlockPart(
                named(root), named(name), named(parent), _KINDS[kind], start, tokens, nbytes, used
            )
            for name, kind, root, parent, start, tokens, nbytes, used in rows
        ]
    except (KeyError, TypeError) as error:
        raise DamagedLedgerError(f"the row of a part: {error!r}") from error


def with_checksum(table: Table, values: Row) -> Row:
    """Append the checksum, if the table has one."""
    return (*values, _checksum(table, values)) if table.has_checksum else values


def without_checksum(table: Table, row: Row) -> Row:
    """Check the checksum, if the table has one, and remove it; `DamagedRowError` if it differs."""
    if not table.has_checksum:
        return row
    values = row[:-1]
    if row[-1] != _checksum(table, values):
        raise DamagedRowError(table, values)
    return values


def damaged_rows(connection: sqlite3.Connection) -> list[DamagedRowError]:
    """Compare all rows with their checksums; 100,000 turns take about a second."""
    found: list[DamagedRowError] = []
    for table in CHECKED_TABLES:
        for row in connection.execute(table.select("")):
            try:
                without_checksum(table, row)
            except DamagedRowError as error:
                found.append(error)
    return found


def _checksum(table: Table, values: Sequence[Any]) -> int:
    pieces: list[bytes] = []
    for value in (*values[: table.mutable.start], *values[table.mutable.stop :]):
        data = value if isinstance(value, bytes) else str(value).encode()
        # Including lengths makes ("ab", "c") and ("a", "bc") differ.
        pieces += (b"%d:" % len(data), data)
    return zlib.crc32(b"".join(pieces))
