"""What keeping a turn costs it: sealed in memory, and written behind, against not kept at all.

python -m benchmarks.bench_sealing [--tokens 2048] [--reply 48] [--rounds 5]
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack

from benchmarks.common import (
    PersistentEngine,
    Target,
    interleaved,
    persistent_engine,
    seconds,
    verdict,
)
from benchmarks.starter import backend, random_tokens, starter_directory
from semantic.application.engine.scheduler import EngineLimits

_TARGET = 1.05


def turn(made: PersistentEngine, tokens: list[int], reply: int) -> float:
    """Seconds of one turn, its end included."""
    job = made.job(tokens, reply)

    def run() -> None:
        made.engine.submit(job)
        made.run()

    return seconds(run)


def main() -> int:
    """Run the three ways in turns and report; 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--reply", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    directory = starter_directory()
    seeds = itertools.count(10**6)
    with ExitStack() as stack:
        device = stack.enter_context(backend(directory))
        working_mb = device.bytes_for([options.tokens + options.reply + 256]) // 2**20 + 1
        ways: dict[str, dict[str, object]] = {
            # There is room for the sequence alone, so that nothing can be kept.
            "not kept": {"durability": "none", "memory_budget_mb": working_mb},
            "in memory": {"durability": "none", "memory_budget_mb": 2000},
            "written behind": {"durability": "write_behind", "memory_budget_mb": 2000},
        }
        calls: dict[str, Callable[[], float]] = {}
        for name, settings in ways.items():
            cache = stack.enter_context(tempfile.TemporaryDirectory())
            limits = EngineLimits(max_idle=0)
            engine = persistent_engine(device, directory, settings | {"cache_dir": cache}, limits)
            made = stack.enter_context(engine)
            calls[name] = lambda made=made: turn(  # type: ignore[misc]
                made, random_tokens(options.tokens, next(seeds)), options.reply
            )
        rounds = interleaved(calls, options.rounds)
    rounds.print("s")
    others = [name for name in ways if name != "not kept"]
    return verdict(
        [Target(f"{name}, of not kept", rounds.ratio(name, "not kept"), _TARGET) for name in others]
    )


if __name__ == "__main__":
    sys.exit(main())
