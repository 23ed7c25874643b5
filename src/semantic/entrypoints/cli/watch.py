"""`semantic top` and `semantic bench`: monitor a running server and measure its latency."""

import platform
import statistics
import time
import uuid
from bisect import bisect_right
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.panel import Panel
from rich.progress import track
from rich.table import Table
from rich.text import Text

from semantic import __version__
from semantic.entrypoints.cli.client import Json, ServerClient, ServerError
from semantic.entrypoints.cli.flags import AsJson, print_json, with_server
from semantic.entrypoints.cli.screen import SOURCES, agents_table, console, size, table

_MAX_AGENTS = 100
_BAR = 30
_FIXED_LINES = 14
_MESSAGE = "Go on."
_WORDS = ("The", "agent", "reads", "a", "note", "about", "the", "harbour", "and", "the", "tide.")
_WAYS = {"computed": "computed", "disk": "from disk", "memory": "from memory", "hot": "still open"}


# -- top -------------------------------------------------------------------------------------------


@with_server
def top(
    client: ServerClient,
    *,
    interval: Annotated[float, typer.Option(min=0.1, help="seconds between updates")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="print once and exit")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch a server: memory, disk, reuse of the KV cache, and agents. Ctrl-C stops."""
    screen = console()
    seen = read_server(client)
    if as_json:
        print_json(seen)
    elif once or not screen.is_terminal:
        screen.print(draw(seen, None, interval, _MAX_AGENTS))
    else:
        _watch(client, seen, interval)


def read_server(client: ServerClient) -> Json:
    """Read the health, cache statistics and agents of a server."""
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
                seen = read_server(client)
            except ServerError as error:
                gone = Panel(Text(error.message), title="waiting", border_style="red")
                live.update(gone, refresh=True)
                time.sleep(interval)


def draw(seen: Json, before: Json | None, interval: float, rows: int) -> RenderableType:
    """Render one screen: the server, its budgets and at most `rows` agents.

    Rates are computed from `before`, the values one `interval` (in seconds) earlier, if given.
    """
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
    return Group(Panel(head, title=Text(title), title_align="left"), agents_table(listed), *foot)


def _budgets(cache: Json) -> Table:
    memory, disk = cache["memory"], cache["disk"]
    made = table("", "~", ">")
    bars = {
        "memory": (memory["used"] + memory["working"], memory["budget"]),
        "disk": (disk["used"] + disk["other"], disk["budget"]),
        "writing": (disk["queue_used"], disk["queue_budget"]),
    }
    if device := cache["device"]:
        bars["device"] = (device["used"], device["budget"])
    for name, (used, budget) in bars.items():
        made.add_row(name, _Bar(used, budget), f"{size(used)} of {size(budget)}")
    return made


@dataclass(frozen=True, slots=True)
class _Bar:
    """A bar of the used share of a budget; it shrinks on a narrow terminal."""

    used: int
    budget: int

    def __rich_measure__(self, _: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(0, min(_BAR, options.max_width))

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        share, width = self.used / self.budget if self.budget else 0.0, options.max_width
        filled = min(width, round(width * share))
        bar = Text("█" * filled, "red" if share > 0.9 else "green")
        yield bar.append("·" * (width - filled), "dim")


def _reuse(cache: Json) -> str:
    rates, reuse = cache["hit_rates"], cache["reuse"]
    if rates["all"] is None:
        return "no requests yet"
    sources = ", ".join(f"{rates[kind]:.0%} {SOURCES[kind]}" for kind in ("hot", "pool", "disk"))
    return f"{rates['all']:.0%} of prompts ({sources}); {reuse['computed']:,} tokens computed"


def _now(cache: Json, before: Json | None, interval: float) -> str:
    running = f"{cache['live_requests']} running, {cache['replies']:,} replies"
    if before is None:
        return running
    changed = {
        name: value - before["cache"]["counters"].get(name, 0)
        for name, value in cache["counters"].items()
    }
    blocks = ", ".join(f"{name} {number / interval:.0f}" for name, number in changed.items())
    return f"{running}; blocks per second: {blocks}"


# -- bench -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The results of one benchmark run, as medians over its rounds.

    Attributes:
        prompt_tokens: Tokens of the prompt that was computed; each later one has a few more.
        first_token_s: Seconds to the first token, by where the prompt's KV cache was.
        rate: Decoded tokens per second of a single reply.
    """

    version: str
    machine: str
    model: str
    backend: str
    prompt_tokens: int
    first_token_s: dict[str, float]
    rate: float


@with_server
def bench(
    client: ServerClient,
    *,
    tokens: Annotated[int, typer.Option(min=64, help="length of the prompt in tokens")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="number of rounds; results are medians")] = 3,
    as_json: AsJson = False,
) -> None:
    """Measure the time to the first token: computed, from disk, from memory, still open.

    Creates a few agents, measures them and deletes them; other agents are not affected.
    """
    result = measure(client, tokens, rounds, is_shown=not as_json)
    if as_json:
        print_json(asdict(result))
    else:
        _print_result(result)


