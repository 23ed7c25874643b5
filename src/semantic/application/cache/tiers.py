"""Tracks where the parts of blocks are: in memory within the pool's budget, on disk, or in transit.

A sealed part is queued for writing and held in memory until it is on disk. Parts that the writer
has no room for stay dirty and are offered again later. Not thread-safe: the caller holds `lock`.
Callbacks of the writer acquire it themselves.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from semantic.application.cache.eviction import disk_victims, superseded_tails
from semantic.application.cache.index import BlockIndex, BlockNode
from semantic.application.cache.restore_plan import RestorePlan, WantedPart, worth_reading
from semantic.application.cache.writer import DiskTier, WriteJob
from semantic.domain.agents import Pointer
from semantic.domain.blocks import BlockName, BlockPart, PartKey
from semantic.domain.errors import CachePersistenceError
from semantic.domain.pool import BlockPool
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.backend import KVPayload
from semantic.ports.storage import SharedBlocksPort
from semantic.ports.telemetry import CacheCounts, EvictionReason

OnMoved = Callable[[BlockName, BlockName], object]


class BlockTiers:
    """The parts in memory and on disk.

    Attributes:
        index: All known blocks.
        pool: Counts the bytes in memory and chooses the parts to evict.
        disk: Writes and reads files; None if blocks are kept in memory only.
        remote: Parts that several servers share; None on a single server.
        lock: Guards all of these.
        counts: Counters since the start.
    """

    def __init__(
        self,
        pool: BlockPool,
        disk: DiskTier | None,
        counts: CacheCounts,
        on_moved: OnMoved | None = None,
        remote: SharedBlocksPort | None = None,
    ) -> None:
        self.index = BlockIndex()
        self.pool = pool
        self.disk = disk
        self.remote = remote
        self.lock = threading.RLock()
        self.counts = counts
        self._on_moved = on_moved
        self._writing: set[PartKey] = set()
        self._dirty: dict[PartKey, WantedPart] = {}  # the queue was full or writing failed

    # -- memory ---------------------------------------------------------------------------------

    def keep(
        self, node: BlockNode, payloads: Sequence[KVPayload], chain: Sequence[BlockNode] = ()
    ) -> list[LayerKind]:
        """Add those payloads to a node that it lacks; returns their kinds.

        Other parts are evicted for them, but not the node's own parts and not those of its chain.

        Raises:
            PoolExhaustedError: there is no room; nothing was added.
        """
        new = {p.kind: p for p in payloads if p.kind not in node.payloads}
        before = [(link.name, LayerKind.FULL) for link in chain]
        before += [(node.name, kind) for kind in node.payloads]
        sizes = {(node.name, kind): payload.nbytes for kind, payload in new.items()}
        self._forget(self.pool.put(sizes, before), EvictionReason.BUDGET)
        node.payloads.update(new)
        self.index.version += len(new)
        self.index.note_change(node.name)
        return list(new)

    def has_room(self, nbytes: int, *, unused_since: float) -> bool:
        """Whether `nbytes` fit by evicting only parts that were not used since a time."""
        usage = self.pool.usage()
        excess = usage.used + nbytes - usage.total
        if excess > usage.idle:
            return False
        nodes = [self.index.get(name) for name, _ in self.pool.oldest(excess)]
        return all(node is not None and node.last_used < unused_since for node in nodes)

    def reserve(self, nbytes: int) -> None:
        """Reserve memory for other uses, evicting idle parts if necessary.

        Raises:
            PoolExhaustedError: too little memory can be freed.
        """
        self._forget(self.pool.reserve(nbytes), EvictionReason.BUDGET)

    def resize(self, nbytes: int) -> None:
        """Change the memory budget, evicting idle parts if necessary.

        Raises:
            PoolExhaustedError: more than the new budget is in use.
        """
        self._forget(self.pool.resize(nbytes), EvictionReason.BUDGET)

    def drop_payloads(
        self, parts: Iterable[WantedPart], reason: EvictionReason = EvictionReason.UNUSED
    ) -> int:
        """Drop idle parts from memory; returns how many were dropped."""
        dropped = self.pool.discard(part.key for part in parts)
        self._forget(dropped, reason)
        return len(dropped)

    def _forget(self, evicted: Iterable[PartKey], reason: EvictionReason) -> None:
        for name, kind in evicted:
            node = self.index.get(name)
            assert node is not None  # noqa: S101 - parts in memory have a node
            del node.payloads[kind]
            self.index.version += 1
            self.index.note_change(name)
            self.counts.evictions["memory", reason.value] += 1
            self.index.prune(node)

    # -- reading --------------------------------------------------------------------------------

    def worth_reading(
        self,
        plan: RestorePlan,
        root: BlockName,
        spec: ModelCacheSpec,
        seconds_per_token: float,
        begun: Collection[PartKey],
    ) -> RestorePlan:
        """Remove parts from a plan that are slower to read than to compute, remote tier first."""
        disk = self.disk.cost if self.disk is not None else None
        for tier, part in ((self.remote, WantedPart.far_part), (disk, WantedPart.near_part)):
            if tier is not None:
                is_read_in = tier.is_read_in
                plan = worth_reading(plan, root, spec, part, is_read_in, seconds_per_token, begun)
        return plan

    # -- writing --------------------------------------------------------------------------------

    @property
    def is_writing(self) -> bool:
        """Whether a part is queued for writing or being written."""
        return bool(self._writing)

    def write(self, part: WantedPart) -> None:
        """Offer a part to the writer, unless it is on disk; holds it in memory until then."""
        node, kind = part.node, part.kind
        if self.disk is None or kind in node.files or part.key in self._writing:
            return
        if kind not in node.payloads:
            return  # it was dropped while it was dirty
        payload = node.payloads[kind]
        job = WriteJob(
            node.part(kind), payload, self._victims, self._end_writing, self._lose_payload
        )
        if self.disk.offer(job):
            self._writing.add(part.key)
            self.pool.hold(part.key)
        else:
            self._dirty[part.key] = part

    def offer_again(self) -> None:
        """Offer dirty parts that are still in memory to the writer again."""
        waiting, self._dirty = self._dirty, {}
        for part in waiting.values():
            self.write(part)

    def _end_writing(self, part: BlockPart, file: BlockPart | None) -> None:
        """Record that a part is on disk, or dirty after a failure. Runs on the writer's thread."""
        with self.lock:
            node = self._written(part)
            if file is None:
                self.counts.unwritten += 1
                self._dirty[part.key] = WantedPart(node, part.kind)
                return
            self.counts.written += 1
            self.counts.written_bytes += file.nbytes
            self.index.put_file(node, file)
            if self.remote is not None and file.kind not in node.remote:
                self.remote.offer(file, self._end_upload)
            self.free_tails(node)
            self.free_if_tail(node)
            self.offer_again()

    def _end_upload(self, part: BlockPart) -> None:
        """Record that a part is in the object store. Runs on an upload thread."""
        with self.lock:
            node = self.index.get(part.name)
            if node is not None:
                node.remote[part.kind] = part

    def _lose_payload(self, part: BlockPart) -> None:
        """Drop a part that could not be copied from the device. Runs on the writer's thread."""
        with self.lock:
            self.counts.corrupt += 1
            self.drop_payloads([WantedPart(self._written(part), part.kind)])

    def _written(self, part: BlockPart) -> BlockNode:
        """Release a part from the writer; returns its node."""
        node = self.index.get(part.name)
        assert node is not None  # noqa: S101 - parts being written are held
        self._writing.remove(part.key)
        self.pool.let_go(part.key)
        return node

    def is_on_disk(self, pointer: Pointer) -> bool:
        """Whether all blocks up to a pointer are on disk and none of their parts is dirty."""
        chain = self.index.chain_from(pointer.root, pointer.block)
        if not chain:
            return False
        return all(LayerKind.FULL in node.files and not self._is_dirty(node) for node in chain)

    def _is_dirty(self, node: BlockNode) -> bool:
        """Whether a part of a node is dirty or being written."""
        keys = [(node.name, kind) for kind in node.payloads if kind not in node.files]
        return any(key in self._dirty or key in self._writing for key in keys)

    # -- deleting -------------------------------------------------------------------------------

    def drop_file(self, part: WantedPart, reason: EvictionReason = EvictionReason.UNUSED) -> int:
        """Delete a part's file, if any; returns its bytes. A corrupt file goes to quarantine."""
        file = self.index.pop_file(part.node, part.kind)
        if file is None and reason is EvictionReason.CORRUPT:
            part.node.remote.pop(part.kind, None)  # the object store had the corrupt copy
            self.index.version += 1
        if file is not None and self.disk is not None:
            self.counts.evictions["disk", reason.value] += 1
            self.disk.delete([file], is_bad=reason is EvictionReason.CORRUPT)
        self.index.prune(part.node)
        return file.nbytes if file is not None else 0

    def lose_file(self, part: WantedPart) -> None:
        """Drop a file that is missing or corrupt, and count it."""
        self.counts.corrupt += 1
        self.drop_file(part, EvictionReason.CORRUPT)

    def _victims(self, part: BlockPart, nbytes: int, excess: int, slack: int) -> list[BlockPart]:
        """Choose files to evict for a new one, and remove them from the index.

        Runs on the writer's thread.

        Args:
            part: The new part; the blocks before it in its chain are spared.
            nbytes: Upper bound of its file's size.
            excess: Bytes to free to meet the disk budget; if less can be freed, nothing is.
            slack: Further bytes to free if possible.

        Raises:
            CachePersistenceError: the tenant's share is full.
        """
        assert self.disk is not None  # noqa: S101 - only the disk tier calls this
        quota = self.disk.limits.tenant_bytes(part.root)
        with self.lock:
            victims: list[BlockPart] = []
            if quota is not None:
                over_quota = self.index.disk_bytes(part.root) + nbytes - quota
                victims = self._evict_files(over_quota, part, root=part.root)
                if self.index.disk_bytes(part.root) + nbytes > quota:
                    raise CachePersistenceError("the tenant's share of the disk is full.")
            excess -= sum(victim.nbytes for victim in victims)
            return victims + self._evict_files(excess, part, slack=slack)

    def _evict_files(
        self, nbytes: int, incoming: BlockPart, *, root: BlockName | None = None, slack: int = 0
    ) -> list[BlockPart]:
        """Remove at least `nbytes` of files from the index, or none; returns them."""
        if nbytes <= 0:
            return []
        spared = {node.name for node in self.index.chain(incoming.parent)}
        nodes = disk_victims(self.index, nbytes + slack, spared=spared, root=root)
        if sum(node.disk_bytes for node in nodes) < nbytes:
            return []
        victims = [file for node in nodes for file in node.files.values()]
        reason = EvictionReason.BUDGET if root is None else EvictionReason.QUOTA
        self.counts.evictions["disk", reason.value] += len(victims)
        for node in nodes:
            for kind in tuple(node.files):
                self.index.pop_file(node, kind)
            self.index.prune(node)
        return victims

    # -- tails ----------------------------------------------------------------------------------

    def free_tails(self, node: BlockNode) -> None:
        """Drop the tails that `node` replaces; turns that ended in a tail now point into `node`."""
        for tail in superseded_tails(self.index, node):
            full = WantedPart(tail, LayerKind.FULL)
            self.drop_payloads([full])
            if LayerKind.FULL not in tail.payloads:  # False while it is held
                self.drop_file(full)
                node.num_pins = max(node.num_pins, tail.num_pins)
                if self._on_moved is not None:
                    self._on_moved(tail.name, node.name)

    def free_if_tail(self, node: BlockNode) -> None:
        """Drop a tail that could not be dropped when its longer block was sealed."""
        if self.index.get(node.name) is not node or not node.has(LayerKind.FULL):
            return
        longer = self.index.extension_of(node)
        if longer is not None:
            self.free_tails(longer)

    def reconsider(self, node: BlockNode) -> None:
        """Remove or free a node after a hold or lease on it has ended."""
        self.index.prune(node)
        self.free_if_tail(node)

    # -- readings -------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Check the pool, and that payloads and index match it.

        Raises:
            AssertionError: they do not match.
        """
        self.pool.check_integrity()
        keys = {(node.name, kind) for node in self.index for kind in node.payloads}
        if keys != self.pool.keys():
            raise AssertionError("index, payloads and pool do not match")
        if not self._writing <= keys:
            raise AssertionError("what is being written is not in memory")
        if any(not (n.payloads or n.files or n.remote or n.num_leases) for n in self.index):
            raise AssertionError("a node without parts is in the index")
        self.index.check_integrity()
