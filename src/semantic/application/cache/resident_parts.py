"""Parts of blocks that are in memory, within the pool's budget.

Joins the pool, which counts the bytes of names, with the nodes, which have the payloads. Knows
neither files nor prompts. Not thread-safe: its owner has the lock.
"""

import hashlib
from collections.abc import Iterable, Sequence

from semantic.application.cache.counters import CacheCounters
from semantic.application.cache.index import BlockIndex, BlockNode
from semantic.application.cache.restore_plan import WantedPart
from semantic.domain.blocks import BlockName, KVBlock
from semantic.domain.pool import BlockPool
from semantic.domain.spec import LayerKind
from semantic.ports.outbound import KVPayload


class ResidentParts:
    """The payloads in memory: the pool says how many there may be, and which goes next."""

    def __init__(self, pool: BlockPool, index: BlockIndex, counters: CacheCounters) -> None:
        self._pool = pool
        self._index = index
        self._counters = counters
        self._parts: dict[BlockName, WantedPart] = {}  # by the name the pool knows

    def __len__(self) -> int:
        """How many parts are in memory."""
        return len(self._parts)

    def keep(
        self, node: BlockNode, payloads: Sequence[KVPayload], chain: Sequence[BlockNode] = ()
    ) -> list[LayerKind]:
        """Take those of a block's parts that are not there yet, and say which; mutates the node.

        Others make room for them, but not the block's own parts, nor those of its chain.

        Raises:
            PoolExhaustedError: there is no room; nothing was taken.
        """
        new = [payload for payload in payloads if payload.kind not in node.payloads]
        blocks = [
            KVBlock(_pool_name(node.name, payload.kind), node.parent, (), payload.nbytes)
            for payload in new
        ]
        own = [_pool_name(node.name, kind) for kind in node.payloads]
        names = [*(link.name for link in chain), *own]
        spared = [found for name in names if (found := self._pool.get(name)) is not None]
        self._forget(self._pool.allocate([*spared, *blocks]))
        # Nobody holds a sealed block as such. Freed together, tails go before what they follow.
        self._pool.free([block.name for block in (*spared, *blocks)])
        for payload, block in zip(new, blocks, strict=True):
            node.payloads[payload.kind] = payload
            self._parts[block.name] = WantedPart(node, payload.kind)
        return [payload.kind for payload in new]

    def has_room(self, nbytes: int, *, unused_since: float) -> bool:
        """Whether so much fits if only those parts go that were not used since a time."""
        usage = self._pool.usage()
        excess = usage.used + nbytes - usage.total
        victims = self._pool.oldest(excess)
        if sum(block.nbytes for block in victims) < excess:
            return False
        return all(self._parts[block.name].node.last_used < unused_since for block in victims)

    def hold(self, part: WantedPart) -> None:
        """Keep a part that is in memory there, until it was let go as often as it was held."""
        self._pool.acquire([_pool_name(part.node.name, part.kind)])

    def let_go(self, part: WantedPart) -> None:
        """Undo one `hold`."""
        self._pool.free([_pool_name(part.node.name, part.kind)])

    def drop(self, parts: Iterable[WantedPart]) -> int:
        """Drop parts that nobody holds; returns how many went."""
        before = len(self._parts)
        self._forget(self._pool.discard(_pool_name(p.node.name, p.kind) for p in parts))
        return before - len(self._parts)

    def touch(self, parts: Iterable[WantedPart]) -> None:
        """Mark parts as just used, of a chain the end first."""
        self._pool.touch(_pool_name(part.node.name, part.kind) for part in parts)

    def reserve(self, nbytes: int) -> None:
        """Take room for something else, dropping parts that nobody holds if need be.

        Raises:
            PoolExhaustedError: there is not that much.
        """
        self._forget(self._pool.reserve(nbytes))

    def release(self, nbytes: int) -> None:
        """Give back what was reserved."""
        self._pool.release(nbytes)

    def check_integrity(self) -> None:
        """Check the pool, and that nodes and pool have the same parts.

        Raises:
            AssertionError: they have not.
        """
        self._pool.check_integrity()
        held = {_pool_name(node.name, kind) for node in self._index for kind in node.payloads}
        if held != set(self._parts) or not all(self._pool.get(name) for name in held):
            raise AssertionError("index, payloads and pool do not match")

    def _forget(self, evicted: Iterable[KVBlock]) -> None:
        for block in evicted:
            part = self._parts.pop(block.name)
            del part.node.payloads[part.kind]
            self._counters.evicted += 1
            self._index.prune(part.node)


def _pool_name(name: BlockName, kind: LayerKind) -> BlockName:
    """What the pool calls a part: the block's own name for the part every block has."""
    if kind is LayerKind.FULL:
        return name
    return BlockName(hashlib.sha256(name + kind.value.encode()).digest())
