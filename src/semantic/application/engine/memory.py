"""Room for the backend's sequences within the memory budget: those that run, and idle ones.

An idle copy is a sequence whose turn has ended: while it stays open, the next turn needs no
restore. A request that needs room closes the oldest of them first. On the engine's thread.
"""

import sys
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.request import Generation
from semantic.domain.blocks import BlockName
from semantic.domain.errors import PoolExhaustedError
from semantic.ports.backend import ModelBackendPort, SequenceId

_IDLE_SHARE = 0.25


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
    """The idle copies, the least recently used first."""

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


class WorkingMemory:
    """Room in the pool for open sequences, counted together since padding may be shared.

    Attributes:
        idle: Sequences that stay open after their turn.
    """

    def __init__(self, backend: ModelBackendPort, store: AgentCacheStore) -> None:
        self._backend = backend
        self._store = store
        self._block_tokens = backend.spec.block_tokens
        self.idle = IdleCopies()
        self._lengths: dict[SequenceId, int] = {}
        self._reserved = 0

    @property
    def sequences(self) -> set[SequenceId]:
        """Sequences that room is reserved for."""
        return set(self._lengths)

    def admit(self, seq: SequenceId, num_tokens: int) -> bool:
        """Reserve room for so many tokens and one block; False if there is none."""
        length = num_tokens + self._block_tokens
        return self.resize(seq, min(length, self.longest_that_fits()))

    def grow(self, generation: Generation) -> bool:
        """See that the next tokens of one that is open have room; False if they do not."""
        length = generation.num_launched + max(generation.num_behind, 1)
        generation.num_reserved = self._lengths.get(generation.seq, sys.maxsize)
        if length <= generation.num_reserved:
            return True
        longest = self.longest_that_fits()
        if length > longest:
            return False
        return self.resize(generation.seq, min(length + self._block_tokens, longest))

    def tighten(self, generation: Generation) -> bool:
        """Give back what a sequence does not need before it decodes; False if that is nothing."""
        before = self._reserved
        self.resize(generation.seq, len(generation.tokens))
        return self._reserved < before

    def resize(self, seq: SequenceId, length: int) -> bool:
        """Reserve room for a sequence of `length` tokens; 0 gives all of it back."""
        lengths = {**self._lengths, seq: length}
        if not length:
            del lengths[seq]
        needed = self._backend.bytes_for(list(lengths.values()))
        try:
            if needed > self._reserved:
                self._store.reserve(needed - self._reserved)
            else:
                self._store.release(self._reserved - needed)
        except PoolExhaustedError:
            return False
        self._lengths, self._reserved = lengths, needed
        return True

    def close(self, seq: SequenceId) -> None:
        """Close a sequence and give its room back."""
        self._backend.close(seq)
        self.resize(seq, 0)
        self.idle.remove(seq)

    def close_all(self) -> None:
        """Close every sequence and give everything back."""
        for seq in self._lengths:
            self._backend.close(seq)
            self.idle.remove(seq)
        self._store.release(self._reserved)
        self._lengths, self._reserved = {}, 0

    # -- idle copies ----------------------------------------------------------------------------

    def go_idle(self, generation: Generation, max_idle: int) -> None:
        """Leave a sequence open for its agent's next turn, within a share of the memory."""
        self.resize(generation.seq, generation.num_computed)
        self.idle.add(generation)
        budget = self._store.usage().total * _IDLE_SHARE
        while self.idle:
            lengths = [len(copy.tokens) for copy in self.idle]
            if len(lengths) <= max_idle and self._backend.bytes_for(lengths) <= budget:
                return
            self.close_oldest_idle()

    def close_oldest_idle(self, spared: SequenceId | None = None) -> bool:
        """Close the copy that was idle longest; False if there is none."""
        for copy in self.idle:
            if copy.seq != spared:
                self.close(copy.seq)
                return True
        return False

    def close_idle_of(self, agent: str) -> None:
        """Close an agent's idle copies."""
        for copy in [copy for copy in self.idle if copy.agent == agent]:
            self.close(copy.seq)

    # -- the whole budget -----------------------------------------------------------------------

    def resize_budget(self, nbytes: int) -> None:
        """Use another budget; idle copies and blocks make way.

        Raises:
            PoolExhaustedError: running sequences need more.
        """
        while True:
            try:
                self._store.resize(nbytes)
                return
            except PoolExhaustedError:
                if not self.close_oldest_idle():
                    raise

    def longest_that_fits(self) -> int:
        """Tokens of the longest sequence that fits if it is alone."""
        lengths = range(1, self._backend.spec.max_context + 1)
        total = self._store.usage().total
        return bisect_right(lengths, total, key=lambda length: self._backend.bytes_for([length]))
