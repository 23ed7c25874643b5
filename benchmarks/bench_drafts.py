"""Speed of replies with a draft model, against how often the draft model is right.

Compares one stream and eight, with a draft model and without, interleaved. Drafts from memory are
off, so that only the draft model counts. The pairs of models agree by construction:

- On a CPU, the starter drafts for a model of SmolLM2's 360M or 1.7B shape that contains the starter
  (`pairs_torch.py`). Noise in its last layer makes it disagree.
- With `--shape llama-8b`, on a GPU with MLX, a 1B-shaped model drafts for an 8B-shaped one
  (`pairs_mlx.py`). Both have random weights and prefer the same next token, except after a share of
  the tokens. `--peer` also measures mlx-lm's own decoding with a draft model, for one stream.
- With `--shape head-1b` or `head-8b`, it measures what a step of a model's own head (MTP) costs
  instead (`head_steps.py`), on the backend of `--backend`.

    python -m benchmarks.bench_drafts --agree 60 80 95
    python -m benchmarks.bench_drafts --shape llama-8b --agree 60 80 95 --peer
    python -m benchmarks.bench_drafts --shape head-8b --backend mlx --rounds 20
"""

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks import head_steps
from benchmarks.common import make_job
from benchmarks.report import Report, interleaved, run
from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.generation import Generation
from semantic.application.engine.request import EventBatch
from semantic.application.engine.speculative.memory_source import MemoryDrafts
from semantic.application.engine.speculative.model_source import ModelDrafts
from semantic.application.engine.speculative.planner import AdaptiveDraftPlanner
from semantic.application.settings import EngineLimits
from semantic.domain.events import Failed, TextDelta
from semantic.domain.pool import BlockPool
from semantic.ports.backend import ModelBackendPort

SHAPES = {
    "smollm2-360m": "benchmarks.pairs_torch",
    "smollm2-1.7b": "benchmarks.pairs_torch",
    "tiny": "benchmarks.pairs_mlx",
    "llama-8b": "benchmarks.pairs_mlx",
}
MEMORY_BYTES = 2**32


class NoMemory(MemoryDrafts):
    """Drafts nothing."""

    def chances(self, row: Generation, limit: int, num_unknown: int = 0) -> list[float]:  # noqa: ARG002
        return []


@dataclass
class Pair:
    """A model, its draft model, and prompts that the models continue.

    Attributes:
        prompt: Returns the tokens of a prompt by its number.
    """

    served: ModelBackendPort
    draft: ModelBackendPort
    tokenizer: Any
    prompt: Callable[[int], list[int]]


@dataclass
class Loop:
    """An engine that lives through all rounds, as in a server."""

    pair: Pair
    has_draft: bool
    drafts: ModelDrafts | None = None
    num_prompts: int = 0
    begun: set[str] = field(default_factory=set)
    num_pieces: int = 0

    def __post_init__(self) -> None:
        served = self.pair.served
        limits = EngineLimits(max_idle=0, draft_tokens=16 if self.has_draft else 0)
        store = AgentCacheStore(BlockPool(served.spec, MEMORY_BYTES))
        self.engine = BlockPoolBatchEngine(served, self.pair.tokenizer, store, limits, self._keep)
        if self.has_draft:
            vocab_size = served.spec.vocab_size
            self.drafts = ModelDrafts(self.pair.draft, store, time.monotonic, vocab_size)
            planner = AdaptiveDraftPlanner(served.traits, self.pair.tokenizer.eos_ids, self.drafts)
            planner.memory = NoMemory()
            self.engine.draft_with(planner)

    def _keep(self, batch: EventBatch) -> None:
        for name, event in batch:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, TextDelta):
                self.begun.add(name)
                self.num_pieces += 1

    def speed(self, num_streams: int, num_tokens: int) -> float:
        """Return the tokens per second of all streams together, once all have begun."""
        numbers = range(self.num_prompts, self.num_prompts + num_streams)
        for number in numbers:
            self.engine.submit(make_job(f"job{number}", self.pair.prompt(number), num_tokens))
        self.num_prompts += num_streams
        self.num_pieces = 0
        while not self.begun.issuperset(f"job{number}" for number in numbers):
            self.engine.step()
        num_before, started = self.num_pieces, time.perf_counter()
        while self.engine.has_work:
            self.engine.step()
        return (num_streams * num_tokens - num_before) / (time.perf_counter() - started)


def measure(report: Report) -> None:
    """Measure each pair of models, with each number of streams."""
    options = report.options
    if options.shape in head_steps.SHAPES:
        report.settings.update(shape=options.shape, backend=options.backend)
        opener = importlib.import_module(head_steps.MODULES[options.backend])
        with opener.open_head(options.shape) as backend:
            head_steps.measure_head(report, backend, report.choose(2, options.rounds))
        return
    pairs = importlib.import_module(SHAPES[options.shape])
    num_tokens, rounds = report.choose((48, 1), (options.tokens, options.rounds))
    report.settings.update(shape=options.shape, num_tokens=num_tokens)
    for agree in options.agree:
        if options.peer:
            pairs.measure_peer(report, options.shape, agree, num_tokens)
        with pairs.open_pair(options.shape, agree) as pair:
            measure_pair(report, pair, agree, num_tokens, rounds)


def measure_pair(report: Report, pair: Pair, agree: int, num_tokens: int, rounds: int) -> None:
    """Measure a pair with each number of streams, with the draft model and without."""
    loops = {"off": Loop(pair, has_draft=False), "on": Loop(pair, has_draft=True)}
    for num_streams in report.options.streams:
        calls = {
            name: lambda loop=loop, n=num_streams: loop.speed(n, num_tokens)
            for name, loop in loops.items()
        }
        speeds = interleaved(calls, rounds)
        label = f"agree {agree} %, {num_streams} stream{'s' * (num_streams > 1)}, "
        report.add_rounds(speeds, "tokens/s", label)
        report.add(f"{label}on / off", speeds.ratios("on", "off"), least=0.98)
    if (drafts := loops["on"].drafts) is not None:
        report.add(f"agree {agree} %, measured", 100 * drafts.acceptance, "%")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--shape", choices=(*SHAPES, *head_steps.SHAPES), default="smollm2-360m")
    parser.add_argument("--agree", nargs="+", type=int, choices=(60, 80, 95, 100), default=[80])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", choices=head_steps.MODULES, default="mlx")
    parser.add_argument("--peer", action="store_true", help="also measure mlx-lm's own loop")


if __name__ == "__main__":
    sys.exit(run("drafts", measure, add_options=add_options))
