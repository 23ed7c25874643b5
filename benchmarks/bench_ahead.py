r"""Decoding ahead: tokens a second of what agents do, with it against without, over HTTP.

Starts the real server and asks it in pairs: without (`draft_tokens` 0, set while it runs), then
with, in turns. Tokens a second are those between the first token and the last.

    edit    a file of 400 lines with small changes: the client sends as `prediction` what the model
            says without it, of which one line in twelve is changed
    again   the same reply once more, from the server's memory alone: what an agent repeats of a
            file, or of what another has said
    calls   five agents, one after another, say the same forty-eight tokens: calls of one tool
    agents  five agents at once with one task and names of their own
    prose   sampled at temperature 1, where nothing repeats

A model with random weights writes no code: its replies stand for text of that length, and say what
checking guesses costs and spares. With the starter model `edit` is a real file.

    python -m benchmarks.bench_ahead                                   # the starter model
    python -m benchmarks.bench_ahead --shape llama-8b --backend mlx --memory-mb 40000 \
        --directory /tmp/models --json ahead.json
"""

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.common import Target, serving, verdict
from benchmarks.random_models import SHAPES, make_model
from semantic.adapters.config.settings import STARTER_MODEL

SCENARIOS = ("edit", "again", "calls", "agents", "prose")
TASK = "You are one of five reviewers. List every function of this file with one line on each.\n\n"


