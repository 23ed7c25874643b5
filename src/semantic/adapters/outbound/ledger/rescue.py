"""Rebuilds a ledger from a damaged one and its backups.

Restoring only the backup would lose all turns that were acknowledged since it was made, and
Python's library does not include SQLite's own recovery. Rows are therefore merged one by one, and
those that are readable in the damaged ledger take precedence over the older backups. A table that
is completely readable is taken as it is, so that removed rows stay removed. (A truncated ledger is
older than its backup; then the backup takes precedence.) The index of parts is not rescued, since
it can be rebuilt from the KV cache files.
"""

import itertools
import logging
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
    OLDEST_FIRST,
    RESCUED_TABLES,
    TURNS,
    DamagedLedgerError,
    DamagedRowError,
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

_log = logging.getLogger(__name__)
_Key = tuple[str, str]
_MAX_TOLD = 3
_BLOCKS = "blocks"  # the KV cache's directory, beside the ledger


@dataclass(frozen=True, slots=True)
class Rescue:
    """Repairs a ledger that is damaged or missing; `backups`, newest first, may be missing too."""

    ledger: Path
    backups: tuple[Path, ...]
    timeout_s: float
    cipher: Cipher | None = None

    def run(self, reason: str, *, is_backup_newer: bool = False) -> str:
        """Replace the ledger by a rebuilt one; returns a message.

        The old ledger is moved aside, never removed. So is an unreadable backup, since the next
        backup would replace it.

        Raises:
            NewerLedgerError: a newer server wrote the backup.
            sqlite3.Error: another program holds a lock, or the disk fails.
        """
        fresh = self.ledger.with_name(f"{self.ledger.name}.rescue")
        remove(fresh)
        sources = [self.ledger, *self.backups]
        if is_backup_newer:
            sources[:2] = sources[1::-1]
        with closing(connect(fresh, self.timeout_s, self.cipher)) as target:
            target.execute("PRAGMA auto_vacuum = INCREMENTAL")
            target.execute("PRAGMA synchronous = OFF")
            migrate(target, 0)
            num_cut, unsound = self._fill(target, sources)
            what = _contents(target, num_cut)
        sync_file(fresh)
        origin = self._origin(unsound)
        aside = move_aside(self.ledger)
        for backup in self.backups:
            if backup in unsound:
                origin += move_aside(backup)
        fresh.replace(self.ledger)
        sync_file(self.ledger.parent)
        return f"{self.ledger.name} {reason}{aside}; restored {what}{origin}."

    def total_loss(self) -> str:
        """Describe the loss of the ledger and all backups; empty if there was no ledger.

        Block files prove that there was one: only a server with a ledger writes blocks.
        """
        blocks = self.ledger.parent / _BLOCKS
        if not blocks.is_dir() or not any(blocks.iterdir()):
            return ""
        return (
            f"{self.ledger.name} and its backups were missing, although {_BLOCKS} holds KV cache: "
            "all earlier agents and turns are lost. To get them back, stop the server and restore "
            "these files from a copy of the cache directory."
        )

    def _fill(self, target: sqlite3.Connection, paths: Sequence[Path]) -> tuple[int, list[Path]]:
        """Copy all sound rows; returns how many agents lost turns, and the damaged files."""
        with ExitStack() as stack:
            opened = {
                p: stack.enter_context(_opened(p, self.timeout_s, self.cipher)) for p in paths
            }
            unsound = {path for path, source in opened.items() if source is None}
            lost: list[Row] = []
            target.execute("BEGIN")
            for table in RESCUED_TABLES:
                for path, source in opened.items():
                    if source is None:
                        continue
                    if _copy(source, target, table, lost):
                        break
                    unsound.add(path)
            num_cut = _mend_agents(target, lost, [opened[path] for path in self.backups])
            set_num_logged(target, max(map(_num_logged, opened.values())))
            target.execute("COMMIT")
        return num_cut, [path for path in unsound if path.exists()]

    def restore_row(self, ledger: sqlite3.Connection, damage: DamagedRowError) -> str:
        """Restore a damaged row from the newest backup that has it; mutates the ledger.

        Returns a message; empty if no backup has the row, or if the ledger no longer has a row with
        that key: either the row was removed since and stays removed, or its key is damaged.
        """
        if ledger.execute(damage.table.find, damage.key).fetchone() is None:
            return ""
        for path in self.backups:
            with _opened(path, self.timeout_s, self.cipher) as backup:
                row = _sound_row(backup, damage) if backup else None
            if row is not None:
                ledger.execute(damage.table.put, row)
                return f"{damage}; restored it from {_backup_name(path)}"
        return ""

    def _origin(self, unsound: Sequence[Path]) -> str:
        there = [path for path in self.backups if path.exists()]
        if not there:
            return "; there was no backup"
        whole = [path for path in there if path not in unsound]
        if whole:
            return f", with {_backup_name(whole[0])}"
        return f"; {_backup_name(there[0])} was damaged too"


