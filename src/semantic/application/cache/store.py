"""KV cache that outlives its sequence: sealed blocks, in memory and on disk.

The store finds the longest known prefix of a prompt, and keeps the blocks that sequences seal. It
works for any model and does not interpret payloads.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from semantic.application.cache.index import BlockIndex, BlockNode
from semantic.application.cache.restore_plan import (
    ReadCosts,
    RestorePlan,
    WantedPart,
    needed_windows,
    plan_restore,
)
from semantic.application.cache.tiers import BlockTiers, OnMoved
from semantic.application.cache.watch import BlockWatch
from semantic.application.cache.writer import DiskTier
from semantic.domain.agents import Pointer
from semantic.domain.blocks import BlockName, BlockPart, PartKey, pack_tokens
from semantic.domain.errors import PoolExhaustedError
from semantic.domain.pool import BlockPool, PoolUsage
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.backend import KVPayload
from semantic.ports.sharing import SharedBlocksPort
from semantic.ports.telemetry import CacheCounts, EvictionReason, NoTelemetry, TelemetryPort

_RECENT_S = 1.0  # precision of `last_used` for the blocks of a running sequence


class AgentCacheStore:
    """Sealed blocks by content, within the budgets of memory and disk.

    Thread-safe: the engine seals and plans, readers and the writer move parts, all may query.

    Attributes:
        roots: Roots of the served model under which blocks were sealed or looked up.
        telemetry: Sink for events, also used by the engine; `counts` are its cache counters.
        tiers: Where the parts are; a restore acquires and releases them there.
        read_costs: Durations of reads, which `worth_reading` compares with computing.
    """

    def __init__(
        self,
        pool: BlockPool,
        disk: DiskTier | None = None,
        *,
        on_moved: OnMoved | None = None,
        now: Callable[[], float] = time.time,
        telemetry: TelemetryPort | None = None,
        shared: SharedBlocksPort | None = None,
        index: BlockIndex | None = None,
    ) -> None:
        """Start with the blocks of `index`, which must not be used elsewhere; None is empty.

        `on_moved` is called in the lock when pointers to one block must move to another.
        """
        self.telemetry: TelemetryPort = telemetry or NoTelemetry()
        self.counts: CacheCounts = self.telemetry.counts.cache
        self._pool = pool
        self._now = now
        self.tiers = BlockTiers(pool, disk, self.counts, on_moved, shared, index)
        self.read_costs = ReadCosts(
            disk.cost.seconds_to_read if disk else None, shared.seconds_to_read if shared else None
        )
        self._index, self._lock = self.tiers.index, self.tiers.lock
        self.spec: ModelCacheSpec = pool.spec
        self.roots: set[BlockName] = set()
        self.watch = BlockWatch(self.tiers)

    # -- recall ---------------------------------------------------------------------------------

    def plan(self, root: BlockName, tokens: Sequence[int], *, is_used: bool = True) -> RestorePlan:
        """Find the longest prefix of `tokens` that can be restored; `is_used` marks it as used.

        `tokens` is the prompt without the tokens that must be computed in any case.
        """
        packed = pack_tokens(tokens)
        with self._lock:
            self.roots.add(root)
            plan = self.find_prefix(root, packed)
            if is_used:
                self.touch_parts(plan.parts)
            return plan

    def find_prefix(self, root: BlockName, packed: bytes) -> RestorePlan:
        """Like `plan`, for packed tokens and without side effects."""
        spec = self.spec
        with self._lock:
            match = self._index.match(root, packed, spec.block_tokens)
            ends = frozenset(
                node.name
                for node in match.nodes
                if node.num_tokens == spec.block_tokens or self._index.has_followers(node)
            )
            return plan_restore(root, match, spec, ends)

    def learn(self, root: BlockName, tokens: Sequence[int]) -> None:
        """Look up which blocks of a prompt other machines have uploaded, and add them to the index.

        Does nothing if less than one block of the prompt is unknown here. Sends one query to the
        shared index, so it must not run on the engine's thread.
        """
        shared, packed = self.tiers.shared, pack_tokens(tokens)
        if shared is None:
            return
        with self._lock:
            end = self._index.match(root, packed, self.spec.block_tokens).end
        if len(tokens) - end < self.spec.block_tokens:
            return
        parts = shared.follow(root, packed)
        with self._lock:
            for part in parts:
                node = self._index.add(part.root, part.parent, part.start, part.tokens)
                node.shared.setdefault(part.kind, part)
                node.last_used = node.last_used or self._now()
            self._index.version += len(parts)

    @property
    def version(self) -> int:
        """Changes whenever a plan may change: a block or part was added or removed."""
        return self._index.version

    def prefetch(
        self, parts: Sequence[WantedPart], max_bytes: int | None = None
    ) -> list[WantedPart]:
        """Start reading parts that are not in memory, as far as they fit; returns those parts.

        Args:
            parts: Candidates, the most useful first.
            max_bytes: Upper limit of the bytes to read, including prefetches already queued; None
                means all that fits beside those of the parts that are already in memory.
        """
        with self._lock:
            usage = self._pool.usage()
            known = {w.key: w.node.payloads[w.kind] for w in parts if w.kind in w.node.payloads}
            room = usage.available + usage.idle - sum(p.nbytes for p in known.values())
            room = room if max_bytes is None else min(room, max_bytes)
            room -= self.tiers.prefetch_bytes
            chosen: dict[PartKey, WantedPart] = {}
            for wanted in parts:
                if wanted.key in chosen or not self.tiers.is_unread(wanted):
                    continue
                room -= self.tiers.room_for(wanted)
                if room < 0:
                    break
                chosen[wanted.key] = wanted
            self.tiers.prefetch(chosen.values())
            return list(chosen.values())

    def discard(self, parts: Iterable[WantedPart]) -> None:
        """Drop parts that could not be loaded, so that their tokens are computed again."""
        with self._lock:
            for wanted in parts:
                num_dropped = self.tiers.drop_payloads([wanted], EvictionReason.CORRUPT)
                if num_dropped or wanted.kind in wanted.node.files:
                    self.counts.corrupt += 1
                self.tiers.drop_file(wanted, EvictionReason.CORRUPT)

    # -- seal -----------------------------------------------------------------------------------

    def seal(
        self,
        root: BlockName,
        parent: BlockName,
        tokens: Sequence[int],
        payloads: Sequence[KVPayload],
    ) -> BlockName | None:
        """Keep the block that follows `parent`; parts that are already known are not stored twice.

        Window parts stay in memory only, until `settle_windows` decides which of them to write.
        Returns its name, or None if there is no room: a full cache never fails a request.
        """
        packed = pack_tokens(tokens)
        with self._lock:
            self.roots.add(root)
            before = self._index.get(parent)
            if parent != root and (before is None or not before.has(LayerKind.FULL)):
                return None  # a block is useless without its predecessors
            node = self._index.add(root, parent, before.end if before else 0, packed)
            nbytes = sum(payload.nbytes for payload in payloads)
            if before is not None and self._is_young(before, nbytes):
                node.last_used = max(node.last_used, before.last_used)  # recorded in its files
                is_kept = self._keep(node, payloads)
            else:
                is_kept = self._keep_in_chain(node, payloads)
            if not is_kept:
                self._index.prune(node)
                return None
            self.counts.sealed += 1
            self.tiers.free_tails(node)
            return node.name

    def touch_parts(self, parts: Sequence[WantedPart]) -> None:
        """Mark parts as just used, so that the end of a chain is evicted before its beginning."""
        with self._lock:
            now = self._now()
            self._pool.touch(wanted.key for wanted in parts)
            self._index.touch([wanted.node for wanted in parts], now)
            for wanted in parts:
                if wanted.kind is not LayerKind.FULL:
                    wanted.node.last_kept = now

    def touch_chain(self, name: BlockName) -> None:
        with self._lock:
            self.touch_parts([WantedPart(node, LayerKind.FULL) for node in self._index.chain(name)])

    def add_parts(self, name: BlockName, payloads: Sequence[KVPayload]) -> None:
        """Keep further parts of a block, if there is room."""
        with self._lock:
            node = self._index.get(name)
            if node is not None:
                self._keep(node, payloads, self._index.chain(node.parent))

    def settle_windows(
        self, sealed: Iterable[BlockName], last: BlockName, boundaries: Sequence[int]
    ) -> None:
        """Write the sealed window parts needed to resume at `boundaries`, and drop the others."""
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
                    self.tiers.write(WantedPart(node, LayerKind.WINDOW))
                elif node in nodes and not node.last_kept:
                    self.tiers.drop_payloads([WantedPart(node, LayerKind.WINDOW)])

    # -- memory ---------------------------------------------------------------------------------

    def reserve(self, nbytes: int, *, may_evict: bool = True) -> None:
        """Reserve memory for open sequences, evicting blocks; may raise `PoolExhaustedError`."""
        with self._lock:
            if not may_evict and nbytes > self.usage().available:
                raise PoolExhaustedError("no memory is free without eviction.")
            try:
                self.tiers.reserve(nbytes)
            except PoolExhaustedError:
                self.tiers.stop_prefetching()  # leaves the room to requests that wait
                raise

    def unreserve(self, nbytes: int) -> None:
        self._pool.unreserve(nbytes)

    def resize(self, nbytes: int) -> None:
        """Change the memory budget; `PoolExhaustedError` if more than that is in use."""
        with self._lock:
            self.tiers.resize(nbytes)

    def usage(self) -> PoolUsage:
        return self._pool.usage()

    @property
    def is_busy(self) -> bool:
        """Whether parts are being read or written, after which more memory can be freed."""
        with self._lock:
            return self.tiers.is_reading or self.tiers.is_writing

    def drop_payloads(self, parts: Iterable[WantedPart]) -> int:
        """Drop parts that are not held from memory; returns how many were dropped."""
        with self._lock:
            return self.tiers.drop_payloads(parts)

    def drop_files(
        self, parts: Iterable[WantedPart], reason: EvictionReason = EvictionReason.UNUSED
    ) -> int:
        """Delete the files of parts without leases; returns the bytes freed."""
        with self._lock:
            unused = [part for part in parts if not part.node.num_leases]
            return sum(self.tiers.drop_file(part, reason) for part in unused)

    def drop_memory(self) -> None:
        self.tiers.stop_prefetching()
        self.drop_payloads(WantedPart(n, kind) for n in self.nodes() for kind in tuple(n.payloads))

    def serve(self, spec: ModelCacheSpec, roots: Iterable[BlockName]) -> None:
        """Switch to the blocks of another model; blocks of other models stay on disk."""
        with self._lock:
            self.spec, self.roots = spec, set(roots)

    # -- disk -----------------------------------------------------------------------------------

    def restore_index(self, parts: Iterable[BlockPart]) -> None:
        with self._lock:
            self._index.restore(parts)

    def begin_comparison(self) -> list[BlockNode]:
        """Return all known blocks, to compare them with the files; `reconcile` ends that."""
        with self._lock:
            self._index.written = set()
            return self.nodes()

    def has_file(self, part: BlockPart) -> bool:
        with self._lock:
            return self._index.has_file(part)

    def reconcile(
        self, present: Iterable[BlockPart], missing: Iterable[PartKey]
    ) -> list[BlockPart]:
        """Add unknown files to the index, remove missing ones; returns the unknown ones.

        A file is unknown, too, if the row that names it was damaged.
        """
        with self._lock:
            written, self._index.written = self._index.written or (), None
            for name, kind in missing:
                node = self._index.get(name)
                if node is None or node.num_leases or name in written:
                    continue
                if kind in node.files:  # not deleted meanwhile
                    self.tiers.lose_file(WantedPart(node, kind))
            # Files written during the scan are in the index already.
            unknown = [part for part in present if not self._index.has_file(part)]
            if unknown:  # sorting a million nodes takes seconds
                self._index.restore(unknown)
            return unknown

    def offer_again(self) -> bool:
        """Offer dirty parts to the writer again; False if nothing is being written."""
        with self._lock:
            self.tiers.offer_again()
            return self.tiers.is_writing

    def is_on_disk(self, pointer: Pointer) -> bool:
        with self._lock:
            return self.tiers.is_on_disk(pointer)

    # -- blocks of agents -----------------------------------------------------------------------

    def nodes(self) -> list[BlockNode]:
        """Return all known blocks, the least recently used first."""
        with self._lock:
            return list(self._index)

    def get(self, name: BlockName) -> BlockNode | None:
        with self._lock:
            return self._index.get(name)

    def chain(self, name: BlockName) -> list[BlockNode]:
        with self._lock:
            return self._index.chain(name)

    def disk_bytes(self, root: BlockName) -> int:
        return self._index.disk_bytes(root)

    def files_on_disk(self) -> tuple[int, int]:
        """Return the number of all blocks' files, and their bytes."""
        with self._lock:
            return self._index.num_files, self._index.all_disk_bytes

    def used_files(self, since: float) -> list[PartKey]:
        with self._lock:
            used = (node for node in self._index if node.last_used >= since)
            return [(node.name, kind) for node in used for kind in node.files]

    # -- readings -------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        with self._lock:
            self.tiers.check_integrity()

    # -- inside the lock ------------------------------------------------------------------------

    def _keep(
        self, node: BlockNode, payloads: Sequence[KVPayload], chain: Sequence[BlockNode] = ()
    ) -> bool:
        try:
            kinds = self.tiers.keep(node, payloads, chain)
        except PoolExhaustedError:
            return all(node.has(payload.kind) for payload in payloads)
        if LayerKind.STATE in kinds:
            node.last_kept = self._now()
        return True

    def _is_young(self, node: BlockNode, nbytes: int) -> bool:
        """Whether a node is recent, and `nbytes` fit by evicting only parts older than it.

        In that case its chain is safe from eviction and need not be touched.
        """
        usage = self._pool.usage()
        excess = usage.used + nbytes - usage.total
        if not 0 <= self._now() - node.last_used < _RECENT_S or excess > usage.idle:
            return False
        victims = [self._index.get(name) for name, _ in self._pool.oldest(excess)]
        return all(v is not None and v.last_used < node.last_used for v in victims)

    def _keep_in_chain(self, node: BlockNode, payloads: Sequence[KVPayload]) -> bool:
        """Keep parts without evicting their chain, and mark it as used. Slow for long chains."""
        chain = self._index.chain_from(node.root, node.parent)
        if chain is None or not all(link.has(LayerKind.FULL) for link in chain):
            return False
        node.last_used = self._now()
        is_kept = self._keep(node, payloads, chain)
        self.touch_parts([WantedPart(link, LayerKind.FULL) for link in (*chain, node)])
        return is_kept
