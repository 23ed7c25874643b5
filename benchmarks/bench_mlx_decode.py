"""Time of a decode step on MLX, compared with a bare mlx-lm loop and with memory bandwidth.

Runs a Llama with random weights one step ahead, as the engine does. The bare loop is the library's
model over one dense batch of equal lengths, without a server.

    python -m benchmarks.bench_mlx_decode                                   # small, any machine
    python -m benchmarks.bench_mlx_decode --shape llama-8b --lengths 4096x8 32768,2048x7
    python -m benchmarks.bench_mlx_decode --shape llama-8b --formats 4-bit 8-bit mxfp4
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.report import Report, run
from semantic.adapters.outbound.backends.mlx import runtime
from semantic.domain.sampling import SamplingParams
from semantic.domain.spec import ModelCacheSpec
from semantic.ports.backend import LAST_SAMPLED, Chunk, Draw, SequenceId, Step

runtime.prepare()
import mlx.core as mx  # noqa: E402 - after the BLAS it is to use

from semantic.adapters.outbound.backends.mlx.backend import MlxBackend  # noqa: E402
from semantic.adapters.outbound.backends.mlx.cuda import tuning  # noqa: E402
from semantic.adapters.outbound.backends.mlx.device_limits import (  # noqa: E402
    MemoryLimit,
    MemoryPlan,
    device_room,
)
from semantic.adapters.outbound.backends.mlx.loading import MlxModel, choose_device  # noqa: E402

SHAPES = {
    "tiny": (256, 8, 512, 8, 2, 1000, "float32"),
    "llama-8b": (4096, 32, 14336, 32, 8, 128_256, "bfloat16"),
}
FORMATS = {"4-bit": (64, 4, "affine"), "8-bit": (64, 8, "affine"), "mxfp4": (32, 4, "mxfp4")}
GREEDY = Draw(SamplingParams(temperature=0, seed=0), num_prompt=1)
PREFILL = 2048


def llama_config(
    hidden: int, layers: int, inner: int, heads: int, kv_heads: int, vocab: int
) -> dict[str, Any]:
    """Return the configuration of a Llama of these sizes."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    }


def make_model(shape: str, packed: str = "") -> MlxModel:
    """Create a Llama with random weights, quantised if a key of `FORMATS` is given."""
    hidden, layers, inner, heads, kv_heads, vocab, dtype = SHAPES[shape]
    config = llama_config(hidden, layers, inner, heads, kv_heads, vocab)
    llama = runtime.import_library("mlx_lm.models.llama")
    cache = runtime.import_library("mlx_lm.models.cache")
    tree_map = runtime.import_library("mlx.utils").tree_map
    model = llama.Model(llama.ModelArgs.from_dict(config))
    number = getattr(mx, dtype)
    model.update(
        tree_map(
            lambda p: (
                mx.random.normal(p.shape, number, scale=0.02) if p.ndim > 1 else p.astype(number)
            ),
            model.parameters(),
        )
    )
    if packed:
        group_size, bits, mode = FORMATS[packed]
        nn = runtime.import_library("mlx.nn")
        nn.quantize(model, group_size=group_size, bits=bits, mode=mode)
    mx.eval(model.parameters())
    return MlxModel(
        model, ModelCacheSpec.from_config(config), lambda: list(cache.make_prompt_cache(model))
    )


