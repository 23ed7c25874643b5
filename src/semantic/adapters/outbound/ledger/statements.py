"""What is asked of the ledger and done to it, as SQL. It opens no connection and no transaction."""

import sqlite3
from typing import TypeAlias, assert_never

from semantic.adapters.outbound.ledger.schema import (
    AGENTS,
    INSERT_PART,
    REPLAYS,
    TENANTS,
    TURNS,
    agent_row,
    part_row,
    read_agent,
    read_parts,
    read_pointer,
    read_tenant,
    read_turn,
    replay_row,
    tenant_row,
    turn_row,
)
from semantic.adapters.outbound.ledger.sealing import opened, opened_part, sealed, sealed_part
from semantic.domain.agents import Agent, Pointer, Turn
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
    PutPart,
    PutReplay,
    PutTenant,
    PutTurn,
    Repoint,
    Tenant,
    TouchParts,
    TurnPlace,
)

_IndexChange: TypeAlias = PutPart | DropPart | TouchParts | MarkIndexWhole
_AgentChange: TypeAlias = PutTenant | PutAgent | AdvanceHead | DropAgent
# UNION ends a walk that comes back to where it was, which only a damaged ledger can make it do.
_WALK = """
WITH RECURSIVE walk (id, parent) AS (
    SELECT id, parent FROM turns WHERE id = :head AND tenant = :tenant
    UNION SELECT turns.id, turns.parent FROM walk
        JOIN turns ON turns.id = walk.parent AND turns.tenant = :tenant
    LIMIT :limit
)
SELECT turns.* FROM walk CROSS JOIN turns ON turns.id = walk.id AND turns.tenant = :tenant
"""
_ANCESTRY = """
WITH RECURSIVE walk (id, parent) AS (
    SELECT id, parent FROM turns WHERE id = :head AND tenant = :tenant
    UNION SELECT turns.id, turns.parent FROM walk
        JOIN turns ON turns.id = walk.parent AND turns.tenant = :tenant
        WHERE walk.id <> :until
)
SELECT id, parent FROM walk
"""
_PLACE = "SELECT num_tokens, root, block, pointer_tokens FROM turns WHERE id = ? AND tenant = ?"
_POINTERS = """
WITH RECURSIVE reached (id, tenant) AS (
    SELECT head, tenant FROM agents WHERE head IS NOT NULL
    UNION SELECT turns.parent, turns.tenant FROM reached
        JOIN turns ON turns.id = reached.id AND turns.tenant = reached.tenant
        WHERE turns.parent IS NOT NULL
)
SELECT DISTINCT root, block, pointer_tokens FROM reached
    JOIN turns ON turns.id = reached.id AND turns.tenant = reached.tenant
    WHERE block IS NOT NULL
"""
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


# -- readings -----------------------------------------------------------------------------------


def read_state(connection: sqlite3.Connection, problem: str) -> LedgerState:
    """Read what a server must know from the start.

    Raises:
        DamagedLedgerError: a row is not as it was written.
    """
    is_lost = connection.execute("SELECT value FROM facts WHERE name = 'is_index_lost'").fetchone()
    return LedgerState(
        tenants=tuple(
            read_tenant(opened(connection, TENANTS, row))
            for row in connection.execute(TENANTS.forwards)
        ),
        agents=tuple(
            read_agent(opened(connection, AGENTS, row))
            for row in connection.execute(AGENTS.forwards)
        ),
        parts=tuple(
            read_parts(
                opened_part(connection, row) for row in connection.execute("SELECT * FROM parts")
            )
        ),
        is_index_lost=is_lost != (0,),
        problem=problem,
    )


def read_one_tenant(connection: sqlite3.Connection, tenant_id: str) -> Tenant | None:
    """Read a tenant."""
    row = connection.execute("SELECT * FROM tenants WHERE id = ?", (tenant_id,)).fetchone()
    return read_tenant(opened(connection, TENANTS, row)) if row else None


def read_one_agent(connection: sqlite3.Connection, tenant: str, agent_id: str) -> Agent | None:
    """Read an agent."""
    query = "SELECT * FROM agents WHERE tenant = ? AND id = ?"
    row = connection.execute(query, (tenant, agent_id)).fetchone()
    return read_agent(opened(connection, AGENTS, row)) if row else None


def read_agents(connection: sqlite3.Connection, tenant: str) -> tuple[Agent, ...]:
    """Read all agents of a tenant."""
    rows = connection.execute("SELECT * FROM agents WHERE tenant = ?", (tenant,)).fetchall()
    return tuple(read_agent(opened(connection, AGENTS, row)) for row in rows)


