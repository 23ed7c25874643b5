"""What the HTTP side costs the device: eight streams over HTTP against the engine alone.

A server in a process of its own is asked for eight streams by this process; the same jobs then run
on an engine without HTTP. The two are measured in turns. With `--busy` another client keeps the
server's event loop occupied with short requests meanwhile.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import interleaved, make_engine, make_job, serving
from benchmarks.starter import backend, prompt_tokens, starter_directory
from semantic.adapters.config.settings import STARTER_MODEL
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.models.tokenizer import HFTokenizer

NUM_STREAMS, NUM_TOKENS, ROUNDS = 8, 48, 3


async def read_stream(port: int, index: int, arrivals: list[float]) -> None:
    """Read one stream as cheaply as possible, noting when pieces arrive."""
    body = json.dumps(
        {
            "model": STARTER_MODEL,
            "messages": [{"role": "user", "content": f"Write a long story about number {index}."}],
            "temperature": 0,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = (
        "POST /v1/chat/completions HTTP/1.1",
        "host: 127.0.0.1",
        "content-type: application/json",
        "connection: close",
        f"content-length: {len(body)}",
    )
    writer.write(("\r\n".join(lines) + "\r\n\r\n" + body).encode())
    while data := await reader.read(65536):
        arrivals += [time.perf_counter()] * data.count(b'"content":')
    writer.close()


async def chatter(port: int, stop: asyncio.Event) -> None:
    """Keep the event loop busy with small requests."""
    while not stop.is_set():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        await reader.read()
        writer.close()


async def http_run(port: int, *, is_busy: bool) -> float:
    """Tokens a second of eight streams, from the first piece to the last."""
    arrivals: list[float] = []
    stop = asyncio.Event()
    noise = [asyncio.create_task(chatter(port, stop))] if is_busy else []
    await asyncio.gather(*(read_stream(port, i, arrivals) for i in range(NUM_STREAMS)))
    stop.set()
    await asyncio.gather(*noise)
    arrivals.sort()
    return (len(arrivals) - NUM_STREAMS) / (arrivals[-1] - arrivals[NUM_STREAMS - 1])


def engine_run(made: TorchBackend, directory: Path) -> float:
    """Tokens a second of eight jobs without HTTP."""
    engine = make_engine(made, HFTokenizer(directory))
    for i in range(NUM_STREAMS):
        engine.submit(make_job(str(i), [*prompt_tokens(directory, 40), 1000 + i], NUM_TOKENS))
    for _ in range(2):
        engine.step()
    started, num_steps = time.perf_counter(), 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    return NUM_STREAMS * num_steps / (time.perf_counter() - started)


def main() -> int:
    """Print both speeds and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", action="store_true", help="with other requests meanwhile")
    is_busy = parser.parse_args().busy
    directory = starter_directory()
    with serving() as port, backend(directory) as made:
        calls: dict[str, Callable[[], float]] = {
            "engine alone": lambda: engine_run(made, directory),
            "over HTTP": lambda: asyncio.run(http_run(port, is_busy=is_busy)),
        }
        speeds = interleaved(calls, ROUNDS)
    speeds.print(f"tokens a second, {NUM_STREAMS} streams")
    ratio = speeds.ratio("over HTTP", "engine alone")
    print(f"  HTTP leaves {ratio:.0%} of the engine's speed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
