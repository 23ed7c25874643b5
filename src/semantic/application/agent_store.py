"""Attention state that outlives its sequence: sealed blocks and their payloads.

Finds the longest known beginning of a prompt, and keeps blocks that sequences leave behind. It
moves payloads between the engine and the pool's budget; it does not know what is in them.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from semantic.application.generation import common_prefix
from semantic.domain.block_pool import BlockPool, PoolUsage
from semantic.domain.blocks import BlockName, KVBlock, block_name
from semantic.domain.errors import PoolExhaustedError
from semantic.domain.spec import LayerKind
from semantic.ports.outbound import KVPayload


@dataclass(frozen=True, slots=True)
class Recall:
    """What is known of a prompt.

    Attributes:
        parts: Payloads to load up to `num_tokens`, in order.
        names: The blocks they are of.
        num_tokens: Positions they cover.
        chain: Name of the last whole block.
        num_whole: Positions covered by whole blocks; the rest is a slice of one more.
    """

    parts: tuple[KVPayload, ...]
    names: tuple[BlockName, ...]
    num_tokens: int
    chain: BlockName
    num_whole: int

    @classmethod
    def nothing(cls, root: BlockName) -> "Recall":
        """Everything is to be computed."""
        return cls((), (), 0, root, 0)


class AgentCacheStore:
    """Sealed blocks by content, within the pool's budget.

    Thread-safe; the engine's thread seals and recalls, any thread may read.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._payloads: dict[BlockName, tuple[KVPayload, ...]] = {}
        self._children: dict[BlockName, dict[BlockName, KVBlock]] = {}

    def recall(self, root: BlockName, tokens: Sequence[int], *, can_slice: bool) -> Recall:
        """Find the longest known beginning of `tokens`; marks its blocks as just used.

        Args:
            root: Root of the tenant's names.
            tokens: The prompt, less the tokens that must be computed anyway.
            can_slice: Whether a block's beginning is of use without its end.
        """
        with self._lock:
            found: list[tuple[KVBlock, int]] = []
            chain, num_whole = root, 0
            while (block := self._next_block(chain, tokens, num_whole)) is not None:
                num_whole += block.num_tokens
                found.append((block, num_whole))
                chain = block.name
            num_tokens = num_whole
            if can_slice and (child := self._longest_child(chain, tokens, num_whole)):
                block, num_shared = child
                num_tokens += num_shared
                found.append((block, num_tokens))
            names = tuple(block.name for block, _ in found)
            self._pool.touch(names)
            parts = self._needed(names, num_tokens)
            return Recall(parts, names, num_tokens, chain, num_whole)

    def discard(self, recall: Recall) -> None:
        """Drop the blocks of a recall that could not be loaded, so that they are made anew."""
        with self._lock:
            self._forget(self._pool.discard(recall.names))

    def seal(
        self,
        root: BlockName,
        parent: BlockName,
        tokens: Sequence[int],
        payloads: Sequence[KVPayload],
    ) -> BlockName | None:
        """Keep the block that follows `parent`; a known one is not written again.

        Returns:
            Its name, or None if there is no room: caching never fails a request.
        """
        block = KVBlock.of(parent, tokens, sum(payload.nbytes for payload in payloads))
        with self._lock:
            chain = [*self._ancestors(root, parent), block]
            if chain[0].parent != root:
                return None  # its beginning is gone; without it the block is of no use
            try:
                self._forget(self._pool.allocate(chain))
            except PoolExhaustedError:
                return None
            # Nobody holds a sealed block as such. Freed together, tails go before what they follow.
            self._pool.free([b.name for b in chain])
            self._payloads.setdefault(block.name, tuple(payloads))
            self._children.setdefault(parent, {}).setdefault(block.name, block)
            return block.name

    def reserve(self, nbytes: int) -> None:
        """Take room for live sequences, evicting blocks if need be.

        Raises:
            PoolExhaustedError: there is not that much.
        """
        with self._lock:
            self._forget(self._pool.reserve(nbytes))

    def release(self, nbytes: int) -> None:
        """Give room back."""
        self._pool.release(nbytes)

    def usage(self) -> PoolUsage:
        """Read the pool's counters."""
        return self._pool.usage()

    def check_integrity(self) -> None:
        """Check the pool, and that payloads and index match it.

        Raises:
            AssertionError: they do not.
        """
        self._pool.check_integrity()
        with self._lock:
            names = {name for children in self._children.values() for name in children}
            if names != set(self._payloads) or not all(self._pool.get(name) for name in names):
                raise AssertionError("index, payloads and pool do not match")

    # -- inside the lock ----------------------------------------------------------------------

    def _next_block(self, parent: BlockName, tokens: Sequence[int], start: int) -> KVBlock | None:
        """The longest whole block that follows `parent` and agrees with `tokens`."""
        children = self._children.get(parent)
        if not children:
            return None
        longest = tokens[start : start + self._pool.spec.block_tokens]
        if longest and (block := children.get(block_name(parent, longest))):
            return block
        matching = [b for b in children.values() if _agrees(b, tokens, start)]
        return max(matching, key=lambda block: block.num_tokens, default=None)

    def _needed(self, names: Sequence[BlockName], end: int) -> tuple[KVPayload, ...]:
        """Of the blocks' parts those that `end` depends on."""
        first = {
            LayerKind.FULL: 0,
            LayerKind.WINDOW: max(0, end - self._pool.spec.window),
            LayerKind.STATE: end - 1,
        }
        payloads = [payload for name in names for payload in self._payloads[name]]
        return tuple(payload for payload in payloads if payload.end > first[payload.kind])

    def _longest_child(
        self, parent: BlockName, tokens: Sequence[int], start: int
    ) -> tuple[KVBlock, int] | None:
        rest = tuple(tokens[start : start + self._pool.spec.block_tokens])
        shared = [
            (common_prefix(b.tokens, rest), b) for b in self._children.get(parent, {}).values()
        ]
        num_shared, block = max(shared, key=lambda pair: pair[0], default=(0, None))
        return (block, num_shared) if block is not None and num_shared else None

    def _ancestors(self, root: BlockName, name: BlockName) -> list[KVBlock]:
        """The blocks from the root up to `name`, as far back as they are there."""
        chain: list[KVBlock] = []
        while name != root and (block := self._pool.get(name)) is not None:
            chain.append(block)
            name = block.parent
        return chain[::-1]

    def _forget(self, evicted: Sequence[KVBlock]) -> None:
        for block in evicted:
            self._payloads.pop(block.name, None)
            siblings = self._children.get(block.parent, {})
            siblings.pop(block.name, None)
            if not siblings:
                self._children.pop(block.parent, None)


def _agrees(block: KVBlock, tokens: Sequence[int], start: int) -> bool:
    return tuple(tokens[start : start + block.num_tokens]) == block.tokens
