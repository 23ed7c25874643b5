"""Which blocks go: every rule, side by side. Pure functions over the index; the store acts on them.

memory      idle parts, least recently used first; `domain/pool.py` keeps that order
disk        `disk_victims`: when a budget is full
tails       `superseded_tails`: when a longer block begins with what a turn ended in
boundaries  `old_boundaries`: window and state parts where nobody will resume
orphans     `orphans`: what no agent reaches, after a while
"""

from collections.abc import Collection, Sequence

from semantic.application.cache.index import BlockIndex, BlockNode
from semantic.application.cache.restore_plan import needed_windows
from semantic.domain.blocks import BlockName
from semantic.domain.spec import LayerKind, ModelCacheSpec

GRACE_S = 60.0  # a turn that just ended may not be logged yet


def disk_victims(
    index: BlockIndex, nbytes: int, *, spared: Collection[BlockName], root: BlockName | None = None
) -> list[BlockNode]:
    """Choose nodes whose files make up `nbytes`: least recently used first, ends before beginnings.

    Nodes that are pinned, being read or in `spared` stay, and so does what they follow.

    Args:
        index: All nodes, in the order in which they were used.
        nbytes: How much must go; less does if there is no more.
        spared: Names of nodes that must stay.
        root: Only this root's nodes go; None takes those of all.
    """
    victims: dict[BlockName, BlockNode] = {}
    passed: set[BlockName] = set()

    def may_go(node: BlockNode) -> bool:
        if node.name in spared or root not in (None, node.root):
            return False
        if not node.files or node.num_leases or node.num_pins:
            return False
        return all(f.name in victims for f in index.followers(node.name) if f.files)

    for oldest in index:
        node: BlockNode | None = oldest
        # After an end goes what it followed, if that was passed for its sake.
        while node is not None and nbytes > 0 and may_go(node):
            victims[node.name] = node
            nbytes -= node.disk_bytes
            node = index.get(node.parent) if node.parent in passed else None
        if nbytes <= 0:
            break
        passed.add(oldest.name)
    return list(victims.values())


def superseded_tails(index: BlockIndex, node: BlockNode) -> list[BlockNode]:
    """The short blocks turns ended in that `node` begins with, unless a reader counts on them.

    A tail's file stays until there is one to take its place, for that may never be written.
    """
    return [
        tail
        for tail in index.prefixes_of(node)
        if tail.has(LayerKind.FULL)
        and not tail.num_leases
        and (LayerKind.FULL in node.files or LayerKind.FULL not in tail.files)
    ]


def resumable_blocks(
    nodes: Sequence[BlockNode], ends: Sequence[int], spec: ModelCacheSpec
) -> set[BlockName]:
    """Of a turn's blocks, those whose window and state parts let it be resumed at `ends`.

    Also where the head that agents share ends: in the first block that was cut short.
    """
    short = [node.end for node in nodes if node.num_tokens < spec.block_tokens]
    ends = [*ends, *([min(short)] if short else [])]
    at_ends = {node.name for node in nodes if node.end in ends}
    return at_ends | needed_windows(nodes, ends, spec.window)


def old_boundaries(
    index: BlockIndex,
    roots: Collection[BlockName],
    *,
    needed: Collection[BlockName],
    passed: Collection[BlockName],
    now: float,
    unused_since: float,
) -> list[BlockNode]:
    """Nodes from whose window and state parts nobody will resume.

    Those parts are large, and matter only where someone goes on (`needed`). Of other blocks that
    agents have gone past (`passed`) they are old soon; of the rest, when unused since a time.
    """

    def is_old(node: BlockNode) -> bool:
        if node.name in passed:
            return node.last_kept < now - GRACE_S
        return max(node.last_used, node.last_kept) < unused_since

    return [n for n in index if n.root in roots and n.name not in needed and is_old(n)]


def orphans(
    index: BlockIndex, reachable: Collection[BlockName], *, unused_since: float
) -> list[BlockNode]:
    """Nodes that no agent reaches and nobody used since a time."""
    return [
        node
        for node in index
        if node.name not in reachable and node.last_used < unused_since and not node.num_pins
    ]
