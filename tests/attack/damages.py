"""Ways to damage a cache directory, each a function of the directory and of chance.

What lies in `outside` and every file that a damage adds is foreign: a server must leave it alone.
"""

import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

NOTE = b"not the server's"


@dataclass(frozen=True)
class Place:
    """A cache directory, and a directory beside it that is none of its business."""

    cache: Path
    outside: Path

    @property
    def blocks(self) -> list[Path]:
        return sorted(self.cache.glob("blocks/*/*/*.safetensors"))

    @property
    def ledger(self) -> Path:
        return self.cache / "ledger.db"

    @property
    def backups(self) -> list[Path]:
        return sorted(self.cache.glob("ledger.backup*.db"))


DoDamage = Callable[[Place, random.Random], None]


@dataclass(frozen=True)
class Damage:
    """One way of damaging.

    Attributes:
        may_lose: Turns may be gone, if `/health` says so.
        may_refuse: The start may be refused, if it says why.
    """

    name: str
    do: DoDamage
    may_lose: bool = False
    may_refuse: bool = False


# -- bytes of a file --------------------------------------------------------------------------


def _cut(path: Path, dice: random.Random) -> None:
    os.truncate(path, dice.randrange(path.stat().st_size))


def _empty(path: Path, _: random.Random) -> None:
    os.truncate(path, 0)


