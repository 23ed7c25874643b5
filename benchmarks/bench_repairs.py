"""Repaired prompts: seconds to the first token of later turns, with rules and without, over HTTP.

A client writes the date and time at the beginning of its system prompt in each turn, as some coding
agents do, so every turn computes its whole prompt again. One server has a rule for each of three
clients, which the User-Agent tells apart: none, `freeze` and `move_to_end`. The clients have the
same conversation, one after another in each round. Later turns are those after the first.

    python -m benchmarks.bench_repairs
    python -m benchmarks.bench_repairs --lines 300 --turns 6 --rounds 5 --json repairs.json
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from statistics import mean

from benchmarks.bench_ahead import source
from benchmarks.client import Client, Messages, Reply
from benchmarks.common import serving
from benchmarks.report import Report, run
from semantic.adapters.config.settings import STARTER_MODEL

CLIENTS = ("plain", "freeze", "move_to_end")
RULE = """
[[rule]]
name = "{name}"
enabled = true
client = "^{action}$"
place = "system"
pattern = '^Current time: .*$'
action = "{action}"
"""


async def converse(port: int, client: str, topic: str, options: argparse.Namespace) -> list[Reply]:
    """Have a conversation; returns the replies of all turns."""
    asking = Client(f"http://127.0.0.1:{port}/v1", headers={"user-agent": client})
    file, history, replies = source(topic, options.lines), Messages(), []
    for turn in range(options.turns):
        now = f"Current time: 2026-11-17 10:{turn:02}:{7 * turn % 60:02}"
        system = {"role": "system", "content": f"You review code.\n{now}\n\n{file}"}
        history.append({"role": "user", "content": f"Explain function number {turn}."})
        replies.append(await asking.ask([system, *history], options.tokens))
        history.append({"role": "assistant", "content": replies[-1].text})
    return replies


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--model", default=STARTER_MODEL)
    parser.add_argument("--backend", choices=("auto", "mlx", "torch"), default="auto")
    parser.add_argument("--lines", type=int, default=200, help="lines of code in the system prompt")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24, help="tokens of a reply")
    parser.add_argument("--rounds", type=int, default=3)


def measure(report: Report) -> None:
    """Start the server and have the conversations, interleaved."""
    options = report.options
    if report.is_quick:
        options.lines, options.turns, options.rounds = 60, 3, 1
    report.settings.update({name: str(value) for name, value in vars(options).items()})
    firsts: dict[str, list[float]] = {client: [] for client in CLIENTS}
    shares: dict[str, list[float]] = {client: [] for client in CLIENTS}
    longest = 0
    with tempfile.TemporaryDirectory() as temporary:
        rules = Path(temporary, "repairs.toml")
        rules.write_text(
            "".join(
                RULE.format(name=client.replace("_", "-"), action=client) for client in CLIENTS[1:]
            )
        )
        flags = ["--model", options.model, "--backend", options.backend, "--repairs", str(rules)]
        with serving(*flags, "--cache-dir", str(Path(temporary, "cache"))) as port:
            for number in range(1 + options.rounds):
                for client in CLIENTS:
                    replies = asyncio.run(converse(port, client, f"{client}{number}", options))
                    later, longest = replies[1:], replies[-1].num_prompt
                    if number:  # the first round warms up
                        firsts[client].append(mean(reply.first for reply in later))
                        reused = sum(reply.num_reused for reply in later)
                        shares[client].append(reused / sum(reply.num_prompt for reply in later))
    report.note(f"the last prompt of a conversation has {longest:,} tokens")
    for client in CLIENTS:
        report.add(f"{client}, first token of later turns", firsts[client], "s")
        report.add(f"{client}, share of reused tokens", shares[client])
    for client in CLIENTS[1:]:
        pairs = zip(firsts["plain"], firsts[client], strict=True)
        report.add(f"plain over {client}", [plain / own for plain, own in pairs], least=2.0)


if __name__ == "__main__":
    sys.exit(run("repairs", measure, add_options=add_options))
