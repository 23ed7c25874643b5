"""How HTTP, busy clients and long prompts slow down streams.

Compares eight streams over HTTP, from a server in a separate process, with the same jobs on an
engine without HTTP, interleaved; with `--busy` another client keeps the server's event loop busy.
Then a prompt of 7,000 tokens beside a stream: the gaps between the stream's tokens should stay near
the default of `target_step_ms`, and the prompt should take little longer than alone. Then such a
prompt beside an agent whose KV cache is in memory: how long its turns wait for their first token.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

from benchmarks.client import Client, continued, said
from benchmarks.common import make_engine, make_job, serving
from benchmarks.report import Report, interleaved, run
from benchmarks.starter import TEXT, backend, prompt_tokens, starter_directory
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.application.engine.request import EventBatch
from semantic.application.engine.steps import ChunkBudget
from semantic.application.settings import EngineLimits
from semantic.domain.errors import DrainingError
from semantic.domain.events import Failed, Finished, TextDelta

NUM_STREAMS = 8


# -- over HTTP -----------------------------------------------------------------------------------


async def chatter(port: int, stop: asyncio.Event) -> None:
    """Keep the event loop busy with small requests."""
    while not stop.is_set():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        await reader.read()
        writer.close()


async def http_speed(port: int, num_tokens: int, *, is_busy: bool) -> float:
    """Return the tokens per second of eight streams, from the first piece to the last."""
    stop = asyncio.Event()
    noise = [asyncio.create_task(chatter(port, stop))] if is_busy else []
    client = Client(f"http://127.0.0.1:{port}/v1")
    stories = (said(f"Write a long story about number {i}.") for i in range(NUM_STREAMS))
    replies = await asyncio.gather(*(client.ask(story, num_tokens) for story in stories))
    stop.set()
    await asyncio.gather(*noise)
    arrivals = sorted(at for reply in replies for at in reply.arrivals)
    return (len(arrivals) - NUM_STREAMS) / (arrivals[-1] - arrivals[NUM_STREAMS - 1])


def engine_speed(made: TorchBackend, directory: Path, num_tokens: int) -> float:
    """Return the tokens per second of eight jobs without HTTP."""
    engine = make_engine(made, HFTokenizer(directory), EngineLimits(max_idle=0))
    for i in range(NUM_STREAMS):
        engine.submit(make_job(str(i), [*prompt_tokens(directory, 40), 1000 + i], num_tokens))
    for _ in range(2):
        engine.step()
    started, num_steps = time.perf_counter(), 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    return NUM_STREAMS * num_steps / (time.perf_counter() - started)


def measure_http(report: Report, made: TorchBackend, directory: Path) -> None:
    """Measure eight streams with HTTP and without."""
    num_tokens, rounds = report.choose((16, 1), (48, 3))
    is_busy = report.options.busy
    # Without guesses: with them several tokens come at once, and pieces are no tokens.
    with serving(settings={"draft_tokens": "0"}) as port:
        calls: dict[str, Callable[[], float]] = {
            "engine alone": lambda: engine_speed(made, directory, num_tokens),
            "over HTTP": lambda: asyncio.run(http_speed(port, num_tokens, is_busy=is_busy)),
        }
        speeds = interleaved(calls, rounds)
    report.add_rounds(speeds, "tokens/s", f"{NUM_STREAMS} streams, ")
    report.add("over HTTP / engine alone", speeds.ratios("over HTTP", "engine alone"))


# -- beside a prompt -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """Seconds of the prompt, and between the stream's tokens before and during it."""

    took: float
    gaps_before: list[float]
    gaps: list[float]


