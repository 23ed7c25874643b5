"""Memory and disk use of agents: blocks compared with left-padded batches, and how many fit.

1 to 10 agents of mixed lengths share a system prompt. The real store seals their blocks, with
random numbers, and the bytes are counted. The padded batch consists of mlx-lm's own caches, filled
and counted, for a layer of each kind. Heads are a sixteenth as wide, and bytes are multiplied by
sixteen. The report also shows the bytes by geometry alone. Where prompts diverge, a window is
stored once more, so that other agents can continue there. The padded batch has windows too: only
padding and sharing differ.

The number of agents that fit includes the scales of the 8- and 4-bit formats. These are storage
formats on disk: in memory, blocks have the model's precision, so 16 bits apply there.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.blocks import CONFIGS, spec_of
from benchmarks.report import Report, run
from semantic.adapters.outbound.backends.mlx import runtime
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.blocks.format import FORMATS
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskLimits, DiskTier
from semantic.domain.blocks import BlockName, BlockNamespace, block_end
from semantic.domain.pool import BlockPool
from semantic.domain.spec import LayerKind, LayerSpec, ModelCacheSpec
from semantic.ports.backend import HostBuffer, KVPayload

SCALE = 16
GROUP = 64  # numbers that share a scale
BUDGET = 10.2 * 2**30
CONTEXTS = (4096, 8192, 16384, 32768)
NUM_SHARED = 1024
LENGTHS = (3000, 1500, 8000, 2000, 12000, 1200, 6000, 16000, 4000, 2500)
COUNTS = (1, 3, 5, 10)
MAX_OVERHEAD = 1.1  # a conversation may take a tenth more than its geometry asks for
_ROOT = BlockNamespace("bench", "raw").root()
_GB, _MB = 1e9, 2**20


# -- blocks ----------------------------------------------------------------------------------------


class _Numbers:
    """Random 16-bit numbers; payloads of one size share them to save memory."""

    def __init__(self, spec: ModelCacheSpec) -> None:
        self._spec = spec
        self._made: dict[int, bytes] = {}

    def payload(self, kind: LayerKind, start: int, end: int) -> KVPayload:
        if kind is LayerKind.WINDOW:
            start = max(start, end - self._spec.window)
        layers = [layer for layer in self._spec.layers if layer.kind is kind]
        shape = (len(layers), layers[0].num_kv_heads, end - start, layers[0].key_dim)
        nbytes = int(np.prod(shape)) * 2
        if nbytes not in self._made:
            self._made[nbytes] = np.random.default_rng(nbytes).bytes(nbytes)
        data = self._made[nbytes]
        buffers = tuple(HostBuffer(name, shape, "bfloat16", data) for name in ("keys", "values"))
        return KVPayload("bench.v1", kind, start, end, buffers)


def seal(store: AgentCacheStore, spec: ModelCacheSpec, tokens: Sequence[int], cut: int) -> int:
    """Seal one conversation block by block and settle it; returns the bytes before settling.

    Args:
        cut: Where its reply begins: a block ends there too.
    """
    numbers = _Numbers(spec)
    names: list[BlockName] = []
    chain, end = _ROOT, 0
    while end < len(tokens):
        start, end = end, min(block_end(end, spec.block_tokens, [cut]), len(tokens))
        payloads = [numbers.payload(kind, start, end) for kind in spec.kinds]
        name = store.seal(_ROOT, chain, tokens[start:end], payloads)
        assert name is not None
        names.append(name)
        chain = name
    unsettled = store.usage().used
    store.settle_windows(names, chain, [cut, len(tokens)])
    return unsettled


def agents_bytes(spec: ModelCacheSpec, lengths: Sequence[int], num_shared: int) -> int:
    """Return the bytes of agents that share their first tokens, sealed by the real store."""
    store = AgentCacheStore(BlockPool(spec, 2**45))
    head = list(range(num_shared))
    for agent, length in enumerate(lengths):
        own = [10**6 * (agent + 1) + index for index in range(length - num_shared)]
        seal(store, spec, [*head, *own], num_shared or length)
    return store.usage().used


# -- the padded batch ------------------------------------------------------------------------------


def computed_bytes(spec: ModelCacheSpec, lengths: Sequence[int], num_shared: int = 0) -> int:
    """Return the bytes by geometry: full layers share the prefix, windows are per agent."""
    full = sum(spec.kind_bytes(LayerKind.FULL, length - num_shared) for length in lengths)
    windows = sum(spec.kind_bytes(LayerKind.WINDOW, length) for length in lengths)
    return full + spec.kind_bytes(LayerKind.FULL, num_shared) + windows


def padded_bytes(spec: ModelCacheSpec, lengths: Sequence[int]) -> int:
    """Return the bytes of a left-padded batch, by geometry: all rows are as long as the longest."""
    return len(lengths) * spec.bytes_per_context(max(lengths))


def padded_batch_bytes(spec: ModelCacheSpec, lengths: Sequence[int]) -> int:
    """Return the measured bytes of mlx-lm's filled batch caches, for a layer of each kind."""
    caches = runtime.import_library("mlx_lm.models.cache")
    padding = [max(lengths) - length for length in lengths]
    total = 0
    for kind in spec.kinds:
        layers = [layer for layer in spec.layers if layer.kind is kind]
        cache = (
            caches.BatchRotatingKVCache(layers[0].window, padding)
            if kind is LayerKind.WINDOW
            else caches.BatchKVCache(padding)
        )
        total += len(layers) * _filled_bytes(cache, layers[0], lengths)
    return total


