"""Parts of blocks on their way to disk, and those that are there.

Says which files there are, which may go, and what has yet to become one; the disk's own thread
does the work. Not thread-safe: its owner has the lock.
"""

from collections.abc import Iterable

from semantic.application.cache.counters import CacheCounters
from semantic.application.cache.disk_eviction import choose_victims
from semantic.application.cache.index import BlockIndex, BlockNode
from semantic.application.cache.resident_parts import ResidentParts
from semantic.application.cache.restore_plan import WantedPart
from semantic.application.cache.writer import DiskTier
from semantic.domain.agents import Pointer
from semantic.domain.blocks import BlockName, BlockPart, PartKey
from semantic.domain.spec import LayerKind


class FiledParts:
    """What of the blocks in memory is on disk, is being written, or waits for room there."""

    def __init__(
        self,
        disk: DiskTier | None,
        index: BlockIndex,
        memory: ResidentParts,
        counters: CacheCounters,
    ) -> None:
        self._disk = disk
        self._index = index
        self._memory = memory
        self._counters = counters
        self._writing: set[PartKey] = set()
        self._dirty: dict[PartKey, WantedPart] = {}  # the writer had no room for these

    def restore(self, parts: Iterable[BlockPart]) -> None:
        """Take over what a directory holds."""
        for part in parts:
            node = self._index.add(part.root, part.parent, part.start, part.tokens)
            self._index.put_file(node, part)
            node.last_used = max(node.last_used, part.last_used)
        self._index.sort_by_age()

    # -- writing --------------------------------------------------------------------------------

    def write(self, part: WantedPart) -> None:
        """Hand a part to the writer, if it is not there; it stays in memory until it is on disk."""
        node, kind = part.node, part.kind
        if self._disk is None or kind in node.files or part.key in self._writing:
            return
        if kind not in node.payloads:
            return  # it was dropped while it waited
        if self._disk.offer(node.part(kind), node.payloads[kind]):
            self._writing.add(part.key)
            self._memory.hold(part)
        else:
            self._dirty[part.key] = part

    def offer_again(self) -> None:
        """Hand over what the writer had no room for, as far as it is still in memory."""
        waiting, self._dirty = self._dirty, {}
        for part in waiting.values():
            self.write(part)

    @property
    def is_busy(self) -> bool:
        """Whether something is being written."""
        return bool(self._writing)

    def end_writing(self, part: BlockPart, *, is_written: bool) -> BlockNode | None:
        """Note that a part is on disk, or could not be written; returns the node of a new file."""
        node = self._index.get(part.name)
        assert node is not None  # noqa: S101 - what is being written is held
        wanted = WantedPart(node, part.kind)
        self._writing.remove(part.key)
        self._memory.let_go(wanted)
        if not is_written:
            self._counters.unwritten += 1
            self._dirty[part.key] = wanted
            return None
        self._counters.written += 1
        self._index.put_file(node, part)
        return node

    def is_whole(self, pointer: Pointer) -> bool:
        """Whether all that leads to a place is on disk, and none of it is still to be written."""
        chain = self._index.chain(pointer.block)
        if not chain or chain[0].parent != pointer.root:
            return False
        return all(LayerKind.FULL in node.files and not self._is_unwritten(node) for node in chain)

    def _is_unwritten(self, node: BlockNode) -> bool:
        """Whether a part of a node waits to be written."""
        keys = [(node.name, kind) for kind in node.payloads if kind not in node.files]
        return any(key in self._dirty or key in self._writing for key in keys)

    # -- deleting -------------------------------------------------------------------------------

    def drop(self, part: WantedPart, *, is_bad: bool = False) -> int:
        """Delete a part's file, if there is one; returns its bytes. A bad one is set aside."""
        filed = self._index.pop_file(part.node, part.kind)
        if filed is not None and self._disk is not None:
            self._disk.delete([filed], is_bad=is_bad)
        self._index.prune(part.node)
        return filed.nbytes if filed is not None else 0

    def lose(self, part: WantedPart) -> None:
        """Forget a file that turned out to be gone or bad, and count it."""
        self._counters.corrupt += 1
        self.drop(part, is_bad=True)

    def victims(
        self, nbytes: int, incoming: BlockPart, *, root: BlockName | None, slack: int
    ) -> list[BlockPart]:
        """Choose files to delete, as `choose_victims` does, and forget them; none in vain.

        Args:
            nbytes: How much must go; if less may, nothing does.
            incoming: What the room is for; what it follows is spared.
            root: Only this root's files go; None takes those of all.
            slack: How much more may go.
        """
        spared = {node.name for node in self._index.chain(incoming.parent)}
        nodes = choose_victims(self._index, nbytes + slack, spared=spared, root=root)
        if sum(part.nbytes for node in nodes for part in node.files.values()) < nbytes:
            return []
        chosen: list[BlockPart] = []
        for node in nodes:
            parts = [self._index.pop_file(node, kind) for kind in tuple(node.files)]
            chosen += [part for part in parts if part is not None]
            self._index.prune(node)
        return chosen

    def check_integrity(self) -> None:
        """See that what is being written is in memory.

        Raises:
            AssertionError: it is not.
        """
        for name, kind in self._writing:
            node = self._index.get(name)
            if node is None or kind not in node.payloads:
                raise AssertionError("what is being written is not in memory")
