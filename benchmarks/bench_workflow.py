"""The main workload of this server: concurrent agents, several turns, and a restart.

Agents share a system prompt (a quarter of the prompt) and have their own notes. All send their
first turn at once, over HTTP, then some more turns each. Then the server restarts, and each sends
one more turn. Each phase runs against all servers before the next begins, so that noise of the
machine affects all of them.

    python -m benchmarks.bench_workflow      # 5 agents, memory on and off, llama.cpp if it is built
    python -m benchmarks.bench_workflow --tokens 4096 --turns 1    # takes a quarter of an hour
    python -m benchmarks.bench_workflow --agents 1 3 5 10 --tokens 1024 \
        --systems on off transformers llama.cpp mlx_lm
    python -m benchmarks.bench_workflow --peer-url http://127.0.0.1:8080/v1 --peer-model NAME

With memory off, the same server keeps nothing on disk and no sequence open, and each request begins
with different words, so that no two prompts share a prefix. Each turn then computes the whole
prompt. If prompts are long, this server gets only the turn after the restart, with the first
server's conversations.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from benchmarks.client import Client, Messages, Reply, continued, said
from benchmarks.peer import peer_path, peer_version
from benchmarks.report import ROOT, Report, run
from benchmarks.systems import (
    System,
    children,
    llama_cpp,
    mlx_server,
    other,
    ours,
    peak_mb,
    transformers_serve,
)
from semantic.adapters.config.settings import STARTER_MODEL
from semantic.adapters.config.sources import load_settings
from semantic.adapters.outbound.models.source import LocalModelSource
from semantic.adapters.outbound.models.tokenizer import HFTokenizer

NUM_AGENTS = 5  # that bounds are for
# After a restart, memory off over memory on, by tokens of the prompt.
RESTART_BOUNDS = {1024: 8.0, 4096: 20.0}
MAX_RESTART_OVER_HOT, MIN_FIRST_OVER_LATER = 2.0, 5.0
PHASES = ("first", "later", "after a restart")
# Tokens of all first prompts up to which a server without memory has every phase.
MANY_TOKENS = 8192


# -- what is said ----------------------------------------------------------------------------------


def starter_tokenizer_directory() -> Path:
    """Return the directory of the starter model's tokenizer, without torch."""
    models = load_settings().home_dir / "models"
    return LocalModelSource(models, STARTER_MODEL).resolve(STARTER_MODEL, print)


@cache
def _tokenizer() -> HFTokenizer:
    return HFTokenizer(starter_tokenizer_directory())


@cache
def _pages() -> tuple[int, ...]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return tuple(_tokenizer().encode("\n".join(page.read_text("utf-8") for page in pages)))


def text_of(num_tokens: int, start: int) -> str:
    """Return this many tokens of the documentation, from a position on."""
    pages = _pages()
    tokens = [pages[(start + index) % len(pages)] for index in range(num_tokens)]
    return b"".join(map(_tokenizer().token_bytes, tokens)).decode("utf-8", "replace")


def conversations(num_agents: int, num_tokens: int) -> list[Messages]:
    """Return the agents' first messages: a quarter is shared, the rest is their own."""
    shared = num_tokens // 4
    own = num_tokens - shared - 60
    system = f"You are one of several agents of a team. What all know: {text_of(shared, 0)}"
    return [
        said(
            f"You are agent {i}. Your notes: {text_of(own, 5000 + i * own)}\nWhat matters?", system
        )
        for i in range(num_agents)
    ]


# -- one server ------------------------------------------------------------------------------------


