"""What becomes of the short block a turn ended in, once the conversation went on.

Not thread-safe: its owner has the lock.
"""

from collections.abc import Callable

from semantic.application.cache.filed_parts import FiledParts
from semantic.application.cache.index import BlockIndex, BlockNode
from semantic.application.cache.resident_parts import ResidentParts
from semantic.application.cache.restore_plan import WantedPart
from semantic.domain.blocks import BlockName
from semantic.domain.spec import LayerKind

OnMoved = Callable[[BlockName, BlockName], object]


class Tails:
    """Frees a tail when a longer block begins with it, and says that turns now point into that."""

    def __init__(
        self,
        index: BlockIndex,
        memory: ResidentParts,
        files: FiledParts,
        on_moved: OnMoved | None = None,
    ) -> None:
        self._index = index
        self._memory = memory
        self._files = files
        self._on_moved = on_moved

    def free_into(self, node: BlockNode) -> None:
        """Free the tails that `node` begins with, unless somebody counts on them now.

        A file stays until there is one to take its place, for that may never be written.
        """
        for tail in self._index.begun_by(node):
            full = WantedPart(tail, LayerKind.FULL)
            is_last_file = LayerKind.FULL in tail.files and LayerKind.FULL not in node.files
            if not tail.has(LayerKind.FULL) or tail.num_leases or is_last_file:
                continue
            self._memory.drop([full])
            if LayerKind.FULL not in tail.payloads:
                self._files.drop(full)
                node.num_pins = max(node.num_pins, tail.num_pins)
                if self._on_moved is not None:
                    self._on_moved(tail.name, node.name)

    def free(self, node: BlockNode) -> None:
        """Free a node that somebody counted on when what it begins was sealed."""
        if self._index.get(node.name) is not node or not node.has(LayerKind.FULL):
            return
        longer = self._index.continued_by(node)
        if longer is not None:
            self.free_into(longer)
