"""A fake model in several ranks, each a thread of this process."""

import threading
from collections.abc import Sequence
from multiprocessing import Pipe

import numpy as np

from semantic.adapters.outbound.backends.fake import FakeBackend, _Sequence, fake_spec
from semantic.adapters.outbound.backends.sampler import Logits
from semantic.cluster.adapters.sharded import ShardedBackend, mirror
from semantic.ports.backend import ModelBackendPort
from tests.contract.models import BLOCK_TOKENS


class _Rank(FakeBackend):
    """Keeps everything, as every rank does, and says something else if one keeps other things."""

    def __init__(self, others: "list[_Rank]", barrier: threading.Barrier, window: int) -> None:
        super().__init__(fake_spec(block_tokens=BLOCK_TOKENS, window=window))
        self._others, self._barrier = others, barrier
        self._said: Logits = np.empty(0, np.float32)

    def _logits(self, sequence: _Sequence) -> Logits:
        self._said = super()._logits(sequence)
        self._barrier.wait(timeout=60)
        mean: Logits = np.mean([rank._said for rank in self._others], axis=0, dtype=np.float32)
        self._barrier.wait(timeout=60)
        return self._said if np.allclose(mean, self._said) else mean


def fake_in_ranks(num_ranks: int, window: int = 0) -> ShardedBackend:
    """A fake that says what one in a single process says."""
    ranks: list[_Rank] = []
    barrier = threading.Barrier(num_ranks)
    ranks += (_Rank(ranks, barrier, window) for _ in range(num_ranks))
    return in_threads(ranks)


def in_threads(ranks: Sequence[ModelBackendPort]) -> ShardedBackend:
    """A backend that tells these every call."""
    pairs = [Pipe() for _ in ranks]
    threads = [
        threading.Thread(target=mirror, args=(theirs, rank), daemon=True)
        for (_, theirs), rank in zip(pairs, ranks, strict=True)
    ]
    for thread in threads:
        thread.start()

    def end() -> None:
        for ours, _ in pairs:
            ours.close()
        for thread in threads:
            thread.join()

    return ShardedBackend([ours for ours, _ in pairs], end)
