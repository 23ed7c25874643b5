"""EXP-011: is the memory of a model that is unloaded really returned?

python -m experiments.exp_011_memory [--backend torch|mlx] [--model DIR] [--swaps 20]

Passed if less than 1 GB is left after unloading, and the process is within 5 % after 20 swaps. With
mlx, what MLX counts as active is measured too.
"""

import argparse
import sys
from pathlib import Path

from experiments.swapping import megabytes, serving, swap, verdict

_MAX_MB = 1024
_MAX_GROWTH = 0.05


def main() -> int:
    """Run it; the exit status is 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--swaps", type=int, default=20)
    options = parser.parse_args()
    with serving(options.backend, options.model) as (server, first, second):
        loaded = megabytes()
        server.models.unload().result(600)
        unloaded, active = megabytes(), _active_mb(options.backend)
        server.models.load(first).result(600)
        sizes = []
        for turn in range(options.swaps):
            swap(server, first if turn % 2 else second)
            sizes.append(megabytes())
        print(
            f"loaded {loaded:.0f} MB, unloaded {unloaded:.0f} MB, after swaps: "
            f"{' '.join(f'{size:.0f}' for size in sizes)}"
        )
        growth = sizes[-1] / sizes[0] - 1
    figure = f"{unloaded:.0f} MB of {loaded:.0f} MB are left after unloading (below {_MAX_MB})"
    results = [
        verdict("EXP-011 process", figure, is_passed=unloaded < _MAX_MB),
        verdict("EXP-011 device", f"{active:.1f} MB are active", is_passed=active < _MAX_MB),
        verdict(
            f"EXP-011 {options.swaps} swaps",
            f"{100 * growth:+.1f} % from the first to the last (at most {100 * _MAX_GROWTH:.0f} %)",
            is_passed=growth <= _MAX_GROWTH,
        ),
    ]
    return 0 if all(results) else 1


def _active_mb(backend: str) -> float:
    """What MLX counts as in use; 0 for other backends, whose memory is the process's."""
    if backend != "mlx":
        return 0.0
    import mlx.core as mx  # noqa: PLC0415 - not with other backends

    return float(mx.get_active_memory() / 2**20)


if __name__ == "__main__":
    sys.exit(main())
