"""`make soak`: agents talk for many minutes over all protocols; replies are right, nothing grows.

    python -m tests.chaos.soak --minutes 60 --seed 7
    python -m tests.chaos.soak --replies 100000

Agents think for uneven times, write short and long messages, leave streams, and begin anew. Every
reply is compared with that of a server which keeps nothing. Memory, file descriptors, threads and
disk are sampled; the exit status is 1 if a reply was wrong or a figure grew after the first half.
The second form counts replies and not minutes: nobody pauses, and one reply in ten is compared.
"""

import argparse
import contextlib
import random
import secrets
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
import psutil

from tests.attack.site import MAX_TOKENS, MODEL, PATIENT_SETTINGS, Server, Truth, client
from tests.chaos.talk import PATIENCE_S, Message, ask

NUM_AGENTS = 8
NUM_SETTLING = 5 * NUM_AGENTS  # replies before figures count
DISK_BUDGET_MB = 256  # of which the ledger takes a part
# Orphans are deleted after a minute instead of a week, so that the figures settle.
SETTINGS = {**PATIENT_SETTINGS, "upkeep_interval_s": 1, "orphan_ttl_h": 1 / 60}
OPTIONS = ("--disk-budget-mb", str(DISK_BUDGET_MB), "--memory-budget-mb", "2")
WORDS = [
    "rivers",
    "hills",
    "salt",
    "wool",
    "paper",
    "clocks",
    "books",
    "rails",
    "gates",
    "citizens",
    "trade",
    "coast",
]
# What a figure may be over its own of the first half: allocators, caches and pools of threads fill
# up, the latter until there are as many as ask at once.
ALLOWED = {"memory_mb": (1.10, 20.0), "descriptors": (1.0, 8.0), "threads": (1.0, NUM_AGENTS)}


def chat(http: httpx.Client, agent: str, said: Sequence[Message]) -> str:
    return ask(http, MODEL, said, MAX_TOKENS, agent)


def chat_stream(http: httpx.Client, agent: str, said: Sequence[Message]) -> str:
    return ask(http, MODEL, said, MAX_TOKENS, agent, is_stream=True)


