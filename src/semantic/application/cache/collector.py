"""Drops the blocks that no agent needs.

`eviction.py` chooses these blocks. `Upkeep` calls this module, off the engine's thread.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from semantic.application.cache.eviction import old_boundaries, orphans, resumable_blocks
from semantic.application.cache.index import BlockNode
from semantic.application.cache.restore_plan import WantedPart
from semantic.application.cache.store import AgentCacheStore
from semantic.domain.agents import Pointer
from semantic.domain.blocks import BlockName, pack_tokens
from semantic.domain.spec import LayerKind
from semantic.ports.telemetry import EvictionReason


class BlockCollector:
    """Finds the blocks that agents reach in a store, and drops others. Thread-safe."""

    def __init__(self, store: AgentCacheStore, now: Callable[[], float] = time.time) -> None:
        self._store = store
        self._tiers = store.tiers
        self._now = now

    def lineage(self, pointer: Pointer, tokens: Callable[[], Sequence[int]]) -> list[BlockNode]:
        """The blocks up to a pointer; if incomplete, the longest known prefix of `tokens()`."""
        with self._tiers.lock:
            chain = self._tiers.index.chain_from(pointer.root, pointer.block)
        if chain:
            return chain
        packed = pack_tokens(tokens())
        with self._tiers.lock:
            match = self._tiers.index.match(pointer.root, packed, self._store.spec.block_tokens)
            return [node for node in match.nodes if node.end <= match.end]

    def reachable(self, pointers: Iterable[Pointer]) -> set[BlockName]:
        with self._tiers.lock:
            return self._tiers.index.reachable(pointer.block for pointer in pointers)

    def pin(self, pointers: Iterable[Pointer]) -> None:
        """Exempt the blocks up to these pointers from disk eviction, and unpin all others."""
        with self._tiers.lock:
            self._tiers.index.pin([pointer.block for pointer in pointers])

    def evict(
        self,
        pointer: Pointer,
        tokens: Callable[[], Sequence[int]],
        *,
        spared: Collection[BlockName],
        is_cold: bool,
    ) -> int:
        """Drop the blocks up to a pointer from memory and, if `is_cold`, from disk too.

        Unless `is_cold`, parts that are not on disk yet stay. Blocks in `spared` always stay.
        `tokens` as for `lineage`. Returns the number of parts dropped from memory.
        """
        nodes = self.lineage(pointer, tokens)
        with self._tiers.lock:
            known = {node.name: node for node in (*nodes, *self._tiers.index.path(pointer.block))}
            own = [node for name, node in known.items() if name not in spared]
            parts = [WantedPart(node, kind) for node in own[::-1] for kind in LayerKind]
            if self._tiers.disk is not None and not is_cold:
                parts = [wanted for wanted in parts if wanted.kind in wanted.node.files]
            num_dropped = self._tiers.drop_payloads(parts, EvictionReason.REQUEST)
            if is_cold:
                self._store.drop_files(parts, EvictionReason.REQUEST)
            return num_dropped

    def drop_orphans(self, reachable: Collection[BlockName], *, unused_since: float) -> int:
        """Drop blocks not reachable and not used since a time; returns the disk bytes freed."""
        with self._tiers.lock:
            nodes = orphans(self._tiers.index, reachable, unused_since=unused_since)
            return self._drop([WantedPart(n, kind) for n in nodes for kind in LayerKind])

    def drop_old_boundaries(
        self, latest_turns: Iterable[tuple[Pointer, int]], *, unused_since: float
    ) -> int:
        """Drop window and state parts that no agent will resume from; returns disk bytes freed.

        `latest_turns` holds the pointer and prompt length of all agents' last turns. Parts that
        belong to no agent are spared if used after `unused_since`.
        """
        if self._store.spec.kinds == (LayerKind.FULL,):
            return 0
        needed: set[BlockName] = set()
        passed: set[BlockName] = set()
        for pointer, num_prompt in latest_turns:
            if pointer.root not in self._store.roots:
                continue
            with self._tiers.lock:  # not around the loop: reading turns is slow
                nodes = self._tiers.index.path(pointer.block)
            needed |= resumable_blocks(nodes, (pointer.num_tokens, num_prompt), self._store.spec)
            passed.update(node.name for node in nodes)
        with self._tiers.lock:
            nodes = old_boundaries(
                self._tiers.index,
                self._store.roots,
                needed=needed,
                passed=passed,
                now=self._now(),
                unused_since=unused_since,
            )
            kinds = (LayerKind.WINDOW, LayerKind.STATE)
            return self._drop([WantedPart(node, kind) for node in nodes for kind in kinds])

    def _drop(self, parts: Sequence[WantedPart]) -> int:
        with self._tiers.lock:
            freed = self._store.drop_files(parts)
            self._store.drop_payloads(parts)
            return freed
