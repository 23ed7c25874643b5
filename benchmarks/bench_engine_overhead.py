"""What the engine adds to a step: everything but the backend's own launch and collect.

Decoding sequences on the fake backend, with text, stop strings and sealing as in a real server.
Target: at most 0.5 ms + 30 µs a row.
"""

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

from benchmarks.common import Target, make_engine, make_job, verdict
from semantic.adapters.outbound.backends.fake import FakeBackend, FakeTokenizer, fake_spec
from semantic.application.engine.scheduler import EngineLimits
from semantic.domain.sampling import StopRules
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
    engine = make_engine(backend, FakeTokenizer(), EngineLimits(max_batch_size=num_rows))
    stop = StopRules(strings=("never to be seen",), ignore_eos=True)
    for row in range(num_rows):
        prompt = f"prompt {row} of the benchmark".encode()
        engine.submit(make_job(str(row), prompt, NUM_STEPS + 100, stop=stop))
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
    return verdict(
        [Target(f"{rows} rows", overhead_ms(rows), 0.5 + 0.030 * rows, "ms") for rows in ROW_COUNTS]
    )


if __name__ == "__main__":
    sys.exit(main())
