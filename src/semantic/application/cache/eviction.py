"""Eviction rules, side by side: functions over the index that choose blocks.

memory      idle parts, least recently used first; `domain/pool.py` keeps that order
disk        `evict_files`: when a budget is full
tails       `BlockIndex.superseded_tails`: when a longer block begins with a turn's last tokens
boundaries  `old_boundaries`: window and state parts at positions that no agent will resume from
orphans     `orphans`: blocks that no agent reaches, after a period without use
"""

from collections.abc import Collection, Sequence

from semantic.application.cache.index import BlockIndex, BlockNode
from semantic.application.cache.restore_plan import needed_windows
from semantic.domain.blocks import BlockName, BlockPart
from semantic.domain.spec import ModelCacheSpec

GRACE_S = 60.0  # a turn that has just ended may not be in the ledger yet


def disk_victims(
    index: BlockIndex, nbytes: int, *, spared: Collection[BlockName], root: BlockName | None = None
) -> list[BlockNode]:
    """Choose nodes whose files add up to `nbytes`.

    Least recently used nodes come first, and the end of a chain before its beginning. Nodes that
    are pinned, leased or in `spared` stay, and so do the nodes before them in their chains.

    Args:
        nbytes: Bytes to free; the result is smaller if not enough may be evicted.
        root: Evict nodes of this root only; None means all roots.
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
        # A parent that was skipped because of this follower can be evicted now.
        while node is not None and nbytes > 0 and may_go(node):
            victims[node.name] = node
            nbytes -= node.disk_bytes
            node = index.get(node.parent) if node.parent in passed else None
        if nbytes <= 0:
            break
        passed.add(oldest.name)
    return list(victims.values())


def evict_files(
    index: BlockIndex,
    nbytes: int,
    incoming: BlockPart,
    *,
    root: BlockName | None = None,
    slack: int = 0,
) -> list[BlockPart]:
    """Remove at least `nbytes` of files from the index, or none; returns them for deletion.

    Args:
        incoming: The part that needs the room; the blocks before it in its chain are spared.
        slack: Further bytes to free if possible.
    """
    spared = {node.name for node in index.chain(incoming.parent)}
    nodes = disk_victims(index, nbytes + slack, spared=spared, root=root)
    if sum(node.disk_bytes for node in nodes) < nbytes:
        return []
    victims = [file for node in nodes for file in node.files.values()]
    for node in nodes:
        for kind in tuple(node.files):
            index.pop_file(node, kind)
        index.prune(node)
    return victims


def resumable_blocks(
    nodes: Sequence[BlockNode], ends: Sequence[int], spec: ModelCacheSpec
) -> set[BlockName]:
    """Return those of a turn's blocks whose window and state parts are needed to resume at `ends`.

    The end of the first block that was cut short counts as well: the prefix that agents share
    ends there.
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
    """Return nodes whose window and state parts no agent will resume from.

    These parts are large and only useful at positions where a conversation continues (`needed`).
    Other blocks that a conversation has moved past (`passed`) expire after `GRACE_S` seconds; all
    remaining blocks expire when they were last used before `unused_since`.
    """

    def is_old(node: BlockNode) -> bool:
        if node.name in passed:
            return node.last_kept < now - GRACE_S
        return max(node.last_used, node.last_kept) < unused_since

    return [n for n in index if n.root in roots and n.name not in needed and is_old(n)]


def orphans(
    index: BlockIndex, reachable: Collection[BlockName], *, unused_since: float
) -> list[BlockNode]:
    """Return nodes that no agent reaches, that are not pinned and were not used since a time."""
    return [
        node
        for node in index
        if node.name not in reachable and node.last_used < unused_since and not node.num_pins
    ]
