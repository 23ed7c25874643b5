"""The CUDA kernel that samples tokens in a row as plain operations; writes memory as it does."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

MICROSECONDS = 1000


class PlainLoop:
    """Stands in for `LoopKernel`, with weights of 32 bits.

    Attributes:
        calls: Numbers of rows, sequences and steps of each run.
        num_after: How many of them followed drafts that a step verified.
        is_broken: Whether it fails from now on, as the kernel does if a barrier times out.
    """

    def __init__(self, model: Any) -> None:
        self.sizes, self._angles = model.sizes, np.array(model.angles)
        self._weights: list[list[Any]] = [
            [None if a is None else np.array(a) for a in row] for row in model.weights
        ]
        self.calls: list[tuple[int, int, int]] = []
        self.num_after = 0
        self.is_broken = False

    def run(self, rows: Sequence[Any], draws: Sequence[Sequence[Any]], table: Any) -> Any:
        import mlx.core as mx

        from semantic.adapters.outbound.backends.mlx.loop.kernel import LoopRow

        count, num_seqs = len(draws), len(draws[0])
        self.calls.append((len(rows), num_seqs, count))
        if self.is_broken:
            return mx.full((count * num_seqs + 1,), -1, mx.int32)
        ends = {row.number: (place, row.position) for place, row in enumerate(rows)}
        places, tokens = [ends[n][0] for n in range(num_seqs)], []
        given = list(rows)
        for step, wanted in enumerate(draws):
            logits = self._pass(given, np.array(table))
            new = [_choose(logits[p], draw) for p, draw in zip(places, wanted, strict=True)]
            tokens += new
            places = list(range(num_seqs))
            given = [LoopRow(n, ends[n][1] + step + 1, token) for n, token in enumerate(new)]
        return mx.array([*tokens, MICROSECONDS], mx.int32)

    def run_after(self, ends: Sequence[Any], count: int, table: Any) -> Any:
        """As the kernel reads what it is given."""
        from semantic.adapters.outbound.backends.mlx.loop.kernel import (
            LoopDraw,
            LoopRow,
            _given_after,
        )

        self.num_after += 1
        given, size = np.array(_given_after(ends, count)), len(ends)
        rows = [LoopRow(*row[:3]) for row in given[: 8 * size].reshape(-1, 4).tolist()]
        lasts = given[8 * size : 10 * size].reshape(-1, 2).tolist()
        assert lasts == [[2 * n + 1, rows[2 * n + 1].position] for n in range(size)]
        floats = given[10 * size :].view(np.float32).reshape(count, size, 2)
        draws = [[LoopDraw(*draw) for draw in step] for step in floats.tolist()]
        return self.run(rows, draws, table)

    def _pass(self, rows: Sequence[Any], table: Any) -> Any:
        s, (norm, head, embedding) = self.sizes, self._weights[-1][:3]
        hidden = np.stack([embedding[row.token] for row in rows])
        for layer, w in enumerate(self._weights[:-1]):
            heads = _normed(hidden, w[0], s.eps) @ w[1].T + (0 if w[2] is None else w[2])
            heads = heads.reshape(len(rows), -1, s.dim)
            queries, keys, values = np.split(heads, [s.num_heads, s.num_heads + s.num_keys], axis=1)
            if s.head_eps is not None:
                queries, keys = _normed(queries, w[3], s.head_eps), _normed(keys, w[4], s.head_eps)
            kept = [self._memory(table[layer, row.number]) for row in rows]
            for n, row in enumerate(rows):
                kept[n][0][:, row.position] = self._rotated(keys[n], row.position)
                kept[n][1][:, row.position] = values[n]
            mixed = [
                self._attended(self._rotated(queries[n], row.position), kept[n], row.position + 1)
                for n, row in enumerate(rows)
            ]
            hidden = hidden + np.stack(mixed) @ w[5].T
            gate, passed = np.split(_normed(hidden, w[6], s.eps) @ w[7].T, 2, axis=1)
            hidden = hidden + (gate / (1 + np.exp(-gate)) * passed) @ w[8].T
        return _normed(hidden, norm, s.eps) @ head.T

    def _rotated(self, heads: Any, position: int) -> Any:
        cosine, sine = np.split(self._angles[position], 2)
        one, two = np.split(heads, 2, axis=-1)
        return np.concatenate([one * cosine - two * sine, two * cosine + one * sine], axis=-1)

    def _attended(self, queries: Any, kept: Sequence[Any], length: int) -> Any:
        shared = self.sizes.num_heads // self.sizes.num_keys
        keys, values = (np.repeat(array[:, :length], shared, axis=0) for array in kept)
        scores = np.einsum("hd,htd->ht", queries, keys) * self.sizes.scale
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        mixed = np.einsum("ht,htd->hd", weights, values) / weights.sum(axis=1, keepdims=True)
        return mixed.reshape(-1)

    def _memory(self, held: Any) -> list[Any]:
        """Keys and values of a sequence ``[heads, room, dim]``, where they are."""
        *addresses, room = held.tolist()
        shape = (self.sizes.num_keys, room, self.sizes.dim)
        number = int(np.prod(shape))
        return [
            np.ctypeslib.as_array((ctypes.c_float * number).from_address(a)).reshape(shape)
            for a in addresses
        ]


def _normed(given: Any, factors: Any, eps: float) -> Any:
    return given / np.sqrt((given**2).mean(axis=-1, keepdims=True) + eps) * factors


def _choose(logits: Any, draw: Any) -> int:
    if not draw.temperature:
        return int(logits.argmax())
    sums = np.cumsum(np.exp((logits - logits.max()) / draw.temperature))
    return min(int((sums <= draw.point * sums[-1]).sum()), len(logits) - 1)
