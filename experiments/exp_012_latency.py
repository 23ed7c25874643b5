"""EXP-012: how long does a swap take, from the first request that waits to the last?

python -m experiments.exp_012_latency [--backend torch|mlx] [--model DIR] [--rounds 5]

Passed if unloading one model and loading the other take less than 30 s, and at most 1.2 times as
long as loading it where none was loaded. Nothing runs here, so that there is nothing to wait for.
"""

import argparse
import sys
from pathlib import Path
from statistics import median

from experiments.swapping import serving, swap, verdict

_MAX_S = 30.0
_MAX_RATIO = 1.2


def main() -> int:
    """Run it; the exit status is 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    swaps, loads, ratios = [], [], []
    with serving(options.backend, options.model) as (server, first, second):
        swap(server, second)  # both were read once
        for _ in range(options.rounds):
            swaps.append(swap(server, first).seconds)
            server.models.unload().result(600)
            loads.append(server.models.load(second).result(600).seconds)
            ratios.append(swaps[-1] / loads[-1])
    ratio, total = median(ratios), median(swaps)
    print(f"swap {total:.2f} s, cold load {median(loads):.2f} s (medians of {options.rounds})")
    results = [
        verdict("EXP-012 total", f"{total:.2f} s (below {_MAX_S:.0f})", is_passed=total < _MAX_S),
        verdict(
            "EXP-012 over a cold load",
            f"{ratio:.2f} times (at most {_MAX_RATIO})",
            is_passed=ratio <= _MAX_RATIO,
        ),
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