def prompt_round(
    made: TorchBackend, directory: Path, num_prompt: int, *, has_stream: bool
) -> Round:
    """Compute the prompt beside a stream or alone."""
    arrivals: list[float] = []
    finished: dict[str, float] = {}

    def keep(events: EventBatch) -> None:
        for name, event in events:
            if isinstance(event, TextDelta) and name == "stream":
                arrivals.append(time.perf_counter())
            if isinstance(event, Failed) and "long" not in finished:
                raise event.error
            if isinstance(event, Finished):
                finished[name] = time.perf_counter()

    # Without guesses: with them several tokens come at once, and gaps are no steps.
    limits = EngineLimits(draft_tokens=0)
    engine = make_engine(made, HFTokenizer(directory), limits, emit=keep)
    if has_stream:
        engine.submit(make_job("stream", prompt_tokens(directory, 64)[::-1], 2000))
        for _ in range(30):
            engine.step()
    started = time.perf_counter()
    engine.submit(make_job("long", prompt_tokens(directory, num_prompt), 1))
    while "long" not in finished:
        engine.step()
    engine.abandon(DrainingError("the round is over"))
    before = [b - a for a, b in pairwise(t for t in arrivals if t < started)]
    gaps = [b - a for a, b in pairwise(t for t in arrivals if started <= t <= finished["long"])]
    return Round(finished["long"] - started, before, gaps)


def measure_prompt(report: Report, made: TorchBackend, directory: Path) -> None:
    """Measure a prompt beside a stream and alone, interleaved."""
    num_prompt, rounds = report.choose((1024, 1), (7000, 2))
    found: dict[bool, list[Round]] = {False: [], True: []}
    prompt_round(made, directory, 512, has_stream=False)
    for _ in range(rounds):
        for has_stream, each in found.items():
            each.append(prompt_round(made, directory, num_prompt, has_stream=has_stream))
    alone, streams = found[False], found[True]
    decode_ms = 1000 * median(gap for r in streams for gap in r.gaps_before)
    gaps_ms = [1000 * gap for r in streams for gap in r.gaps]
    # What `target_step_ms` is by default.
    target = ChunkBudget.PATIENCE * decode_ms
    report.settings["prompt_tokens"] = num_prompt
    report.add("a decode step", decode_ms, "ms")
    report.add("prompt alone", [r.took for r in alone], "s")
    report.add("prompt beside a stream", [r.took for r in streams], "s")
    ratios = [beside.took / plain.took for beside, plain in zip(streams, alone, strict=True)]
    report.add("prompt beside a stream / alone", ratios, most=1.15)
    if len(gaps_ms) > 1:
        cuts = quantiles(gaps_ms, n=100)
        report.add("gap of the stream, p95", cuts[94], "ms", most=1.5 * target)
        report.add("gap of the stream, p99", cuts[98], "ms", most=3 * target)


async def first_tokens(client: Client, text: str) -> dict[str, list[float]]:
    """Return seconds to first tokens of an agent's turns, alone and while `text` is computed."""
    found: dict[str, list[float]] = {"alone": [], "beside a prompt": []}
    messages = said(TEXT)
    reply = await client.ask(messages, 8)

    async def turn() -> float:
        nonlocal messages, reply
        messages = continued(messages, reply, "And then?")
        reply = await client.ask(messages, 8)
        await asyncio.sleep(0.2)
        return reply.first

    for _ in range(5):
        found["alone"].append(await turn())
    prompt = asyncio.create_task(client.ask(said(text), 1))
    await asyncio.sleep(0.5)
    while not prompt.done():
        found["beside a prompt"].append(await turn())
    await prompt
    return found


def measure_turns(report: Report) -> None:
    """Measure an agent's turns beside another agent's long prompt."""
    with serving() as port:
        client = Client(f"http://127.0.0.1:{port}/v1")
        found = asyncio.run(first_tokens(client, TEXT * report.choose(10, 70)))
    for name, values in found.items():
        report.add(f"first token of a turn, {name}", values, "s")


def measure(report: Report) -> None:
    """Measure streams, prompts and turns."""
    directory = starter_directory()
    with backend(directory) as made:
        measure_http(report, made, directory)
        measure_prompt(report, made, directory)
    measure_turns(report)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--busy", action="store_true", help="send other requests meanwhile")


if __name__ == "__main__":
    sys.exit(run("streams", measure, add_options=add_options))