def source(name: str, num_lines: int) -> str:
    """A file of Python, its functions named after `name`."""
    functions = (
        f"def {name}_{n}(value: int, limit: int = {n * 7}) -> int:\n"
        f'    """Return the value, at most the limit."""\n'
        f"    if value > limit:\n        return limit\n    return value + {n}\n\n"
        for n in range(num_lines // 6 + 1)
    )
    return "".join(functions)


def changed(text: str) -> str:
    """The same with a word of one line in twelve replaced."""
    lines = text.splitlines(keepends=True)
    for index in range(5, len(lines), 12):
        lines[index] = lines[index].replace(" ", " x", 1)
    if len(lines) < 12:  # of a random model
        words = text.split(" ")
        words[9::60] = ["changed"] * len(words[9::60])
        return " ".join(words)
    return "".join(lines)


@dataclass
class Asked:
    """What came of some replies."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    texts: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


class Client:
    """Asks a server."""

    def __init__(self, port: int, options: argparse.Namespace) -> None:
        self._base, self._options = f"http://127.0.0.1:{port}", options
        self.names = itertools.count()

    async def draft(self, num_tokens: int) -> None:
        """Turn it on or off."""
        async with httpx.AsyncClient(base_url=self._base) as http:
            reply = await http.patch("/admin/runtime", json={"draft_tokens": num_tokens})
            reply.raise_for_status()

    async def ask(self, prompt: str, num_tokens: int, **more: Any) -> Asked:
        """Send a chat and read its stream; nobody has the agent's name."""
        body = {
            "model": "any",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        first, last, pieces, usage = 0.0, 0.0, [], {}
        headers = {"x-agent-id": f"agent-{next(self.names)}"}
        async with (
            httpx.AsyncClient(base_url=self._base, timeout=600) as http,
            http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply,
        ):
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                piece = "".join(c["delta"].get("content") or "" for c in event.get("choices", ()))
                if piece:
                    last = time.perf_counter()
                    first = first or last
                    pieces.append(piece)
        details = usage["completion_tokens_details"]
        return Asked(
            last - first,
            usage["completion_tokens"] - 1,
            details["accepted_prediction_tokens"],
            details["rejected_prediction_tokens"],
            ["".join(pieces)],
        )


async def edit(client: Client, options: argparse.Namespace, name: str, before: Asked) -> Asked:
    """Change a file."""
    prompt = (
        f"Rename `value` to `amount` and write the whole file.\n\n{source(name, options.lines)}"
    )
    expected = changed(before.texts[0] if before.texts else "")
    prediction = {"type": "content", "content": expected}
    more = {"prediction": prediction} if expected else {}
    return await client.ask(prompt, options.tokens, **more)


async def again(client: Client, options: argparse.Namespace, name: str, before: Asked) -> Asked:  # noqa: ARG001
    """Say something once more."""
    return await client.ask(f"{name}: tell me of the city.", options.tokens)


async def calls(client: Client, options: argparse.Namespace, name: str, before: Asked) -> Asked:  # noqa: ARG001
    """Call a tool, five times."""
    asked = [await client.ask(f"{name}: call the tool.", 48) for _ in range(5)]
    return _sum(asked, sum(each.seconds for each in asked))


async def agents(client: Client, options: argparse.Namespace, name: str, before: Asked) -> Asked:  # noqa: ARG001
    """Five at once."""
    prompts = [TASK + source(f"{name}{who}", options.lines // 4) for who in "abcde"]
    started = time.perf_counter()
    asked = await asyncio.gather(*(client.ask(p, options.tokens // 2) for p in prompts))
    return _sum(asked, time.perf_counter() - started)


async def prose(client: Client, options: argparse.Namespace, name: str, before: Asked) -> Asked:  # noqa: ARG001
    """Say what nobody has said."""
    return await client.ask(f"{name}: tell me a story.", options.tokens, temperature=1, seed=1)


def _sum(asked: list[Asked], seconds: float) -> Asked:
    return Asked(
        seconds,
        sum(each.num_tokens for each in asked),
        sum(each.num_accepted for each in asked),
        sum(each.num_rejected for each in asked),
        [text for each in asked for text in each.texts],
    )


Scenario = Callable[[Client, argparse.Namespace, str, Asked], Awaitable[Asked]]


async def measure(
    client: Client, scenario: Scenario, options: argparse.Namespace
) -> dict[str, Any]:
    """Ask in pairs; returns what each gave."""
    pairs: list[tuple[Asked, Asked]] = []
    for turn in range(options.rounds + 1):
        name = f"{scenario.__name__}{turn}"
        await client.draft(0)
        without = await scenario(client, options, name, Asked())
        # The same reply again where that is the point; elsewhere another.
        other = name if scenario in (edit, again, calls) else f"{name}x"
        await client.draft(options.draft_tokens)
        ahead = await scenario(client, options, other, without)
        is_same = without.texts == ahead.texts or scenario in (agents, prose)
        print(
            f"  {name:<10} {without.rate:8.1f} {ahead.rate:8.1f} tokens/s, of {ahead.num_tokens} "
            f"{ahead.num_accepted} right, {ahead.num_rejected} wrong"
            f"{'' if is_same else ', OTHER TEXT'}"
        )
        if turn:
            pairs.append((without, ahead))
    return {
        "without": median(without.rate for without, _ in pairs),
        "with": median(ahead.rate for _, ahead in pairs),
        "ratio": median(ahead.rate / without.rate for without, ahead in pairs),
        "accepted": sum(ahead.num_accepted for _, ahead in pairs),
        "rejected": sum(ahead.num_rejected for _, ahead in pairs),
        "tokens": sum(ahead.num_tokens for _, ahead in pairs),
    }


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Decoding ahead, with against without.")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights; else the starter")
    parser.add_argument("--backend", choices=("auto", "mlx", "torch"), default="auto")
    parser.add_argument("--lines", type=int, default=400, help="of the file to edit")
    parser.add_argument("--tokens", type=int, default=600, help="of a reply")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft-tokens", type=int, default=16)
    parser.add_argument("--memory-mb", type=int, default=2048)
    parser.add_argument("--only", nargs="*", choices=SCENARIOS, default=SCENARIOS)
    parser.add_argument("--set", nargs="*", default=[], help="other settings, as name=value")
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("~/.semantic/models/smollm2-135m-instruct")
    )
    parser.add_argument("--directory", type=Path, help="where models are kept")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--goals", action="store_true", help="those of a device with cheap rows")
    return parser.parse_args()


def main() -> int:
    """Measure; returns 1 if a goal is missed."""
    options = parse()
    chosen = [s for s in (edit, again, calls, agents, prose) if s.__name__ in options.only]
    with tempfile.TemporaryDirectory() as temporary:
        home, model = Path(temporary) / "home", STARTER_MODEL
        arguments = ["--memory-budget-mb", str(options.memory_mb), "--backend", options.backend]
        if options.shape:
            directory = options.directory or Path(temporary)
            model = str(make_model(options.shape, directory, options.tokenizer.expanduser()))
            arguments += ["--home", str(home)]
        settings = {"model_aliases": "any", "cache_dir": str(home / "cache")}
        settings |= dict(pair.split("=", 1) for pair in options.set)
        with serving("--model", model, *arguments, settings=settings) as port:
            client = Client(port, options)
            figures = {s.__name__: asyncio.run(measure(client, s, options)) for s in chosen}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    least = {"edit": 2.5, "calls": 2.0} if options.goals else {}
    return verdict(
        [
            Target(
                f"{name}: tokens/s with over without",
                told["ratio"],
                least.get(name, 0.97),
                is_least=True,
            )
            for name, told in figures.items()
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
