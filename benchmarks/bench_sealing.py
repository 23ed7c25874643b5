"""What keeping a turn costs it: sealed in memory, and written behind, against not kept at all.

python -m benchmarks.bench_sealing [--tokens 2048] [--reply 48] [--rounds 5]
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks import starter
from benchmarks.bench_resume import GREEDY, conversation
from semantic.adapters.config.settings import load_settings
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.application.engine.device_thread import LoadedModel
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.request import Job
from semantic.application.engine.scheduler import EngineLimits
from semantic.domain.agents import Principal
from semantic.domain.sampling import StopRules
from semantic.entrypoints.persistence import AgentMemory

_TARGET = 1.05


def turn(engine: BlockPoolBatchEngine, model: LoadedModel, tokens: list[int], reply: int) -> float:
    """Seconds of one turn, its end included."""
    job = Job(
        id=f"job{time.monotonic_ns()}",
        agent="bench",
        root=model.root(Principal()),
        tokens=tuple(tokens),
        sampling=GREEDY,
        stop=StopRules(ignore_eos=True),
        max_tokens=reply,
    )
    started = time.perf_counter()
    engine.submit(job)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


def main() -> None:
    """Run the three ways in turns and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--reply", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    directory = starter.starter_directory()
    seeds = itertools.count(10**6)
    with ExitStack() as stack:
        backend = stack.enter_context(starter.backend(directory))
        working_mb = backend.bytes_for([options.tokens + options.reply + 256]) // 2**20 + 1
        ways = {
            # There is room for the sequence alone, so that nothing can be kept.
            "not kept": {"durability": "none", "memory_budget_mb": working_mb},
            "in memory": {"durability": "none", "memory_budget_mb": 2000},
            "written behind": {"durability": "write_behind", "memory_budget_mb": 2000},
        }
        calls: dict[str, Callable[[], float]] = {}
        for name, given in ways.items():
            cache = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            calls[name] = _way(
                stack,
                backend,
                directory,
                {**given, "cache_dir": str(cache)},
                lambda: conversation(options.tokens, next(seeds)),
                options.reply,
            )
        rounds = starter.interleaved(calls, options.rounds)
    for name in ways:
        ratio = rounds.ratio(name, "not kept")
        verdict = "" if name == "not kept" else f"  ({'ok' if ratio <= _TARGET else 'MISSED'})"
        print(f"  {name:<16} {rounds.median(name):7.3f} s {ratio:6.3f}x{verdict}")
    print(f"  target: at most {_TARGET}x")


def _way(
    stack: ExitStack,
    backend: TorchBackend,
    directory: Path,
    given: dict[str, object],
    prompt: Callable[[], list[int]],
    reply: int,
) -> Callable[[], float]:
    """An engine of its own over the one backend."""
    memory = AgentMemory(load_settings(given))
    stack.callback(memory.close, 60)
    model = LoadedModel("starter", backend, HFTokenizer(directory), "bench", memory.codec.kv_format)
    limits = EngineLimits(max_idle=0)
    engine = memory.make_engine(model, limits, lambda _: None, lambda: None)
    return lambda: turn(engine, model, prompt(), reply)


if __name__ == "__main__":
    main()
