"""The ledger in PostgreSQL, which several servers share: agents, turns, tenants, replays, leases.

Transactions are atomic. An agent's head advances only if it is still the one that the writer read,
and only under a lease that no other server has taken over. All times that matter are the
database's. A second, local ledger holds the index of the block files on this machine's disk.
"""

import json
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, LiteralString, TypeAlias, TypeVar

import psycopg
from psycopg import sql
from psycopg_pool import ConnectionPool, PoolTimeout

from semantic.adapters.outbound.ledger.schema import (
    AGENTS,
    TENANTS,
    DamagedLedgerError,
    Row,
    Table,
    agent_row,
    with_checksum,
    without_checksum,
)
from semantic.adapters.outbound.ledger.statements import (
    REACHED_OR_NEW,
    LedgerReadings,
    forget_images,
    is_of_index,
    link_images,
    shared_change,
)
from semantic.domain.agents import Agent
from semantic.domain.errors import CachePersistenceError, ConflictError
from semantic.ports.storage import (
    AdvanceHead,
    DropAgent,
    DropPart,
    LedgerChange,
    LedgerPort,
    LedgerState,
    MarkIndexWhole,
    PutAgent,
    PutPart,
    PutTurn,
    Tenant,
    TouchParts,
)

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]
# Called with tenant, agent and its new head; all are empty after a time without notifications, in
# which any agent may have moved.
OnMoved: TypeAlias = Callable[[str, str, str], None]
_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 8
_LISTEN_S = 1.0
_RETRY_S = 1.0

_FIRST: LiteralString = """
CREATE SEQUENCE epochs;
CREATE SEQUENCE turn_order;
CREATE TABLE tenants (id TEXT PRIMARY KEY, salt BYTEA NOT NULL, crc BIGINT NOT NULL);
CREATE TABLE agents (
    tenant TEXT NOT NULL, id TEXT NOT NULL, head TEXT, last_used DOUBLE PRECISION NOT NULL,
    body TEXT NOT NULL, crc BIGINT NOT NULL, ttl_s DOUBLE PRECISION,
    stored_at TIMESTAMPTZ NOT NULL, PRIMARY KEY (tenant, id)
);
CREATE INDEX agents_by_ttl ON agents (stored_at) WHERE ttl_s IS NOT NULL;
CREATE TABLE leases (
    tenant TEXT NOT NULL, agent TEXT NOT NULL, epoch BIGINT NOT NULL,
    expires_at TIMESTAMPTZ NOT NULL, PRIMARY KEY (tenant, agent)
);
CREATE TABLE turns (
    id TEXT NOT NULL, tenant TEXT NOT NULL, parent TEXT, agent TEXT NOT NULL,
    num_tokens BIGINT NOT NULL, created_at DOUBLE PRECISION NOT NULL,
    root BYTEA, block BYTEA, pointer_tokens BIGINT, is_durable INTEGER NOT NULL,
    tokens BYTEA NOT NULL, body TEXT NOT NULL, crc BIGINT NOT NULL,
    place BIGINT NOT NULL DEFAULT nextval('turn_order'), PRIMARY KEY (id, tenant)
);
CREATE INDEX turns_by_block ON turns (block) WHERE block IS NOT NULL;
CREATE TABLE replays (
    tenant TEXT NOT NULL, key BYTEA NOT NULL, tokens BYTEA NOT NULL,
    at DOUBLE PRECISION NOT NULL, crc BIGINT NOT NULL, PRIMARY KEY (tenant, key)
);
CREATE TABLE parts (
    name BYTEA NOT NULL, kind TEXT NOT NULL, root BYTEA NOT NULL, parent BYTEA NOT NULL,
    start BIGINT NOT NULL, tokens BYTEA NOT NULL, nbytes BIGINT NOT NULL,
    used_at TIMESTAMPTZ NOT NULL, dead_since TIMESTAMPTZ, deleted_at TIMESTAMPTZ,
    PRIMARY KEY (name, kind)
);
CREATE INDEX parts_by_parent ON parts (parent);
"""
_IMAGES: LiteralString = """
CREATE TABLE images (
    tenant TEXT NOT NULL, digest TEXT NOT NULL, data BYTEA NOT NULL,
    at DOUBLE PRECISION NOT NULL, crc BIGINT NOT NULL, PRIMARY KEY (tenant, digest)
);
CREATE TABLE image_links (
    tenant TEXT NOT NULL, turn TEXT NOT NULL, digest TEXT NOT NULL,
    PRIMARY KEY (tenant, turn, digest)
);
CREATE INDEX image_links_by_digest ON image_links (tenant, digest);
"""
# Script number n, counted from one, brings a database to version n.
MIGRATIONS: tuple[LiteralString, ...] = (_FIRST, _IMAGES)

