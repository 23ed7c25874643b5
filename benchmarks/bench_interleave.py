"""A long prompt beside a stream: what each costs the other.

While a prompt of 7,000 tokens is computed, another agent's stream must go on: the gap between its
tokens stays near `target_step_ms`, and the prompt takes little longer than alone.
"""

import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

from benchmarks.starter import backend, prompt_tokens, starter_directory
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.request import EventBatch, Job
from semantic.application.engine.scheduler import ChunkBudget, EngineLimits
from semantic.domain.blocks import BlockNamespace
from semantic.domain.errors import DrainingError
from semantic.domain.events import Failed, Finished, TextDelta
from semantic.domain.pool import BlockPool
from semantic.domain.sampling import SamplingParams, StopRules

NUM_PROMPT = 7000
NUM_ROUNDS = 2
LIMITS = EngineLimits()


@dataclass(frozen=True)
class Round:
    """Seconds the prompt took, and between the stream's tokens before it came and meanwhile."""

    took: float
    gaps_before: list[float]
    gaps: list[float]


def run(made: TorchBackend, directory: Path, *, has_stream: bool) -> Round:
    """Compute the prompt, beside a stream or alone."""
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

    store = AgentCacheStore(BlockPool(made.spec, 2**31))
    engine = BlockPoolBatchEngine(made, HFTokenizer(directory), store, LIMITS, keep)
    root = BlockNamespace("bench", str(time.time())).root()
    sampling, stop = SamplingParams(temperature=0, seed=0), StopRules(ignore_eos=True)
    if has_stream:
        words = tuple(prompt_tokens(directory, 64)[::-1])
        engine.submit(Job("stream", "stream", root, words, sampling, stop, 2000))
        for _ in range(30):
            engine.step()
    started = time.perf_counter()
    prompt = tuple(prompt_tokens(directory, NUM_PROMPT))
    engine.submit(Job("long", "long", root, prompt, sampling, stop, 1))
    while "long" not in finished:
        engine.step()
    engine.abandon(DrainingError("the round is over"))
    before = [b - a for a, b in pairwise(t for t in arrivals if t < started)]
    gaps = [b - a for a, b in pairwise(t for t in arrivals if started <= t <= finished["long"])]
    return Round(finished["long"] - started, before, gaps)


def main() -> int:
    """Print the figures against their targets; 1 if one is missed."""
    directory = starter_directory()
    with backend(directory) as made:
        run(made, directory, has_stream=False)
        rounds = [run(made, directory, has_stream=bool(i % 2)) for i in range(2 * NUM_ROUNDS + 1)]
    streams = rounds[1::2]
    alone, beside = (median(r.took for r in part) for part in (rounds[::2], streams))
    cuts = quantiles([1000 * gap for r in streams for gap in r.gaps], n=100)
    # What `target_step_ms` is by default.
    decode_ms = 1000 * median(gap for r in streams for gap in r.gaps_before)
    target = ChunkBudget.PATIENCE * decode_ms
    checks = {
        f"p95 gap {cuts[94]:.0f} ms (target {1.5 * target:.0f})": cuts[94] <= 1.5 * target,
        f"p99 gap {cuts[98]:.0f} ms (target {3 * target:.0f})": cuts[98] <= 3 * target,
        f"prompt {beside / alone:.2f}x of alone (target 1.15x)": beside <= 1.15 * alone,
    }
    print(f"a decode step takes {decode_ms:.0f} ms")
    print(f"prompt of {NUM_PROMPT}: {alone:.1f} s alone, {beside:.1f} s beside a stream")
    for text, is_good in checks.items():
        print(f"  {text}  {'ok' if is_good else 'MISSED'}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
