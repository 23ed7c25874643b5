"""`semantic bench`: what remembering saves on this machine, in a minute, on a card to share."""

import platform
import statistics
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.panel import Panel
from rich.progress import track

from semantic import __version__
from semantic.entrypoints.cli.client import Json, ServerClient, ServerError
from semantic.entrypoints.cli.flags import AsJson, print_json, with_server
from semantic.entrypoints.cli.screen import console, table

_SENTENCE = "The {0} agent reads note {1} about the harbour, the tide and the price of salt. "
_WAYS = ("computed", "disk", "memory", "hot")


@dataclass(frozen=True, slots=True)
class Card:
    """The figures of one run; seconds to the first token are medians.

    Attributes:
        first_token_s: By where the prompt's state was.
        rate: Tokens a second while one reply is written.
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
    tokens: Annotated[int, typer.Option(min=64, help="about so long a prompt")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="medians of so many")] = 3,
    as_json: AsJson = False,
) -> None:
    """Measure the wait for a first token: prompt computed, from disk, from memory, still open.

    A few agents are made, measured and deleted; others' state is left alone.
    """
    card = measure(client, tokens, rounds, is_shown=not as_json)
    if as_json:
        print_json(asdict(card))
    else:
        _print_card(card)


def measure(client: ServerClient, tokens: int, rounds: int, *, is_shown: bool = False) -> Card:
    """Run the rounds; each has an agent of its own, so that nothing is known of its prompt."""
    health = client.call("GET", "/health")
    waits: dict[str, list[float]] = {way: [] for way in _WAYS}
    rates: list[float] = []
    lengths: list[int] = []
    numbers = range(rounds)
    for _ in track(numbers, "measuring", console=console(is_error=True), disable=not is_shown):
        agent = f"bench-{uuid.uuid4().hex[:8]}"
        client.call("POST", "/v1/agents", json={"id": agent, "system": _prompt(tokens)})
        try:
            waits["computed"].append(_first_token(client, agent))
            _put(client, agent, "disk")
            waits["disk"].append(_first_token(client, agent))
            _put(client, agent, "disk")
            client.call("POST", f"/v1/agents/{agent}/prefetch")
            waits["memory"].append(_first_token(client, agent))
            waits["hot"].append(_first_token(client, agent))
            rates.append(_rate(client, agent))
            lengths.append(client.call("GET", f"/v1/agents/{agent}")["tokens"])
        finally:
            client.call("DELETE", f"/v1/agents/{agent}")
    return Card(
        __version__,
        f"{platform.machine()}, {platform.system()}",
        health["model"],
        health["backend"],
        round(statistics.median(lengths)),
        {way: round(statistics.median(found), 4) for way, found in waits.items()},
        round(statistics.median(rates), 1),
    )


def _prompt(tokens: int) -> str:
    """A prompt of about so many tokens that nobody has sent before."""
    name = uuid.uuid4().hex[:8]
    # About sixteen tokens a sentence in most vocabularies.
    return "".join(_SENTENCE.format(name, number) for number in range(max(tokens // 20, 1)))


def _put(client: ServerClient, agent: str, to: str) -> None:
    """Take an agent's state out of memory; it must be on disk for that."""
    for _ in range(100):
        state = client.call("GET", f"/v1/agents/{agent}")["state"]
        if state["disk_tokens"] >= state["tokens"]:
            break
        time.sleep(0.1)
    client.call("POST", f"/v1/agents/{agent}/evict", json={"to": to})


def _first_token(client: ServerClient, agent: str) -> float:
    started, first = time.perf_counter(), 0.0
    for event in _reply(client, agent, 1):
        if event["type"] in ("text", "thinking", "finished"):
            first = first or time.perf_counter()
    return first - started


def _rate(client: ServerClient, agent: str) -> float:
    """Tokens a second from the first to the last."""
    first, number, last = 0.0, 0, 0.0
    for event in _reply(client, agent, 64):
        if event["type"] == "finished":
            number, last = event["usage"]["completion_tokens"] - 1, time.perf_counter()
        elif event["type"] in ("text", "thinking"):
            first = first or time.perf_counter()
    return number / (last - first) if first else 0.0


def _reply(client: ServerClient, agent: str, max_tokens: int) -> Iterator[Json]:
    body = {"message": "Go on.", "stream": True, "max_tokens": max_tokens, "ignore_eos": True}
    for event in client.events("POST", f"/v1/agents/{agent}/generate", json=body):
        if event["type"] == "error":
            raise ServerError(event["error"]["message"])
        yield event


def _print_card(card: Card) -> None:
    made = table("prompt's state", ">first token", ">")
    slowest = card.first_token_s["computed"]
    for way, seconds in card.first_token_s.items():
        ratio = f"{slowest / seconds:.0f}x" if way != "computed" else ""
        made.add_row(way, f"{seconds * 1000:,.0f} ms", ratio)
    made.add_row("one stream", f"{card.rate:,.0f} tokens/s", "")
    title = f"Semantic {card.version}: {card.model} on {card.backend}, {card.machine}"
    foot = f"{card.prompt_tokens:,} tokens of conversation; medians"
    console().print(Panel.fit(made, title=title, subtitle=foot))