def _filled_bytes(cache: object, layer: LayerSpec, lengths: Sequence[int]) -> int:
    """Return the bytes of one layer's batch cache after the longest prompt and one token."""
    import mlx.core as mx  # noqa: PLC0415 - after the BLAS it is to use

    for num_tokens in (max(lengths), 1):
        shape = (len(lengths), layer.num_kv_heads, num_tokens, layer.key_dim)
        cache.update_and_fetch(mx.zeros(shape, mx.bfloat16), mx.zeros(shape, mx.bfloat16))  # type: ignore[attr-defined]
    arrays = (cache.keys, cache.values)  # type: ignore[attr-defined]
    return sum(int(array.nbytes) for array in arrays)


# -- how many fit ----------------------------------------------------------------------------------


def resting_bits(bits: int) -> float:
    """Return the bits per stored number, with its share of the scales: two of 16 bits per group."""
    return bits if bits == 16 else bits + 32 / GROUP


def agents_that_fit(
    spec: ModelCacheSpec,
    length: int,
    bits: int,
    budget: float = BUDGET,
    *,
    has_windows: bool = True,
) -> int:
    """Return how many agents of one length fit a budget, in bytes.

    Without `has_windows`, window layers keep every token.
    """
    nbytes = spec.bytes_per_context(length) if has_windows else spec.bytes_per_context(1) * length
    return int(budget / (nbytes * resting_bits(bits) / 16))


# -- one conversation at rest ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rest:
    """Bytes of one stored conversation."""

    asked_for: int
    unsettled: int
    memory: int
    disk: int
    num_restorable: int


def rest_of(spec: ModelCacheSpec, directory: Path, num_prompt: int, num_reply: int) -> Rest:
    """Seal one conversation in a store with a disk, and count the stored bytes."""
    num_tokens = num_prompt + num_reply
    ledger = SqliteLedger.in_memory()
    disk = DiskTier(SafetensorsCache(directory), ledger, DiskLimits(2**40, 2**40))
    store = AgentCacheStore(BlockPool(spec, 2**40), disk)
    disk.start(store.is_on_disk)
    tokens = list(range(num_tokens))
    unsettled = seal(store, spec, tokens, num_prompt)
    memory = store.usage().used
    assert disk.close(600)
    return Rest(
        asked_for=spec.bytes_per_context(num_tokens),
        unsettled=unsettled,
        memory=memory,
        disk=sum(path.stat().st_size for path in directory.rglob("*.safetensors")),
        num_restorable=store.plan(_ROOT, tokens).end,
    )


def measure_rest(report: Report) -> None:
    """Measure Gemma 3 12B with 8K tokens; a full run writes 1 GB of files."""
    scale = report.choose(SCALE, 1)
    with tempfile.TemporaryDirectory(dir=report.options.directory) as directory:
        rest = rest_of(spec_of("Gemma 3 12B", scale=scale), Path(directory), 8160, 32)
    title = "Gemma 3 12B, 8,192 tokens"
    for name in ("asked_for", "unsettled", "memory", "disk"):
        size = getattr(rest, name) * scale / _MB
        report.add(f"{title}: {name.replace('_', ' ')}", size, "MiB")
    kept = max(rest.memory, rest.disk) / rest.asked_for
    report.add(f"{title}: kept / asked for", kept, most=MAX_OVERHEAD)
    report.add(f"{title}: can be resumed", rest.num_restorable, "tokens", least=8192)


def measure(report: Report) -> None:
    """Measure all geometries."""
    report.settings.update(lengths=LENGTHS, shared=NUM_SHARED, scale=SCALE, budget=BUDGET)
    runtime.prepare()
    for model in CONFIGS:
        spec = spec_of(model, scale=SCALE)
        for count in report.choose((1, 5), COUNTS):
            lengths = LENGTHS[:count]
            num_shared = NUM_SHARED if count > 1 else 0
            blocks = SCALE * agents_bytes(spec, lengths, num_shared)
            padded = SCALE * padded_batch_bytes(spec, lengths)
            title = f"{model}, {count} agents"
            report.add(f"{title}: blocks", blocks / _GB, "GB")
            computed = SCALE * computed_bytes(spec, lengths, num_shared)
            report.add(f"{title}: blocks, computed", computed / _GB, "GB")
            report.add(f"{title}: padded batch", padded / _GB, "GB")
            computed = SCALE * padded_bytes(spec, lengths)
            report.add(f"{title}: padded batch, computed", computed / _GB, "GB")
            bound = 1.0 if count > 1 else None
            report.add(f"{title}: padded / blocks", padded / blocks, least=bound)
    for model in CONFIGS:
        spec = spec_of(model)
        for bits in FORMATS:
            for length in CONTEXTS:
                title = f"{model}, {bits} bits, {length // 1024}k: agents in 10.2 GB"
                report.add(title, agents_that_fit(spec, length, bits), "agents")
        for length in CONTEXTS:
            fits = agents_that_fit(spec, length, 4, has_windows=False)
            title = f"{model}, 4 bits, {length // 1024}k: agents without windows"
            report.add(title, fits, "agents")
    measure_rest(report)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--directory", help="directory for about 1 GB of temporary files")


if __name__ == "__main__":
    sys.exit(run("memory", measure, add_options=add_options))
