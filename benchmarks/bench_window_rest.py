"""What a conversation of a sliding-window model takes at rest, in memory and on disk.

Gemma 3 12B keeps every token in 8 of its 48 layers and the last 1,024 in the others. A conversation
of 8K tokens is sealed block by block, with random numbers, as an engine does, and settled.

Run with `python -m benchmarks.bench_window_rest [DIRECTORY]`; it writes about 1 GB there. The exit
code is 1 if more is kept than a tenth above what the geometry asks for.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import Target, verdict
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskLimits, DiskTier
from semantic.domain.blocks import BlockName, BlockNamespace, block_end
from semantic.domain.pool import BlockPool
from semantic.domain.spec import LayerKind, LayerSpec, ModelCacheSpec
from semantic.ports.backend import HostBuffer, KVPayload

NUM_PROMPT, NUM_REPLY = 8160, 32
TOLERANCE = 1.1
_MB = 2**20
_ROOT = BlockNamespace("bench", "raw").root()


def gemma_3_12b(head_dim: int = 256) -> ModelCacheSpec:
    """Its geometry; a smaller `head_dim` scales all bytes."""
    window = LayerSpec(
        LayerKind.WINDOW, num_kv_heads=8, key_dim=head_dim, value_dim=head_dim, window=1024
    )
    full = LayerSpec(LayerKind.FULL, num_kv_heads=8, key_dim=head_dim, value_dim=head_dim)
    layers = tuple(full if index % 6 == 5 else window for index in range(48))
    return ModelCacheSpec("gemma3_text", layers, vocab_size=262_208, max_context=131_072)


@dataclass(frozen=True, slots=True)
class Rest:
    """Bytes of one conversation."""

    asked_for: int
    unsettled: int
    memory: int
    disk: int
    num_restorable: int


class _Numbers:
    """Random 16-bit numbers; payloads of one size share them, so that little is made."""

    def __init__(self, spec: ModelCacheSpec) -> None:
        self._spec = spec
        self._made: dict[int, bytes] = {}

    def payload(self, kind: LayerKind, start: int, end: int) -> KVPayload:
        if kind is LayerKind.WINDOW:
            start = max(start, end - self._spec.window)
        layers = [layer for layer in self._spec.layers if layer.kind is kind]
        shape = (len(layers), 8, end - start, layers[0].key_dim)
        nbytes = int(np.prod(shape)) * 2
        if nbytes not in self._made:
            self._made[nbytes] = np.random.default_rng(nbytes).bytes(nbytes)
        data = self._made[nbytes]
        buffers = tuple(HostBuffer(name, shape, "bfloat16", data) for name in ("keys", "values"))
        return KVPayload("bench.v1", kind, start, end, buffers)


def measure(spec: ModelCacheSpec, directory: Path) -> Rest:
    """Seal one conversation and settle it; its blocks also end where the reply began."""
    num_tokens = NUM_PROMPT + NUM_REPLY
    ledger = SqliteLedger.in_memory()
    disk = DiskTier(SafetensorsCache(directory), ledger, DiskLimits(2**40, 2**40))
    store = AgentCacheStore(BlockPool(spec, 2**40), disk)
    disk.start(store.is_on_disk)
    tokens = list(range(num_tokens))
    numbers = _Numbers(spec)
    names: list[BlockName] = []
    chain = _ROOT
    end = 0
    while end < num_tokens:
        start, end = end, min(block_end(end, spec.block_tokens, [NUM_PROMPT]), num_tokens)
        payloads = [numbers.payload(kind, start, end) for kind in spec.kinds]
        name = store.seal(_ROOT, chain, tokens[start:end], payloads)
        assert name is not None
        names.append(name)
        chain = name
    unsettled = store.usage().used
    store.settle(names, chain, [NUM_PROMPT, num_tokens])
    memory = store.usage().used
    assert disk.close(600)
    return Rest(
        asked_for=spec.bytes_per_context(num_tokens),
        unsettled=unsettled,
        memory=memory,
        disk=sum(path.stat().st_size for path in directory.rglob("*.safetensors")),
        num_restorable=store.plan(_ROOT, tokens).end,
    )


def main() -> int:
    """Measure and print; returns the exit code."""
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as directory:
        rest = measure(gemma_3_12b(), Path(directory))
    print(f"8K tokens of Gemma 3 12B in 16 bits, the geometry: {rest.asked_for / _MB:8.0f} MB")
    print(f"with all windows of all blocks:                    {rest.unsettled / _MB:8.0f} MB")
    print(f"in memory after the turn:                          {rest.memory / _MB:8.0f} MB")
    print(f"on disk after the turn:                            {rest.disk / _MB:8.0f} MB")
    kept = max(rest.memory, rest.disk) / rest.asked_for
    return verdict(
        [
            Target("kept, of the geometry", kept, TOLERANCE),
            Target(
                "tokens that can be resumed",
                rest.num_restorable,
                NUM_PROMPT + NUM_REPLY,
                "",
                is_least=True,
            ),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
