"""All blocks as those see them who draw a map: a page at a time, then only what changed.

It changes nothing, and holds the store's lock only to look names up, so that a map of 50,000 blocks
costs the engine nothing: what of a block is where is read when it is drawn.
"""

from dataclasses import dataclass

from semantic.application.cache.index import BlockNode
from semantic.application.cache.tiers import BlockTiers
from semantic.domain.blocks import BlockName


@dataclass(frozen=True, slots=True)
class BlockPage:
    """Some blocks.

    Attributes:
        mark: Asks for what changed since.
        num_blocks: All there are.
        gone: Blocks that are not known any more.
        cursor: Asks for the next page; None on the last one.
        is_stale: What changed is not known any more: read all pages again.
    """

    mark: int
    num_blocks: int
    blocks: tuple[BlockNode, ...] = ()
    gone: tuple[BlockName, ...] = ()
    cursor: str | None = None
    is_stale: bool = False


class BlockWatch:
    """The blocks of one store. Thread-safe."""

    def __init__(self, tiers: BlockTiers) -> None:
        self._index = tiers.index
        self._lock = tiers.lock

    def page(self, after: str, limit: int) -> BlockPage:
        """List blocks in the order of their names, from the one after `after`, a cursor, on."""
        with self._lock:
            mark, nodes = self._index.mark, list(self._index)
        rest = [node for node in nodes if node.name.hex() > after] if after else nodes
        rest.sort(key=lambda node: node.name)
        shown = rest[:limit]
        cursor = shown[-1].name.hex() if len(rest) > len(shown) else None
        return BlockPage(mark, len(nodes), tuple(shown), cursor=cursor)

    def changes(self, since: int, limit: int) -> BlockPage:
        """List the blocks that came, changed or went since a mark; stale if they are too many."""
        with self._lock:
            mark, num_blocks = self._index.mark, len(self._index)
            names = self._index.changed_since(since)
            if names is None or len(names) > limit:
                return BlockPage(mark, num_blocks, is_stale=True)
            nodes = [self._index.get(name) for name in names]
        gone = tuple(name for name, node in zip(names, nodes, strict=True) if node is None)
        return BlockPage(mark, num_blocks, tuple(filter(None, nodes)), gone)
