r"""An agent's turns beside a cold prompt, and the device's memory, over HTTP.

Starts the real server, and prints the device's memory when it is ready, after a prompt of 4,096
tokens, and after the long prompt. The long prompt runs alone, then beside an agent that sends turn
after turn. The lengths are approximate.

    python -m benchmarks.bench_beside                                  # tiny, any machine
    python -m benchmarks.bench_beside --shape llama-8b --backend mlx --memory-mb 40000 --long 100000
"""

import argparse
import asyncio
import sys
import time
from statistics import median

import httpx

from benchmarks.bench_served import TEXT
from benchmarks.client import Client, Reply, continued, said
from benchmarks.common import add_model_options, serving_chosen
from benchmarks.report import Report, run

TOKENS_PER_TEXT = 33  # of the starter's tokenizer, about
PAUSE_S, REPLY = 0.3, 32
HOT_TEXTS = 240


def note_memory(report: Report, port: int, when: str) -> None:
    """Report the shares of the device's memory, if the device has its own."""
    device = httpx.get(f"http://127.0.0.1:{port}/v1/cache", timeout=60).json()["device"]
    for share in ("used", "weights", "sequences", "cached", "scratch") if device else ():
        report.add(f"device memory {when}: {share}", device[share] / 1e9, "GB")


async def turns(client: Client, is_over: asyncio.Event) -> list[Reply]:
    """Send turn after turn of one agent; returns the replies of those sent before the end."""
    messages = said("hot: " + TEXT * HOT_TEXTS)
    reply = await client.ask(messages, 8)
    replies: list[Reply] = []
    while not is_over.is_set():
        await asyncio.sleep(PAUSE_S)
        messages = continued(messages, reply, "And then?")
        reply = await client.ask(messages, REPLY)
        replies.append(reply)
    return replies


async def beside(client: Client, text: str) -> tuple[float, list[Reply]]:
    """Compute a cold prompt beside an agent; returns its seconds and the agent's replies."""
    is_over = asyncio.Event()
    agent = asyncio.create_task(turns(client, is_over))
    await asyncio.sleep(2)
    started = time.perf_counter()
    await client.ask(said("beside: " + text), 1)
    took = time.perf_counter() - started
    is_over.set()
    return took, (await agent)[1:-1]


def measure(report: Report) -> None:
    """Measure the long prompt alone and beside an agent, and the device's memory."""
    text = TEXT * (report.options.long // TOKENS_PER_TEXT)
    with serving_chosen(report.options) as port:
        client = Client(f"http://127.0.0.1:{port}/v1")
        note_memory(report, port, "at ready")
        asyncio.run(client.ask(said("first: " + TEXT * 124), 8))
        note_memory(report, port, "after 4k")
        alone = asyncio.run(client.ask(said("alone: " + text), 1))
        note_memory(report, port, "after the long prompt")
        took, replies = asyncio.run(beside(client, text))
        note_memory(report, port, "at the end")
    report.add("long prompt", alone.num_prompt, "tokens")
    report.add("long prompt alone", alone.first, "s")
    report.add("long prompt beside an agent / alone", took / alone.first, most=1.3)
    if replies:
        report.add("first token beside it", [r.first for r in replies], "s", most=0.25)
        report.add("longest first token", max(r.first for r in replies), "s")
        report.add("per token beside it", median(r.ms_per_token for r in replies), "ms", most=40)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    add_model_options(parser)
    parser.add_argument("--long", type=int, default=6000, help="tokens of the cold prompt")


if __name__ == "__main__":
    sys.exit(run("beside", measure, add_options=add_options))
