"""What the engine adds to a step: everything but the backend's own launch and collect.

Decoding sequences on the fake backend, with text, stop strings and sealing as in a real server.
Target: at most 0.5 ms + 30 µs a row.
"""

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

from semantic.adapters.outbound.backends.fake import FakeBackend, FakeTokenizer, fake_spec
from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.request import Job
from semantic.application.engine.scheduler import EngineLimits
from semantic.domain.blocks import BlockNamespace
from semantic.domain.pool import BlockPool
from semantic.domain.sampling import SamplingParams, StopRules
from semantic.ports.backend import Step, StepOutput, Ticket

NUM_STEPS = 400
ROW_COUNTS = (1, 4, 8, 16, 32, 64)

_T = TypeVar("_T")


class TimedBackend(FakeBackend):
    """Counts the time spent in the device's own calls."""

    spent_s = 0.0

    def launch(self, step: Step) -> Ticket:
        """Launch on the clock."""
        return self._timed(lambda: super(TimedBackend, self).launch(step))

    def collect(self, ticket: Ticket) -> StepOutput:
        """Collect on the clock."""
        return self._timed(lambda: super(TimedBackend, self).collect(ticket))

    def _timed(self, call: Callable[[], _T]) -> _T:
        started = time.perf_counter()
        try:
            return call()
        finally:
            self.spent_s += time.perf_counter() - started


def overhead_ms(num_rows: int) -> float:
    """Median time of a step outside the backend, with `num_rows` sequences decoding."""
    backend = TimedBackend(fake_spec(block_tokens=256))
    store = AgentCacheStore(BlockPool(backend.spec, 2**30))
    limits = EngineLimits(max_batch_size=num_rows)
    engine = BlockPoolBatchEngine(backend, FakeTokenizer(), store, limits, lambda _: None)
    root = BlockNamespace("bench", "bench").root()
    for row in range(num_rows):
        engine.submit(
            Job(
                id=str(row),
                agent=str(row),
                root=root,
                tokens=tuple(f"prompt {row} of the benchmark".encode()),
                sampling=SamplingParams(temperature=0, seed=0),
                stop=StopRules(strings=("never to be seen",), ignore_eos=True),
                max_tokens=NUM_STEPS + 100,
            )
        )
    for _ in range(50):
        engine.step()
    times: list[float] = []
    for _ in range(NUM_STEPS):
        backend.spent_s = 0.0
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started - backend.spent_s)
    return 1000 * median(times)


def main() -> int:
    """Print a table; 1 if a row misses its target."""
    print(f"{'rows':>5} {'overhead ms':>12} {'target ms':>10}")
    is_missed = False
    for num_rows in ROW_COUNTS:
        measured, target = overhead_ms(num_rows), 0.5 + 0.030 * num_rows
        is_missed |= measured > target
        print(f"{num_rows:>5} {measured:>12.3f} {target:>10.3f}")
    print("FAIL" if is_missed else "PASS")
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main())
