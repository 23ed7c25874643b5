"""What a sequence takes over instead of computing it, and what it leaves behind.

A sequence that opens takes the longest beginning it can get: sealed blocks from the store, or a
copy of a running sequence's state. While it runs its full blocks are sealed, and its tail when it
is put away. Used on the device's thread only.
"""

import logging
from collections.abc import Sequence

from semantic.application.agent_store import AgentCacheStore, Recall
from semantic.application.generation import Generation, common_prefix
from semantic.domain.errors import CacheCorruptionError
from semantic.ports.outbound import ModelBackendPort

_log = logging.getLogger(__name__)


class PrefixSharing:
    """Moves state between the backend's sequences and the store.

    Attributes:
        can_cut_anywhere: Whether any beginning of a block is of use; window and state layers can be
            resumed only where a block ended.
    """

    def __init__(self, backend: ModelBackendPort, store: AgentCacheStore) -> None:
        self._backend = backend
        self._store = store
        self.can_cut_anywhere = backend.spec.num_window == backend.spec.num_state == 0

    def should_wait(self, generation: Generation, running: Sequence[Generation]) -> bool:
        """Whether an older sequence is computing a prefix this one can use (single flight)."""
        known = None
        for other in running:
            if other.order > generation.order or not other.is_prefilling:
                continue
            if other.is_background and not generation.is_background:
                continue  # it may be overtaken for long
            shared = _num_shared(other, generation)
            if shared <= other.num_computed:
                continue
            if known is None:
                known = self._recall(generation).num_tokens
            if shared - max(known, other.num_computed) >= self._backend.spec.block_tokens:
                return True
        return False

    def open(self, generation: Generation, running: Sequence[Generation]) -> None:
        """Open a sequence in the backend with all the state that can be had; mutates it.

        Raises:
            InvalidRequestError: the backend refuses its tokens.
        """
        recall = self._recall(generation)
        if not self._fork(generation, recall, running):
            self._backend.open(generation.seq, generation.tokens)
            try:
                self._backend.load(generation.seq, recall.parts, recall.num_tokens)
            except CacheCorruptionError as error:
                _log.warning("sealed blocks could not be loaded: %s", error.message)
                self._store.discard(recall)
                recall = Recall.nothing(generation.job.root)
            generation.resume(recall.num_tokens, recall.chain, recall.num_whole)
        generation.count_reuse()

    def seal(self, generation: Generation, *, with_tail: bool = False) -> None:
        """Keep the blocks that are full, and the tail too when the sequence is put away."""
        while generation.is_sealing:
            start = generation.num_sealed
            end = generation.block_end(start)
            is_full = end <= generation.num_computed
            if not is_full:
                end = generation.num_computed
            if end <= start or not (is_full or with_tail):
                return
            generation.is_sealing = self._seal_block(generation, start, end)

    def _recall(self, generation: Generation) -> Recall:
        tokens = generation.tokens[:-1]  # the last one is computed in any case
        return self._store.recall(generation.job.root, tokens, can_slice=self.can_cut_anywhere)

    def _fork(self, generation: Generation, recall: Recall, running: Sequence[Generation]) -> bool:
        """Copy a running sequence's prefix if it has more of this one than the store."""
        shared = [
            (min(_num_shared(other, generation), other.num_computed), other)
            for other in running
            if other is not generation
        ]
        num_shared, source = max(shared, key=lambda pair: pair[0], default=(0, None))
        if source is None or num_shared <= recall.num_tokens:
            return False
        if not self._backend.fork(source.seq, generation.seq, num_shared):
            return False
        generation.resume(num_shared, recall.chain, recall.num_whole)
        return True

    def _seal_block(self, generation: Generation, start: int, end: int) -> bool:
        try:
            tickets = [
                self._backend.snapshot(generation.seq, start, end, kind)
                for kind in self._backend.spec.kinds
            ]
            payloads = [self._backend.payload(ticket) for ticket in tickets]
        except ValueError:
            return False  # the device is past the point where this could be kept
        except Exception:  # noqa: BLE001 - caching never fails a request
            _log.exception("a block could not be kept")
            return False
        name = self._store.seal(
            generation.job.root, generation.chain, generation.tokens[start:end], payloads
        )
        if name is None:
            return False
        generation.chain, generation.num_sealed = name, end
        return True


def _num_shared(other: Generation, generation: Generation) -> int:
    """Tokens that both begin with; tenants share nothing."""
    if other.job.root != generation.job.root:
        return 0
    return min(common_prefix(other.tokens, generation.tokens), len(generation.tokens) - 1)
