"""Makes a whole ledger of a damaged one and its backup.

Restoring the backup alone would lose all turns that were acknowledged since it was made, and
SQLite's own recovery is not in Python's library. So, row by row, what the damaged ledger still
holds goes before the backup, which is older. A table that can be read from end to end is taken as
it is, so that what was removed stays removed. (A ledger that was cut is older than its backup, and
comes second.) The index of parts is not rescued: KV cache files say all of it again.
"""

import sqlite3
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from semantic.adapters.outbound.cipher import Cipher
from semantic.adapters.outbound.ledger.encryption import from_stored, to_stored
from semantic.adapters.outbound.ledger.files import (
    READ_ERRORS,
    connect,
    connect_read_only,
    is_damage,
    move,
    remove,
    sync_file,
)
from semantic.adapters.outbound.ledger.schema import (
    AGENTS,
    CHECKED_TABLES,
    OLDEST_FIRST,
    DamagedLedgerError,
    NewerLedgerError,
    Row,
    Table,
    agent_row,
    latest_version,
    migrate,
    num_logged,
    read_agent,
    set_num_logged,
    version_of,
    without_checksum,
)
from semantic.domain.agents import Agent

_Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Rescue:
    """What can be done about a ledger that is damaged or gone.

    Attributes:
        ledger: Where the ledger is, or should be.
        backup: Where its copy is, if there is one.
        timeout_s: How long to wait for another program's lock.
    """

    ledger: Path
    backup: Path
    timeout_s: float
    cipher: Cipher | None = None

    def run(self, reason: str, *, is_backup_newer: bool = False) -> str:
        """Put a whole ledger in place; returns what happened, for people.

        What was there is moved aside, never removed; a backup that could not be read too, since the
        next one would take its place.

        Raises:
            NewerLedgerError: a newer server wrote the backup.
            sqlite3.Error: another program holds a lock, or the disk fails.
        """
        fresh = self.ledger.with_name(f"{self.ledger.name}.rescue")
        remove(fresh)
        sources = (self.ledger, self.backup)
        with closing(connect(fresh, self.timeout_s, self.cipher)) as target:
            target.execute("PRAGMA auto_vacuum = INCREMENTAL")
            target.execute("PRAGMA synchronous = OFF")
            migrate(target, 0)
            num_cut, unsound = self._fill(target, sources[::-1] if is_backup_newer else sources)
            what = _contents(target, num_cut)
        sync_file(fresh)
        origin = self._origin(is_sound=self.backup not in unsound)
        aside = move_aside(self.ledger)
        if self.backup in unsound:
            origin += move_aside(self.backup)
        fresh.replace(self.ledger)
        sync_file(self.ledger.parent)
        return f"{self.ledger.name} {reason}{aside}; restored {what}{origin}."

    def _fill(self, target: sqlite3.Connection, paths: Sequence[Path]) -> tuple[int, list[Path]]:
        """Copy all rows that can be had; returns how many agents lost turns, and what is bad."""
        with ExitStack() as stack:
            opened = {
                p: stack.enter_context(_opened(p, self.timeout_s, self.cipher)) for p in paths
            }
            unsound = {path for path, source in opened.items() if source is None}
            target.execute("BEGIN")
            for table in CHECKED_TABLES:
                for path, source in opened.items():
                    if source is None:
                        continue
                    if _copy(source, target, table):
                        break
                    unsound.add(path)
            num_cut = _mend_agents(target, opened[self.backup])
            set_num_logged(target, max(map(_num_logged, opened.values())))
            target.execute("COMMIT")
        return num_cut, [path for path in unsound if path.exists()]

    def _origin(self, *, is_sound: bool) -> str:
        if not self.backup.exists():
            return "; there was no backup"
        at = datetime.fromtimestamp(self.backup.stat().st_mtime, UTC)
        when = f"the backup of {at:%Y-%m-%d %H:%M} UTC"
        return f", with {when}" if is_sound else f"; {when} was damaged too"


def move_aside(path: Path) -> str:
    """Move a database out of the way; returns a clause that says so."""
    stamp = time.strftime("%Y%m%dT%H%M%S")
    aside = path.with_name(f"{path.name}.damaged-{stamp}")
    for number in range(2, 1000):
        if not aside.exists():
            break
        aside = path.with_name(f"{path.name}.damaged-{stamp}-{number}")
    is_there = path.exists()
    move(path, aside)
    return f" and is now {aside.name}" if is_there else ""


