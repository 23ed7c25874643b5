"""Compaction of a long conversation: on its own KV cache, and as a server that recomputes does it.

Starts the real server. An agent has a long conversation and is compacted; then comes its next turn.
For comparison, the same two requests are sent with another first word, so that nothing matches the
KV cache: the conversation with the instructions to summarise it, with a reply as long as the
summary, and the shortened conversation with the next message.

    python -m benchmarks.bench_compaction [--quick] [--tokens 2000 6000] [--rounds 3]
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.client import Client, Messages
from benchmarks.common import serving
from benchmarks.report import Report, run
from benchmarks.starter import TEXT
from semantic.adapters.config.settings import STARTER_MODEL

INSTRUCTIONS = "Summarise our conversation in two sentences."
TEXT_TOKENS = 90  # of TEXT, roughly
NUM_TURNS = 8
NEXT = "Go on."


@dataclass(frozen=True)
class Measured:
    """Seconds and computed tokens of a compaction, and of the turn after it."""

    compact_s: float
    first_token_s: float
    num_computed: int


@dataclass
class Talk:
    """A conversation of an agent."""

    http: httpx.Client
    client: Client
    name: str

    def begin(self, num_tokens: int) -> None:
        system = f"{self.name}: you write about cities."
        self.http.post("/v1/agents", json={"id": self.name, "system": system}).raise_for_status()
        for number in range(NUM_TURNS):
            text = TEXT * max(num_tokens // NUM_TURNS // TEXT_TOKENS, 1)
            body = {"message": f"{number}. {text}", "max_tokens": 16, "temperature": 0}
            self.http.post(f"/v1/agents/{self.name}/generate", json=body).raise_for_status()

    def messages(self, name: str, first_word: str) -> Messages:
        """The agent's conversation, with another first word."""
        turns = self.http.get(f"/v1/agents/{name}/turns", params={"limit": 100}).json()["data"]
        found: Messages = []
        for turn in turns:  # the latest first
            said = [{"role": m["role"], "content": _text(m)} for m in turn["messages"]]
            found = [*said, *found]
            if turn["starts_anew"]:
                break
        return [{**found[0], "content": f"{first_word} {found[0]['content']}"}, *found[1:]]

    def warm(self) -> tuple[Measured, dict[str, Any]]:
        """Compact the agent, and measure its branch's next turn."""
        body = {"id": f"{self.name}-2", "instructions": INSTRUCTIONS, "temperature": 0}
        started = time.perf_counter()
        answer = self.http.post(f"/v1/agents/{self.name}/compact", json=body | {"keep_turns": 1})
        elapsed = time.perf_counter() - started
        made: dict[str, Any] = answer.raise_for_status().json()
        first, computed = self._next_turn(made["agent"]["id"])
        num_computed = made["reuse"]["computed"] + made["computed_tokens"] + computed
        return Measured(elapsed, first, num_computed), made

    def _next_turn(self, name: str) -> tuple[float, int]:
        body = {"message": NEXT, "max_tokens": 4, "temperature": 0, "stream": True}
        first, computed, started = 0.0, 0, time.perf_counter()
        with self.http.stream("POST", f"/v1/agents/{name}/generate", json=body) as stream:
            for line in stream.iter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {}
                if event.get("type") == "text":
                    first = first or time.perf_counter() - started
                computed = event.get("reuse", {}).get("computed", computed)
        return first, computed

    async def cold(self, made: dict[str, Any], word: str) -> Measured:
        """Send the same two requests where nothing of them is cached."""
        kept = made["kept_messages"]
        older = self.messages(self.name, word)[:-kept]
        asked = [*older, {"role": "user", "content": INSTRUCTIONS}]
        summary = await self.client.ask(asked, made["usage"]["completion_tokens"])
        shorter = self.messages(made["agent"]["id"], word + "!")[: 2 + kept]
        after = await self.client.ask([*shorter, {"role": "user", "content": NEXT}], 4)
        computed = [reply.num_prompt - reply.num_reused for reply in (summary, after)]
        return Measured(summary.last, after.first, sum(computed))


def _text(message: dict[str, Any]) -> str:
    return "".join(part.get("text", "") for part in message["content"])


def compare(report: Report, port: int, num_tokens: int) -> None:
    """Measure both ways in turns, with a conversation of its own in each round."""
    url = f"http://127.0.0.1:{port}"
    rounds: list[tuple[Measured, Measured]] = []
    with httpx.Client(base_url=url, timeout=None, trust_env=False) as http:  # noqa: S113 - it waits
        for number in range(report.options.rounds):
            talk = Talk(http, Client(f"{url}/v1"), f"agent-{num_tokens}-{number}")
            talk.begin(num_tokens)
            warm, made = talk.warm()
            cold = asyncio.run(talk.cold(made, f"word{number}"))
            sizes = f"{made['tokens_before']:,} tokens became {made['tokens_after']:,}"
            report.note(f"{sizes}: {warm.num_computed:,} and {cold.num_computed:,} tokens computed")
            rounds.append((warm, cold))
    kinds: dict[str, Callable[[Measured], float]] = {
        "compaction": lambda one: one.compact_s,
        "next turn's first token": lambda one: one.first_token_s,
        "both": lambda one: one.compact_s + one.first_token_s,
    }
    for what, seconds_of in kinds.items():
        pairs = [(seconds_of(warm), seconds_of(cold)) for warm, cold in rounds]
        report.add(f"{num_tokens}: {what}, on the KV cache", [a for a, _ in pairs], "s")
        report.add(f"{num_tokens}: {what}, recomputed", [b for _, b in pairs], "s")
        report.add(f"{num_tokens}: {what}, times faster", [b / a for a, b in pairs], least=1.0)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--tokens", type=int, nargs="*", default=[2000, 6000])
    parser.add_argument("--rounds", type=int, default=3)


def measure(report: Report) -> None:
    """Start the server, and compact conversations of each length."""
    options = report.options
    if report.is_quick:
        options.tokens, options.rounds = [1000], 1
    report.settings.update({name: str(value) for name, value in vars(options).items()})
    with (
        tempfile.TemporaryDirectory() as cache,
        serving("--model", STARTER_MODEL, settings={"cache_dir": cache}) as port,
    ):
        for num_tokens in options.tokens:
            compare(report, port, num_tokens)


if __name__ == "__main__":
    sys.exit(run("compaction", measure, add_options=add_options))
