"""Working copies whose turn has ended: while they stay open, the next turn needs no restore."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from semantic.application.engine.request import Generation
from semantic.domain.blocks import BlockName
from semantic.ports.backend import SequenceId


@dataclass(frozen=True, slots=True)
class IdleCopy:
    """An open sequence that nobody runs.

    Attributes:
        agent: Whose it was.
        tokens: The ids whose state it holds.
    """

    seq: SequenceId
    agent: str
    root: BlockName
    tokens: list[int]


class IdleCopies:
    """The idle copies, the least recently used first. On the engine's thread."""

    def __init__(self) -> None:
        self._copies: OrderedDict[SequenceId, IdleCopy] = OrderedDict()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._copies)

    def __iter__(self) -> Iterator[IdleCopy]:
        """All of them, the oldest first."""
        return iter(self._copies.values())

    def add(self, generation: Generation) -> None:
        """Keep a sequence that ended; what the device holds of it is what was computed."""
        tokens = generation.tokens[: generation.num_computed]
        job = generation.job
        self._copies[generation.seq] = IdleCopy(generation.seq, job.agent, job.root, tokens)

    def remove(self, seq: SequenceId) -> None:
        """Forget a copy: it was closed, or runs again."""
        self._copies.pop(seq, None)

    def best_for(self, generation: Generation) -> tuple[IdleCopy, int] | None:
        """The copy that shares most with a request, and how many tokens; its own agent's first."""
        best: tuple[tuple[int, bool], IdleCopy] | None = None
        for copy in self._copies.values():
            rank = (
                generation.num_shared(copy.root, copy.tokens),
                copy.agent == generation.job.agent,
            )
            if rank[0] and (best is None or rank >= best[0]):
                best = (rank, copy)
        return (best[1], best[0][0]) if best else None

    def clear(self) -> None:
        """Forget all."""
        self._copies.clear()
