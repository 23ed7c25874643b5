"""The shared index of the object store: which block parts it holds, and which are to be deleted.

A row is written once its object exists. A part that no agent reaches and that was not used for
long is marked dead. After a grace period it is deleted: first the row is marked deleted, then the
object is removed, and after another grace period the row is removed too. A lookup revives a part
that is only dead; a deleted part can be added again only once its row is gone. All times are the
database's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import LiteralString

from semantic.adapters.outbound.ledger.schema import part_row, read_parts
from semantic.adapters.outbound.ledger.statements import REACHED
from semantic.cluster.adapters.postgres import PostgresLedger
from semantic.domain.blocks import BlockName, BlockPart, PartKey
from semantic.domain.spec import LayerKind

_KINDS = {kind.value: kind for kind in LayerKind}
_REVIVE: LiteralString = """
UPDATE parts SET used_at = clock_timestamp(), dead_since = NULL
WHERE name = %s AND kind = %s AND deleted_at IS NULL
"""
_ADD: LiteralString = """
INSERT INTO parts VALUES (%s, %s, %s, %s, %s, %s, %s, clock_timestamp(), NULL, NULL)
ON CONFLICT (name, kind) DO UPDATE SET used_at = clock_timestamp(), dead_since = NULL
    WHERE parts.deleted_at IS NULL
"""
# Follows every chain of blocks that the prompt starts with, then returns all children that share at
# least one more token, because a block can be used in part.
_FOLLOW: LiteralString = """
WITH RECURSIVE walk (name, stop) AS (
    SELECT %(root)s::bytea, 0::bigint
    UNION SELECT parts.name, parts.start + length(parts.tokens) / 4 FROM walk
        JOIN parts ON parts.parent = walk.name AND parts.deleted_at IS NULL
        WHERE substring(%(tokens)s::bytea FROM (walk.stop * 4 + 1)::int FOR length(parts.tokens))
            = parts.tokens
)
SELECT parts.name, kind, root, parent, start, tokens, nbytes, 0.0::float FROM walk
JOIN parts ON parts.parent = walk.name AND parts.deleted_at IS NULL
WHERE substring(%(tokens)s::bytea FROM (walk.stop * 4 + 1)::int FOR 4)
    = substring(parts.tokens FROM 1 FOR 4)
ORDER BY start LIMIT 10000
"""
_USE: LiteralString = """
UPDATE parts SET used_at = clock_timestamp(), dead_since = NULL
WHERE name = ANY(%s) AND deleted_at IS NULL
    AND (dead_since IS NOT NULL OR used_at < clock_timestamp() - interval '1 hour')
"""
_EXPIRE: LiteralString = """
DELETE FROM agents WHERE ttl_s IS NOT NULL
    AND stored_at + make_interval(secs => ttl_s) < clock_timestamp()
"""
# Also keeps a shorter block that is a prefix of a reachable one.
_MARK: LiteralString = "".join(
    (
        REACHED,
        """,
chain (name, parent, tokens) AS (
    SELECT parts.name, parts.parent, parts.tokens FROM reached
        JOIN turns ON turns.id = reached.id AND turns.tenant = reached.tenant
        JOIN parts ON parts.name = turns.block
    UNION SELECT parts.name, parts.parent, parts.tokens FROM chain
        JOIN parts ON parts.name = chain.parent
),
kept (name) AS (
    SELECT parts.name FROM chain JOIN parts ON parts.parent = chain.parent
        AND substring(chain.tokens FROM 1 FOR length(parts.tokens)) = parts.tokens
)
UPDATE parts SET dead_since = CASE
    WHEN name IN (SELECT name FROM kept) THEN NULL
    ELSE coalesce(dead_since, clock_timestamp()) END
WHERE deleted_at IS NULL AND used_at <= clock_timestamp() - make_interval(secs => %s)
    AND (name IN (SELECT name FROM kept)) = (dead_since IS NOT NULL)
""",
    )
)
_CONDEMN: LiteralString = """
UPDATE parts SET deleted_at = clock_timestamp() WHERE deleted_at IS NULL
    AND dead_since <= clock_timestamp() - make_interval(secs => %s)
"""
_CONDEMN_UNKNOWN: LiteralString = """
INSERT INTO parts VALUES (%s, %s, '', '', 0, '', 0, now(), now(), clock_timestamp())
ON CONFLICT DO NOTHING
"""
_FORGET: LiteralString = """
DELETE FROM parts WHERE deleted_at <= clock_timestamp() - make_interval(secs => %s)
"""
_LOCK: LiteralString = "hashtext('semantic collector ' || current_schema())"


class SharedParts:
    """`SharedPartsPort` in the ledger's database. Thread-safe."""

    def __init__(self, ledger: PostgresLedger) -> None:
        self._ledger = ledger

    def revive(self, key: PartKey) -> bool | None:
        name, kind = key
        with self._ledger.transaction(is_synced=False) as connection:
            if connection.execute(_REVIVE, (name, kind.value)).rowcount:
                return True
            query = "SELECT 1 FROM parts WHERE name = %s AND kind = %s"
            return False if connection.execute(query, (name, kind.value)).fetchone() else None

    def add(self, part: BlockPart) -> bool:
        with self._ledger.transaction(is_synced=False) as connection:
            return connection.execute(_ADD, part_row(part)[:-1]).rowcount > 0

    def follow(self, root: BlockName, tokens: bytes) -> list[BlockPart]:
        with self._ledger.transaction(is_synced=False) as connection:
            rows = connection.execute(_FOLLOW, {"root": root, "tokens": tokens}).fetchall()
            parts = read_parts(rows)
            if parts:
                connection.execute(_USE, ([part.name for part in parts],))
            return parts

    def lose(self, key: PartKey) -> None:
        name, kind = key
        query = (
            "UPDATE parts SET deleted_at = clock_timestamp() "
            "WHERE name = %s AND kind = %s AND deleted_at IS NULL"
        )
        with self._ledger.transaction(is_synced=False) as connection:
            connection.execute(query, (name, kind.value))

    # -- for the collector ----------------------------------------------------------------------

    @contextmanager
    def sole_collector(self) -> Iterator[bool]:
        """The lock ends with the context, or with the process."""
        with self._ledger.transaction() as connection:
            lock = " ".join(("SELECT pg_try_advisory_xact_lock(", _LOCK, ")"))
            row = connection.execute(lock).fetchone()
            yield bool(row and row[0])

    def mark(self, *, unused_s: float) -> None:
        """Removes agents whose time to live is over first."""
        with self._ledger.transaction(is_synced=False) as connection:
            connection.execute(_EXPIRE)
            connection.execute(_MARK, (unused_s,))

    def condemn(self, *, grace_s: float) -> list[tuple[PartKey, int]]:
        with self._ledger.transaction() as connection:
            connection.execute(_CONDEMN, (grace_s,))
            query = "SELECT name, kind, nbytes FROM parts WHERE deleted_at IS NOT NULL"
            rows = connection.execute(query).fetchall()
        return [((BlockName(name), _KINDS[kind]), nbytes) for name, kind, nbytes in rows]

    def condemn_unknown(self, keys: Sequence[PartKey]) -> list[PartKey]:
        with self._ledger.transaction() as connection:
            return [
                (name, kind)
                for name, kind in keys
                if connection.execute(_CONDEMN_UNKNOWN, (name, kind.value)).rowcount
            ]

    def forget(self, *, grace_s: float) -> None:
        with self._ledger.transaction() as connection:
            connection.execute(_FORGET, (grace_s,))
