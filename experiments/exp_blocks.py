"""EXP-002 and EXP-006: the cost of allocating a block, and of gathering a context from blocks."""

import time
from collections.abc import Callable

import numpy as np

from benchmarks.blocks import BLOCK_TOKENS, GEMMA_FULL, GEMMA_WINDOW, Geometry
from benchmarks.report import interleaved, seconds
from experiments.common import Experiment, Findings
from semantic.adapters.outbound.backends.mlx import runtime
from semantic.domain.blocks import BlockNamespace, PartKey, block_name
from semantic.domain.pool import BlockPool
from semantic.domain.spec import LayerKind, LayerSpec, ModelCacheSpec

BLOCK_BYTES = 2**20


# -- EXP-002 ---------------------------------------------------------------------------------------


def make_keys(first: int, count: int) -> list[PartKey]:
    """Return distinct full-size blocks that follow the same root."""
    root = BlockNamespace("bench", "bf16").root()
    indices = range(first, first + count)
    return [(block_name(root, (index, *range(255))), LayerKind.FULL) for index in indices]


def make_full_pool(num_blocks: int) -> BlockPool:
    """Fill a pool to the last byte, and leave every other block idle."""
    layer = LayerSpec(LayerKind.FULL, num_kv_heads=8, key_dim=128, value_dim=128)
    spec = ModelCacheSpec("bench", (layer,), vocab_size=2**17, max_context=2**17)
    pool = BlockPool(spec, num_blocks * BLOCK_BYTES)
    keys = make_keys(0, num_blocks)
    pool.put(dict.fromkeys(keys, BLOCK_BYTES))
    for key in keys[1::2]:
        pool.acquire(key)
    return pool


def allocation_ms(pool: BlockPool, keys: list[PartKey]) -> list[float]:
    """Return the milliseconds to put, acquire and release each block; each evicts one."""
    times = []
    for key in keys:
        started = time.perf_counter_ns()
        evicted = pool.put({key: BLOCK_BYTES})
        pool.acquire(key)
        pool.release(key)
        times.append((time.perf_counter_ns() - started) / 1e6)
        assert len(evicted) == 1
    return times


def percentile(values: list[float], percent: int) -> float:
    """Return the value that this percentage of the values does not exceed.

    >>> percentile([4, 1, 3, 2], 50)
    2
    """
    return sorted(values)[max(0, len(values) * percent // 100 - 1)]


def allocation(found: Findings) -> None:
    """Allocate blocks in a full pool of 100,000."""
    num_blocks, count = (1000, 200) if found.is_quick else (100_000, 20_000)
    pool = make_full_pool(num_blocks)
    times = allocation_ms(pool, make_keys(num_blocks, count))
    pool.check_integrity()
    for percent in (50, 95, 99):
        found.at_most(f"p{percent} of {count:,}", percentile(times, percent), 1.0, "ms")
    found.at_most("p95, our own bound", percentile(times, 95), 0.05, "ms")


# -- EXP-006 ---------------------------------------------------------------------------------------


class Gather:
    """A model's context in blocks, to be gathered into working memory.

    Blocks take turns in few arrays, so that memory for them is not needed twice.
    """

    def __init__(self, geometry: Geometry, num_blocks: int) -> None:
        self._geometry, self._num_blocks = geometry, num_blocks
        self._blocks = [np.ones(geometry.shape(), np.uint16) for _ in range(4)]
        self._working = np.zeros(geometry.shape(num_blocks * BLOCK_TOKENS), np.uint16)
        self.num_bytes = self._working.nbytes

    def copy(self) -> None:
        """Copy the same number of bytes, one piece per block."""
        flat = self._working.reshape(self._num_blocks, -1)
        for index in range(self._num_blocks):
            flat[index] = self._blocks[index % 4].reshape(-1)

    def gather(self) -> None:
        """Copy every block's layers to their places, as backends do."""
        for index in range(self._num_blocks):
            place = slice(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS)
            for layer in range(self._geometry.num_layers):
                self._working[layer, :, place] = self._blocks[index % 4][layer]

    def concatenate(self) -> None:
        """Concatenate layer by layer with `mx.concatenate`, as planned."""
        import mlx.core as mx  # noqa: PLC0415 - after the BLAS it is to use

        for layer in range(self._geometry.num_layers):
            parts = [mx.array(self._blocks[i % 4][layer]) for i in range(self._num_blocks)]
            mx.eval(mx.concatenate(parts, axis=1))


def gathering(found: Findings) -> None:
    """Gather 8K tokens of Gemma 3 12B: 32 blocks of full layers, 4 of window layers."""
    runtime.prepare(1)
    scale = 32 if found.is_quick else 1
    parts = [
        Gather(Geometry(g.name, g.num_layers, g.num_heads, g.dim // scale), num_blocks)
        for g, num_blocks in ((GEMMA_FULL, 32), (GEMMA_WINDOW, 4))
    ]

    def spent(way: Callable[[Gather], None]) -> float:
        def all_parts() -> None:
            for part in parts:
                way(part)

        return seconds(all_parts)

    ways = {"copy": Gather.copy, "gather": Gather.gather, "mx.concatenate": Gather.concatenate}
    rounds = interleaved(
        {name: lambda way=way: spent(way) for name, way in ways.items()},  # type: ignore[misc]
        1 if found.is_quick else 3,
    )
    gigabytes = sum(part.num_bytes for part in parts) / 1e9
    name = f"gather of {gigabytes:.2f} GB, of a plain copy's speed"
    found.at_least(name, rounds.ratio("copy", "gather"), 0.5)
    spent_ms = ", ".join(f"{way} {1000 * rounds.median(way):.0f} ms" for way in ways)
    if 1000 * rounds.median("copy") > 5:
        found.skip("below 5 ms", f"this memory needs longer to copy as many bytes: {spent_ms}")
    else:
        found.at_most("gather", 1000 * rounds.median("gather"), 5, "ms")


EXPERIMENTS = (
    Experiment(
        id="EXP-002",
        question="What does it cost to allocate a block?",
        method="in a full pool of 100,000 blocks, half of them idle, put, acquire and release "
        "20,000 more; each evicts one",
        criterion="below 1 ms each (p95 below 0.05 ms, a bound of this project)",
        adapted="the pool holds names and sizes, and backends hold the tensors: the experiment "
        "allocates a name, not memory",
        answer=allocation,
    ),
    Experiment(
        id="EXP-006",
        question="What does it cost to gather 8K tokens from blocks?",
        method="copy blocks of Gemma 3 12B's 48 layers into working buffers, layer by layer, "
        "compared with a plain copy of the same size and with `mx.concatenate`, "
        "interleaved",
        criterion="below 5 ms where memory copies that fast; elsewhere at least half the speed of "
        "a plain copy",
        adapted="window layers have 4 blocks instead of 32, because they keep only a window",
        answer=gathering,
    ),
)
