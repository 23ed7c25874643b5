"""Each change of the ledger as SQL. It opens no transaction."""

import sqlite3
from typing import TypeAlias, assert_never

from semantic.adapters.outbound.ledger.rows import (
    agent_row,
    part_row,
    replay_row,
    tenant_row,
    turn_row,
)
from semantic.adapters.outbound.ledger.schema import AGENTS, INSERT_PART, REPLAYS, TENANTS, TURNS
from semantic.ports.storage import (
    DropAgent,
    DropPart,
    LedgerChange,
    MarkDurable,
    MarkIndexWhole,
    PutAgent,
    PutPart,
    PutReplay,
    PutTenant,
    PutTurn,
    Repoint,
    TouchParts,
)

_IndexChange: TypeAlias = PutPart | DropPart | TouchParts | MarkIndexWhole
# A new turn keeps those before it: a client may yet continue from it.
_FORGET_TURNS = """
DELETE FROM turns WHERE (id, tenant) NOT IN (
    WITH RECURSIVE reached (id, tenant) AS (
        SELECT head, tenant FROM agents WHERE head IS NOT NULL
        UNION SELECT id, tenant FROM turns WHERE created_at >= ?
        UNION SELECT turns.parent, turns.tenant FROM reached
            JOIN turns ON turns.id = reached.id AND turns.tenant = reached.tenant
            WHERE turns.parent IS NOT NULL
    )
    SELECT id, tenant FROM reached
)
"""


def make_change(connection: sqlite3.Connection, change: LedgerChange) -> None:
    """Make one change; mutates the ledger.

    Raises:
        ValueError: it holds what cannot be stored.
    """
    match change:
        case PutPart() | DropPart() | TouchParts() | MarkIndexWhole():
            _change_index(connection, change)
        case PutTenant(tenant):
            connection.execute(TENANTS.insert, tenant_row(tenant))
        case PutAgent(agent):
            connection.execute(AGENTS.insert, agent_row(agent))
        case DropAgent(tenant_id, agent_id):
            key = (tenant_id, agent_id)
            connection.execute("DELETE FROM agents WHERE tenant = ? AND id = ?", key)
        case PutTurn(tenant_id, turn):
            connection.execute(TURNS.insert, turn_row(tenant_id, turn))
        case MarkDurable(turn_id):
            connection.execute("UPDATE turns SET is_durable = 1 WHERE id = ?", (turn_id,))
        case Repoint(old, new):
            connection.execute("UPDATE turns SET block = ? WHERE block = ?", (new, old))
        case PutReplay():
            connection.execute(REPLAYS.insert, replay_row(change))
        case _:
            assert_never(change)


def is_of_index(change: LedgerChange) -> bool:
    """Whether a change could be made again from the files of attention state."""
    return isinstance(change, _IndexChange)


def is_logged(change: LedgerChange) -> bool:
    """Whether a change is of those that are counted, so that their loss is noticed."""
    return isinstance(change, PutTenant | PutAgent | DropAgent | PutTurn)


def forget_unreachable(connection: sqlite3.Connection, before: float, replays_before: float) -> int:
    """Remove old turns that neither an agent nor a newer turn comes from, and old replays."""
    turns = connection.execute(_FORGET_TURNS, (before,))
    replays = connection.execute("DELETE FROM replays WHERE at < ?", (replays_before,))
    return turns.rowcount + replays.rowcount


def _change_index(connection: sqlite3.Connection, change: _IndexChange) -> None:
    match change:
        case PutPart(part):
            connection.execute(INSERT_PART, part_row(part))
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
