"""How values look on a terminal."""

import sys
import time

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from semantic.entrypoints.cli.client import Json

TIER_STYLES = {"hot": "red", "warm": "yellow", "cold": "blue"}
# A reply's tokens by where they came from, in the order of a bar.
REUSE_STYLES = {"hot": "red", "pool": "magenta", "disk": "yellow", "computed": "bright_black"}
_BAR_WIDTH = 24
_COMMANDS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def console(*, is_error: bool = False) -> Console:
    """A terminal; where there is none, plain text is written."""
    return Console(stderr=is_error, highlight=False)


def working(text: str) -> Status:
    """Shows, at a terminal, that something is going on, for as long as its context lasts.

    Print nothing inside it: what goes to standard output would come out on standard error.
    """
    return Status(text, console=Console(stderr=True, quiet=not sys.stderr.isatty()))


def size(nbytes: float) -> str:
    """Bytes in the largest unit that leaves a whole number before the point."""
    for unit in ("B", "KB", "MB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GB"


def age(moment: float, now: float | None = None) -> str:
    """How long ago a moment was."""
    seconds = max(0.0, (time.time() if now is None else now) - moment)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def printable(text: str) -> str:
    r"""Text without what would command the terminal: a model may have written anything.

    Example:
        >>> printable("one\n\x1b[2Jtwo")
        'one\n[2Jtwo'
    """
    return text.translate(_COMMANDS)


def shorten(text: str, width: int) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 1]}…"


def table(*columns: str) -> Table:
    """An empty table; a column that begins with > is for numbers, one with ~ for long text."""
    made = Table(
        box=None,
        pad_edge=False,
        header_style="bold",
        show_header=any(column.strip(">~") for column in columns),
    )
    for column in columns:
        is_number, is_text = column.startswith(">"), column.startswith("~")
        made.add_column(
            column.strip(">~"),
            justify="right" if is_number else "left",
            no_wrap=not is_text,
            overflow="fold" if is_text else "ellipsis",
        )
    return made


def tier(name: str) -> Text:
    """Hot, warm or cold."""
    return Text(name, TIER_STYLES.get(name, ""))


def agents_table(agents: list[Json]) -> Table:
    """Agents, one a line."""
    made = table("agent", "tier", ">turns", ">tokens", ">memory", ">disk", ">used", "")
    for agent in agents:
        state = agent["state"]
        notes = [
            *(["busy"] if agent["busy"] else []),
            *(["pinned"] if agent["settings"]["pin"] else []),
        ]
        made.add_row(
            agent["id"],
            tier(state["tier"]),
            f"{agent['turns']:,}",
            f"{agent['tokens']:,}",
            size(state["memory_bytes"]),
            size(state["disk_bytes"]),
            f"{age(agent['last_used'])} ago",
            Text(", ".join(notes), "dim"),
        )
    return made


def reuse_bar(reuse: Json) -> Text:
    """Where a prompt's tokens came from, as a bar with its numbers."""
    total = sum(reuse[kind] for kind in REUSE_STYLES)
    bar, place = Text(), 0.0
    for kind, style in REUSE_STYLES.items():
        start, place = round(place), place + _BAR_WIDTH * reuse[kind] / max(total, 1)
        bar.append("━" * (round(place) - start), style)
    shown = [f"{reuse[kind]:,} {kind}" for kind in REUSE_STYLES if reuse[kind]]
    return bar.append(f" {', '.join(shown)}", "dim")


def message_text(message: Json) -> str:
    """What a message says, in words."""
    return printable("".join(_part_text(part) for part in message["content"]))


def _part_text(part: Json) -> str:
    match part["type"]:
        case "text":
            return str(part["text"])
        case "tool_use":
            return f"[calls {part['name']}] "
        case "tool_result":
            return "[tool result] "
        case _:
            return ""
