"""Formatting of values for a terminal.

All text that a command prints goes through `console`, `Spinner` or `say`. They remove control
characters and interpret no markup, so that text of models, clients and servers is safe to print.
"""

import re
import sys
import time
from collections.abc import Iterable
from typing import Self

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress
from rich.segment import Segment
from rich.status import Status
from rich.table import Table
from rich.text import Text

from semantic.adapters.config.terminal import printable
from semantic.entrypoints.cli.client import Json

# Where an agent's KV cache is, by the name that the API has for it.
_PLACES = {"hot": "in memory", "warm": "on disk", "cold": "not cached"}
_PLACE_STYLES = {"hot": "red", "warm": "yellow", "cold": "blue"}
# Sources of a prompt's tokens, in the order in which a bar shows them.
SOURCES = {"hot": "still open", "pool": "from memory", "disk": "from disk", "computed": "computed"}
_SOURCE_STYLES = {"hot": "red", "pool": "magenta", "disk": "yellow", "computed": "bright_black"}
_BAR_WIDTH = 24
_SHARE = re.compile(r"(\d+) % of ")


class _PlainConsole(Console):
    """Removes control characters from all text."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


def console(*, is_error: bool = False, is_quiet: bool = False) -> Console:
    """Make a console without markup; it prints plain text if the stream is no terminal."""
    return _PlainConsole(
        stderr=is_error, quiet=is_quiet, highlight=False, markup=False, emoji=False
    )


def transfer_progress() -> Progress:
    """Make a progress bar for a file that is sent or received; shown on a terminal only."""
    screen = console(is_error=True)
    return Progress(console=screen, transient=True, disable=not screen.is_terminal)


def say(text: str, *, is_error: bool = False) -> None:
    """Print a line without control characters."""
    typer.echo(printable(text), err=is_error)


class Spinner:
    """A context manager that shows a spinner with a text on a terminal.

    Print nothing inside it: rich redirects standard output to standard error meanwhile.
    """

    def __init__(self, text: str) -> None:
        quiet = not sys.stderr.isatty()
        self._status = Status(Text(text), console=console(is_error=True, is_quiet=quiet))

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def show(self, text: str) -> None:
        """Replace the text; a share such as `35 % of 2,300 MB` gets a bar."""
        shown = Text(text)
        if share := _SHARE.search(text):
            done = round(_BAR_WIDTH * min(int(share[1]), 100) / 100)
            shown = Text.assemble(
                "━" * done, ("━" * (_BAR_WIDTH - done), "bright_black"), f" {text}"
            )
        self._status.update(shown)


def size(nbytes: float) -> str:
    """Format a number of bytes in B, KB, MB or GB (powers of 1024)."""
    for unit in ("B", "KB", "MB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GB"


def age(moment: float, now: float | None = None) -> str:
    """Format the time since a Unix timestamp in its largest unit."""
    seconds = max(0.0, (time.time() if now is None else now) - moment)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def shorten(text: str, width: int) -> str:
    """Return a text on one line, cut to `width` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 1]}…"


def table(*columns: str) -> Table:
    """Make an empty table; the prefix > marks a column of numbers, ~ one of long text."""
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


def place(state: Json) -> Text:
    """Say where an agent's KV cache is."""
    tier = str(state["tier"])
    return Text(_PLACES.get(tier, tier), _PLACE_STYLES.get(tier, ""))


def agents_table(agents: list[Json]) -> Table:
    """Make a table of agents, one per row."""
    made = table("agent", "cache", ">turns", ">tokens", ">memory", ">disk", ">used", "")
    for agent in agents:
        state = agent["state"]
        notes = {"busy": agent["busy"], "pinned": agent["settings"]["pin"]}
        made.add_row(
            agent["id"],
            place(state),
            f"{agent['turns']:,}",
            f"{agent['tokens']:,}",
            size(state["memory_bytes"]),
            size(state["disk_bytes"]),
            f"{age(agent['last_used'])} ago",
            Text(", ".join(name for name, applies in notes.items() if applies), "dim"),
        )
    return made


def reuse_bar(reuse: Json) -> Text:
    """Draw a bar of the sources of a prompt's tokens, with their numbers."""
    total = sum(reuse[kind] for kind in SOURCES)
    bar, end = Text(), 0.0
    for kind, style in _SOURCE_STYLES.items():
        start, end = round(end), end + _BAR_WIDTH * reuse[kind] / max(total, 1)
        bar.append("━" * (round(end) - start), style)
    shown = [f"{reuse[kind]:,} {words}" for kind, words in SOURCES.items() if reuse[kind]]
    return bar.append(f" {', '.join(shown)}", "dim")


def message_text(message: Json) -> str:
    """Return a message as plain text; tool calls, results and images become placeholders."""
    return "".join(_part_text(part) for part in message["content"])


def _part_text(part: Json) -> str:
    match part["type"]:
        case "text":
            return str(part["text"])
        case "tool_use":
            return f"[calls {part['name']}] "
        case "tool_result":
            return "[tool result] "
        case "image":
            return f"[image {part['width']}x{part['height']}] "
        case _:
            return ""
