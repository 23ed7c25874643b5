"""Latency that a proxy adds: Ray Serve, HAProxy and none, in front of the same server.

Starts PostgreSQL, a plain server, HAProxy in front of it where it is installed, and `semantic
cluster` with one replica, all with the same shared store, and sends requests to them in turn. It
needs the extras cluster and dev. Ray accepts connections from all hosts, so run it without a
network:

    unshare --net sh -c 'ip link set lo up; python -m benchmarks.bench_proxy'
    ... python -m benchmarks.bench_proxy --backend torch     # the starter model
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import httpx

from benchmarks.client import Client, Reply, continued, said
from benchmarks.common import serving
from benchmarks.report import ROOT, Report, run
from tests.postgres import new_schema, running_postgres

DIRECT, RAY, HAPROXY = "direct", "Ray Serve", "HAProxy"
_NUM_STREAMS = 8
_TEXT = "The quick brown fox jumps over the lazy dog. " * 40


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def _running(command: list[str], port: int) -> Iterator[int]:
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "SEMANTIC_MODEL_ALIASES": "any"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:  # noqa: S603
        try:
            while process.poll() is None:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200:
                        break
                time.sleep(0.2)
            yield port
        finally:
            process.send_signal(signal.SIGINT)


@contextlib.contextmanager
def ways(directory: Path, backend: str) -> Iterator[dict[str, int]]:
    """Yield the ports of the same server, directly and behind each proxy."""
    with contextlib.ExitStack() as stack:
        settings = {
            "store": "shared",
            "database_url": new_schema(stack.enter_context(running_postgres())),
            "objects_url": (directory / "objects").as_uri(),
            "backend": backend,
        }
        config = directory / "config.toml"
        config.write_text("".join(f"{name} = {json.dumps(v)}\n" for name, v in settings.items()))
        options = ["--config", str(config)]
        direct = stack.enter_context(serving("--home", str(directory / "plain"), *options))
        port = _free_port()
        command = [sys.executable, "-m", "semantic", "cluster", "--port", str(port)]
        command += ["--home", str(directory / "ray"), *options]
        found = {DIRECT: direct, RAY: stack.enter_context(_running(command, port))}
        if haproxy := shutil.which("haproxy"):
            port, text = _free_port(), (ROOT / "deploy/haproxy.cfg").read_text()
            for there in ("10.0.0.1:8000", "10.0.0.2:8000"):
                text = text.replace(there, f"127.0.0.1:{direct}")
            config = directory / "haproxy.cfg"
            config.write_text(text.replace("bind :8000", f"bind 127.0.0.1:{port}"))
            command = [haproxy, "-db", "-f", str(config)]
            found[HAPROXY] = stack.enter_context(_running(command, port))
        yield found


async def _streams(client: Client, name: str, num_tokens: int) -> float:
    """Return the total tokens per second of several streams with new prompts."""
    started = time.perf_counter()
    asked = [said(f"{name} {i}: good morning.") for i in range(_NUM_STREAMS)]
    replies = await asyncio.gather(*(client.ask(one, num_tokens) for one in asked))
    return sum(reply.num_tokens for reply in replies) / (time.perf_counter() - started)


def measure(report: Report) -> None:
    """Measure, interleaved, a conversation's next turn, then several streams at once."""
    num_rounds, num_tokens = report.choose((5, 64), (25, 128))
    report.settings.update(backend=report.options.backend, rounds=num_rounds, tokens=num_tokens)
    with tempfile.TemporaryDirectory() as name, ways(Path(name), report.options.backend) as ports:
        clients = {way: Client(f"http://127.0.0.1:{port}/v1") for way, port in ports.items()}
        talks = {way: said(f"{way}: {_TEXT}") for way in clients}
        replies: dict[str, list[Reply]] = {way: [] for way in clients}
        rates: dict[str, list[float]] = {way: [] for way in clients}
        for number in range(num_rounds + 2):
            for way, client in clients.items():
                reply = asyncio.run(client.ask(talks[way], num_tokens))
                talks[way] = continued(talks[way], reply, "And then?")
                replies[way].append(reply)
                rates[way].append(asyncio.run(_streams(client, f"{way} {number}", num_tokens)))
    for way in clients:
        told = replies[way][2:]  # the first is cold
        report.add(f"{way}: first token of a hot turn", [1e3 * r.first for r in told], "ms")
        report.add(f"{way}: a token after it", [reply.ms_per_token for reply in told], "ms")
        report.add(f"{way}: {_NUM_STREAMS} streams", rates[way][2:], "tokens/s")
        reused = median(reply.num_reused / reply.num_prompt for reply in told)
        report.note(f"{way}: {reused:.0%} of the prompt reused")
    for way in (way for way in clients if way != DIRECT):
        pairs = zip(replies[way][2:], replies[DIRECT][2:], strict=True)
        added = [1e3 * (one.first - other.first) for one, other in pairs]
        report.add(f"{way} adds to the first token", added, "ms")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="fake", help="backend of the servers")


if __name__ == "__main__":
    sys.exit(run("proxy", measure, add_options=_options))
