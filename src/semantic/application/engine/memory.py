"""Room for live sequences within the memory budget."""

from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.request import Generation
from semantic.domain.errors import PoolExhaustedError
from semantic.ports.backend import ModelBackendPort, SequenceId


class WorkingMemory:
    """Room in the pool for live sequences, counted together since padding may be shared."""

    def __init__(self, backend: ModelBackendPort, store: AgentCacheStore) -> None:
        self._backend = backend
        self._store = store
        self._block_tokens = backend.spec.block_tokens
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
        """See that the next tokens have room; False if they do not."""
        length = generation.num_launched + max(generation.num_behind, 1)
        if length <= self._lengths[generation.seq]:
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

    def clear(self) -> None:
        """Give everything back."""
        self._store.release(self._reserved)
        self._lengths, self._reserved = {}, 0

    def longest_that_fits(self) -> int:
        """Tokens of the longest sequence that fits if it is alone."""
        total = self._store.usage().total
        low, high = 0, self._backend.spec.max_context
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._backend.bytes_for([middle]) <= total
            low, high = (middle, high) if fits else (low, middle - 1)
        return low
