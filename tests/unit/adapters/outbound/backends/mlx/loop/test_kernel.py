"""The kernel that samples tokens in a row: its source, run on a CPU lane by lane."""

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semantic.adapters.outbound.backends.mlx import runtime
from tests.contract.plain_loop import PlainLoop

runtime.prepare(num_threads=1)
mx = pytest.importorskip("mlx.core")
kernels = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.kernels")
loop = pytest.importorskip("semantic.adapters.outbound.backends.mlx.loop.kernel")

from tests.unit.adapters.outbound.backends.mlx.cuda.lanes import build  # noqa: E402 - needs MLX

pytestmark = [pytest.mark.unit, pytest.mark.slow]

NUM_BLOCKS, ROOM = 2, 1024
FORMS = {
    "one row": (loop.LoopSizes(2, 256, 512, 320, 4, 2, 64, 0.125, 1e-5, None, False), [1], [70]),
    "norms and biases": (
        loop.LoopSizes(1, 256, 2560, 330, 4, 1, 128, 0.0884, 1e-6, 1e-6, True),
        [2, 1],
        [0, 600],
    ),
    "two tiles of rows": (
        loop.LoopSizes(1, 1024, 768, 330, 4, 2, 64, 0.125, 1e-5, None, False),
        [3, 6, 2],
        [5, 130, 600],
    ),
}
MAIN = """
static void* given[10];
static int numbers[5];
static void entry() {
    kernel((Int64*)given[0], (Int64*)given[1], (float*)given[2], (int*)given[3], (int*)given[4],
           (__nv_bfloat16*)given[5], (float*)given[6], (unsigned*)given[7], (Int64*)given[8],
           (int*)given[9], numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]);
    end_lane();
}
extern "C" void run(void** p, int* n, int num_blocks) {
    memcpy(given, p, sizeof given);
    memcpy(numbers, n, sizeof numbers);
    run_blocks(entry, num_blocks, LANES);
}
"""


class EmulatedBlocks:
    """Replaces the compiler and the device, for kernels with the arguments of this one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._libraries: dict[str, Any] = {}

    def compile_source(self, name: str, source: str) -> bytes:
        body = source[source.index("constexpr int MAX_ROWS") :]
        start = body.index('extern "C" __global__')
        body = body[:start] + "static void kernel" + body[body.index("(const long long", start) :]
        declared = "extern __shared__ __align__(128) char dynamic[];"
        assert declared in body
        body = body.replace(
            declared, "__shared__ __align__(128) char dynamic[NUM_TILES * TILE_BYTES];"
        )
        source = f'#include "blocks.h"\n{body}{MAIN}'
        self._libraries[name] = build(self._directory / name, source, f"-I{Path(__file__).parent}")
        return b""

    def run(self, *, name: str, inputs: Any, output_shapes: Any, scalars: Any, **_: Any) -> Any:
        held = [_numpy(array) for array in inputs]
        out = np.full(output_shapes[0], -7, np.int32)
        places = [array.ctypes.data for array in (*held, out)]
        library = self._libraries[name]
        for _launch in range(2):  # it leaves its memory as the next launch needs it
            library.run(
                (ctypes.c_void_p * len(places))(*places),
                (ctypes.c_int * len(scalars))(*scalars),
                NUM_BLOCKS,
            )
        return [mx.array(out)]


def _numpy(array: Any) -> Any:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _bits(values: Any) -> Any:
    """Numbers in bfloat16."""
    return _numpy(mx.array(values.astype(np.float32)).astype(mx.bfloat16))


def _make_weights(random: Any, sizes: Any) -> list[list[Any]]:
    s = sizes

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Any:
        return mx.array(random.normal(size=(rows, columns)) * scale / columns**0.5)

    def factors(size: int) -> Any:
        return mx.array(1 + 0.1 * random.normal(size=size))

    layers: list[list[Any]] = []
    for _ in range(s.layers):
        heads = [matrix(s.all_heads, s.hidden), mx.array(random.normal(size=s.all_heads))]
        norms = [factors(s.dim), factors(s.dim)] if s.head_eps else [None, None]
        layers.append([factors(s.hidden), heads[0], heads[1] if s.has_bias else None, *norms])
        layers[-1] += [matrix(s.hidden, s.num_heads * s.dim), factors(s.hidden)]
        layers[-1] += [matrix(2 * s.inner, s.hidden), matrix(s.hidden, s.inner)]
    head, embedding = matrix(s.vocab, s.hidden, 4.0), matrix(s.vocab, s.hidden, s.hidden**0.5)
    layers.append([factors(s.hidden), head, embedding, *[None] * 6])
    return [[None if a is None else a.astype(mx.bfloat16) for a in row] for row in layers]


@pytest.fixture(autouse=True)
def _forget_kernels() -> Iterator[None]:
    """A kernel remembers what it has compiled."""
    loop._kernel.cache_clear()
    yield
    loop._kernel.cache_clear()


@pytest.mark.parametrize(
    "form, temperatures",
    [
        ("one row", [0.0]),
        ("one row", [0.8]),
        ("norms and biases", [0.0, 0.0]),
        ("two tiles of rows", [0.8, 0.0, 0.8]),
    ],
)
def test_the_source_samples_what_plain_operations_do(
    form: str, temperatures: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    sizes, news, lengths = FORMS[form]
    emulated = EmulatedBlocks(tmp_path)
    random = np.random.default_rng(1)
    weights = _make_weights(random, sizes)
    turns = np.arange(ROOM)[:, None] / 10_000 ** (np.arange(sizes.dim // 2) / (sizes.dim // 2))
    angles = mx.array(np.concatenate([np.cos(turns), np.sin(turns)], axis=1))
    held = [[_numpy(a) if a is not None else None for a in row] for row in weights]
    places = iter([[0 if a is None else a.ctypes.data for a in row] for row in held])
    monkeypatch.setattr(loop, "_addresses", lambda _: mx.array(next(places), mx.int64))
    monkeypatch.setattr(kernels, "compile_source", emulated.compile_source)
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", emulated.run)
    made = loop.LoopKernel(loop.LoopModel(sizes, weights, angles), NUM_BLOCKS, 3)
    shape = (sizes.num_keys, ROOM, sizes.dim)
    kept = [[_bits(random.normal(size=shape)) for _ in range(2)] for _ in range(4)]
    wide = [[(a.astype(np.uint32) << 16).view(np.float32) for a in pair] for pair in kept]
    rows = [
        loop.LoopRow(n, length + i, int(random.integers(sizes.vocab)))
        for n, (length, new) in enumerate(zip(lengths, news, strict=True))
        for i in range(new)
    ]
    drawn = zip(temperatures, random.random(len(news)), strict=True)
    draws = [[loop.LoopDraw(temperature, float(p)) for temperature, p in drawn]] * 2

    def table(pairs: Any) -> Any:
        found = [[a.ctypes.data for a in pair] + [ROOM] for pair in pairs[: len(news)]]
        return mx.array([found] * sizes.layers, mx.int64)

    plain = PlainLoop(loop.LoopModel(sizes, [[_wide(a) for a in r] for r in weights], angles))
    expected = plain.run(rows, draws, table(wide)).tolist()
    assert made.run(rows, draws, table(kept)).tolist()[:-1] == expected[:-1]


def _wide(array: Any) -> Any:
    return None if array is None else array.astype(mx.float32)