def bandwidth(dtype: str) -> float:
    """Return the bytes per second that the product of a large matrix and a vector reads."""
    size = 2**33 if mx.default_device() == mx.Device(mx.gpu) else 2**26
    number = getattr(mx, dtype)
    matrix = mx.ones((size // number.size // 4096, 4096), number)
    vector = mx.ones((4096,), number)
    best = 0.0
    for _ in range(16):
        mx.eval(matrix, vector)
        started = time.perf_counter()
        mx.eval(matrix @ vector)
        best = max(best, matrix.nbytes / (time.perf_counter() - started))
    return best


def timed(*steps: Callable[[], None], num_steps: int, rounds: int = 6) -> list[float]:
    """Return seconds per step of each, interleaved, the best of some rounds."""
    best = [float("inf")] * len(steps)
    for _ in range(rounds):
        for place, step in enumerate(steps):
            for _ in range(4):
                step()
            started = time.perf_counter()
            for _ in range(num_steps):
                step()
            best[place] = min(best[place], (time.perf_counter() - started) / num_steps)
    return best


def bare(loaded: MlxModel, num_rows: int, length: int) -> Callable[[], None]:
    """Run the library's model over a dense batch, one step ahead."""
    cache = runtime.import_library("mlx_lm.models.cache")
    layer = loaded.spec.layers[0]
    number = loaded.model.model.norm.weight.dtype
    caches = []
    # A multiple of the library's step, as its caches grow: only those get its fastest kernel.
    capacity = length // cache.KVCache.step * cache.KVCache.step + 3 * cache.KVCache.step
    for _ in loaded.spec.layers:
        made = cache.KVCache()
        shape = (num_rows, layer.num_kv_heads, capacity, layer.key_dim)
        made.keys, made.values = (mx.random.normal(shape, number) for _ in range(2))
        made.offset = length
        mx.eval(made.keys, made.values)
        caches.append(made)
    held = [mx.zeros((num_rows,), mx.uint32)]

    def step() -> None:
        logits = loaded.model(held[0][:, None], cache=caches)
        following = mx.argmax(logits[:, -1], axis=-1)
        mx.async_eval(following)
        held[0].tolist()
        held[0] = following

    return step


def served(backend: MlxBackend, lengths: list[int]) -> Callable[[], None]:
    """Run this project's backend, one step ahead as the engine does."""
    held = list(lengths)
    for row, length in enumerate(lengths):
        prefill(backend, SequenceId(row), length)
    chunks = [Chunk(SequenceId(r), n, (1,), GREEDY) for r, n in enumerate(held)]
    flights = [backend.launch(Step(tuple(chunks)))]

    def step() -> None:
        for row in range(len(held)):
            held[row] += 1
        rows = tuple(Chunk(SequenceId(r), n, LAST_SAMPLED, GREEDY) for r, n in enumerate(held))
        flights.append(backend.launch(Step(rows)))
        backend.collect(flights.pop(0))

    return step


def prefill(backend: MlxBackend, seq: SequenceId, length: int) -> None:
    """Compute a prompt in chunks."""
    tokens = [1 + i % 999 for i in range(length)]
    backend.open_sequence(seq, tokens)
    for start in range(0, length, PREFILL):
        chunk = Chunk(seq, start, tuple(tokens[start : start + PREFILL]))
        backend.collect(backend.launch(Step((chunk,))))


def parse(lengths: str) -> list[int]:
    """Parse lengths: `32768,2048x7` is one of 32768 and seven of 2048."""
    parsed: list[int] = []
    for item in lengths.split(","):
        length, _, count = item.partition("x")
        parsed += [int(length)] * int(count or 1)
    return parsed


def make_backend(shape: str, packed: str = "") -> MlxBackend:
    """Make a backend as a model is loaded."""
    tuned = make_model(shape, packed)
    tuning.tune(tuned.model, device_room(0).total)
    return MlxBackend(tuned)


def measure(report: Report) -> None:
    """Measure all loops, interleaved, for each set of lengths."""
    options = report.options
    choose_device(options.device)
    loaded = make_model(options.shape)
    weight_bytes = loaded.num_bytes
    plan = MemoryPlan(device_room(0).total, weight_bytes)
    counted = MemoryLimit(plan)  # beside the served models
    itemsize = loaded.model.model.norm.weight.dtype.size
    token_bytes = loaded.spec.bytes_per_context(1, bits=8 * itemsize)
    speed = bandwidth(SHAPES[options.shape][-1])
    backends = {name: make_backend(options.shape, name) for name in ("", *options.formats)}
    report.settings.update(shape=options.shape, weight_gb=weight_bytes / 1e9)
    report.add("memory's speed", speed / 1e9, "GB/s")
    for given in options.lengths:
        lengths = parse(given)
        # Of unlike lengths, the dense batch that reads as many bytes.
        average = sum(lengths) // len(lengths)
        steps = [served(backend, lengths) for backend in backends.values()]
        plain, ours, *others = timed(
            bare(loaded, len(lengths), average), *steps, num_steps=options.steps
        )
        for backend in backends.values():
            for row in range(len(lengths)):
                backend.close_sequence(SequenceId(row))
        mx.clear_cache()
        num_bytes = weight_bytes + sum(lengths) * token_bytes
        report.add(f"{given}, bare", plain * 1e3, "ms")
        report.add(f"{given}, served", ours * 1e3, "ms")
        report.add(f"{given}, served / bare", ours / plain)
        report.add(f"{given}, share of the memory's speed", 100 * num_bytes / ours / speed, "%")
        for name, taken in zip(options.formats, others, strict=True):
            report.add(f"{given}, {name}", taken * 1e3, "ms")
            report.add(f"{given}, served / {name}", ours / taken)
    counted.release()
    for backend in backends.values():
        backend.shutdown()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--lengths", nargs="+", default=["256x1", "256x4", "900,200x3"])
    parser.add_argument(
        "--formats", nargs="*", choices=FORMATS, default=[], help="also quantised weights"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


if __name__ == "__main__":
    sys.exit(run("mlx_decode", measure, add_options=add_options))