@dataclass
class Talk:
    """The same agents on one server.

    Attributes:
        firsts: Seconds to the first token, by phase.
        walls: Seconds of each phase.
        peak: Peak memory of its processes, in MB.
        is_brief: Whether it gets only the turn after the restart.
    """

    system: System
    home: Path
    talks: list[Messages]
    num_reply: int
    is_brief: bool = False
    firsts: dict[str, list[float]] = field(default_factory=dict)
    walls: dict[str, float] = field(default_factory=dict)
    replies: list[Reply] = field(default_factory=list)
    peak: float = 0.0
    _salt: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(reply.num_tokens for reply in self.replies)

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Start the server and send one request; reads its memory use before it stops."""
        before = children()
        with self.system.start(self.home) as url:
            asyncio.run(self._client(url).ask(said("Good morning."), 2))
            yield url
            self.peak = max(self.peak, peak_mb(children() - before))

    def phase(self, url: str, name: str, num_turns: int) -> None:
        """Run this many turns of every agent; agents do not wait for each other."""
        started = time.perf_counter()
        replies = asyncio.run(self._everyone(url, num_turns))
        self.walls[name] = time.perf_counter() - started
        self.firsts[name] = [reply.first for reply in replies]
        self.replies += replies

    async def _everyone(self, url: str, num_turns: int) -> list[Reply]:
        places = range(len(self.talks))
        everyone = await asyncio.gather(*(self._turns(url, place, num_turns) for place in places))
        return [reply for replies in everyone for reply in replies]

    async def _turns(self, url: str, place: int, num_turns: int) -> list[Reply]:
        replies = []
        for turn in range(num_turns):
            messages = self.talks[place]
            replies.append(await self._client(url).ask(self._salted(messages), self.num_reply))
            question = f"Agent {place}, go on: what follows from that, {turn}?"
            self.talks[place] = continued(messages, replies[-1], question)
        return replies

    def _client(self, url: str) -> Client:
        return Client(url, self.system.model, dict(self.system.more))

    def _salted(self, messages: Messages) -> Messages:
        if not self.system.is_salted:
            return messages
        self._salt += 1
        head = {"role": "system", "content": f"Request {self._salt}. {messages[0]['content']}"}
        return [head, *messages[1:]]


def run_workflow(talks: Sequence[Talk], num_later: int, tell: Callable[[str], None]) -> None:
    """Run all phases, each against every server before the next."""
    whole = [talk for talk in talks if not talk.is_brief]
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(talk.running()) for talk in whole]
        for name, num_turns in (("first", 1), ("later", num_later)):
            for talk, url in zip(whole, urls, strict=True):
                talk.phase(url, name, num_turns)
                tell(f"{talk.system.name}, {name}: {talk.walls[name]:.1f} s")
    for talk in talks:
        if talk.is_brief:
            talk.talks = list(whole[0].talks)
    again = [talk for talk in talks if talk.system.can_restart]
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(talk.running()) for talk in again]
        for talk, url in zip(again, urls, strict=True):
            talk.phase(url, PHASES[2], 1)
            tell(f"{talk.system.name}, {PHASES[2]}: {talk.walls[PHASES[2]]:.1f} s")


# -- all of them -----------------------------------------------------------------------------------


def make_systems(options: argparse.Namespace, num_agents: int, num_tokens: int) -> list[System]:
    """Create the selected servers; `usable` omits those that cannot run here."""
    makers: dict[str, Callable[[], System]] = {
        "on": lambda: ours(num_agents, has_memory=True),
        "off": lambda: ours(num_agents, has_memory=False),
        "transformers": transformers_serve,
        "llama.cpp": lambda: llama_cpp(num_agents, num_tokens),
        "mlx_lm": mlx_server,
    }
    made = [makers[name]() for name in options.systems]
    return made + [other(url, options.peer_model) for url in options.peer_url]


def tell_talk(report: Report, talk: Talk, title: str) -> None:
    """Add one server's figures to the report."""
    name = f"{title}, {talk.system.name}"
    for phase in talk.firsts:
        report.add(f"{name}: TTFT, {phase}", talk.firsts[phase], "s")
    wall = sum(talk.walls.values())
    report.add(f"{name}: tokens a second", talk.num_tokens / wall, "tokens/s")
    report.add(f"{name}: wall time", wall, "s")
    if talk.peak:
        report.add(f"{name}: peak memory", talk.peak, "MB")


def tell_ratios(report: Report, title: str, count: int, num_tokens: int, base: str) -> None:
    """Add the effect of memory to the report; with five agents it has bounds."""
    figures = {
        (system, phase): found.median
        for system in ("memory on", base)
        for phase in PHASES
        if (found := report.figures.get(f"{title}, {system}: TTFT, {phase}"))
    }
    is_judged = count == NUM_AGENTS and base == "memory off"
    restart = ("memory on", PHASES[2])
    if restart in figures and (base, PHASES[2]) in figures:
        report.add(
            f"{title}: after a restart, {base} / memory on",
            figures[base, PHASES[2]] / figures[restart],
            least=RESTART_BOUNDS.get(num_tokens) if is_judged else None,
        )
    if base == "memory off" and restart in figures:
        first, later = figures["memory on", "first"], figures["memory on", "later"]
        most = MAX_RESTART_OVER_HOT if is_judged else None
        report.add(f"{title}: after a restart / hot turn", figures[restart] / later, most=most)
        least = MIN_FIRST_OVER_LATER if is_judged else None
        report.add(f"{title}: first / later turn", first / later, least=least)


def measure(report: Report) -> None:
    """Measure every number of agents and every length."""
    options = report.options
    counts = options.agents or report.choose([2], [NUM_AGENTS])
    lengths = options.tokens or report.choose([256], [1024])
    num_later = options.turns or report.choose(1, 2)
    num_reply = options.reply or report.choose(8, 24)
    many = report.choose(0, MANY_TOKENS)
    report.settings.update(agents=counts, tokens=lengths, later_turns=num_later, reply=num_reply)
    if "llama.cpp" in options.systems:
        report.settings["llama.cpp"] = peer_version()
    for count in counts:
        for length in lengths:
            title = f"{count} agents x {length}"
            report.note(title)
            with tempfile.TemporaryDirectory() as directory:
                talks = [
                    Talk(
                        system,
                        Path(directory) / str(place),
                        conversations(count, length),
                        num_reply,
                        # The first has every phase: others may need what was said there.
                        is_brief=system.is_salted and place > 0 and count * length > many,
                    )
                    for place, system in enumerate(make_systems(options, count, length))
                ]
                run_workflow(talks, num_later, lambda text: print(f"    {text}", flush=True))
            for talk in talks:
                tell_talk(report, talk, title)
            for base in [talk.system.name for talk in talks if talk.system.name != "memory on"]:
                tell_ratios(report, title, count, length, base)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--agents", type=int, nargs="+", help="numbers of concurrent agents")
    parser.add_argument("--tokens", type=int, nargs="+", help="tokens of the first prompts")
    parser.add_argument("--turns", type=int, help="later turns of each agent")
    parser.add_argument("--reply", type=int, help="tokens of a reply")
    names = ("on", "off", "transformers", "llama.cpp", "mlx_lm")
    usual = ["on", "off", *(["llama.cpp"] if peer_path().exists() else [])]
    parser.add_argument("--systems", nargs="*", choices=names, default=usual)
    parser.add_argument(
        "--peer-url", nargs="*", default=[], help="URLs of other servers, up to /v1"
    )
    parser.add_argument("--peer-model", default="any", help="the model's name on those servers")


if __name__ == "__main__":
    sys.exit(run("workflow", measure, add_options=add_options))
