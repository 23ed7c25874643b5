"""Which files go when a disk budget is full."""

from collections.abc import Collection

from semantic.application.cache.index import BlockIndex, BlockNode
from semantic.domain.blocks import BlockName


def choose_victims(
    index: BlockIndex,
    nbytes: int,
    *,
    spared: Collection[BlockName],
    root: BlockName | None = None,
) -> list[BlockNode]:
    """Choose nodes whose files make up `nbytes`: least recently used first, ends before beginnings.

    Nodes that are pinned, being read or in `spared` stay, and so does what they follow.

    Args:
        index: All nodes, in the order in which they were used.
        nbytes: How much must go; less does if there is no more.
        spared: Names of nodes that must stay.
        root: Only this root's nodes go; None takes those of all.
    """
    chosen: dict[BlockName, BlockNode] = {}
    is_done = False
    while not is_done:
        is_done = True
        for node in index:
            if nbytes <= 0:
                return list(chosen.values())
            if node.name in chosen or node.name in spared or root not in (None, node.root):
                continue
            if _may_go(index, node, chosen):
                chosen[node.name] = node
                nbytes -= sum(part.nbytes for part in node.files.values())
                # What it followed may stand earlier in the order.
                is_done = False
    return list(chosen.values())


def _may_go(index: BlockIndex, node: BlockNode, gone: Collection[BlockName]) -> bool:
    """Whether a node's files may be deleted: nothing on disk follows, nobody counts on it."""
    if not node.files or node.num_leases or node.num_pins:
        return False
    return all(f.name in gone for f in index.followers(node.name) if f.files)