def _num_logged(source: sqlite3.Connection | None) -> int:
    try:
        return num_logged(source) if source else 0
    except READ_ERRORS as error:
        if not is_damage(error):
            raise
        return 0


def _opened(
    path: Path, timeout_s: float, cipher: Cipher | None
) -> AbstractContextManager[sqlite3.Connection | None]:
    """Open what may be a ledger; None if it is not."""
    if not path.exists() or not path.stat().st_size:
        return nullcontext()
    # Reading only leaves the files as they are, for whoever wants to look closer.
    connection = connect_read_only(path, timeout_s, cipher)
    try:
        version = version_of(connection)
        if 0 < version < latest_version():
            connection.close()
            connection = connect(path, timeout_s, cipher)
            migrate(connection, version)
    except (*READ_ERRORS, NewerLedgerError) as error:
        connection.close()
        if not is_damage(error):
            raise
        return nullcontext()
    # Text that is none belongs to a row whose checksum is wrong; those after it may be right.
    connection.text_factory = lambda data: data.decode(errors="replace")
    return closing(connection)


def _copy(source: sqlite3.Connection, target: sqlite3.Connection, table: Table) -> bool:
    """Add the rows that `target` lacks; returns whether all could be read and are sound."""
    query = table.select(OLDEST_FIRST)
    if _copy_rows(source, target, table, query):
        return True
    # From the other end, up to where the damage is.
    _copy_rows(source, target, table, f"{query} DESC")
    return False


def _copy_rows(
    source: sqlite3.Connection, target: sqlite3.Connection, table: Table, query: str
) -> bool:
    is_whole = True
    try:
        for row in source.execute(query):
            if _is_good(source, table, row):
                target.execute(table.fill, row)
            else:
                is_whole = False
    except READ_ERRORS as error:
        if not is_damage(error):
            raise
        return False
    return is_whole


def _is_good(source: sqlite3.Connection, table: Table, row: Row) -> bool:
    """Whether a row is as it was written, and would not stop the server from starting."""
    try:
        if table is AGENTS:
            read_agent(from_stored(source, table, row))
        else:
            without_checksum(table, row)  # to copy it takes no key
    except DamagedLedgerError:
        return False
    return True


def _mend_agents(target: sqlite3.Connection, backup: sqlite3.Connection | None) -> int:
    """Take back agents to where all their turns are there; returns how many."""
    parents = {
        (tenant, turn_id): parent
        for tenant, turn_id, parent in target.execute("SELECT tenant, id, parent FROM turns")
    }
    cut = [agent for agent in _agents(target).values() if not _is_rooted(agent, parents)]
    older = _agents(backup) if cut and backup else {}
    for agent in cut:
        mended = older.get((agent.tenant, agent.id))
        if mended is None or not _is_rooted(mended, parents):
            mended = replace(agent, head=None, num_turns=0)
        target.execute(AGENTS.put, to_stored(target, AGENTS, agent_row(mended)))
    return len(cut)


def _agents(source: sqlite3.Connection) -> dict[_Key, Agent]:
    """Read the agents that are sound, up to where there is damage."""
    found: dict[_Key, Agent] = {}
    try:
        for row in source.execute(AGENTS.select(OLDEST_FIRST)):
            with suppress(DamagedLedgerError):
                agent = read_agent(from_stored(source, AGENTS, row))
                found[agent.tenant, agent.id] = agent
    except READ_ERRORS as error:
        if not is_damage(error):
            raise
    return found


def _is_rooted(agent: Agent, parents: dict[_Key, str | None]) -> bool:
    """Whether all turns from the agent's head to its first are there."""
    seen: set[str] = set()
    turn = agent.head
    while turn is not None:
        if turn in seen or (agent.tenant, turn) not in parents:
            return False
        seen.add(turn)
        turn = parents[agent.tenant, turn]
    return True


def _contents(target: sqlite3.Connection, num_cut: int) -> str:
    (num_agents,) = target.execute("SELECT count(*) FROM agents").fetchone()
    (num_turns,) = target.execute("SELECT count(*) FROM turns").fetchone()
    cut = f", of which {num_cut} lost turns," if num_cut else ""
    return f"{_count(num_agents, 'agent')}{cut} and {_count(num_turns, 'turn')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
