"""A long prompt beside a stream: what each costs the other.

While a prompt of 7,000 tokens is computed, another agent's stream must go on: the gap between its
tokens stays near `target_step_ms`, and the prompt takes little longer than alone.
"""

import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import quantiles

from benchmarks.starter import backend, prompt_tokens, starter_directory
from semantic.adapters.outbound.hf_tokenizer import HFTokenizer
from semantic.adapters.outbound.torch_backend import TorchBackend
from semantic.application.agent_store import AgentCacheStore
from semantic.application.batch_engine import BlockPoolBatchEngine, EventBatch
from semantic.application.generation import Job
from semantic.application.scheduler import EngineLimits
from semantic.domain.block_pool import BlockPool
from semantic.domain.blocks import BlockNamespace
from semantic.domain.chat import Finished, TextDelta
from semantic.domain.sampling import SamplingParams, StopRules

NUM_PROMPT = 7000
LIMITS = EngineLimits()


def run(made: TorchBackend, directory: Path, *, has_stream: bool) -> tuple[float, list[float]]:
    """Seconds the prompt took, and the gaps between the stream's tokens meanwhile."""
    arrivals: list[float] = []
    finished: dict[str, float] = {}

    def keep(events: EventBatch) -> None:
        for name, event in events:
            if isinstance(event, TextDelta) and name == "stream":
                arrivals.append(time.perf_counter())
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
    engine.cancel("stream")
    while engine.has_work:
        engine.step()
    meanwhile = [t for t in arrivals if started <= t <= finished["long"]]
    gaps = [b - a for a, b in pairwise(meanwhile)]
    return finished["long"] - started, gaps


def main() -> int:
    """Print the figures against their targets; 1 if one is missed."""
    directory = starter_directory()
    with backend(directory) as made:
        run(made, directory, has_stream=False)
        alone, _ = run(made, directory, has_stream=False)
        beside, gaps = run(made, directory, has_stream=True)
        again, _ = run(made, directory, has_stream=False)
    alone = (alone + again) / 2
    cuts = quantiles([1000 * gap for gap in gaps], n=100)
    target = LIMITS.target_step_ms
    checks = {
        f"p95 gap {cuts[94]:.0f} ms (target {1.5 * target:.0f})": cuts[94] <= 1.5 * target,
        f"p99 gap {cuts[98]:.0f} ms (target {3 * target:.0f})": cuts[98] <= 3 * target,
        f"prompt {beside / alone:.2f}x of alone (target 1.15x)": beside <= 1.15 * alone,
    }
    print(f"prompt of {NUM_PROMPT}: {alone:.1f} s alone, {beside:.1f} s beside a stream")
    for text, is_good in checks.items():
        print(f"  {text}  {'ok' if is_good else 'MISSED'}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
