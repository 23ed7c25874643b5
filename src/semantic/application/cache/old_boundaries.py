"""Where conversations can be resumed, for models that cannot be cut anywhere.

Window and state parts are large and matter only where someone goes on: at the end of the head that
agents share, and at the prompts and ends of an agent's latest turns. All others are dropped.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from semantic.application.cache.index import BlockNode
from semantic.application.cache.restore_plan import WantedPart, kept_windows
from semantic.application.cache.store import AgentCacheStore
from semantic.domain.agents import Pointer, Turn
from semantic.domain.blocks import BlockName
from semantic.domain.spec import LayerKind

KEPT_TURNS = 2
_GRACE_S = 60.0  # a turn that just ended may not be logged yet


class OldBoundaries:
    """Finds and drops window and state parts that nobody will need. Safe on any thread."""

    def __init__(self, store: AgentCacheStore, now: Callable[[], float] = time.time) -> None:
        self._store = store
        self._now = now

    def drop(self, latest_turns: Iterable[Sequence[Turn]], *, unused_since: float) -> int:
        """Drop what agents have gone past, and what no agent has and nobody used for long.

        Args:
            latest_turns: The last `KEPT_TURNS` of each agent.
            unused_since: What was used later is spared.

        Returns:
            The bytes freed on disk.
        """
        if self._store.spec.kinds == (LayerKind.FULL,):
            return 0
        needed: set[BlockName] = set()
        passed: set[BlockName] = set()
        for turns in latest_turns:
            for turn in turns:
                if turn.pointer is None or turn.pointer.root not in self._store.roots:
                    continue
                with self._store.lock:
                    nodes = self._store.index.path(turn.pointer.block)
                needed |= self._needed_by(turn, turn.pointer, nodes)
                passed.update(node.name for node in nodes)
        with self._store.lock:
            parts = [
                WantedPart(node, kind)
                for node in self._store.index
                if node.root in self._store.roots and node.name not in needed
                for kind in (LayerKind.WINDOW, LayerKind.STATE)
                if self._is_old(node, node.name in passed, unused_since)
            ]
            freed = self._store.drop_files(parts)
            self._store.drop_payloads(parts)
        return freed

    def _is_old(self, node: BlockNode, is_passed: bool, unused_since: float) -> bool:
        if is_passed:
            return node.last_kept < self._now() - _GRACE_S
        return max(node.last_used, node.last_kept) < unused_since

    def _needed_by(self, turn: Turn, pointer: Pointer, nodes: list[BlockNode]) -> set[BlockName]:
        """Blocks whose window and state parts let a turn be continued, or its reply made anew."""
        spec = self._store.spec
        ends = [pointer.num_tokens, turn.usage.prompt_tokens]
        # The head that agents share ends in the first block that was cut short.
        short = [n.end for n in nodes if n.num_tokens < spec.block_tokens]
        ends += short and [min(short)]
        at_ends = {node.name for node in nodes if node.end in ends}
        return at_ends | kept_windows(nodes, ends, spec.window)
