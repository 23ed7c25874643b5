"""`make stress`: ten agents, fifty rapid requests each, memory at 80, 90 and 100 % of need.

    python -m tests.chaos.stress --agents 10 --requests 50

Their prompts are as long as the agents together need that share of the memory for the KV cache.
Every request is answered, or refused with 429, 503 or 529; a reply is the right one; latencies are
printed. The exit status is 1 if anything else happened.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

import httpx

from tests.attack.site import MAX_TOKENS, MODEL, PATIENT_SETTINGS, Server, Truth, client
from tests.chaos.talk import PATIENCE_S, ask

LOADS = (80, 90, 100)
REFUSALS = frozenset({429, 503, 529})
NUM_QUESTIONS = 3
_BYTES_A_TOKEN = 4  # of the fake model, whose tokens are bytes of text
_MEMORY_MB = 1
_OVERHEAD = 300  # tokens beside the text: the template, the reply, the block it grows by


@dataclass
class Outcome:
    """What became of the requests at one load."""

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def prompt(agent: int, question: int, num_tokens: int) -> str:
    """A long text of one agent, with a question at its end."""
    text = f"Agent {agent} knows much. "
    return (text * (num_tokens // len(text) + 1))[:num_tokens] + f" Question {question}?"


def talk(url: str, truth: Truth, agent: int, num_requests: int, num_tokens: int) -> Outcome:
    """All requests of one agent, one right after the other."""
    outcome = Outcome()
    with client(url, PATIENCE_S) as http:
        for number in range(num_requests):
            said = [{"role": "user", "content": prompt(agent, number % NUM_QUESTIONS, num_tokens)}]
            started = time.monotonic()
            try:
                reply = ask(http, MODEL, said, MAX_TOKENS, f"agent-{agent}")
            except httpx.HTTPStatusError as error:
                outcome.statuses[error.response.status_code] += 1
                continue
            outcome.statuses[200] += 1
            outcome.seconds.append(time.monotonic() - started)
            if number < NUM_QUESTIONS and reply != truth.reply(said):
                outcome.wrong.append(f"agent {agent}, request {number}")
    return outcome


def press(work: Path, truth: Truth, load: int, num_agents: int, num_requests: int) -> bool:
    """Serve all agents at one load; whether all went well."""
    budget = _MEMORY_MB * 2**20 // _BYTES_A_TOKEN
    num_tokens = budget * load // 100 // num_agents - _OVERHEAD
    options = ("--memory-budget-mb", str(_MEMORY_MB))
    server = Server(work / f"load-{load}", *options, settings=PATIENT_SETTINGS).start()
    url = str(server.http.base_url)
    with ThreadPoolExecutor(num_agents) as threads:
        outcomes = list(
            threads.map(
                lambda agent: talk(url, truth, agent, num_requests, num_tokens), range(num_agents)
            )
        )
    is_well = server.http.get("/health").status_code == 200
    is_well &= server.stop() == 0
    statuses = sum((outcome.statuses for outcome in outcomes), Counter[int]())
    seconds = [second for outcome in outcomes for second in outcome.seconds]
    wrong = [what for outcome in outcomes for what in outcome.wrong]
    is_well &= statuses.total() == num_agents * num_requests
    is_well &= not wrong and statuses.keys() <= {200, *REFUSALS}
    late = quantiles(seconds, n=20)[-1] if len(seconds) > 1 else 0.0
    sys.stdout.write(
        f"  {load:>3} %: {dict(statuses)}, half within {median(seconds or [0]):.2f} s, 19 of 20 "
        f"within {late:.2f} s, all within {max(seconds, default=0):.2f} s"
        f"{f', WRONG: {wrong[:5]}' if wrong else ''}{'' if is_well else ', FAILED'}\n"
    )
    sys.stdout.flush()
    return is_well


def stress(work: Path, num_agents: int, num_requests: int, loads: Sequence[int] = LOADS) -> int:
    """Try all loads; returns the exit status."""
    truth = Truth(work / "truth").start()
    try:
        results = [press(work, truth, load, num_agents, num_requests) for load in loads]
    finally:
        truth.close()
    return 0 if all(results) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Press in a directory of its own."""
    parser = argparse.ArgumentParser(prog="stress")
    parser.add_argument("--agents", type=int, default=10)
    parser.add_argument("--requests", type=int, default=50)
    given = parser.parse_args(arguments)
    sys.stdout.write(f"stress: {given.agents} agents, {given.requests} requests each\n")
    with tempfile.TemporaryDirectory(prefix="semantic-stress-") as work:
        return stress(Path(work), given.agents, given.requests)


if __name__ == "__main__":
    raise SystemExit(main())
