"""`semantic top`: a live view of a server, for terminals."""

import time
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from semantic.entrypoints.cli.client import Json, ServerClient, ServerError
from semantic.entrypoints.cli.flags import AsJson, print_json, with_server
from semantic.entrypoints.cli.screen import agents_table, console, size, table

_MAX_AGENTS = 100
_BAR = 30
_FIXED_LINES = 14


@with_server
def top(
    client: ServerClient,
    *,
    interval: Annotated[float, typer.Option(min=0.1, help="seconds between looks")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="look once and end")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch a server: memory, disk, what is reused, and its agents. Ctrl-C ends."""
    screen = console()
    seen = look(client)
    if as_json:
        print_json(seen)
    elif once or not screen.is_terminal:
        screen.print(draw(seen, None, interval, _MAX_AGENTS))
    else:
        _watch(client, seen, interval)


def look(client: ServerClient) -> Json:
    """What a server says of itself now."""
    agents = client.call("GET", "/v1/agents", params={"limit": _MAX_AGENTS})
    health = client.call("GET", "/health")
    return {"health": health, "cache": client.call("GET", "/v1/cache"), "agents": agents}


def _watch(client: ServerClient, seen: Json, interval: float) -> None:
    screen = console()
    with Live(console=screen, screen=True, auto_refresh=False) as live:
        before: Json | None = None
        while True:
            rows = max(screen.height - _FIXED_LINES, 3)
            live.update(draw(seen, before, interval, rows), refresh=True)
            time.sleep(interval)
            before = seen
            try:
                seen = look(client)
            except ServerError as error:
                gone = Panel(Text(error.message), title="waiting", border_style="red")
                live.update(gone, refresh=True)
                time.sleep(interval)


def draw(seen: Json, before: Json | None, interval: float, rows: int) -> RenderableType:
    """One screen: the server, its budgets, its agents."""
    health, cache, agents = seen["health"], seen["cache"], seen["agents"]
    title = f"{health['model']} on {health['backend']}: {health['state']}"
    problem = health.get("problem") or cache["disk"]["problem"]
    head = Group(
        _budgets(cache),
        Text(f"reuse   {_reuse(cache)}"),
        Text(f"now     {_now(cache, before, interval)}"),
        *([Text(problem, "red")] if problem else []),
    )
    listed = agents["data"][:rows]
    more = agents["total"] - len(listed)
    foot = [Text(f"and {more:,} more", "dim")] if more > 0 else []
    return Group(Panel(head, title=title, title_align="left"), agents_table(listed), *foot)


def _budgets(cache: Json) -> Table:
    memory, disk = cache["memory"], cache["disk"]
    made = table("", "", ">")
    bars = {
        "memory": (memory["used"] + memory["working"], memory["budget"]),
        "disk": (disk["used"] + disk["other"], disk["budget"]),
        "writing": (disk["queue_used"], disk["queue_budget"]),
    }
    for name, (used, budget) in bars.items():
        made.add_row(name, _bar(used, budget), f"{size(used)} of {size(budget)}")
    return made


def _bar(used: int, budget: int) -> Text:
    filled = min(_BAR, round(_BAR * used / budget)) if budget else 0
    style = "red" if budget and used > 0.9 * budget else "green"
    return Text("█" * filled, style).append("·" * (_BAR - filled), "dim")


def _reuse(cache: Json) -> str:
    rates, reuse = cache["hit_rates"], cache["reuse"]
    if rates["all"] is None:
        return "nothing was asked yet"
    tiers = ", ".join(f"{rates[tier]:.0%} {tier}" for tier in ("hot", "pool", "disk"))
    return f"{rates['all']:.0%} of prompts ({tiers}); {reuse['computed']:,} tokens computed"


def _now(cache: Json, before: Json | None, interval: float) -> str:
    running = f"{cache['live_requests']} running, {cache['replies']:,} replies"
    if before is None:
        return running
    changed = {
        name: value - before["cache"]["counters"].get(name, 0)
        for name, value in cache["counters"].items()
    }
    blocks = ", ".join(f"{name} {number / interval:.0f}" for name, number in changed.items())
    return f"{running}; blocks a second: {blocks}"