def _flip(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(dice.choice((1, 1, 30))):
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def _zero(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = dice.randrange(len(content))
    end = min(len(content), start + dice.choice((16, 512, 4096)))
    content[start:end] = bytes(end - start)
    path.write_bytes(content)


def _lengthen(path: Path, dice: random.Random) -> None:
    with path.open("ab") as file:
        file.write(dice.randbytes(dice.choice((1, 64, 5000))))


def _swell(path: Path, _: random.Random) -> None:
    os.truncate(path, 2**30)  # a hole, which takes no room


def _scramble(path: Path, dice: random.Random) -> None:
    path.write_bytes(dice.randbytes(path.stat().st_size))


def _as_text(path: Path, _: random.Random) -> None:
    path.write_bytes(b"these are somebody's notes\n" * 40)


def _long_header(path: Path, _: random.Random) -> None:
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def _remove(path: Path, _: random.Random) -> None:
    path.unlink()


BYTE_DAMAGES: Sequence[Callable[[Path, random.Random], None]] = (
    _cut,
    _empty,
    _flip,
    _zero,
    _lengthen,
    _swell,
    _scramble,
    _as_text,
    _long_header,
    _remove,
)


# -- block files ------------------------------------------------------------------------------


def _to_some_blocks(change: Callable[[Path, random.Random], None]) -> DoDamage:
    def do(place: Place, dice: random.Random) -> None:
        blocks = place.blocks
        for path in dice.sample(blocks, dice.choice((1, len(blocks) // 2, len(blocks)))):
            change(path, dice)

    return do


def _swap(place: Place, dice: random.Random) -> None:
    one, other = dice.sample(place.blocks, 2)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def _rename(place: Place, dice: random.Random) -> None:
    """Give a block a name that is well made, but not its own."""
    path = dice.choice(place.blocks)
    name = dice.randbytes(32).hex()
    target = path.parent.parent / name[:2] / f"{name}.full.safetensors"
    target.parent.mkdir(exist_ok=True)
    path.rename(target)


def _misplace(place: Place, dice: random.Random) -> None:
    path = dice.choice(place.blocks)
    target = path.parent.parent / "zz" / path.name
    target.parent.mkdir(exist_ok=True)
    path.rename(target)


def _block_is_directory(place: Place, dice: random.Random) -> None:
    path = dice.choice(place.blocks)
    path.unlink()
    path.mkdir()
    (path / "notes.txt").write_bytes(NOTE)


def _block_is_link(place: Place, dice: random.Random) -> None:
    path = dice.choice(place.blocks)
    target = place.outside / "linked.safetensors"
    shutil.copy(path, target)
    path.unlink()
    path.symlink_to(target)


def _block_is_pipe(place: Place, dice: random.Random) -> None:
    path = dice.choice(place.blocks)
    path.unlink()
    os.mkfifo(path)  # opening it to read blocks for ever


def _block_is_link_to_endless(place: Place, dice: random.Random) -> None:
    path = dice.choice(place.blocks)
    path.unlink()
    path.symlink_to("/dev/zero")


def _blocks_gone(place: Place, _: random.Random) -> None:
    shutil.rmtree(place.cache / "blocks")


def _blocks_is_file(place: Place, _: random.Random) -> None:
    shutil.rmtree(place.cache / "blocks")
    (place.cache / "blocks").write_bytes(NOTE)


def _blocks_is_link(place: Place, _: random.Random) -> None:
    """The directory of blocks, and much else, lies elsewhere."""
    target = place.outside / "elsewhere"
    (place.cache / "blocks").rename(target)
    for depth in ("notes.txt", "a/notes.txt", "a/b/notes.txt"):
        (target / depth).parent.mkdir(parents=True, exist_ok=True)
        (target / depth).write_bytes(NOTE)
    (place.cache / "blocks").symlink_to(target)


def _branch_is_link(place: Place, dice: random.Random) -> None:
    """A directory among the blocks leads out."""
    root = dice.choice(place.blocks).parent.parent
    (root / "ff-link").symlink_to(place.outside)
    (root.parent / "0123456789abcdef").symlink_to(place.outside)


def _foreign_files(place: Place, dice: random.Random) -> None:
    root = place.blocks[0].parent.parent
    name = dice.randbytes(32).hex()
    names = (
        "blocks/notes.txt",
        "blocks/.hidden",
        "blocks/model.safetensors",
        "blocks/a/b/c/deep",
        f"blocks/{root.name}/notes.txt",
        f"blocks/{root.name}/00/README.md",
        f"blocks/{root.name}/00/draft.tmp",
        f"blocks/{root.name}/{name[:2]}/{name}.txt",
        "thesis.doc",
        "blocks/aa/bb/thesis.doc",
        "notes/of/mine.txt",
    )
    for path in dice.sample(names, 6):
        (place.cache / path).parent.mkdir(parents=True, exist_ok=True)
        (place.cache / path).write_bytes(NOTE)


def _unreadable(place: Place, dice: random.Random) -> None:
    dice.choice(place.blocks).chmod(0)
    dice.choice(place.blocks).chmod(0o200)


# -- the ledger -------------------------------------------------------------------------------


def _ledger(change: Callable[[Path, random.Random], None]) -> DoDamage:
    return lambda place, dice: change(place.ledger, dice)


def _both_copies(change: Callable[[Path, random.Random], None]) -> DoDamage:
    def do(place: Place, dice: random.Random) -> None:
        for path in (place.ledger, *place.backups):
            if path.exists():
                change(path, dice)

    return do


def _write_ahead_log(change: Callable[[Path, random.Random], None]) -> DoDamage:
    def do(place: Place, dice: random.Random) -> None:
        path = Path(f"{place.ledger}-wal")
        if path.exists() and path.stat().st_size:
            change(path, dice)

    return do


def _all_of_the_ledger_gone(place: Place, _: random.Random) -> None:
    for path in place.cache.glob("ledger.*"):
        path.unlink()


def _flip_turn(place: Place, dice: random.Random) -> None:
    """Flip a bit in what was said in a turn; no page looks wrong."""
    with closing(sqlite3.connect(place.ledger)) as ledger:
        rows = ledger.execute("SELECT id, body FROM turns").fetchall()
        turn_id, body = dice.choice(sorted(rows))
        content = bytearray(body.encode())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        change = "UPDATE turns SET body = CAST(? AS TEXT) WHERE id = ?"
        ledger.execute(change, (bytes(content), turn_id))
        ledger.commit()


def _spoil_rows(place: Place, dice: random.Random) -> None:
    """Change a value in every row of a table behind the server's back."""
    values = ("{", b"\xff\xfe", -1, 2**62, None, '{"labels": [["a", {"x": 1}]]}', "abc")
    with closing(sqlite3.connect(place.ledger)) as ledger:
        found = ledger.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        tables = sorted(name for (name,) in found if not name.startswith("sqlite_"))
        table = dice.choice(tables)
        columns = [row[1] for row in ledger.execute(f"PRAGMA table_info({table})")]
        column = dice.choice(columns)
        change = f"UPDATE {table} SET {column} = ? WHERE rowid % 2 = 0"  # noqa: S608
        try:
            ledger.execute(change, [dice.choice(values)])
        except sqlite3.Error:
            return  # a constraint guards it, or the table has no row ids
        ledger.commit()


def _another_database(place: Place, _: random.Random) -> None:
    place.ledger.unlink()
    with closing(sqlite3.connect(place.ledger)) as ledger:
        ledger.execute("CREATE TABLE recipes (name TEXT)")
        ledger.execute("INSERT INTO recipes VALUES ('soup')")
        ledger.commit()


def _ledger_is_directory(place: Place, _: random.Random) -> None:
    place.ledger.unlink()
    place.ledger.mkdir()
    (place.ledger / "notes.txt").write_bytes(NOTE)


def _ledger_is_link(place: Place, _: random.Random) -> None:
    target = place.outside / "notes.txt"
    place.ledger.unlink()
    place.ledger.symlink_to(target)


def _lock_is_link(place: Place, _: random.Random) -> None:
    lock = place.cache / "lock"
    lock.unlink(missing_ok=True)
    lock.symlink_to(place.outside / "notes.txt")


def _lock_is_text(place: Place, _: random.Random) -> None:
    (place.cache / "lock").write_text('{"pid": "one", ')


def _lock_gone(place: Place, _: random.Random) -> None:
    (place.cache / "lock").unlink(missing_ok=True)


BLOCK_DAMAGES = tuple(
    Damage(f"block{change.__name__}", _to_some_blocks(change)) for change in BYTE_DAMAGES
)
OTHER_DAMAGES = (
    Damage("two blocks change places", _swap),
    Damage("a block under another name", _rename),
    Damage("a block in another directory", _misplace),
    Damage("a block is a directory", _block_is_directory),
    Damage("a block is a link", _block_is_link),
    Damage("a block is a pipe", _block_is_pipe),
    Damage("a block is a link to an endless file", _block_is_link_to_endless),
    Damage("blocks are gone", _blocks_gone),
    Damage("blocks is a file", _blocks_is_file, may_refuse=True),
    Damage("blocks is a link", _blocks_is_link, may_refuse=True),
    Damage("a directory of blocks is a link", _branch_is_link, may_refuse=True),
    Damage("foreign files", _foreign_files),
    Damage("the lock is a link", _lock_is_link, may_refuse=True),
    Damage("the lock is text", _lock_is_text),
    Damage("the lock is gone", _lock_gone),
)
LEDGER_DAMAGES = (
    *(
        Damage(f"ledger{change.__name__}", _ledger(change), may_lose=True)
        for change in BYTE_DAMAGES
    ),
    *(
        Damage(f"ledger and backup{change.__name__}", _both_copies(change), may_lose=True)
        for change in (_cut, _empty, _zero, _scramble, _as_text, _remove)
    ),
    *(
        Damage(f"write-ahead log{change.__name__}", _write_ahead_log(change), may_lose=True)
        for change in (_cut, _empty, _flip, _zero, _scramble, _remove)
    ),
    Damage("all files of the ledger gone", _all_of_the_ledger_gone, may_lose=True),
    Damage("a bit of a turn is flipped", _flip_turn, may_lose=True),
    Damage("rows are spoilt", _spoil_rows, may_lose=True),
    Damage("another database", _another_database, may_lose=True, may_refuse=True),
    Damage("the ledger is a directory", _ledger_is_directory, may_lose=True, may_refuse=True),
    Damage("the ledger is a link", _ledger_is_link, may_lose=True, may_refuse=True),
)
# The superuser reads and writes whatever the mode is.
PERMISSION_DAMAGES = () if os.geteuid() == 0 else (Damage("unreadable blocks", _unreadable),)
DAMAGES = (*BLOCK_DAMAGES, *OTHER_DAMAGES, *PERMISSION_DAMAGES, *LEDGER_DAMAGES)
