r"""Latency and speed that clients observe: seconds to first token and tokens/s, over HTTP.

Starts the real server in a separate process on a model with random weights, and sends requests as
chat clients do. Before that, in the same run, the bare loop of the backend's library measures what
the device needs for the same tokens without a server.

    python -m benchmarks.bench_served                                  # tiny, any machine
    python -m benchmarks.bench_served --shape llama-8b --backend mlx --memory-mb 40000 \
        --lengths 4096 16384 30720 --json served.json
"""

import argparse
import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks import bare_loop
from benchmarks.client import Client, Messages, Reply, continued, said
from benchmarks.common import serving
from benchmarks.random_models import SHAPES, make_model
from benchmarks.report import Report, run

TEXT = (
    "The city lay where two rivers met, and its people had always traded: salt from the coast, "
    "wool from the hills, and later paper, clocks and printed books. "
)
_PEER_LIMIT_S = 180.0
SCENARIOS = ("bare", "start", "peer", "alone", "agents", "streams")


@dataclass(frozen=True)
class Served:
    """A running server, and the time its start took."""

    port: int
    start_s: float

    async def ask(self, messages: Messages, num_tokens: int) -> Reply:
        return await Client(f"http://127.0.0.1:{self.port}/v1").ask(messages, num_tokens)


@contextlib.contextmanager
def served(options: argparse.Namespace, model: Path, home: Path) -> Iterator[Served]:
    """Run a server on a free port; yields it after its first answer."""
    arguments = ["--model", str(model), "--backend", options.backend, "--home", str(home)]
    arguments += ["--memory-budget-mb", str(options.memory_mb), "--device", options.device]
    arguments += ["--disk-budget-mb", str(2 * options.memory_mb)]
    settings = {"max_batch_size": "32", "model_aliases": "any", "write_queue_mb": "8192"}
    settings |= dict(pair.split("=", 1) for pair in options.set)
    started = time.perf_counter()
    with serving(*arguments, settings=settings) as port:
        asyncio.run(Served(port, 0).ask(said("Good morning."), 1))
        yield Served(port, time.perf_counter() - started)