_PUT_AGENT: LiteralString = """
INSERT INTO agents VALUES (%s, %s, %s, %s, %s, %s, %s, clock_timestamp())
ON CONFLICT (tenant, id) DO
"""
_REPLACE_AGENT: LiteralString = """
UPDATE SET head = EXCLUDED.head, last_used = EXCLUDED.last_used, body = EXCLUDED.body,
    crc = EXCLUDED.crc, ttl_s = EXCLUDED.ttl_s, stored_at = EXCLUDED.stored_at
"""
_ADVANCE: LiteralString = """
UPDATE agents SET head = %s, last_used = %s, body = %s, crc = %s, ttl_s = %s,
    stored_at = clock_timestamp()
WHERE tenant = %s AND id = %s AND head IS NOT DISTINCT FROM %s
"""
_ACQUIRE: LiteralString = """
INSERT INTO leases VALUES (
    %s, %s, nextval('epochs'), clock_timestamp() + make_interval(secs => %s)
) ON CONFLICT (tenant, agent) DO UPDATE
    SET epoch = EXCLUDED.epoch, expires_at = EXCLUDED.expires_at
    WHERE leases.expires_at <= clock_timestamp()
RETURNING epoch
"""
_RENEW: LiteralString = """
UPDATE leases SET expires_at = clock_timestamp() + make_interval(secs => %s)
WHERE tenant = %s AND agent = %s AND epoch = %s
"""
_END_LEASE: LiteralString = "DELETE FROM leases WHERE tenant = %s AND agent = %s AND epoch = %s"
_FORGET_TURNS = " ".join(
    (
        REACHED_OR_NEW,
        "DELETE FROM turns WHERE NOT EXISTS (SELECT 1 FROM reached",
        "WHERE reached.id = turns.id AND reached.tenant = turns.tenant)",
    )
)


class PostgresLedger(LedgerReadings):
    """`LedgerPort` and `LeaseStorePort` over a PostgreSQL database. Thread-safe."""

    _NUM_BYTES = "octet_length({})"

    def __init__(self, url: str, index: LedgerPort, *, timeout_s: float = _TIMEOUT_S) -> None:
        """Configure the connection pool without opening a connection.

        Args:
            url: URL of the database, e.g. ``postgresql://user@host/name``.
            index: Ledger of the block files on this machine.
        """
        self._index = index
        self._url = url
        self._origin = secrets.token_hex(8)  # identifies this process's own notifications
        self._is_closed = threading.Event()
        self._pool = ConnectionPool(
            url, min_size=1, max_size=_MAX_CONNECTIONS, timeout=timeout_s, open=False
        )

    def load(self) -> LedgerState:
        """Open the local index and migrate the database; agents are read on demand."""
        local = self._index.load()
        with self._refusals():
            self._pool.open()
            with self._pool.connection() as connection:
                _migrate(connection)
        tenants = self._read(TENANTS.select(""), (), lambda row: Tenant(*row), TENANTS)
        return LedgerState(tuple(tenants), (), local.parts, local.is_index_lost, local.problem)

    @contextmanager
    def transaction(self, *, is_synced: bool = True) -> Iterator[Connection]:
        """Lend a connection for one transaction.

        Raises:
            CachePersistenceError: the database cannot be reached.
            ValueError: a value cannot be stored.
        """
        with self._refusals(), self._pool.connection() as connection:
            if not is_synced:
                connection.execute("SET LOCAL synchronous_commit = off")
            yield connection

    def apply(self, changes: Sequence[LedgerChange], *, is_synced: bool) -> None:
        """Apply changes in order; changes of the index go to the local ledger."""
        local = [change for change in changes if is_of_index(change)]
        if local:
            self._index.apply(local, is_synced=is_synced)
        shared = [change for change in changes if not is_of_index(change)]
        if shared:
            with self.transaction(is_synced=is_synced) as connection:
                for change in shared:
                    _make_change(connection, change)
                self._announce(connection, shared)

    # -- leases ---------------------------------------------------------------------------------

    def acquire(self, tenant: str, agent_id: str, *, ttl_s: float) -> int | None:
        with self.transaction(is_synced=False) as connection:
            row = connection.execute(_ACQUIRE, (tenant, agent_id, ttl_s)).fetchone()
            return int(row[0]) if row else None

    def renew(self, tenant: str, agent_id: str, epoch: int, *, ttl_s: float) -> bool:
        with self.transaction(is_synced=False) as connection:
            return connection.execute(_RENEW, (ttl_s, tenant, agent_id, epoch)).rowcount > 0

    def release(self, tenant: str, agent_id: str, epoch: int) -> None:
        with self.transaction(is_synced=False) as connection:
            connection.execute(_END_LEASE, (tenant, agent_id, epoch))

    # -- upkeep ---------------------------------------------------------------------------------

    def forget_unreachable(self, *, before: float, replays_before: float) -> int:
        with self.transaction(is_synced=False) as connection:
            turns = _execute(connection, _FORGET_TURNS, (before,))
            replays = connection.execute("DELETE FROM replays WHERE at < %s", (replays_before,))
            num_images = forget_images(partial(_execute, connection), before)
            return turns.rowcount + replays.rowcount + num_images

    def back_up(self) -> None:
        """Back up the local index; backing up the database is left to its administrator."""
        self._index.back_up()

    def close(self) -> None:
        self._is_closed.set()
        self._pool.close(timeout=_TIMEOUT_S)
        self._index.close()

    # -- notifications --------------------------------------------------------------------------

    def listen(self, on_moved: OnMoved) -> None:
        """Start a thread that calls `on_moved` for agents that other processes move or delete."""
        listener = threading.Thread(
            target=self._listen, args=(on_moved,), name="semantic-listener", daemon=True
        )
        listener.start()

    def _listen(self, on_moved: OnMoved) -> None:
        while not self._is_closed.is_set():
            try:
                with psycopg.connect(self._url, autocommit=True) as connection:
                    channel = sql.Identifier(_channel(connection))
                    connection.execute(sql.SQL("LISTEN {}").format(channel))
                    on_moved("", "", "")  # notifications before this point were missed
                    while not self._is_closed.is_set():
                        for notice in connection.notifies(timeout=_LISTEN_S):
                            origin, tenant, agent, turn = json.loads(notice.payload)
                            if origin != self._origin:
                                on_moved(tenant, agent, turn)
            except psycopg.Error as error:
                _log.warning(
                    "notifications from other servers are interrupted; reconnecting: %s", error
                )
                self._is_closed.wait(_RETRY_S)

    def _announce(self, connection: Connection, changes: Sequence[LedgerChange]) -> None:
        for change in changes:
            match change:
                case AdvanceHead(agent) | PutAgent(agent):
                    moved = [self._origin, agent.tenant, agent.id, agent.head or ""]
                case DropAgent(tenant, agent_id):
                    moved = [self._origin, tenant, agent_id, ""]
                case _:
                    continue
            notify = "SELECT pg_notify('semantic_' || current_schema(), %s)"
            connection.execute(notify, (json.dumps(moved),))

    # -- inside ---------------------------------------------------------------------------------

    def _read(
        self, query: str, values: Row, decode: Callable[[Row], _T], table: Table | None = None
    ) -> list[_T]:
        with self._refusals(), self._pool.connection() as connection:
            rows = _execute(connection, query, values).fetchall()
            return [decode(without_checksum(table, row) if table else row) for row in rows]

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            raise ValueError(f"a change cannot be stored: {error}") from error
        except (psycopg.Error, PoolTimeout, DamagedLedgerError) as error:
            raise CachePersistenceError(f"the database does not respond: {error}") from error


