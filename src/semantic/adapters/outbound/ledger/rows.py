"""How rows of the ledger stand for domain values.

Rows that cannot be made again from anything else end with a checksum: SQLite notices a page that
is no page, but not a page whose text has changed. It knows no files and no transactions.
"""

import zlib
from collections.abc import Iterable
from typing import Any, TypeAlias

from semantic.adapters.outbound.ledger import codec as ledger_json
from semantic.adapters.outbound.ledger.schema import (
    AGENTS,
    REPLAYS,
    TENANTS,
    TURNS,
    DamagedLedgerError,
    Table,
)
from semantic.domain.agents import Agent, Pointer, Turn
from semantic.domain.blocks import BlockName, BlockPart, pack_tokens, unpack_tokens
from semantic.domain.spec import LayerKind
from semantic.ports.storage import PutReplay, Tenant

Row: TypeAlias = tuple[Any, ...]


def is_sound(table: Table, row: Row) -> bool:
    """Whether a row is as it was written."""
    return bool(row[-1] == _checksum(table, row[:-1]))


def tenant_row(tenant: Tenant) -> Row:
    """Stand for a tenant."""
    return sealed(TENANTS, (tenant.id, tenant.salt))


def read_tenant(row: Row) -> Tenant:
    """Undo `tenant_row`; raises `DamagedLedgerError`."""
    name, salt, _ = _checked(TENANTS, row)
    return Tenant(name, salt)


def agent_row(agent: Agent) -> Row:
    """Stand for an agent."""
    body = ledger_json.encode_agent(agent)
    return sealed(AGENTS, (agent.tenant, agent.id, agent.head, float(agent.last_used), body))


def read_agent(row: Row) -> Agent:
    """Undo `agent_row`; raises `DamagedLedgerError`."""
    tenant, name, _, _, body, _ = _checked(AGENTS, row)
    try:
        return ledger_json.decode_agent(tenant, name, body)
    except ValueError as error:
        raise DamagedLedgerError(f"the row of agent {name}: {error}") from error


def turn_row(tenant: str, turn: Turn) -> Row:
    """Stand for a turn of a tenant."""
    body = ledger_json.encode_turn(ledger_json.TurnBody.of(turn))
    pointer = turn.pointer
    place = (pointer.root, pointer.block, pointer.num_tokens) if pointer else (None, None, None)
    return sealed(
        TURNS,
        (
            *(turn.id, tenant, turn.parent, turn.agent_id),
            *(turn.num_tokens, float(turn.created_at), *place, int(turn.is_durable)),
            *(pack_tokens(turn.tokens), body),
        ),
    )


def read_turn(row: Row) -> Turn:
    """Undo `turn_row`; raises `DamagedLedgerError`."""
    name, _, parent, agent, num_tokens, created_at, *place, is_durable, tokens, body, _ = _checked(
        TURNS, row
    )
    try:
        said = ledger_json.decode_turn(body)
    except ValueError as error:
        raise DamagedLedgerError(f"the row of turn {name}: {error}") from error
    return Turn(
        id=name,
        parent=parent,
        agent_id=agent,
        messages=said.messages,
        tokens=unpack_tokens(tokens),
        num_tokens=num_tokens,
        pointer=None if place[1] is None else read_pointer(tuple(place)),
        usage=said.usage,
        created_at=created_at,
        reuse=said.reuse,
        num_messages=said.num_messages,
        digest=said.digest,
        is_durable=bool(is_durable),
        num_dropped=said.num_dropped,
        divergence=said.divergence,
        model=said.model,
        reason=said.reason,
    )


def read_pointer(row: Row) -> Pointer:
    """Make a pointer of root, block and number of tokens."""
    root, block, num_tokens = row
    return Pointer(BlockName(root), BlockName(block), num_tokens)


def replay_row(replay: PutReplay) -> Row:
    """Stand for the ids of a reply."""
    tokens = pack_tokens(replay.tokens)
    return sealed(REPLAYS, (replay.tenant, replay.key, tokens, float(replay.at)))


def read_replay(row: Row) -> tuple[int, ...]:
    """Read the ids; raises `DamagedLedgerError`."""
    return unpack_tokens(_checked(REPLAYS, row)[2])


def part_row(part: BlockPart) -> Row:
    """Stand for a part; it needs no checksum, since its file says it all again."""
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


def sealed(table: Table, values: Row) -> Row:
    """Add the checksum to a row."""
    return (*values, _checksum(table, values))


def _checked(table: Table, row: Row) -> Row:
    if not is_sound(table, row):
        raise DamagedLedgerError(f"a row of {table.name} is not as it was written")
    return row


def _checksum(table: Table, values: Row) -> int:
    crc = 0
    for index, value in enumerate(values):
        if index not in table.unsealed:
            data = value if isinstance(value, bytes) else str(value).encode()
            # Lengths keep ("ab", "c") and ("a", "bc") apart.
            crc = zlib.crc32(data, zlib.crc32(b"%d:" % len(data), crc))
    return crc