def peer_start(model: Path) -> float:
    """Return the seconds until the first answer of `mlx_lm.server`, which also compiles kernels."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm.server", "--model", str(model), "--port", str(port)]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
    try:
        client = Client(f"http://127.0.0.1:{port}/v1", str(model), {})
        while process.poll() is None and time.perf_counter() - started < _PEER_LIMIT_S:
            with contextlib.suppress(httpx.TransportError, RuntimeError):
                asyncio.run(client.ask(said("Good morning."), 4))
                return time.perf_counter() - started
            time.sleep(0.2)
        raise RuntimeError("mlx_lm.server did not answer")
    finally:
        process.terminate()
        process.wait()


class Prompts:
    """Makes text of about a given number of tokens."""

    def __init__(self, server: Served) -> None:
        counts = [asyncio.run(server.ask(said(TEXT * n), 1)).num_prompt for n in (1, 11)]
        self._per_text = (counts[1] - counts[0]) / 10

    def of(self, num_tokens: int, name: str) -> str:
        """Return text that shares no prefix with other texts."""
        return f"{name}: " + TEXT * max(1, round(num_tokens / self._per_text))


# -- one agent ---------------------------------------------------------------------------------


async def alone(server: Served, prompts: Prompts, length: int) -> tuple[dict[str, Any], Messages]:
    """Measure a cold prompt five times, then the next turn, and one from the pool."""
    cold: list[Reply] = []
    for turn in range(5):
        messages = said(prompts.of(length, f"cold {length} {turn}"))
        cold.append(await server.ask(messages, 64))
    messages = continued(messages, cold[-1], "And then?")
    hot = await server.ask(messages, 16)
    messages = continued(messages, hot, "What came of it?")
    hot_again = await server.ask(messages, 16)
    for other in range(9):  # more than stay open, so that the copy is closed
        await server.ask(said(f"{length} {other}: good morning."), 2)
    messages = continued(messages, hot_again, "Who was there?")
    pooled = await server.ask(messages, 16)
    return {
        "tokens": cold[-1].num_prompt,
        "cold_s": [reply.first for reply in cold],
        "hot_s": [hot.first, hot_again.first],
        "pool_s": pooled.first,
        "pool_reused": pooled.num_reused,
        "ms_per_token": cold[-1].ms_per_token,
    }, continued(messages, pooled, "And in the end?")


async def alone_again(server: Served, messages: Messages) -> dict[str, Any]:
    """Measure the next turn after a restart."""
    reply = await server.ask(messages, 16)
    return {"restart_s": reply.first, "restart_reused": reply.num_reused}


# -- several ------------------------------------------------------------------------------------


async def _turns(
    server: Served, messages: Messages, num_turns: int
) -> tuple[list[Reply], Messages]:
    replies = []
    for turn in range(num_turns):
        replies.append(await server.ask(messages, 64))
        messages = continued(messages, replies[-1], f"And then, {turn}?")
    return replies, messages


async def agents(
    server: Served, prompts: Prompts, shared: int, own: int
) -> tuple[dict[str, Any], list[Messages]]:
    """Measure eight agents with a common prefix, four turns each, all at once."""
    head = prompts.of(shared, f"shared {shared}")
    started = time.perf_counter()
    everyone = await asyncio.gather(
        *(_turns(server, said(prompts.of(own, f"agent {i}"), head), 4) for i in range(8))
    )
    wall = time.perf_counter() - started
    firsts = [replies[0].first for replies, _ in everyone]
    later = [reply.first for replies, _ in everyone for reply in replies[1:]]
    return {
        "tokens": everyone[0][0][0].num_prompt,
        "wall_s": wall,
        "first_p50_s": median(firsts),
        "first_max_s": max(firsts),
        "later_p50_s": median(later),
        "later_max_s": max(later),
    }, [messages for _, messages in everyone]


async def agents_again(server: Served, everyone: list[Messages]) -> dict[str, Any]:
    """Measure one more turn of all eight at once after a restart."""
    started = time.perf_counter()
    replies = await asyncio.gather(*(server.ask(messages, 64) for messages in everyone))
    return {
        "restart_wall_s": time.perf_counter() - started,
        "restart_first_p50_s": median(reply.first for reply in replies),
        "restart_first_max_s": max(reply.first for reply in replies),
        "restart_reused": min(reply.num_reused for reply in replies),
    }


async def streams(server: Served, head: str, count: int, num_tokens: int) -> dict[str, Any]:
    """Measure concurrent streams that share a prefix."""
    started = time.perf_counter()
    replies = await asyncio.gather(
        *(server.ask(said(f"{count}: stream {i}", head), num_tokens) for i in range(count))
    )
    begun = max(reply.first for reply in replies)
    wall = max(reply.last for reply in replies)
    return {
        "streams": count,
        "tokens_per_s": sum(reply.num_tokens for reply in replies) / wall,
        "ms_per_token": median(reply.ms_per_token for reply in replies),
        "first_p50_s": median(reply.first for reply in replies),
        "first_max_s": begun,
        "wall_s": time.perf_counter() - started,
    }


# -- all of it ----------------------------------------------------------------------------------


class Run:
    """One run and its figures."""

    def __init__(self, report: Report, model: Path, home: Path) -> None:
        self._report, self._options = report, report.options
        self._model, self._home = model, home
        self._conversations: dict[int, Messages] = {}
        self._everyone: list[Messages] = []

    def all(self) -> None:
        options, wanted = self._options, self._options.only
        if "bare" in wanted:
            self._note("bare", bare_loop.measure(*self._how(), options.lengths))
        if "start" in wanted:
            with served(options, self._model, self._home) as server:
                self._note("first_start_s", server.start_s)
        if "peer" in wanted:
            self._note("mlx_lm.server, start_s", peer_start(self._model))
        with served(options, self._model, self._home) as server:
            self._note("start_s", server.start_s)
            self._talk(server, Prompts(server))
        if self._conversations or self._everyone:
            with served(options, self._model, self._home) as server:
                self._talk_again(server)

    def _how(self) -> tuple[str, Path, str]:
        return self._options.backend, self._model, self._options.device

    def _talk(self, server: Served, prompts: Prompts) -> None:
        options, wanted = self._options, self._options.only
        if "alone" in wanted:
            for length in options.lengths:
                figures, self._conversations[length] = asyncio.run(alone(server, prompts, length))
                self._note(f"alone {length}", figures)
        if "streams" in wanted:
            head = prompts.of(options.head, "streams")
            for count in (1, *options.streams):  # the first one brings the head
                figures = asyncio.run(streams(server, head, count, options.tokens))
                self._note(f"streams {count}", figures)
        if "agents" in wanted:
            figures, self._everyone = asyncio.run(agents(server, prompts, *options.agents))
            self._note("agents", figures)

    def _talk_again(self, server: Served) -> None:
        for length, messages in self._conversations.items():
            self._note(f"alone {length} again", asyncio.run(alone_again(server, messages)))
        if self._everyone:
            self._note("agents again", asyncio.run(agents_again(server, self._everyone)))

    def _note(self, name: str, value: Any) -> None:
        """Add figures, however nested, and print them at once: a run may take an hour."""
        if isinstance(value, dict):
            for inner, figure in value.items():
                self._note(f"{name}, {inner}", figure)
            return
        unit = next((text for mark, text in _UNITS.items() if mark in name), "")
        print(f"  {name}: {self._report.add(name, value, unit).median:.4g} {unit}", flush=True)


_UNITS = {"tokens_per_s": "tokens/s", "ms_per_token": "ms", "_s": "s", "tokens": "tokens"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--backend", choices=("mlx", "torch"), default="torch")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--lengths", type=int, nargs="*", default=[512, 2048], help="prompt lengths in tokens"
    )
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 16, 32])
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a stream's reply")
    parser.add_argument("--head", type=int, default=256, help="tokens that streams share")
    parser.add_argument(
        "--agents",
        type=int,
        nargs=2,
        default=(256, 256),
        help="shared tokens, and tokens per agent",
    )
    parser.add_argument(
        "--memory-mb", type=int, default=1024, help="memory_budget_mb of the server"
    )
    parser.add_argument("--set", nargs="*", default=[], help="other settings, as name=value")
    usual = [name for name in SCENARIOS if name != "peer"]  # which is there with MLX alone
    parser.add_argument("--only", nargs="*", choices=SCENARIOS, default=usual)
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("~/.semantic/models/smollm2-135m-instruct")
    )
    parser.add_argument("--directory", type=Path, help="directory for models")


def measure(report: Report) -> None:
    """Create the model and run the selected cases."""
    options = report.options
    report.settings.update({name: str(value) for name, value in vars(options).items()})
    with tempfile.TemporaryDirectory() as temporary:
        models = options.directory or Path(temporary) / "models"
        model = make_model(options.shape, models, options.tokenizer.expanduser())
        Run(report, model, Path(temporary) / "home").all()


if __name__ == "__main__":
    sys.exit(run("served", measure, add_options=add_options))