def _channel(connection: Connection) -> str:
    row = connection.execute("SELECT 'semantic_' || current_schema()").fetchone()
    assert row is not None  # noqa: S101 - it always answers
    return str(row[0])


def _migrate(connection: Connection) -> None:
    """Migrate the database to the latest version, one server at a time."""
    connection.execute("SELECT pg_advisory_xact_lock(hashtext('semantic migrate'))")
    connection.execute("CREATE TABLE IF NOT EXISTS versions (version INTEGER PRIMARY KEY)")
    row = connection.execute("SELECT coalesce(max(version), 0) FROM versions").fetchone()
    version = int(row[0]) if row else 0
    if version > len(MIGRATIONS):
        raise CachePersistenceError(
            f"a newer version of Semantic wrote the database (format {version}; this version "
            f"supports {len(MIGRATIONS)}). Upgrade, or choose another database_url."
        )
    for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
        connection.execute(script)
        connection.execute("INSERT INTO versions VALUES (%s)", (number,))


def _execute(connection: Connection, query: str, values: Row) -> psycopg.Cursor[Row]:
    return connection.execute(query.replace("?", "%s").encode(), values)


def _make_change(connection: Connection, change: LedgerChange) -> None:
    match change:
        case PutAgent(agent):
            connection.execute(_PUT_AGENT + _REPLACE_AGENT, _timed_row(agent))
        case AdvanceHead():
            _advance(connection, change)
        case PutPart() | DropPart() | TouchParts() | MarkIndexWhole():
            raise AssertionError(f"{change} belongs to the index")
        case _:
            statement, row, table = shared_change(change)
            _execute(connection, statement, with_checksum(table, row) if table else row)
            if isinstance(change, PutTurn):
                link_images(partial(_execute, connection), change)


def _timed_row(agent: Agent) -> Row:
    """The row of an agent with its time to live; None for pinned agents, which do not expire."""
    row = with_checksum(AGENTS, agent_row(agent))
    return (*row, None if agent.is_pinned else agent.ttl_s)


def _advance(connection: Connection, change: AdvanceHead) -> None:
    """Advance an agent's head; a concurrent writer waits for the row lock, then conflicts."""
    agent, before = change.agent, change.before
    if change.epoch is not None:
        ended = connection.execute(_END_LEASE, (agent.tenant, agent.id, change.epoch))
        if not ended.rowcount:
            raise ConflictError(f"another server took over the lease of agent {agent.id!r}.")
    row = _timed_row(agent)
    if before is None:
        moved = connection.execute(_PUT_AGENT + "NOTHING", row)
    else:
        moved = connection.execute(_ADVANCE, (*row[2:], agent.tenant, agent.id, before.head))
    if not moved.rowcount:
        raise ConflictError(f"another request moved agent {agent.id!r} to another turn.")
