"""EXP-002: what it costs to put, hold and let go one block in a full pool.

The pool has 100,000 blocks, half of them held and half idle, and not one byte is free: every block
that is put evicts exactly one. Blocks are named before the clock starts.

Run with `python -m benchmarks.bench_block_pool`; the exit code is 1 if the target is missed.
"""

import sys
import time

from benchmarks.common import Target, verdict
from semantic.domain.blocks import BlockNamespace, PartKey, block_name
from semantic.domain.pool import BlockPool
from semantic.domain.spec import LayerKind, LayerSpec, ModelCacheSpec

NUM_BLOCKS = 100_000
NUM_OPERATIONS = 20_000
BLOCK_BYTES = 2**20
TARGET_P95_MS = 0.05


def make_keys(first: int, count: int) -> list[PartKey]:
    """Distinct full-size blocks that follow the same root."""
    root = BlockNamespace("bench", "bf16").root()
    indices = range(first, first + count)
    return [(block_name(root, (index, *range(255))), LayerKind.FULL) for index in indices]


def make_full_pool() -> BlockPool:
    """Fill a pool to the last byte, and leave every other block idle."""
    layer = LayerSpec(LayerKind.FULL, num_kv_heads=8, key_dim=128, value_dim=128)
    spec = ModelCacheSpec("bench", (layer,), vocab_size=2**17, max_context=2**17)
    pool = BlockPool(spec, NUM_BLOCKS * BLOCK_BYTES)
    keys = make_keys(0, NUM_BLOCKS)
    pool.put(dict.fromkeys(keys, BLOCK_BYTES))
    for key in keys[1::2]:
        pool.hold(key)
    assert pool.usage().available == 0
    return pool


def measure(pool: BlockPool) -> dict[str, list[int]]:
    """Time single-block operations, in nanoseconds."""
    times: dict[str, list[int]] = {"put (evicts one)": [], "hold and let go": [], "both": []}
    for key in make_keys(NUM_BLOCKS, NUM_OPERATIONS):
        start = time.perf_counter_ns()
        evicted = pool.put({key: BLOCK_BYTES})
        middle = time.perf_counter_ns()
        pool.hold(key)
        pool.let_go(key)
        end = time.perf_counter_ns()
        assert len(evicted) == 1
        spent = (middle - start, end - middle, end - start)
        for row, nanoseconds in zip(times.values(), spent, strict=True):
            row.append(nanoseconds)
    return times


def percentile_ms(times: list[int], percent: int) -> float:
    """The time that so many percent of the operations did not exceed."""
    return sorted(times)[len(times) * percent // 100 - 1] / 1e6


def main() -> int:
    """Print the table and the verdict."""
    pool = make_full_pool()
    times = measure(pool)
    pool.check_integrity()
    print(f"{NUM_BLOCKS:,} blocks, {NUM_OPERATIONS:,} operations, milliseconds")
    print(f"{'':24}{'p50':>9}{'p95':>9}{'p99':>9}")
    for name, row in times.items():
        print(f"{name:24}" + "".join(f"{percentile_ms(row, p):9.4f}" for p in (50, 95, 99)))
    p95 = percentile_ms(times["both"], 95)
    return verdict([Target("p95 of both", p95, TARGET_P95_MS, "ms")])


if __name__ == "__main__":
    sys.exit(main())
