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

from benchmarks.common import Target, make_engine, make_job, verdict
from benchmarks.starter import backend, prompt_tokens, starter_directory
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.application.engine.request import EventBatch
from semantic.application.engine.scheduler import ChunkBudget
from semantic.domain.errors import DrainingError
from semantic.domain.events import Failed, Finished, TextDelta

NUM_PROMPT = 7000
NUM_ROUNDS = 2


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

    engine = make_engine(made, HFTokenizer(directory), emit=keep)
    if has_stream:
        engine.submit(make_job("stream", prompt_tokens(directory, 64)[::-1], 2000))
        for _ in range(30):
            engine.step()
    started = time.perf_counter()
    engine.submit(make_job("long", prompt_tokens(directory, NUM_PROMPT), 1))
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
    print(f"a decode step takes {decode_ms:.0f} ms")
    print(f"prompt of {NUM_PROMPT}: {alone:.1f} s alone, {beside:.1f} s beside a stream")
    return verdict(
        [
            Target("p95 gap", cuts[94], 1.5 * target, "ms"),
            Target("p99 gap", cuts[98], 3 * target, "ms"),
            Target("prompt, of alone", beside / alone, 1.15),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