def measure(
    client: ServerClient, tokens: int, rounds: int, *, is_shown: bool = False
) -> BenchResult:
    """Run the rounds; each creates a new agent, so that no part of its prompt is cached."""
    health = client.call("GET", "/health")
    waits: dict[str, list[float]] = {way: [] for way in _WAYS}
    rates: list[float] = []
    lengths: list[int] = []
    numbers = range(rounds)
    for _ in track(numbers, "measuring", console=console(is_error=True), disable=not is_shown):
        agent = f"bench-{uuid.uuid4().hex[:8]}"
        system = _prompt(client, health["model"], tokens)
        client.call("POST", "/v1/agents", json={"id": agent, "system": system})
        try:
            waits["computed"].append(_timed(client, agent, 1)[0])
            (turn,) = client.call("GET", f"/v1/agents/{agent}/turns")["data"]
            lengths.append(turn["usage"]["prompt_tokens"])
            _evict(client, agent)
            waits["disk"].append(_timed(client, agent, 1)[0])
            _evict(client, agent)
            client.call("POST", f"/v1/agents/{agent}/prefetch")
            waits["memory"].append(_timed(client, agent, 1)[0])
            waits["hot"].append(_timed(client, agent, 1)[0])
            rates.append(_timed(client, agent, 64)[1])
        finally:
            client.call("DELETE", f"/v1/agents/{agent}")
    return BenchResult(
        __version__,
        f"{platform.machine()}, {platform.system()}",
        health["model"],
        health["backend"],
        round(statistics.median(lengths)),
        {way: round(statistics.median(found), 4) for way, found in waits.items()},
        round(statistics.median(rates), 1),
    )


def _prompt(client: ServerClient, model: str, tokens: int) -> str:
    """Make a system prompt whose first turn has `tokens` tokens, or as few less as words permit."""
    name = uuid.uuid4().hex[:8]  # so that no other prompt begins like it

    def text(num_words: int) -> str:
        return " ".join((name, *islice(cycle(_WORDS), num_words)))

    def num_tokens(num_words: int) -> int:
        messages = [{"role": "user", "content": _MESSAGE}]
        body = {"model": model, "system": text(num_words), "messages": messages}
        return int(client.call("POST", "/v1/messages/count_tokens", json=body)["input_tokens"])

    return text(bisect_right(range(tokens), tokens, lo=1, key=num_tokens) - 1)


def _evict(client: ServerClient, agent: str) -> None:
    """Evict an agent's KV cache to disk, once all of it has been written there."""
    for _ in range(100):
        state = client.call("GET", f"/v1/agents/{agent}")["state"]
        if state["disk_tokens"] >= state["tokens"]:
            break
        time.sleep(0.1)
    client.call("POST", f"/v1/agents/{agent}/evict", json={"to": "disk"})


def _timed(client: ServerClient, agent: str, max_tokens: int) -> tuple[float, float]:
    """Return the seconds to a reply's first token, and the tokens per second after it."""
    body = {"message": _MESSAGE, "stream": True, "max_tokens": max_tokens, "ignore_eos": True}
    started, first, rate = time.perf_counter(), 0.0, 0.0
    for event in client.events("POST", f"/v1/agents/{agent}/generate", json=body):
        now = time.perf_counter()
        if event["type"] == "error":
            raise ServerError(event["error"]["message"])
        if event["type"] == "finished" and first:
            rate = (event["usage"]["completion_tokens"] - 1) / (now - first)
        if event["type"] in ("text", "thinking", "finished"):
            first = first or now
    return first - started, rate


def _print_result(result: BenchResult) -> None:
    made = table("prompt", ">first token", ">")
    slowest = result.first_token_s["computed"]
    for way, seconds in result.first_token_s.items():
        ratio = f"{slowest / seconds:.0f}x" if way != "computed" else ""
        made.add_row(_WAYS[way], f"{seconds * 1000:,.0f} ms", ratio)
    made.add_row("one stream", f"{result.rate:,.0f} tokens/s", "")
    title = f"Semantic {result.version}: {result.model} on {result.backend}, {result.machine}"
    foot = f"a prompt of {result.prompt_tokens:,} tokens; medians"
    console().print(Panel.fit(made, title=Text(title), subtitle=Text(foot)))
