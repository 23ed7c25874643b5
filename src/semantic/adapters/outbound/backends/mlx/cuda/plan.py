"""Which block of threads of our attention kernel reads what.

Each gets about as much as the others, and there are about so many as the device runs at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.layout import Array

MAX_GROUPS = 4  # whose arrays a kernel takes
TILE = 16  # tokens that a warp attends over at once

_SIZES = range(256, 2049, 128)  # of a chunk, at most
_SETUP = 64  # tokens that could be read while a block of threads starts and ends
_AT_ONCE = 3 * 132  # blocks of threads that a H100 runs


@dataclass(frozen=True, slots=True)
class Plan:
    """Which block of threads computes what.

    Attributes:
        chunks: By block its row, the first token, how many, and the row's place and group.
        firsts: The first block of each row, and one past the last.
    """

    chunks: Array
    firsts: Array


def make_plan(lengths: Sequence[Sequence[int]], num_key_heads: int) -> Plan:
    """Plan a step over groups of rows, given how many tokens each row looks at: at least one."""
    most = _most_tokens([length for rows in lengths for length in rows], num_key_heads)
    chunks: list[tuple[int, int, int, int]] = []
    firsts = [0]
    for group, rows in enumerate(lengths):
        for place, length in enumerate(rows):
            row = len(firsts) - 1
            num_chunks = -(-length // most)
            size = -(-length // (num_chunks * TILE)) * TILE
            chunks += [
                (row, start, min(size, length - start), place * MAX_GROUPS + group)
                for start in range(0, length, size)
            ]
            firsts.append(len(chunks))
    return Plan(mx.array(chunks, mx.int32), mx.array(firsts, mx.int32))


def _most_tokens(lengths: Sequence[int], num_key_heads: int) -> int:
    """How many tokens to give a block of threads so that the last to start end with the others."""

    def cost(size: int) -> int:
        num_blocks = num_key_heads * sum(-(-length // size) for length in lengths)
        return -(-num_blocks // _AT_ONCE) * (size + _SETUP)

    return min(_SIZES, key=cost)
