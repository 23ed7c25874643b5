"""Attention state that outlives its sequence: sealed blocks, in memory and on disk.

Finds the longest known beginning of a prompt, and keeps the blocks that sequences leave behind. It
moves payloads between the engine, the pool's budget and the disk; it does not know what is in them.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from semantic.application.cache.counters import CacheCounters
from semantic.application.cache.filed_parts import FiledParts
from semantic.application.cache.index import BlockIndex, BlockNode
from semantic.application.cache.loader import PartReads
from semantic.application.cache.resident_parts import ResidentParts
from semantic.application.cache.restore_plan import (
    RestorePlan,
    WantedPart,
    kept_windows,
    plan_restore,
)
from semantic.application.cache.tails import OnMoved, Tails
from semantic.application.cache.writer import DiskTier
from semantic.domain.agents import Pointer
from semantic.domain.blocks import BlockName, BlockPart, pack_tokens
from semantic.domain.errors import PoolExhaustedError
from semantic.domain.pool import BlockPool, PoolUsage
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.outbound import KVPayload

_RECENT_S = 1.0  # how exactly it is known when the blocks of a running sequence were used


class AgentCacheStore:
    """Sealed blocks by content, within the budgets of memory and disk.

    Thread-safe; the engine's thread seals and recalls, readers and the writer bring parts and take
    them away, any thread may ask.

    Attributes:
        lock: Guards the index.
        index: All known blocks.
        roots: Those whose blocks were sealed or asked for: the served model's.
        counters: What happened since the start.
        reads: Brings parts into memory and holds them there.
    """

    def __init__(
        self,
        pool: BlockPool,
        disk: DiskTier | None = None,
        *,
        on_moved: OnMoved | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Start empty.

        Args:
            pool: The budget of memory.
            disk: Where blocks are kept beyond it, if anywhere.
            on_moved: Told, within the lock, that what pointed at one block must point into another.
            now: Seconds since the epoch.
        """
        self._pool = pool
        self._disk = disk
        self._now = now
        self.roots: set[BlockName] = set()
        self.lock = threading.RLock()
        self.index = BlockIndex()
        self.counters = CacheCounters()
        self._memory = ResidentParts(pool, self.index, self.counters)
        self._files = FiledParts(disk, self.index, self._memory, self.counters)
        self._tails = Tails(self.index, self._memory, self._files, on_moved)
        self.reads = PartReads(
            disk, self._memory, self._files, self.counters, self.lock, self._reconsider
        )

    # -- recall ---------------------------------------------------------------------------------

    def plan(
        self,
        root: BlockName,
        tokens: Sequence[int],
        *,
        seconds_per_token: float = 0.0,
        is_used: bool = True,
    ) -> RestorePlan:
        """Find the longest beginning of `tokens` that can be restored.

        Args:
            root: Root of the tenant's names.
            tokens: The prompt, less the tokens that must be computed anyway.
            seconds_per_token: What computing costs; what is slower to read is left out. 0 if it
                is not known.
            is_used: Whether that makes it young again.
        """
        packed = pack_tokens(tokens)
        spec = self._pool.spec
        with self.lock:
            self.roots.add(root)
            match = self.index.match(root, packed, spec.block_tokens)
            ends = frozenset(
                node.name
                for node in match.nodes
                if node.num_tokens == spec.block_tokens or self.index.has_followers(node)
            )
            plan = plan_restore(root, match, spec, ends)
            if self._disk is not None and seconds_per_token:
                plan = self._worth_reading(plan, root, seconds_per_token)
            if is_used:
                self._touch(plan.parts)
            return plan

    def prefetch(
        self, parts: Sequence[WantedPart], max_bytes: int | None = None
    ) -> list[WantedPart]:
        """Begin to read what is not in memory, no more than can stay there; returns those parts.

        Args:
            parts: The most useful first.
            max_bytes: The most that is read; None is as much as fits beside those of them that
                are in memory.
        """
        with self.lock:
            usage = self._pool.usage()
            known = {w.key: w.node.payloads[w.kind] for w in parts if w.kind in w.node.payloads}
            room = usage.available + usage.idle - sum(p.nbytes for p in known.values())
            return self.reads.prefetch(parts, room if max_bytes is None else min(room, max_bytes))

    def discard(self, parts: Iterable[WantedPart]) -> None:
        """Drop parts that could not be loaded, so that they are made anew."""
        with self.lock:
            for wanted in parts:
                num_dropped = self._memory.drop([wanted])
                if num_dropped or wanted.kind in wanted.node.files:
                    self.counters.corrupt += 1
                self._files.drop(wanted, is_bad=True)

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
        with self.lock:
            self.roots.add(root)
            before = self.index.get(parent)
            if parent != root and (before is None or not before.has(LayerKind.FULL)):
                return None  # without its beginning the block is of no use
            node = self.index.add(root, parent, before.end if before else 0, packed)
            nbytes = sum(payload.nbytes for payload in payloads)
            if before is not None and self._is_young(before, nbytes):
                node.last_used = max(node.last_used, before.last_used)  # its files say so
                is_kept = self._keep(node, payloads)
            else:
                is_kept = self._keep_in_chain(node, payloads)
            if not is_kept:
                self.index.prune(node)
                return None
            self.counters.sealed += 1
            self._tails.free_into(node)
            return node.name

    def touch(self, name: BlockName) -> None:
        """Mark all that leads to a block as just used."""
        with self.lock:
            self._touch([WantedPart(node, LayerKind.FULL) for node in self.index.chain(name)])

    def add(self, name: BlockName, payloads: Sequence[KVPayload]) -> None:
        """Keep further parts of a block, as far as there is room."""
        with self.lock:
            node = self.index.get(name)
            if node is not None:
                self._keep(node, payloads, self.index.chain(node.parent))

    def settle(
        self, sealed: Iterable[BlockName], last: BlockName, boundaries: Sequence[int]
    ) -> None:
        """Of blocks sealed in a turn, write the window parts its boundaries need, drop the others'.

        Args:
            sealed: The turn's blocks.
            last: The end of their chain.
            boundaries: Positions the conversation may be resumed at.
        """
        with self.lock:
            known = [self.index.get(name) for name in sealed]
            nodes = [node for node in known if node and LayerKind.WINDOW in node.payloads]
            chain = [*self.index.chain(last), *nodes]
            kept = kept_windows(chain, boundaries, self._pool.spec.window)
            now = self._now()
            for node in chain:
                if node.name in kept:
                    node.last_kept = now
                if LayerKind.WINDOW not in node.payloads or LayerKind.WINDOW in node.files:
                    continue
                if node.name in kept:
                    self._files.write(WantedPart(node, LayerKind.WINDOW))
                elif node in nodes and not node.last_kept:
                    self._memory.drop([WantedPart(node, LayerKind.WINDOW)])

    # -- memory ---------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> None:
        """Take room for live sequences, evicting blocks if need be.

        Raises:
            PoolExhaustedError: there is not that much.
        """
        with self.lock:
            try:
                self._memory.reserve(nbytes)
            except PoolExhaustedError:
                self.reads.stop_prefetching()  # what nobody waits for gives way
                raise

    def release(self, nbytes: int) -> None:
        """Give room back."""
        self._memory.release(nbytes)

    @property
    def spec(self) -> ModelCacheSpec:
        """The geometry of the model whose blocks are kept."""
        return self._pool.spec

    def usage(self) -> PoolUsage:
        """Read the pool's counters."""
        return self._pool.usage()

    @property
    def is_busy(self) -> bool:
        """Whether parts are being read or written: some of what is in use will soon not be."""
        with self.lock:
            return self.reads.is_busy or self._files.is_busy

    # -- what the disk tells --------------------------------------------------------------------

    def restore_index(self, parts: Iterable[BlockPart]) -> None:
        """Take over what a directory holds, at the start."""
        with self.lock:
            self._files.restore(parts)

    def end_writing(self, part: BlockPart, *, is_written: bool) -> None:
        """Note that a part is on disk, or that it could not be written."""
        with self.lock:
            node = self._files.end_writing(part, is_written=is_written)
            if node is not None:
                self._tails.free_into(node)
                self._tails.free(node)
                self._files.offer_again()

    def offer_again(self) -> None:
        """Hand over what the writer had no room for, as far as it is still in memory."""
        with self.lock:
            self._files.offer_again()

    def is_on_disk(self, pointer: Pointer) -> bool:
        """Whether all that leads to a place is on disk, and none of it is still to be written."""
        with self.lock:
            return self._files.is_whole(pointer)

    def disk_bytes(self, root: BlockName) -> int:
        """Bytes of the files of one root's blocks."""
        with self.lock:
            return self.index.disk_bytes(root)

    def victims(
        self, nbytes: int, incoming: BlockPart, *, root: BlockName | None = None, slack: int = 0
    ) -> list[BlockPart]:
        """Choose files to delete that make room for another, and forget them; none in vain."""
        with self.lock:
            return self._files.victims(nbytes, incoming, root=root, slack=slack)

    def drop_files(self, parts: Iterable[WantedPart]) -> int:
        """Delete parts from disk that nobody counts on; returns the bytes freed."""
        with self.lock:
            return sum(self._files.drop(part) for part in parts if not part.node.num_leases)

    def lose_files(self, parts: Iterable[WantedPart]) -> None:
        """Forget files that turned out to be gone or bad; those that are being read tell later."""
        with self.lock:
            for wanted in parts:
                if wanted.kind in wanted.node.files and not wanted.node.num_leases:
                    self._files.lose(wanted)

    def drop_payloads(self, parts: Iterable[WantedPart]) -> int:
        """Drop parts from memory that are not in use; returns how many went."""
        with self.lock:
            return self._memory.drop(parts)

    # -- readings -------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Check the pool, and that payloads and index match it.

        Raises:
            AssertionError: they do not.
        """
        with self.lock:
            self._memory.check_integrity()
            self._files.check_integrity()
            if any(not (node.payloads or node.files or node.num_leases) for node in self.index):
                raise AssertionError("a node without parts is in the index")
            self.index.check_integrity()

    # -- inside the lock ------------------------------------------------------------------------

    def _worth_reading(
        self, plan: RestorePlan, root: BlockName, seconds_per_token: float
    ) -> RestorePlan:
        """Leave out what would take longer to read than to compute."""
        assert self._disk is not None  # noqa: S101 - the caller has looked
        unread = [w for w in plan.parts if w.kind not in w.node.payloads]
        nbytes = sum(w.node.files[w.kind].nbytes for w in unread if w.kind in w.node.files)
        first = min((w.node.start for w in unread), default=plan.end)
        if self._disk.seconds_to_read(nbytes) <= (plan.end - first) * seconds_per_token:
            return plan
        self._disk.doubt()
        if self._pool.spec.kinds != (LayerKind.FULL,):
            return RestorePlan.nothing(root)
        parts = tuple(w for w in plan.parts if w.node.end <= first)
        chain = parts[-1].node.name if parts else root
        return RestorePlan(parts, first, chain, first)

    def _keep(
        self, node: BlockNode, payloads: Sequence[KVPayload], chain: Sequence[BlockNode] = ()
    ) -> bool:
        """Take parts into memory, and hand them to the writer; False without room."""
        try:
            kinds = self._memory.keep(node, payloads, chain)
        except PoolExhaustedError:
            return all(node.has(payload.kind) for payload in payloads)
        for kind in kinds:
            if kind is LayerKind.STATE:
                node.last_kept = self._now()
            if kind is not LayerKind.WINDOW:
                self._files.write(WantedPart(node, kind))
        return True

    def _is_young(self, node: BlockNode, nbytes: int) -> bool:
        """Whether nothing that leads to a node, as young as it is, would go for so many bytes."""
        is_recent = 0 <= self._now() - node.last_used < _RECENT_S
        return is_recent and self._memory.has_room(nbytes, unused_since=node.last_used)

    def _keep_in_chain(self, node: BlockNode, payloads: Sequence[KVPayload]) -> bool:
        """Keep parts at the expense of anything but what leads to them, and mark it all as used.

        Takes time for every block of the chain.
        """
        chain = self.index.chain(node.parent)
        if not self._is_unbroken(node.root, node.parent, chain):
            return False
        node.last_used = self._now()
        is_kept = self._keep(node, payloads, chain)
        self._touch([WantedPart(link, LayerKind.FULL) for link in (*chain, node)])
        return is_kept

    def _reconsider(self, node: BlockNode) -> None:
        """Forget or free a node if nobody counts on it any more."""
        self.index.prune(node)
        self._tails.free(node)

    def _touch(self, parts: Sequence[WantedPart]) -> None:
        """Mark parts as just used, of a chain the end first."""
        now = self._now()
        self._memory.touch(parts)
        self.index.touch([wanted.node for wanted in parts], now)
        for wanted in parts:
            if wanted.kind is not LayerKind.FULL:
                wanted.node.last_kept = now

    def _is_unbroken(self, root: BlockName, parent: BlockName, chain: Sequence[BlockNode]) -> bool:
        if parent == root:
            return True
        return (
            bool(chain)
            and chain[0].parent == root
            and all(node.has(LayerKind.FULL) for node in chain)
        )
