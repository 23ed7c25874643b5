r"""Speculative decoding: tokens per second of typical agent work with it and without, over HTTP.

Starts the real server and sends requests in pairs: without (`draft_tokens` 0, set while it runs),
then with. Tokens per second are counted between the first token and the last.

    edit    a file of 400 lines with small changes: the client sends the model's earlier reply as
            `prediction`, with one line in twelve changed
    again   the same reply again, drafted from the server's index alone, as when an agent repeats
            a file or another agent's text
    calls   five agents, one after another, generate the same 48 tokens: calls of one tool
    agents  five agents at once with one task and different names
    prose   sampled at temperature 1, without repetition

A model with random weights writes no code: its replies only have the right length, and show what
verifying drafts costs and saves. Such a model is built to be certain of its next token, like a
model that copies text; when sampled, one token in five differs. With the starter model, `edit`
uses a real file.

    python -m benchmarks.bench_ahead                                   # the starter model
    python -m benchmarks.bench_ahead --shape llama-8b --backend mlx --memory-mb 40000 --goals \
        --json ahead.json
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from benchmarks.client import Client, Reply
from benchmarks.common import add_model_options, serving_chosen
from benchmarks.report import Report, run

SCENARIOS = ("edit", "again", "calls", "agents", "prose")
GOALS = {"edit": 2.5, "calls": 2.0}
LEAST = 0.97
TASK = "You are one of five reviewers. List every function of this file with one line on each.\n\n"


def source(name: str, num_lines: int) -> str:
    """Return a Python file whose functions are named after `name`."""
    functions = (
        f"def {name}_{n}(value: int, limit: int = {n * 7}) -> int:\n"
        f'    """Return the value, at most the limit."""\n'
        f"    if value > limit:\n        return limit\n    return value + {n}\n\n"
        for n in range(num_lines // 6 + 1)
    )
    return "".join(functions)


def changed(text: str) -> str:
    """Return the text with one word replaced in every twelfth line."""
    lines = text.splitlines(keepends=True)
    for index in range(5, len(lines), 12):
        lines[index] = lines[index].replace(" ", " x", 1)
    if len(lines) < 12:  # of a random model
        words = text.split(" ")
        words[9::60] = ["changed"] * len(words[9::60])
        return " ".join(words)
    return "".join(lines)


@dataclass(frozen=True)
class Server:
    """A server, and the lengths of its files and replies."""

    port: int
    num_lines: int
    num_tokens: int

    async def draft(self, num_tokens: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}") as http:
            reply = await http.patch("/admin/runtime", json={"draft_tokens": num_tokens})
            reply.raise_for_status()

    async def ask(self, prompt: str, num_tokens: int = 0, **more: Any) -> Reply:
        client = Client(f"http://127.0.0.1:{self.port}/v1")
        client = replace(client, more={**client.more, **more})
        messages = [{"role": "user", "content": prompt}]
        return await client.ask(messages, num_tokens or self.num_tokens)


@dataclass(frozen=True)
class Work:
    """The results of some replies."""

    replies: Sequence[Reply]
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second after the first token."""
        return sum(reply.num_tokens - 1 for reply in self.replies) / self.seconds


def one_by_one(*replies: Reply) -> Work:
    """Request replies one after another."""
    return Work(replies, sum(reply.last - reply.first for reply in replies))


async def edit(server: Server, name: str, before: Work | None) -> Work:
    """Edit a file; the client sends the earlier reply, with changes, as its prediction."""
    file = source(name, server.num_lines)
    prompt = f"Rename `value` to `amount` and write the whole file.\n\n{file}"
    if before is None:
        return one_by_one(await server.ask(prompt))
    expected = {"type": "content", "content": changed(before.replies[0].text)}
    return one_by_one(await server.ask(prompt, prediction=expected))


async def again(server: Server, name: str, before: Work | None) -> Work:  # noqa: ARG001
    """Generate the same reply again."""
    return one_by_one(await server.ask(f"{name}: tell me of the city."))


async def calls(server: Server, name: str, before: Work | None) -> Work:  # noqa: ARG001
    """Call the same tool five times."""
    return one_by_one(*[await server.ask(f"{name}: call the tool.", 48) for _ in range(5)])


async def agents(server: Server, name: str, before: Work | None) -> Work:
    """Run five agents at once, with new names each time."""
    names = [f"{name}{who}{'' if before is None else 'x'}" for who in "abcde"]
    prompts = [TASK + source(own, server.num_lines // 4) for own in names]
    started = time.perf_counter()
    replies = await asyncio.gather(*(server.ask(each, server.num_tokens // 2) for each in prompts))
    return Work(replies, time.perf_counter() - started)


async def prose(server: Server, name: str, before: Work | None) -> Work:
    """Generate text that occurs nowhere else."""
    seed = 1 if before is None else 2
    return one_by_one(await server.ask(f"{name}: tell me a story.", temperature=1, seed=seed))


Scenario = Callable[[Server, str, Work | None], Awaitable[Work]]


async def compare(report: Report, server: Server, scenario: Scenario) -> None:
    """Measure in pairs after a warm-up pair; adds the figures to the report."""
    name, options, pairs = scenario.__name__, report.options, []
    for turn in range(1 + options.rounds):
        await server.draft(0)
        without = await scenario(server, f"{name}{turn}", None)
        await server.draft(options.draft_tokens)
        ahead = await scenario(server, f"{name}{turn}", without)
        right = sum(reply.num_accepted for reply in ahead.replies)
        wrong = sum(reply.num_rejected for reply in ahead.replies)
        texts = [[reply.text for reply in work.replies] for work in (without, ahead)]
        is_other = scenario in (edit, again, calls) and texts[0] != texts[1]
        rates = f"{without.rate:.1f} and {ahead.rate:.1f} tokens/s"
        said = ", OTHER TEXT" if is_other else ""
        report.note(
            f"{name} {turn}: {rates}; {right} draft tokens accepted, {wrong} rejected{said}"
        )
        pairs += [(without.rate, ahead.rate)] if turn else []
    report.add(f"{name}, without", [without for without, _ in pairs], "tokens/s")
    report.add(f"{name}, with", [ahead for _, ahead in pairs], "tokens/s")
    least = GOALS.get(name, LEAST) if options.goals else LEAST
    report.add(f"{name}, with over without", [b / a for a, b in pairs], least=least)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    add_model_options(parser)
    parser.add_argument("--lines", type=int, default=400, help="lines of the file to edit")
    parser.add_argument("--tokens", type=int, default=600, help="tokens of a reply")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft-tokens", type=int, default=16)
    parser.add_argument("--only", nargs="*", choices=SCENARIOS, default=SCENARIOS)
    parser.add_argument(
        "--goals", action="store_true", help="check goals for devices with cheap rows"
    )


def measure(report: Report) -> None:
    """Start the server and run the selected cases."""
    options = report.options
    if report.is_quick:
        options.lines, options.rounds = min(options.lines, 80), 1
    report.settings.update({name: str(value) for name, value in vars(options).items()})
    with serving_chosen(options) as port:
        server = Server(port, options.lines, report.choose(120, options.tokens))
        for scenario in (edit, again, calls, agents, prose):
            if scenario.__name__ in options.only:
                asyncio.run(compare(report, server, scenario))


if __name__ == "__main__":
    sys.exit(run("ahead", measure, add_options=add_options))
