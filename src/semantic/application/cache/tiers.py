"""Where the parts of blocks are: in memory within the pool's budget, on disk, or on the way.

A part that was sealed is written, and held in memory until it is on disk; what the writer has no
room for stays dirty and is offered again. Not thread-safe: its owner has the lock, which the
writer's callbacks take.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from semantic.application.cache.eviction import disk_victims, superseded_tails
from semantic.application.cache.index import BlockIndex, BlockNode
from semantic.application.cache.remote import RemoteTier
from semantic.application.cache.restore_plan import RestorePlan, WantedPart, worth_reading
from semantic.application.cache.writer import DiskTier, WriteJob
from semantic.domain.agents import Pointer
from semantic.domain.blocks import BlockName, BlockPart, PartKey
from semantic.domain.errors import CachePersistenceError
from semantic.domain.pool import BlockPool
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.backend import KVPayload
from semantic.ports.telemetry import CacheCounts, EvictionReason

OnMoved = Callable[[BlockName, BlockName], object]


class BlockTiers:
    """The parts in memory and on disk.

    Attributes:
        index: All known blocks.
        pool: Counts what is in memory, and says which goes next.
        disk: Writes and reads files; None if there are none.
        remote: Uploads files and downloads others'; None if no other machine has any.
        lock: Guards all of these.
        counts: What happened since the start.
    """

    def __init__(
        self,
        pool: BlockPool,
        disk: DiskTier | None,
        counts: CacheCounts,
        on_moved: OnMoved | None = None,
        remote: RemoteTier | None = None,
    ) -> None:
        self.index = BlockIndex()
        self.pool = pool
        self.disk = disk
        self.remote = remote
        self.lock = threading.RLock()
        self.counts = counts
        self._on_moved = on_moved
        self._writing: set[PartKey] = set()
        self._dirty: dict[PartKey, WantedPart] = {}  # the writer had no room for these

    # -- memory ---------------------------------------------------------------------------------

    def keep(
        self, node: BlockNode, payloads: Sequence[KVPayload], chain: Sequence[BlockNode] = ()
    ) -> list[LayerKind]:
        """Take those of a block's parts that are not there yet, and say which; mutates the node.

        Others make room for them, but not the block's own parts, nor those of its chain.

        Raises:
            PoolExhaustedError: there is no room; nothing was taken.
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
        """Whether so much fits if only those parts go that were not used since a time."""
        usage = self.pool.usage()
        excess = usage.used + nbytes - usage.total
        if excess > usage.idle:
            return False
        nodes = [self.index.get(name) for name, _ in self.pool.oldest(excess)]
        return all(node is not None and node.last_used < unused_since for node in nodes)

    def reserve(self, nbytes: int) -> None:
        """Take room for something else, dropping parts that nobody holds if need be.

        Raises:
            PoolExhaustedError: there is not that much.
        """
        self._forget(self.pool.reserve(nbytes), EvictionReason.BUDGET)

    def resize(self, nbytes: int) -> None:
        """Use another budget, dropping parts that nobody holds if need be.

        Raises:
            PoolExhaustedError: more than that is in use.
        """
        self._forget(self.pool.resize(nbytes), EvictionReason.BUDGET)

    def drop_payloads(
        self, parts: Iterable[WantedPart], reason: EvictionReason = EvictionReason.UNUSED
    ) -> int:
        """Drop parts from memory that nobody holds; returns how many went."""
        dropped = self.pool.discard(part.key for part in parts)
        self._forget(dropped, reason)
        return len(dropped)

    def _forget(self, evicted: Iterable[PartKey], reason: EvictionReason) -> None:
        for name, kind in evicted:
            node = self.index.get(name)
            assert node is not None  # noqa: S101 - what is in memory is known
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
        """Leave out of a plan what is slower to read than to compute; the slower tier first."""
        for tier, part in ((self.remote, WantedPart.far_part), (self.disk, WantedPart.near_part)):
            if tier is not None:
                is_read_in = tier.cost.is_read_in
                plan = worth_reading(plan, root, spec, part, is_read_in, seconds_per_token, begun)
        return plan

    # -- writing --------------------------------------------------------------------------------

    @property
    def is_writing(self) -> bool:
        """Whether something is being written."""
        return bool(self._writing)

    def write(self, part: WantedPart) -> None:
        """Hand a part to the writer, if it is not there; it stays in memory until it is on disk."""
        node, kind = part.node, part.kind
        if self.disk is None or kind in node.files or part.key in self._writing:
            return
        if kind not in node.payloads:
            return  # it was dropped while it waited
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
        """Hand over what the writer had no room for, as far as it is still in memory."""
        waiting, self._dirty = self._dirty, {}
        for part in waiting.values():
            self.write(part)

    def _end_writing(self, part: BlockPart, file: BlockPart | None) -> None:
        """Note that a part is on disk, or that it could not be written. On the writer's thread."""
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
        """Note that others can have a part. On an upload's thread."""
        with self.lock:
            node = self.index.get(part.name)
            if node is not None:
                node.remote[part.kind] = part

    def _lose_payload(self, part: BlockPart) -> None:
        """Forget a part whose bytes never came from the device. On the writer's thread."""
        with self.lock:
            self.counts.corrupt += 1
            self.drop_payloads([WantedPart(self._written(part), part.kind)])

    def _written(self, part: BlockPart) -> BlockNode:
        """Let go of a part that was handed to the writer; returns its node."""
        node = self.index.get(part.name)
        assert node is not None  # noqa: S101 - what is being written is held
        self._writing.remove(part.key)
        self.pool.let_go(part.key)
        return node

    def is_on_disk(self, pointer: Pointer) -> bool:
        """Whether all that leads to a place is on disk, and none of it is still to be written."""
        chain = self.index.chain_from(pointer.root, pointer.block)
        if not chain:
            return False
        return all(LayerKind.FULL in node.files and not self._is_dirty(node) for node in chain)

    def _is_dirty(self, node: BlockNode) -> bool:
        """Whether a part of a node waits to be written."""
        keys = [(node.name, kind) for kind in node.payloads if kind not in node.files]
        return any(key in self._dirty or key in self._writing for key in keys)

    # -- deleting -------------------------------------------------------------------------------

    def drop_file(self, part: WantedPart, reason: EvictionReason = EvictionReason.UNUSED) -> int:
        """Delete a part's file, if there is one; returns its bytes. A bad one is set aside."""
        file = self.index.pop_file(part.node, part.kind)
        if file is None and reason is EvictionReason.CORRUPT:
            part.node.remote.pop(part.kind, None)  # it was read from there
            self.index.version += 1
        if file is not None and self.disk is not None:
            self.counts.evictions["disk", reason.value] += 1
            self.disk.delete([file], is_bad=reason is EvictionReason.CORRUPT)
        self.index.prune(part.node)
        return file.nbytes if file is not None else 0

    def lose_file(self, part: WantedPart) -> None:
        """Forget a file that turned out to be gone or bad, and count it."""
        self.counts.corrupt += 1
        self.drop_file(part, EvictionReason.CORRUPT)

    def _victims(self, part: BlockPart, nbytes: int, excess: int, slack: int) -> list[BlockPart]:
        """Choose and forget files that make way for a new one. On the writer's thread.

        Args:
            part: What the room is for; what it follows is spared.
            nbytes: What it takes at most.
            excess: How much of the disk's budget must be freed; if less can be, nothing is.
            slack: How much more would be welcome.

        Raises:
            CachePersistenceError: the tenant's share is full.
        """
        assert self.disk is not None  # noqa: S101 - it asks
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
        """Forget at least `nbytes` of files, and say which; none in vain."""
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
        """Free the tails that `node` begins with: turns that ended there point into it now."""
        for tail in superseded_tails(self.index, node):
            full = WantedPart(tail, LayerKind.FULL)
            self.drop_payloads([full])
            if LayerKind.FULL not in tail.payloads:  # nobody holds it
                self.drop_file(full)
                node.num_pins = max(node.num_pins, tail.num_pins)
                if self._on_moved is not None:
                    self._on_moved(tail.name, node.name)

    def free_if_tail(self, node: BlockNode) -> None:
        """Free a node that somebody counted on when what it begins was sealed."""
        if self.index.get(node.name) is not node or not node.has(LayerKind.FULL):
            return
        longer = self.index.extension_of(node)
        if longer is not None:
            self.free_tails(longer)

    def reconsider(self, node: BlockNode) -> None:
        """Forget or free a node if nobody counts on it any more."""
        self.index.prune(node)
        self.free_if_tail(node)

    # -- readings -------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Check the pool, and that payloads and index match it.

        Raises:
            AssertionError: they do not.
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