def read_place(connection: sqlite3.Connection, tenant: str, turn_id: str) -> TurnPlace | None:
    """Read where a turn ended, without what was said in it."""
    row = connection.execute(_PLACE, (turn_id, tenant)).fetchone()
    if row is None:
        return None
    num_tokens, *place = row
    return TurnPlace(num_tokens, None if place[1] is None else read_pointer(tuple(place)))


def read_turns(
    connection: sqlite3.Connection, tenant: str, head: str, limit: int
) -> tuple[Turn, ...]:
    """Read the turns that led to `head`, the latest first, at most `limit`."""
    if limit <= 0:
        return ()
    rows = connection.execute(_WALK, {"head": head, "tenant": tenant, "limit": limit})
    turns = (read_turn(opened(connection, TURNS, row)) for row in rows.fetchall())
    turns_by_id = {turn.id: turn for turn in turns}
    # SQL promises no order.
    log: list[Turn] = []
    next_id: str | None = head
    while next_id in turns_by_id:
        turn = turns_by_id.pop(next_id)
        log.append(turn)
        next_id = turn.parent
    return tuple(log)


def read_ancestry(
    connection: sqlite3.Connection, tenant: str, head: str, until: str
) -> tuple[str, ...]:
    """Read the ids of the turns that led to `head`, the latest first, down to `until`."""
    named = {"head": head, "tenant": tenant, "until": until}
    parents = dict(connection.execute(_ANCESTRY, named).fetchall())
    log: list[str] = []
    next_id: str | None = head
    while next_id is not None and next_id in parents:
        log.append(next_id)
        next_id = parents.pop(next_id)
    return tuple(log)


def read_pointers(connection: sqlite3.Connection) -> tuple[Pointer, ...]:
    """Read where all turns that an agent reaches end."""
    return tuple(map(read_pointer, connection.execute(_POINTERS).fetchall()))


# -- changes ------------------------------------------------------------------------------------


def make_change(connection: sqlite3.Connection, change: LedgerChange) -> None:
    """Make one change; mutates the ledger.

    Raises:
        ConflictError: an agent is not what it should be.
        ValueError: it holds what cannot be stored.
    """
    match change:
        case PutPart() | DropPart() | TouchParts() | MarkIndexWhole():
            _change_index(connection, change)
        case PutTenant() | PutAgent() | AdvanceHead() | DropAgent():
            _change_agents(connection, change)
        case PutTurn(tenant_id, turn):
            connection.execute(TURNS.insert, sealed(connection, TURNS, turn_row(tenant_id, turn)))
        case MarkDurable(turn_id):
            connection.execute("UPDATE turns SET is_durable = 1 WHERE id = ?", (turn_id,))
        case Repoint(old, new):
            connection.execute("UPDATE turns SET block = ? WHERE block = ?", (new, old))
        case PutReplay():
            connection.execute(REPLAYS.insert, sealed(connection, REPLAYS, replay_row(change)))
        case _:
            assert_never(change)


def is_of_index(change: LedgerChange) -> bool:
    """Whether a change could be made again from the KV cache files."""
    return isinstance(change, _IndexChange)


def is_logged(change: LedgerChange) -> bool:
    """Whether a change is of those that are counted, so that their loss is noticed."""
    return isinstance(change, _AgentChange | PutTurn)


def forget_unreachable(connection: sqlite3.Connection, before: float, replays_before: float) -> int:
    """Remove old turns that neither an agent nor a newer turn comes from, and old replays."""
    turns = connection.execute(_FORGET_TURNS, (before,))
    replays = connection.execute("DELETE FROM replays WHERE at < ?", (replays_before,))
    return turns.rowcount + replays.rowcount


def _change_agents(connection: sqlite3.Connection, change: _AgentChange) -> None:
    match change:
        case PutTenant(tenant):
            connection.execute(TENANTS.fill, sealed(connection, TENANTS, tenant_row(tenant)))
        case PutAgent(agent):
            connection.execute(AGENTS.insert, sealed(connection, AGENTS, agent_row(agent)))
        case AdvanceHead(agent, before):
            known = read_one_agent(connection, agent.tenant, agent.id)
            expected = before.head if before else None
            if (known is None) != (before is None) or (known and known.head != expected):
                raise ConflictError(f"agent {agent.id!r} moved to another turn meanwhile.")
            connection.execute(AGENTS.insert, sealed(connection, AGENTS, agent_row(agent)))
        case DropAgent(tenant_id, agent_id):
            key = (tenant_id, agent_id)
            connection.execute("DELETE FROM agents WHERE tenant = ? AND id = ?", key)
        case _:
            assert_never(change)


def _change_index(connection: sqlite3.Connection, change: _IndexChange) -> None:
    match change:
        case PutPart(part):
            connection.execute(INSERT_PART, sealed_part(connection, part_row(part)))
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