def anthropic(http: httpx.Client, agent: str, said: Sequence[Message]) -> str:
    body = {
        "model": MODEL,
        "system": said[0]["content"],
        "messages": list(said[1:]),
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    reply = http.post("/v1/messages", json=body, headers={"x-agent-id": agent}).raise_for_status()
    return "".join(part.get("text", "") for part in reply.json()["content"])


def responses(http: httpx.Client, agent: str, said: Sequence[Message]) -> str:
    body = {
        "model": MODEL,
        "input": list(said),
        "max_output_tokens": MAX_TOKENS,
        "temperature": 0,
        "store": False,
    }
    reply = http.post("/v1/responses", json=body, headers={"x-agent-id": agent}).raise_for_status()
    outputs = [out for out in reply.json()["output"] if out["type"] == "message"]
    return "".join(part["text"] for out in outputs for part in out["content"])


def direct(http: httpx.Client, agent: str, said: Sequence[Message]) -> str:
    """The server keeps the conversation; what is new alone is sent."""
    if len(said) == 2:
        http.delete(f"/v1/agents/{agent}")
        made = {"id": agent, "system": said[0]["content"]}
        http.post("/v1/agents", json=made).raise_for_status()
    body = {"message": said[-1]["content"], "max_tokens": MAX_TOKENS, "temperature": 0}
    reply = http.post(f"/v1/agents/{agent}/generate", json=body).raise_for_status()
    return str(reply.json()["text"])


def raw(http: httpx.Client, agent: str, said: Sequence[Message]) -> str:
    """A prompt without a template."""
    prompt = "\n".join(message["content"] for message in said)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    headers = {"x-agent-id": agent} if agent else {}
    reply = http.post("/v1/completions", json=body, headers=headers).raise_for_status()
    return str(reply.json()["choices"][0]["text"])


Protocol = Callable[[httpx.Client, str, Sequence[Message]], str]
PROTOCOLS: tuple[Protocol, ...] = (chat, chat_stream, anthropic, responses, direct, raw)


@dataclass
class Tally:
    """What the agents of a soak did and found. They share it."""

    requests: Counter[str] = field(default_factory=Counter)
    num_compared: int = 0
    findings: list[str] = field(default_factory=list)


class Talker(threading.Thread):
    """One agent after the other, each with a conversation of its own."""

    def __init__(
        self, number: int, url: str, truth: str, tally: Tally, seed: str, *, is_hasty: bool
    ) -> None:
        super().__init__(daemon=True)
        self.is_over = threading.Event()
        self._number = number
        self._url = url
        self._truth = truth
        self._tally = tally
        self._pause_s = 0.0 if is_hasty else 0.05
        self._compared = 0.1 if is_hasty else 1.0
        self._dice = random.Random(seed)  # noqa: S311 - chance, not secrets

    def run(self) -> None:
        with client(self._url, PATIENCE_S) as http, client(self._truth, PATIENCE_S) as truth:
            conversation = 0
            while not self.is_over.is_set():
                conversation += 1
                try:
                    self._talk(http, truth, f"agent-{self._number}-{conversation % 40}")
                except (httpx.HTTPError, KeyError, ValueError) as error:
                    self._tally.findings.append(f"agent {self._number}: {error!r}")

    def _talk(self, http: httpx.Client, truth: httpx.Client, agent: str) -> None:
        """Some turns of one conversation; it may be left, forgotten, or dropped from memory."""
        dice = self._dice
        system = f"You are one of {NUM_AGENTS} agents. " + self._words(dice.choice((5, 40, 200)))
        said: list[Message] = [{"role": "system", "content": system}]
        protocol = dice.choice(PROTOCOLS)
        for _ in range(dice.randint(1, 6)):
            said.append({"role": "user", "content": self._words(dice.choice((3, 10, 120)))})
            reply = protocol(http, agent, said)
            self._tally.requests[protocol.__name__] += 1
            if dice.random() < self._compared:
                right = (raw if protocol is raw else chat)(truth, "", said)
                self._tally.num_compared += 1
                if reply != right:
                    self._tally.findings.append(f"{agent}: a wrong reply over {protocol.__name__}")
            said.append({"role": "assistant", "content": reply})
            if self.is_over.wait(dice.expovariate(1) * self._pause_s):
                return
        self._leave(http, agent, said)

    def _leave(self, http: httpx.Client, agent: str, said: Sequence[Message]) -> None:
        match self._dice.randrange(4):
            case 0:
                body = {"model": MODEL, "messages": list(said), "stream": True, "max_tokens": 500}
                headers = {"x-agent-id": agent}
                path = "/v1/chat/completions"
                with http.stream("POST", path, json=body, headers=headers) as stream:
                    next(stream.iter_lines())
                self._tally.requests["left"] += 1
            case 1:
                http.post(f"/v1/agents/{agent}/evict")
            case 2:
                http.delete(f"/v1/agents/{agent}")

    def _words(self, number: int) -> str:
        return " ".join(self._dice.choices(WORDS, k=number))


def sample(server: Server) -> dict[str, float]:
    """What a server takes now."""
    process, disk = psutil.Process(server.pid), 0
    for path in server.cache.rglob("*"):
        with contextlib.suppress(OSError):  # it may go meanwhile
            disk += path.stat().st_size if path.is_file() else 0
    return {
        "memory_mb": process.memory_info().rss / 2**20,
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "disk_mb": disk / 2**20,
    }


def growth(samples: Sequence[dict[str, float]]) -> list[str]:
    """Say which figures are higher at the end than they were halfway."""
    found = []
    quarter = max(1, len(samples) // 4)
    before, after = samples[quarter : 2 * quarter] or samples[:1], samples[-quarter:]
    for name, (factor, slack) in ALLOWED.items():
        was, now = (median(s[name] for s in part) for part in (before, after))
        if now > was * factor + slack:
            found.append(f"{name} grew from {was:.1f} to {now:.1f}")
    most = max(s["disk_mb"] for s in samples)
    if most > DISK_BUDGET_MB * 1.1:
        found.append(f"{most:.1f} MB on a disk of {DISK_BUDGET_MB} MB")
    return found


def soak(work: Path, seconds: float, seed: int, most_replies: int | None = None) -> int:
    """Talk for so long, or until so many replies came; returns the exit status."""
    truth = Truth(work / "truth").start()
    server = Server(work / "soak", *OPTIONS, settings=SETTINGS).start()
    tally = Tally()
    urls = str(server.http.base_url), str(truth.server.http.base_url)
    talkers = [
        Talker(n, *urls, tally, f"{seed}/{n}", is_hasty=most_replies is not None)
        for n in range(NUM_AGENTS)
    ]
    for talker in talkers:
        talker.start()
    while tally.requests.total() < NUM_SETTLING and server.is_alive and not tally.findings:
        time.sleep(0.1)  # connections and threads are made at first
    until, samples = time.monotonic() + seconds, [sample(server)]
    most = most_replies or float("inf")
    while time.monotonic() < until and tally.requests.total() < most:
        if not server.is_alive or tally.findings:
            break
        time.sleep(min(5.0, seconds / 20))
        samples.append(sample(server))
        if len(samples) % 60 == 0:  # someone may watch
            figures = " ".join(f"{name} {figure:.1f}" for name, figure in samples[-1].items())
            sys.stdout.write(f"  {tally.requests.total()} replies, {figures}\n")
            sys.stdout.flush()
    for talker in talkers:
        talker.is_over.set()
    for talker in talkers:
        talker.join(PATIENCE_S)
    status = server.stop() if server.is_alive else -1
    truth.close()
    findings = [*tally.findings, *growth(samples)]
    if status != 0:
        findings.append(f"the server ended with status {status}")
    report(tally, samples, findings, seed)
    return 1 if findings else 0


def report(
    tally: Tally, samples: Sequence[dict[str, float]], findings: Sequence[str], seed: int
) -> None:
    """Print what was done, how the figures went, and what was found."""
    counts = f"{tally.requests.total()} replies, {tally.num_compared} compared"
    lines = [f"soak: seed {seed}, {counts}: {dict(tally.requests)}"]
    for name in samples[0]:
        row = [f"{s[name]:.1f}" for s in samples[:: max(1, len(samples) // 8)]]
        lines.append(f"  {name:<12} {' '.join(row)}")
    lines += [f"  FOUND: {finding}" for finding in findings[:20]] or ["  nothing was found"]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak in a directory of its own."""
    parser = argparse.ArgumentParser(prog="soak")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--replies", type=int, default=None, help="stop after so many instead")
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args(arguments)
    seed = given.seed if given.seed is not None else secrets.randbelow(10**6)
    with tempfile.TemporaryDirectory(prefix="semantic-soak-") as work:
        seconds = given.minutes * 60 if given.replies is None else float("inf")
        return soak(Path(work), seconds, seed, given.replies)


if __name__ == "__main__":
    raise SystemExit(main())
