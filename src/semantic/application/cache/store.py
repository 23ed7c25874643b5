"""KV cache that outlives its sequence: sealed blocks, in memory and on disk.

Finds the longest known beginning of a prompt, and keeps the blocks that sequences leave behind,
whichever model is loaded; it does not know what is in payloads.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from semantic.application.cache.eviction import old_boundaries, orphans, resumable_blocks
from semantic.application.cache.index import BlockNode, BlockWatch
from semantic.application.cache.loader import PartLoader
from semantic.application.cache.remote import RemoteTier
from semantic.application.cache.restore_plan import (
    RestorePlan,
    WantedPart,
    needed_windows,
    plan_restore,
    state_of,
)
from semantic.application.cache.tiers import BlockTiers, OnMoved
from semantic.application.cache.writer import DiskTier
from semantic.domain.agents import Pointer
from semantic.domain.blocks import BlockName, BlockPart, PartKey, pack_tokens
from semantic.domain.errors import PoolExhaustedError
from semantic.domain.pool import BlockPool, PoolUsage
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.backend import KVPayload
from semantic.ports.inbound import StateView
from semantic.ports.telemetry import CacheCounts, EvictionReason, NoTelemetry, TelemetryPort

_RECENT_S = 1.0  # how exactly it is known when the blocks of a running sequence were used


class AgentCacheStore:
    """Sealed blocks by content, within the budgets of memory and disk.

    Thread-safe: the engine seals and recalls, readers and the writer move parts, anyone may ask.

    Attributes:
        spec: The geometry of the model whose blocks are kept.
        roots: Those whose blocks were sealed or asked for: the served model's.
        telemetry: The same, for the engine over this store; `counts` are its own.
        loader: Brings parts into memory and holds them there.
        watch: Lists blocks for those who draw them.
    """

    def __init__(
        self,
        pool: BlockPool,
        disk: DiskTier | None = None,
        *,
        on_moved: OnMoved | None = None,
        now: Callable[[], float] = time.time,
        telemetry: TelemetryPort | None = None,
        remote: RemoteTier | None = None,
    ) -> None:
        """Start empty.

        Args:
            pool: The budget of memory.
            disk: Where blocks are kept beyond it, if anywhere.
            on_moved: Told, within the lock, that what pointed at one block must point into another.
            now: Seconds since the epoch.
            telemetry: Who is told what happens; None is nobody.
            remote: Where other machines find blocks, and theirs are; None if there are none.
        """
        self.telemetry: TelemetryPort = telemetry or NoTelemetry()
        self.counts: CacheCounts = self.telemetry.counts.cache
        self._pool = pool
        self._disk = disk
        self._now = now
        self._tiers = BlockTiers(pool, disk, self.counts, on_moved, remote)
        self._index, self._lock = self._tiers.index, self._tiers.lock
        self.spec: ModelCacheSpec = pool.spec
        self.roots: set[BlockName] = set()
        self.loader = PartLoader(self._tiers)
        self.watch = BlockWatch(self._index, self._lock)

    # -- recall ---------------------------------------------------------------------------------

    def plan(self, root: BlockName, tokens: Sequence[int], *, is_used: bool = True) -> RestorePlan:
        """Find the longest beginning of `tokens` that can be restored.

        Args:
            root: Root of the tenant's names.
            tokens: The prompt, less the tokens that must be computed anyway.
            is_used: Whether that makes it young again.
        """
        packed, spec = pack_tokens(tokens), self.spec
        with self._lock:
            self.roots.add(root)
            match = self._index.match(root, packed, spec.block_tokens)
            ends = frozenset(
                node.name
                for node in match.nodes
                if node.num_tokens == spec.block_tokens or self._index.has_followers(node)
            )
            plan = plan_restore(root, match, spec, ends)
            if is_used:
                self.use(plan.parts)
            return plan

    def worth_reading(
        self,
        root: BlockName,
        plan: RestorePlan,
        seconds_per_token: float,
        begun: Collection[PartKey] = (),
    ) -> RestorePlan:
        """Leave out what is now slower to read than to compute, unless it is being read for it."""
        if not seconds_per_token:
            return plan
        with self._lock:
            return self._tiers.worth_reading(plan, root, self.spec, seconds_per_token, begun)

    @property
    def version(self) -> int:
        """Changes whenever a plan may: a block, or a part of one, came or went."""
        return self._index.version

    def prefetch(
        self, parts: Sequence[WantedPart], max_bytes: int | None = None
    ) -> list[WantedPart]:
        """Begin to read what is not in memory, no more than can stay there; returns those parts.

        Args:
            parts: The most useful first.
            max_bytes: The most that is read; None is as much as fits beside those of them that
                are in memory.
        """
        with self._lock:
            usage = self._pool.usage()
            known = {w.key: w.node.payloads[w.kind] for w in parts if w.kind in w.node.payloads}
            room = usage.available + usage.idle - sum(p.nbytes for p in known.values())
            return self.loader.prefetch(parts, room if max_bytes is None else min(room, max_bytes))

    def discard(self, parts: Iterable[WantedPart]) -> None:
        """Drop parts that could not be loaded, so that they are computed again."""
        with self._lock:
            for wanted in parts:
                num_dropped = self._tiers.drop_payloads([wanted], EvictionReason.CORRUPT)
                if num_dropped or wanted.kind in wanted.node.files:
                    self.counts.corrupt += 1
                self._tiers.drop_file(wanted, EvictionReason.CORRUPT)

    # -- seal -----------------------------------------------------------------------------------

    def seal(
        self,
        root: BlockName,
        parent: BlockName,
        tokens: Sequence[int],
        payloads: Sequence[KVPayload],
    ) -> BlockName | None:
        """Keep the block that follows `parent`; the parts that are known are not kept twice.

        Window parts are kept in memory alone until `settle` says which of them matter.

        Args:
            root: Root of the tenant's names.
            parent: The block before it, or the root.
            tokens: Its ids.
            payloads: Its parts.

        Returns:
            Its name, or None if there is no room: caching never fails a request.
        """
        packed = pack_tokens(tokens)
        with self._lock:
            self.roots.add(root)
            before = self._index.get(parent)
            if parent != root and (before is None or not before.has(LayerKind.FULL)):
                return None  # without its beginning the block is of no use
            node = self._index.add(root, parent, before.end if before else 0, packed)
            nbytes = sum(payload.nbytes for payload in payloads)
            if before is not None and self._is_young(before, nbytes):
                node.last_used = max(node.last_used, before.last_used)  # its files say so
                is_kept = self._keep(node, payloads)
            else:
                is_kept = self._keep_in_chain(node, payloads)
            if not is_kept:
                self._index.prune(node)
                return None
            self.counts.sealed += 1
            self._tiers.free_tails(node)
            return node.name

    def use(self, parts: Sequence[WantedPart]) -> None:
        """Mark parts as just used, of a chain the end first."""
        with self._lock:
            now = self._now()
            self._pool.touch(wanted.key for wanted in parts)
            self._index.touch([wanted.node for wanted in parts], now)
            for wanted in parts:
                if wanted.kind is not LayerKind.FULL:
                    wanted.node.last_kept = now

    def touch(self, name: BlockName) -> None:
        """Mark all that leads to a block as just used."""
        with self._lock:
            self.use([WantedPart(node, LayerKind.FULL) for node in self._index.chain(name)])

    def add(self, name: BlockName, payloads: Sequence[KVPayload]) -> None:
        """Keep further parts of a block, as far as there is room."""
        with self._lock:
            node = self._index.get(name)
            if node is not None:
                self._keep(node, payloads, self._index.chain(node.parent))

    def settle(
        self, sealed: Iterable[BlockName], last: BlockName, boundaries: Sequence[int]
    ) -> None:
        """Of blocks sealed in a turn, write the window parts its boundaries need, drop the others'.

        Args:
            sealed: The turn's blocks.
            last: The end of their chain.
            boundaries: Positions the conversation may be resumed at.
        """
        with self._lock:
            known = [self._index.get(name) for name in sealed]
            nodes = [node for node in known if node and LayerKind.WINDOW in node.payloads]
            chain = [*self._index.chain(last), *nodes]
            kept = needed_windows(chain, boundaries, self.spec.window)
            now = self._now()
            for node in chain:
                if node.name in kept:
                    node.last_kept = now
                if LayerKind.WINDOW not in node.payloads or LayerKind.WINDOW in node.files:
                    continue
                if node.name in kept:
                    self._tiers.write(WantedPart(node, LayerKind.WINDOW))
                elif node in nodes and not node.last_kept:
                    self._tiers.drop_payloads([WantedPart(node, LayerKind.WINDOW)])

    # -- memory ---------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> None:
        """Take room for live sequences, evicting blocks if need be.

        Raises:
            PoolExhaustedError: there is not that much.
        """
        with self._lock:
            try:
                self._tiers.reserve(nbytes)
            except PoolExhaustedError:
                self.loader.stop_prefetching()  # what nobody waits for gives way
                raise

    def release(self, nbytes: int) -> None:
        """Give room back."""
        self._pool.release(nbytes)

    def resize(self, nbytes: int) -> None:
        """Use another budget of memory; `PoolExhaustedError` if more than that is in use."""
        with self._lock:
            self._tiers.resize(nbytes)

    def usage(self) -> PoolUsage:
        """Read the pool's counters."""
        return self._pool.usage()

    @property
    def is_busy(self) -> bool:
        """Whether parts are being read or written, so that room will come."""
        with self._lock:
            return self.loader.is_busy or self._tiers.is_writing

    def drop_payloads(self, parts: Iterable[WantedPart]) -> int:
        """Drop parts from memory that are not in use; returns how many went."""
        with self._lock:
            return self._tiers.drop_payloads(parts)

    def drop_files(
        self, parts: Iterable[WantedPart], reason: EvictionReason = EvictionReason.UNUSED
    ) -> int:
        """Delete parts from disk that nobody counts on; returns the bytes freed."""
        with self._lock:
            unused = [part for part in parts if not part.node.num_leases]
            return sum(self._tiers.drop_file(part, reason) for part in unused)

    def drop(self, parts: Sequence[WantedPart]) -> int:
        """Drop parts from disk and memory; returns the bytes freed on disk."""
        with self._lock:
            freed = self.drop_files(parts)
            self.drop_payloads(parts)
            return freed

    def drop_memory(self) -> None:
        """Drop all that is in memory and not in use."""
        self.loader.stop_prefetching()
        self.drop_payloads(WantedPart(n, kind) for n in self.nodes() for kind in tuple(n.payloads))

    def serve(self, spec: ModelCacheSpec, roots: Iterable[BlockName]) -> None:
        """Keep the blocks of another model from now on; those of others stay on disk."""
        with self._lock:
            self.spec, self.roots = spec, set(roots)

    # -- disk -----------------------------------------------------------------------------------

    def restore_index(self, parts: Iterable[BlockPart]) -> None:
        """Take over what a directory holds, at the start."""
        with self._lock:
            for part in parts:
                node = self._index.add(part.root, part.parent, part.start, part.tokens)
                self._index.put_file(node, part)
                node.last_used = max(node.last_used, part.last_used)
            self._index.sort_by_age()

    def reconcile(
        self, present: Iterable[BlockPart], missing: Iterable[PartKey]
    ) -> list[BlockPart]:
        """Take over unknown files, forget those that are not there; returns the unknown ones."""
        with self._lock:
            # Those that were written while the files were read are known by now.
            unknown = [part for part in present if not self._index.has_file(part.key)]
            self.restore_index(unknown)
            for name, kind in missing:
                node = self._index.get(name)
                if node is not None and kind in node.files and not node.num_leases:
                    self._tiers.lose_file(WantedPart(node, kind))
            return unknown

    def offer_again(self) -> bool:
        """Hand over what the writer had no room for; False if nothing is left to write."""
        with self._lock:
            self._tiers.offer_again()
            return self._tiers.is_writing

    def is_on_disk(self, pointer: Pointer) -> bool:
        """Whether all that leads to a place is on disk, and none of it is still to be written."""
        with self._lock:
            return self._tiers.is_on_disk(pointer)

    # -- what agents reach ----------------------------------------------------------------------

    def nodes(self) -> list[BlockNode]:
        """All known blocks, the least recently used first."""
        with self._lock:
            return list(self._index)

    def get(self, name: BlockName) -> BlockNode | None:
        """Find a block by its name."""
        with self._lock:
            return self._index.get(name)

    def chain(self, name: BlockName) -> list[BlockNode]:
        """The blocks up to `name`, from the first one that is known without a gap."""
        with self._lock:
            return self._index.chain(name)

    def lineage(self, pointer: Pointer, tokens: Callable[[], Sequence[int]]) -> list[BlockNode]:
        """What is known of the blocks that lead to a pointer, from the first on.

        `tokens` reads the conversation, if its end is gone: what is left is then found as a prompt
        would find it.
        """
        with self._lock:
            chain = self._index.chain_from(pointer.root, pointer.block)
        if chain:
            return chain
        packed = pack_tokens(tokens())
        with self._lock:
            match = self._index.match(pointer.root, packed, self.spec.block_tokens)
            return [node for node in match.nodes if node.end <= match.end]

    def footprint(self, pointer: Pointer, tokens: Callable[[], Sequence[int]]) -> StateView:
        """See where the blocks that lead to a pointer are; `tokens` as for `lineage`."""
        nodes = self.lineage(pointer, tokens)
        with self._lock:
            return state_of(nodes, pointer.num_tokens)

    def reachable(self, pointers: Iterable[Pointer]) -> set[BlockName]:
        """Blocks that lead to any of these places, and the boundaries inside them."""
        with self._lock:
            return self._index.reachable(pointer.block for pointer in pointers)

    def pin(self, pointers: Iterable[Pointer]) -> None:
        """Keep what leads to these places on disk whatever the budget, and nothing else."""
        with self._lock:
            self._index.pin([pointer.block for pointer in pointers])

    def used_files(self, since: float) -> list[PartKey]:
        """Files of the blocks that were used since a time."""
        with self._lock:
            used = (node for node in self._index if node.last_used >= since)
            return [(node.name, kind) for node in used for kind in node.files]

    def evict(
        self,
        pointer: Pointer,
        tokens: Callable[[], Sequence[int]],
        *,
        spared: Collection[BlockName],
        is_cold: bool,
    ) -> int:
        """Drop what leads to a pointer from memory, and from disk too if it is to be cold.

        What is not on disk yet stays, unless it is to be cold; `spared` blocks stay in any case.
        `tokens` as for `lineage`. Returns how many parts went from memory.
        """
        nodes = self.lineage(pointer, tokens)
        with self._lock:
            known = {node.name: node for node in (*nodes, *self._index.path(pointer.block))}
            own = [node for name, node in known.items() if name not in spared]
            parts = [WantedPart(node, kind) for node in own[::-1] for kind in LayerKind]
            if self._disk is not None and not is_cold:
                parts = [wanted for wanted in parts if wanted.kind in wanted.node.files]
            num_dropped = self._tiers.drop_payloads(parts, EvictionReason.REQUEST)
            if is_cold:
                self.drop_files(parts, EvictionReason.REQUEST)
            return num_dropped

    def drop_orphans(self, reachable: Collection[BlockName], *, unused_since: float) -> int:
        """Drop what is not reachable and nobody used since a time; returns the disk bytes freed."""
        with self._lock:
            nodes = orphans(self._index, reachable, unused_since=unused_since)
            return self.drop([WantedPart(n, kind) for n in nodes for kind in LayerKind])

    def drop_old_boundaries(
        self, latest_turns: Iterable[tuple[Pointer, int]], *, unused_since: float
    ) -> int:
        """Drop window and state parts that nobody will resume from; returns the disk bytes freed.

        Args:
            latest_turns: Where the last turns of all agents end, and how long their prompts were.
            unused_since: What no agent has and was used later is spared.
        """
        if self.spec.kinds == (LayerKind.FULL,):
            return 0
        needed: set[BlockName] = set()
        passed: set[BlockName] = set()
        for pointer, num_prompt in latest_turns:
            if pointer.root not in self.roots:
                continue
            with self._lock:  # not around them all: reading turns takes its time
                nodes = self._index.path(pointer.block)
            needed |= resumable_blocks(nodes, (pointer.num_tokens, num_prompt), self.spec)
            passed.update(node.name for node in nodes)
        with self._lock:
            nodes = old_boundaries(
                self._index,
                self.roots,
                needed=needed,
                passed=passed,
                now=self._now(),
                unused_since=unused_since,
            )
            kinds = (LayerKind.WINDOW, LayerKind.STATE)
            return self.drop([WantedPart(node, kind) for node in nodes for kind in kinds])

    # -- readings -------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Check the pool, and that payloads and index match it.

        Raises:
            AssertionError: they do not.
        """
        with self._lock:
            self._tiers.check_integrity()

    # -- inside the lock ------------------------------------------------------------------------

    def _keep(
        self, node: BlockNode, payloads: Sequence[KVPayload], chain: Sequence[BlockNode] = ()
    ) -> bool:
        """Take parts into memory, and hand them to the writer; False without room."""
        try:
            kinds = self._tiers.keep(node, payloads, chain)
        except PoolExhaustedError:
            return all(node.has(payload.kind) for payload in payloads)
        for kind in kinds:
            if kind is LayerKind.STATE:
                node.last_kept = self._now()
            if kind is not LayerKind.WINDOW:
                self._tiers.write(WantedPart(node, kind))
        return True

    def _is_young(self, node: BlockNode, nbytes: int) -> bool:
        """Whether nothing that leads to a node, as young as it is, would go for so many bytes."""
        is_recent = 0 <= self._now() - node.last_used < _RECENT_S
        return is_recent and self._tiers.has_room(nbytes, unused_since=node.last_used)

    def _keep_in_chain(self, node: BlockNode, payloads: Sequence[KVPayload]) -> bool:
        """Keep parts at the expense of anything but what leads to them, and mark it all as used.

        Slow for long chains.
        """
        chain = self._index.chain_from(node.root, node.parent)
        if chain is None or not all(link.has(LayerKind.FULL) for link in chain):
            return False
        node.last_used = self._now()
        is_kept = self._keep(node, payloads, chain)
        self.use([WantedPart(link, LayerKind.FULL) for link in (*chain, node)])
        return is_kept
