"""Memory reservations of the backend's running sequences and idle copies, within the budget.

An idle copy is a sequence whose turn has ended: while it stays open, the agent's next turn needs no
restore. When memory is short, the oldest idle copies close first. Used on the device thread only.
"""

import sys
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.generation import Generation
from semantic.domain.blocks import BlockName
from semantic.domain.errors import PoolExhaustedError
from semantic.ports.backend import ModelBackendPort, SequenceId

_IDLE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class IdleCopy:
    """An open sequence that no request uses."""

    seq: SequenceId
    agent: str
    root: BlockName
    tokens: list[int]


class IdleCopies:
    """The idle copies, least recently used first."""

    def __init__(self) -> None:
        self._copies: OrderedDict[SequenceId, IdleCopy] = OrderedDict()

    def __len__(self) -> int:
        return len(self._copies)

    def __iter__(self) -> Iterator[IdleCopy]:
        return iter(self._copies.values())

    def add(self, generation: Generation) -> None:
        tokens = generation.tokens[: generation.progress.num_computed]
        job = generation.job
        self._copies[generation.seq] = IdleCopy(generation.seq, job.agent, job.root, tokens)

    def remove(self, seq: SequenceId) -> None:
        self._copies.pop(seq, None)

    def best_for(self, generation: Generation) -> tuple[IdleCopy, int] | None:
        """Return the copy that shares the most tokens with a request, and how many.

        Among equals it prefers the request's own agent, then the latest copy.
        """
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
    """Reserves memory in the pool for open sequences.

    It reserves one total for all sequences, since they may share padding.
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
        return set(self._lengths)

    def admit(self, seq: SequenceId, num_tokens: int) -> bool:
        """Reserve memory for `num_tokens` and one block; returns False if memory is short."""
        length = num_tokens + self._block_tokens
        return self.resize(seq, min(length, self.longest_that_fits()))

    def grow(self, generation: Generation) -> bool:
        """Reserve memory for an open sequence's next tokens; returns False if memory is short."""
        progress = generation.progress
        length = progress.num_launched + max(generation.num_behind, 1)
        progress.num_reserved = self._lengths.get(generation.seq, sys.maxsize)
        if length <= progress.num_reserved:
            return True
        longest = self.longest_that_fits()
        if length > longest:
            return False
        return self.resize(generation.seq, min(length + self._block_tokens, longest))

    def tighten(self, generation: Generation) -> bool:
        """Release memory that a sequence needs only for decoding; returns whether there was any."""
        before = self._reserved
        self.resize(generation.seq, len(generation.tokens))
        return self._reserved < before

    def resize(self, seq: SequenceId, length: int) -> bool:
        """Reserve `length` tokens for a sequence; False, without a change, if memory is short."""
        lengths = {**self._lengths, seq: length}
        if not length:
            del lengths[seq]
        needed = self._backend.bytes_for(list(lengths.values()))
        try:
            if needed > self._reserved:
                self._store.reserve(needed - self._reserved)
            else:
                self._store.unreserve(self._reserved - needed)
        except PoolExhaustedError:
            return False
        self._lengths, self._reserved = lengths, needed
        return True

    def close_sequence(self, seq: SequenceId) -> None:
        self._backend.close_sequence(seq)
        self.resize(seq, 0)
        self.idle.remove(seq)

    def close_all(self) -> None:
        for seq in self._lengths:
            self._backend.close_sequence(seq)
            self.idle.remove(seq)
        self._store.unreserve(self._reserved)
        self._lengths, self._reserved = {}, 0

    # -- idle copies ----------------------------------------------------------------------------

    def go_idle(self, generation: Generation, max_idle: int) -> None:
        """Keep a sequence open for its agent's next turn.

        Closes the oldest idle copies beyond `max_idle` or beyond a share of the memory budget.
        """
        self.resize(generation.seq, generation.progress.num_computed)
        self.idle.add(generation)
        budget = self._store.usage().total * _IDLE_SHARE
        while self.idle:
            lengths = [len(copy.tokens) for copy in self.idle]
            if len(lengths) <= max_idle and self._backend.bytes_for(lengths) <= budget:
                return
            self.close_oldest_idle()

    def close_oldest_idle(self, spared: SequenceId | None = None) -> bool:
        """Close the oldest idle copy other than `spared`; returns False if there is none."""
        for copy in self.idle:
            if copy.seq != spared:
                self.close_sequence(copy.seq)
                return True
        return False

    def close_idle_of(self, agent: str) -> None:
        for copy in [copy for copy in self.idle if copy.agent == agent]:
            self.close_sequence(copy.seq)

    # -- the whole budget -----------------------------------------------------------------------

    def resize_budget(self, nbytes: int) -> None:
        """Close idle copies and evict blocks to fit; may raise `PoolExhaustedError`."""
        while True:
            try:
                self._store.resize(nbytes)
                return
            except PoolExhaustedError:
                if not self.close_oldest_idle():
                    raise

    def longest_that_fits(self) -> int:
        lengths = range(1, self._backend.spec.max_context + 1)
        total = self._store.usage().total
        return bisect_right(lengths, total, key=lambda length: self._backend.bytes_for([length]))
