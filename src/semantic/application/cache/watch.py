"""Lists the known blocks for the web page's map."""

from dataclasses import dataclass

from semantic.application.cache.index import BlockNode
from semantic.application.cache.tiers import BlockTiers
from semantic.domain.blocks import BlockName


@dataclass(frozen=True, slots=True)
class BlockPage:
    """A list of blocks: one page of all blocks, or the changes since a mark.

    Attributes:
        mark: Pass it to `BlockWatch.changes` to list later changes.
        cursor: Pass it to `BlockWatch.page` for the next page; None on the last one.
        is_stale: The changes are too many or no longer recorded: read all pages again.
    """

    mark: int
    num_blocks: int
    blocks: tuple[BlockNode, ...] = ()
    gone: tuple[BlockName, ...] = ()
    cursor: str | None = None
    is_stale: bool = False


class BlockWatch:
    """Lists blocks for the web page's map: page by page, then changes only.

    Read-only. It holds the lock only to look up names, so that a map of 50,000 blocks does not
    delay the engine; the locations of a block's parts are read without the lock. Thread-safe.
    """

    def __init__(self, tiers: BlockTiers) -> None:
        self._index = tiers.index
        self._lock = tiers.lock

    def page(self, after: str, limit: int) -> BlockPage:
        """List blocks in the order of their names, after the cursor `after`."""
        with self._lock:
            mark, nodes = self._index.mark, list(self._index)
        rest = [node for node in nodes if node.name.hex() > after] if after else nodes
        rest.sort(key=lambda node: node.name)
        shown = rest[:limit]
        cursor = shown[-1].name.hex() if len(rest) > len(shown) else None
        return BlockPage(mark, len(nodes), tuple(shown), cursor=cursor)

    def changes(self, since: int, limit: int) -> BlockPage:
        """List blocks added, changed or removed since a mark; stale if over `limit`."""
        with self._lock:
            mark, num_blocks = self._index.mark, len(self._index)
            names = self._index.changed_since(since)
            if names is None or len(names) > limit:
                return BlockPage(mark, num_blocks, is_stale=True)
            nodes = [self._index.get(name) for name in names]
        gone = tuple(name for name, node in zip(names, nodes, strict=True) if node is None)
        return BlockPage(mark, num_blocks, tuple(filter(None, nodes)), gone)
