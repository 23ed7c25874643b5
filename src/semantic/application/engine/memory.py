"""Memory reservations of the backend's running sequences and idle copies, within the budget.

An idle copy is a sequence whose turn has ended: while it stays open, the agent's next turn needs no
restore. When memory is short, tokens computed ahead are dropped first, then the oldest idle copies
close. Used on the device thread only.
"""

import sys
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.generation import Generation
from semantic.domain.blocks import BlockName
from semantic.domain.errors import PoolExhaustedError
from semantic.ports.backend import ModelBackendPort, SequenceId
from semantic.ports.telemetry import EngineCounts

_IDLE_SHARE = 0.25


@dataclass(slots=True, eq=False)
class IdleCopy:
    """An open sequence that no request uses.

    Attributes:
        num_ahead: Tokens at its end that were computed ahead and that no request has used.
        is_paired: Whether this is one of two copies: the agent's own, and a fork of it in which
            tokens are computed ahead. The agent's next turn uses one and closes the other.
    """

    seq: SequenceId
    agent: str
    root: BlockName
    tokens: list[int]
    num_ahead: int = 0
    is_paired: bool = False

    @property
    def num_settled(self) -> int:
        """Tokens of turns that have ended."""
        return len(self.tokens) - self.num_ahead


class IdleCopies:
    """The idle copies, least recently used first."""

    def __init__(self, counts: EngineCounts | None = None) -> None:
        self._copies: OrderedDict[SequenceId, IdleCopy] = OrderedDict()
        self._counts = counts or EngineCounts()

    def __len__(self) -> int:
        return len(self._copies)

    def __iter__(self) -> Iterator[IdleCopy]:
        return iter(self._copies.values())

    def add(self, generation: Generation) -> None:
        tokens = generation.tokens[: generation.progress.num_computed]
        job = generation.job
        self._copies[generation.seq] = IdleCopy(generation.seq, job.agent, job.root, tokens)

    def put(self, copy: IdleCopy) -> None:
        self._copies[copy.seq] = copy

    def put_oldest(self, copy: IdleCopy) -> None:
        self.put(copy)
        self._copies.move_to_end(copy.seq, last=False)

    def remove(self, seq: SequenceId) -> None:
        copy = self._copies.pop(seq, None)
        if copy is not None:
            self._counts.wasted_ahead_tokens += copy.num_ahead

    def use(self, seq: SequenceId, num_tokens: int) -> int:
        """Count the first tokens of a copy as used; returns how many were computed ahead."""
        copy = self._copies.get(seq)
        num_used = max(num_tokens - copy.num_settled, 0) if copy is not None else 0
        if copy is not None:
            copy.num_ahead -= num_used
        self._counts.used_ahead_tokens += num_used
        return num_used

    def drop_ahead(self, copy: IdleCopy) -> None:
        """Count the tokens computed ahead as wasted, and forget them."""
        self._counts.wasted_ahead_tokens += copy.num_ahead
        del copy.tokens[copy.num_settled :]
        copy.num_ahead = 0

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

    Attributes:
        release_drafts: Frees the memory of a draft model's sequences; returns whether there were
            any.
    """

    def __init__(self, backend: ModelBackendPort, store: AgentCacheStore) -> None:
        self._backend = backend
        self._store = store
        self._block_tokens = backend.spec.block_tokens
        self.idle = IdleCopies(store.telemetry.counts.engine)
        self.release_drafts: Callable[[], bool] = lambda: False
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

    def resize(self, seq: SequenceId, length: int, *, may_evict: bool = True) -> bool:
        """Reserve `length` tokens for a sequence; False, without a change, if memory is short.

        Evicts no blocks as long as `make_room` can drop tokens computed ahead.
        """
        lengths = {**self._lengths, seq: length}
        if not length:
            del lengths[seq]
        needed = self._backend.bytes_for(list(lengths.values()))
        if needed > max(self._room, self._reserved):
            return False
        try:
            if needed > self._reserved:
                may_evict = may_evict and self._oldest_ahead(spared=seq) is None
                self._store.reserve(needed - self._reserved, may_evict=may_evict)
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
        while self.idle:
            if self._may_be_idle([len(copy.tokens) for copy in self.idle], max_idle):
                return
            self.close_oldest_idle()

    def _may_be_idle(self, lengths: list[int], max_idle: int) -> bool:
        budget = self._room * _IDLE_SHARE
        return len(lengths) <= max_idle and self._backend.bytes_for(lengths) <= budget

    def make_room(self, spared: SequenceId | None = None) -> bool:
        """Free memory that no request needs, except the idle copy `spared`; False if none is left.

        A draft model's sequences close before idle copies do.
        """
        return self.release_drafts() or self.close_oldest_idle(spared)

    def close_oldest_idle(self, spared: SequenceId | None = None) -> bool:
        """Close the oldest idle copy other than `spared`; returns False if there is none.

        As long as there are tokens computed ahead, drops those of one copy instead.
        """
        if (ahead := self._oldest_ahead(spared)) is not None:
            self._drop_ahead(ahead)
            return True
        for copy in self.idle:
            if copy.seq != spared:
                self.close_sequence(copy.seq)
                return True
        return False

    def close_idle_of(self, agent: str) -> None:
        for copy in [copy for copy in self.idle if copy.agent == agent]:
            self.close_sequence(copy.seq)

    # -- tokens computed ahead ------------------------------------------------------------------

    def extend_idle(self, copy: IdleCopy, length: int, max_idle: int) -> bool:
        """Reserve memory to lengthen an idle copy; False if that takes more than is free."""
        lengths = [length if other is copy else len(other.tokens) for other in self.idle]
        return self._may_be_idle(lengths, max_idle) and self.resize(
            copy.seq, length, may_evict=False
        )

    def open_idle(self, seq: SequenceId, length: int, max_idle: int) -> bool:
        """Reserve memory for another idle copy; False if that takes more than is free."""
        lengths = [length, *(len(copy.tokens) for copy in self.idle)]
        return self._may_be_idle(lengths, max_idle) and self.resize(seq, length, may_evict=False)

    def fork_idle(
        self, copy: IdleCopy, seq: SequenceId, num_tokens: int, max_idle: int
    ) -> IdleCopy | None:
        """Fork an idle copy; None if that takes more than is free, or the model cannot be cut."""
        if not self.open_idle(seq, num_tokens, max_idle):
            return None
        if not self._backend.fork(copy.seq, seq, num_tokens):
            self.resize(seq, 0)
            return None
        copy.is_paired = True
        forked = IdleCopy(seq, copy.agent, copy.root, copy.tokens[:num_tokens], is_paired=True)
        self.idle.put(forked)
        return forked

    def close_paired(self, agent: str) -> None:
        """Close the copies of an agent that its turn did not use; see `IdleCopy.is_paired`."""
        for copy in [copy for copy in self.idle if copy.is_paired and copy.agent == agent]:
            self.close_sequence(copy.seq)

    def _oldest_ahead(self, spared: SequenceId | None) -> IdleCopy | None:
        return next((copy for copy in self.idle if copy.num_ahead and copy.seq != spared), None)

    def _drop_ahead(self, copy: IdleCopy) -> None:
        if copy.is_paired:
            self.close_sequence(copy.seq)
            return
        self.idle.drop_ahead(copy)
        self._backend.truncate(copy.seq, len(copy.tokens))
        self.resize(copy.seq, len(copy.tokens))

    # -- the whole budget -----------------------------------------------------------------------

    def resize_budget(self, nbytes: int) -> None:
        """Close idle copies and evict blocks to fit; may raise `PoolExhaustedError`."""
        while True:
            try:
                self._store.resize(nbytes)
                return
            except PoolExhaustedError:
                if not self.make_room():
                    raise

    @property
    def _room(self) -> int:
        """Bytes for open sequences: the budget, or what the device has for them."""
        total, room = self._store.usage().total, self._backend.traits.kv_room
        return total if room is None else min(total, room)

    def longest_that_fits(self) -> int:
        lengths = range(1, self._backend.spec.max_context + 1)
        return bisect_right(
            lengths, self._room, key=lambda length: self._backend.bytes_for([length])
        )
