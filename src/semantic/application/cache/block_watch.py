"""All blocks as those see them who draw a map: a page at a time, then only what changed.

Reads names, positions and sizes; it changes nothing, and holds the store's lock only to look names
up, so that a map of 50,000 blocks costs the engine nothing.
"""

from dataclasses import dataclass

from semantic.application.cache.index import BlockNode
from semantic.application.cache.tiers import BlockTiers
from semantic.domain.blocks import BlockName


@dataclass(frozen=True, slots=True)
class BlockView:
    """A block, and what of it is where.

    Attributes:
        parent: The block before it, or the root of its chain.
        start: Position of its first token.
        last_used: Seconds since the epoch.
    """

    name: BlockName
    parent: BlockName
    start: int
    num_tokens: int
    memory_bytes: int
    disk_bytes: int
    last_used: float
    is_pinned: bool


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
    blocks: tuple[BlockView, ...] = ()
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
        return BlockPage(mark, len(nodes), tuple(map(_view, shown)), cursor=cursor)

    def changes(self, since: int, limit: int) -> BlockPage:
        """List the blocks that came, changed or went since a mark; stale if they are too many."""
        with self._lock:
            mark, num_blocks = self._index.mark, len(self._index)
            names = self._index.changed_since(since)
            if names is None or len(names) > limit:
                return BlockPage(mark, num_blocks, is_stale=True)
            nodes = [self._index.get(name) for name in names]
        gone = tuple(name for name, node in zip(names, nodes, strict=True) if node is None)
        return BlockPage(mark, num_blocks, tuple(_view(node) for node in nodes if node), gone)


def _view(node: BlockNode) -> BlockView:
    return BlockView(
        name=node.name,
        parent=node.parent,
        start=node.start,
        num_tokens=node.num_tokens,
        memory_bytes=node.memory_bytes,
        disk_bytes=node.disk_bytes,
        last_used=node.last_used,
        is_pinned=node.num_pins > 0,
    )