class DamagedRows:
    """Records damaged rows and how each was handled."""

    def __init__(self, rescue: Rescue) -> None:
        self._rescue = rescue
        self._told: dict[Row, str] = {}

    @property
    def problem(self) -> str:
        """Message about damaged rows; empty if there were none. Names at most `_MAX_TOLD`."""
        told = list(self._told.values())
        more = [f"and {len(told) - _MAX_TOLD} more"] if len(told) > _MAX_TOLD else []
        return "; ".join(told[:_MAX_TOLD] + more)

    def clear(self) -> None:
        self._told.clear()

    def restore(
        self, ledger: sqlite3.Connection, damages: Sequence[DamagedRowError]
    ) -> list[DamagedRowError]:
        """Restore damaged rows in the caller's transaction; returns those that no backup has."""
        lost = []
        for damage in damages:
            if _sound_row(ledger, damage) is not None:
                continue  # it was rewritten since
            done = self._rescue.restore_row(ledger, damage)
            if not done:
                lost.append(damage)
            told = done or f"{damage}, and no backup has it"
            key = (damage.table.name, *damage.key)
            if self._told.get(key) != told:
                self._told[key] = told
                _log.warning("the ledger is damaged: %s", told)
        return lost


def _backup_name(path: Path) -> str:
    at = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return f"the backup of {at:%Y-%m-%d %H:%M} UTC"


def _sound_row(source: sqlite3.Connection, damage: DamagedRowError) -> Row | None:
    try:
        found: Row | None = source.execute(damage.table.find, damage.key).fetchone()
        if found is not None:
            without_checksum(damage.table, found)
    except READ_ERRORS as error:
        if not is_damage(error):
            raise
        return None
    return found


def move_aside(path: Path) -> str:
    """Rename a database as damaged; returns a clause for a message."""
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
    """Open and migrate a ledger; None if it is missing, empty or damaged."""
    if not path.exists() or not path.stat().st_size:
        return nullcontext()
    # Opening read-only leaves the files unchanged for later inspection.
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
    return closing(connection)


def _copy(
    source: sqlite3.Connection, target: sqlite3.Connection, table: Table, lost: list[Row]
) -> bool:
    """Add missing rows to `target`, damaged turns to `lost`; returns whether all were sound."""
    query = table.select(OLDEST_FIRST)
    bad: list[Row] = []
    if _copy_rows(source, target, table, query, bad):
        return True
    # Read backwards, up to the damage.
    _copy_rows(source, target, table, f"{query} DESC", bad)
    if table is TURNS:
        lost += bad
    return False


def _copy_rows(
    source: sqlite3.Connection,
    target: sqlite3.Connection,
    table: Table,
    query: str,
    bad: list[Row],
) -> bool:
    is_whole = True
    try:
        for row in source.execute(query):
            if _is_good(source, table, row):
                target.execute(table.fill, row)
            else:
                is_whole = False
                bad.append(row)
    except READ_ERRORS as error:
        if not is_damage(error):
            raise
        return False
    return is_whole


def _is_good(source: sqlite3.Connection, table: Table, row: Row) -> bool:
    """Whether a row matches its checksum and, if an agent, can be decoded at start."""
    try:
        if table is AGENTS:
            read_agent(from_stored(source, table, row))
        else:
            without_checksum(table, row)  # copying needs no key
    except DamagedLedgerError:
        return False
    return True


def _mend_agents(
    target: sqlite3.Connection,
    lost: Sequence[Row],
    backups: Sequence[sqlite3.Connection | None],
) -> int:
    """Rewind agents to a turn whose ancestors all exist; returns how many needed it.

    Args:
        lost: Damaged rows of turns; their parent columns may still be right.
        backups: Hold earlier heads of the agents.
    """
    parents = {
        (tenant, turn_id): parent
        for tenant, turn_id, parent in target.execute("SELECT tenant, id, parent FROM turns")
    }
    claimed = {(row[1], row[0]): row[2] for row in lost}
    cut = [agent for agent in _agents(target).values() if not _is_rooted(agent, parents)]
    older = [_agents(backup) for backup in backups if cut and backup]
    for agent in cut:
        before = [known.get((agent.tenant, agent.id)) for known in older]
        choices = [_cut_back(agent, parents, claimed)]
        choices += [known for known in before if known and _is_rooted(known, parents)]
        mended = max(choices, key=lambda choice: choice.num_turns)
        target.execute(AGENTS.put, to_stored(target, AGENTS, agent_row(mended)))
    return len(cut)


def _cut_back(
    agent: Agent, parents: dict[_Key, str | None], claimed: dict[_Key, str | None]
) -> Agent:
    """The agent rewound to its latest turn whose ancestors all exist."""
    log: dict[str, bool] = {}  # whether each turn exists, latest first
    turn = agent.head
    while turn is not None:
        if turn in log:
            log.clear()
            break
        key = (agent.tenant, turn)
        log[turn] = key in parents
        turn = parents[key] if key in parents else claimed.get(key)
    kept = [*itertools.takewhile(log.__getitem__, reversed(log))]
    return replace(agent, head=kept[-1] if kept else None, num_turns=len(kept))


def _agents(source: sqlite3.Connection) -> dict[_Key, Agent]:
    """Read the sound agents, up to the first unreadable page."""
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
    """Whether all turns from the agent's head to its first exist."""
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
