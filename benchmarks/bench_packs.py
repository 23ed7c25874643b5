r"""Cache packs: seconds until a coding agent's first token, with a pack and without, over HTTP.

Sends the first request of a client, as it was recorded, to servers that have never seen it: one
without a pack, and one to which a pack was added first. Another server makes the pack from a
conversation with another question. The servers run in turns, each with a new home directory.

    python -m benchmarks.bench_packs                                # a prompt of the same kind
    python -m benchmarks.bench_packs --request claude-code.json     # the body of POST /v1/messages
    python -m benchmarks.bench_packs --request claude-code.json --shape llama-1b --weights int4

Without `--request`, the prompt is made up: a system prompt and tools of about `--tokens` tokens. To
record a request of Claude Code, point `ANTHROPIC_BASE_URL` at any program that stores bodies. If it
does not fit the model's context, `--tools N` keeps its first tools only.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import serving
from benchmarks.random_models import SHAPES, make_model
from benchmarks.report import Report, run
from benchmarks.starter import starter_directory
from semantic.adapters.outbound.blocks.pack_keys import PackKeys

CHARS_PER_TOKEN = 4
OTHER = [{"role": "user", "content": "Which files are there?"}]


def made_up(num_tokens: int) -> dict[str, Any]:
    """Return a request whose system prompt and tools have about `num_tokens` tokens."""
    rule = "Read a file before you change it, and run its tests when you have changed it. "
    half = num_tokens * CHARS_PER_TOKEN // 2
    tool = {"input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}
    count = max(1, half // 500)
    tools = [{"name": f"tool_{n}", "description": rule * 5, **tool} for n in range(count)]
    asked = [{"role": "user", "content": "Rename the function in main.py."}]
    return {"system": rule * (half // len(rule)), "tools": tools, "messages": asked}


def request_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the first request of a client, without what only its own server knows."""
    if options.request is None:
        return made_up(options.tokens)
    recorded = json.loads(options.request.read_text("utf-8"))
    kept = {name: recorded[name] for name in ("system", "tools", "messages")}
    return {**kept, "tools": kept["tools"][: options.tools]}


@dataclass(frozen=True)
class Site:
    """Where servers run, and what they are asked."""

    directory: Path
    model: Path
    arguments: tuple[str, ...]
    request: dict[str, Any]

    @contextlib.contextmanager
    def serve(self, name: str) -> Iterator[httpx.Client]:
        home = ("--home", str(self.directory / name))
        with serving("--model", str(self.model), *home, *self.arguments) as port:
            url = f"http://127.0.0.1:{port}"
            with httpx.Client(base_url=url, timeout=None) as http:  # noqa: S113 - who measures waits
                yield http

    def keys(self, name: str) -> PackKeys:
        home = self.directory / name
        return PackKeys(home / "pack.key", home / "pack_keys")

    def ask(self, http: httpx.Client, agent: str, **more: Any) -> tuple[float, dict[str, Any]]:
        """Ask for one token; returns the seconds until it came, and the usage."""
        body = {"model": "any", "max_tokens": 1, "temperature": 0, **self.request, **more}
        started = time.perf_counter()
        reply = http.post("/v1/messages", json=body, headers={"x-agent-id": agent})
        elapsed = time.perf_counter() - started
        usage: dict[str, Any] = reply.raise_for_status().json()["usage"]
        return elapsed, usage


def measure(report: Report) -> None:
    """Make a pack, then ask servers with it and without in turns."""
    options = report.options
    if report.is_quick:
        options.tokens, options.rounds = 1000, 1
    report.settings.update({name: str(value) for name, value in vars(options).items()})
    with tempfile.TemporaryDirectory() as temporary:
        directory, starter = Path(temporary), starter_directory()
        shape = options.shape
        model = make_model(shape, directory / "models", starter) if shape else starter
        arguments = ("--memory-budget-mb", str(options.memory_mb), "--weights", options.weights)
        site = Site(directory, model, arguments, request_of(options))
        with site.serve("maker") as http:
            site.ask(http, "coder", messages=OTHER)
            reply = http.get("/v1/agents/coder/pack", params={"name": "bench"})
            pack = reply.raise_for_status().content
        figures: dict[str, list[float]] = {"without": [], "with": [], "add": []}
        num_read = num_prompt = 0
        for index in range(options.rounds):
            with site.serve(f"without-{index}") as http:
                figures["without"].append(site.ask(http, "coder")[0])
            name = f"with-{index}"
            site.keys(name).trust("maker", site.keys("maker").public)
            with site.serve(name) as http:
                started = time.perf_counter()
                http.post("/admin/packs", content=pack).raise_for_status()
                figures["add"].append(time.perf_counter() - started)
                seconds, usage = site.ask(http, "coder")
                figures["with"].append(seconds)
                num_read = usage["cache_read_input_tokens"]
                num_prompt = num_read + usage["input_tokens"]
                num_prompt += usage["cache_creation_input_tokens"]
    report.add("tokens of the prompt", num_prompt, "tokens")
    report.add("tokens from the pack", num_read, "tokens", least=1)
    report.add("size of the pack", len(pack) / 2**20, "MB")
    report.add("first token without a pack", figures["without"], "s")
    report.add("first token with the pack", figures["with"], "s")
    report.add("adding it, once", figures["add"], "s")
    ratios = [a / b for a, b in zip(figures["without"], figures["with"], strict=True)]
    report.add("without / with", ratios, least=2)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--request", type=Path, help="a recorded body of POST /v1/messages")
    parser.add_argument("--tools", type=int, default=None, help="keep this many of its tools")
    parser.add_argument("--tokens", type=int, default=4000, help="of a prompt that is made up")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights, not the starter")
    parser.add_argument("--weights", default="auto", help="as in `semantic serve`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-mb", type=int, default=2048)


if __name__ == "__main__":
    sys.exit(run("packs", measure, add_options=add_options))
