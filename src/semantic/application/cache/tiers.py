"""Where the parts of blocks are: in memory within the pool's budget, on disk, or in transit.

A sealed part is queued for writing and held in memory until it is on disk. Parts that the writer
has no room for stay dirty and are offered again later. Room in the pool is reserved before a file
is read, and a part that was read stays in the pool while it is held, so that parts waiting to be
loaded never exceed the memory budget. No call waits for the disk: where there is no room, the
caller tries again later.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from semantic.application.cache.eviction import evict_files
from semantic.application.cache.index import BlockIndex, BlockNode
from semantic.application.cache.restore_plan import HeldPart, WantedPart
from semantic.application.cache.writer import NUM_READERS, DiskTier, WriteJob
from semantic.domain.agents import Pointer
from semantic.domain.blocks import BlockName, BlockPart, PartKey
from semantic.domain.errors import (
    CacheCorruptionError,
    CachePersistenceError,
    DrainingError,
    PoolExhaustedError,
)
from semantic.domain.pool import BlockPool
from semantic.domain.spec import LayerKind
from semantic.ports.backend import KVPayload
from semantic.ports.sharing import SharedBlocksPort
from semantic.ports.telemetry import CacheCounts, EvictionReason

_log = logging.getLogger(__name__)

# Number of files that are prefetched at the same time.
_NUM_PREFETCHED = max(2, NUM_READERS // 2)

OnMoved = Callable[[BlockName, BlockName], object]


@dataclass(slots=True, eq=False)
class _Reading:
    """A file that is being read into reserved room of `nbytes`, and the parts waiting for it."""

    wanted: WantedPart
    part: BlockPart
    nbytes: int
    waiting: list[HeldPart]


def _full_parts(nodes: Iterable[BlockNode]) -> list[PartKey]:
    return [(node.name, LayerKind.FULL) for node in nodes]


class BlockTiers:
    """The parts in memory and on disk, and the reads and writes between the two.

    It owns the cache's lock. The methods for any thread and the callbacks of readers and writer
    acquire it; `AgentCacheStore` holds it when it calls the other methods or uses `index`.

    Attributes:
        pool: Counts the bytes in memory and chooses the parts to evict.
        disk: Writes and reads files; None if blocks are kept in memory only.
        shared: Parts that several servers share; None on a single server.
    """

    def __init__(
        self,
        pool: BlockPool,
        disk: DiskTier | None,
        counts: CacheCounts,
        on_moved: OnMoved | None = None,
        shared: SharedBlocksPort | None = None,
        index: BlockIndex | None = None,
    ) -> None:
        self.index = BlockIndex() if index is None else index
        self.pool = pool
        self.disk = disk
        self.shared = shared
        self.lock = threading.RLock()
        self.counts = counts
        self._on_moved = on_moved
        self._writing: set[PartKey] = set()
        self._dirty: dict[PartKey, WantedPart] = {}  # the queue was full or writing failed
        self._reading: dict[PartKey, _Reading] = {}
        self._prefetches: deque[WantedPart] = deque()

    # -- any thread: load -----------------------------------------------------------------------

    def acquire(self, wanted: WantedPart) -> HeldPart | None:
        held = HeldPart(wanted)
        with self.lock:
            payload = wanted.node.payloads.get(wanted.kind)
            reading = self._reading.get(wanted.key)
            if payload is not None:
                self._count(held)
                held.nbytes = payload.nbytes
                held.was_in_memory = True
                held.future.set_result(payload)
            elif reading is not None:
                held.nbytes = reading.nbytes
                reading.waiting.append(held)
            elif not self.is_unread(wanted):
                gone = CacheCorruptionError(f"block {wanted.node.name.short} is gone")
                held.future.set_exception(gone)
            elif not self._begin_reading(wanted, [held]):
                return None
        return held

    def release(self, held: HeldPart) -> None:
        """Undo `acquire`. A read that has started still runs to its end."""
        with self.lock:
            reading = self._reading.get(held.wanted.key)
            if held.is_counted:
                held.is_counted = False
                self.pool.release(held.wanted.key)
                self._reconsider(held.wanted.node)
            elif reading is not None and held in reading.waiting:
                reading.waiting.remove(held)

    def lease(self, parts: Sequence[WantedPart]) -> None:
        with self.lock:
            leased = {wanted.key for wanted in parts}
            for wanted in parts:
                wanted.node.num_leases += 1
            # `acquire` reads these parts when the restore reaches them, so they are not prefetched.
            self._prefetches = deque(w for w in self._prefetches if w.key not in leased)

    def end_lease(self, parts: Sequence[WantedPart]) -> None:
        with self.lock:
            for wanted in parts:
                self._end_lease(wanted.node)

    @property
    def is_reading(self) -> bool:
        with self.lock:
            return bool(self._reading)

    @property
    def reading_bytes(self) -> int:
        with self.lock:
            return sum(reading.nbytes for reading in self._reading.values())

    # -- memory ---------------------------------------------------------------------------------

    def keep(
        self, node: BlockNode, payloads: Sequence[KVPayload], chain: Sequence[BlockNode] = ()
    ) -> list[LayerKind]:
        """Add those payloads to a node that it lacks; returns their kinds.

        Offers them to the writer, except window parts. Other parts are evicted for them, but not
        the node's own parts. Those of its chain are evicted last, and only if they are on disk.

        Raises:
            PoolExhaustedError: there is no room; nothing was added.
        """
        new = {p.kind: p for p in payloads if p.kind not in node.payloads}
        own = [(node.name, kind) for kind in node.payloads]
        sizes = {(node.name, kind): payload.nbytes for kind, payload in new.items()}
        try:
            evicted = self.pool.put(sizes, [*_full_parts(chain), *own])
        except PoolExhaustedError:  # a chain longer than half of the memory
            unwritten = [link for link in chain if LayerKind.FULL not in link.files]
            evicted = self.pool.put(sizes, [*_full_parts(unwritten), *own])
        self._forget(evicted, EvictionReason.BUDGET)
        self.index.put_payloads(node, new)
        for kind in new:
            if kind is not LayerKind.WINDOW:
                self.write(WantedPart(node, kind))
        return list(new)

    def reserve(self, nbytes: int) -> None:
        self._forget(self.pool.reserve(nbytes), EvictionReason.BUDGET)

    def resize(self, nbytes: int) -> None:
        self._forget(self.pool.resize(nbytes), EvictionReason.BUDGET)

    def drop_payloads(
        self, parts: Iterable[WantedPart], reason: EvictionReason = EvictionReason.UNUSED
    ) -> int:
        dropped = self.pool.discard(part.key for part in parts)
        self._forget(dropped, reason)
        return len(dropped)

    def _forget(self, evicted: Iterable[PartKey], reason: EvictionReason) -> None:
        for name, kind in evicted:
            node = self.index.get(name)
            assert node is not None  # noqa: S101 - parts in memory have a node
            self.index.pop_payload(node, kind)
            self.counts.evictions["memory", reason.value] += 1
            self.index.prune(node)

    # -- reading --------------------------------------------------------------------------------

    def prefetch(self, parts: Iterable[WantedPart]) -> None:
        """Read parts in order, a few at a time; skips those that do not fit when they are next."""
        self._prefetches.extend(parts)
        self._prefetch_more()

    @property
    def prefetch_bytes(self) -> int:
        """Upper bound of the memory that the queued prefetches take."""
        return sum(self.room_for(wanted) for wanted in self._prefetches)

    def stop_prefetching(self) -> None:
        """Clear the prefetch queue, because the room is needed; reads in progress continue."""
        self._prefetches.clear()

    def _prefetch_more(self) -> None:
        while self._prefetches and len(self._reading) < _NUM_PREFETCHED:
            wanted = self._prefetches.popleft()
            if self.is_unread(wanted):
                self._begin_reading(wanted, [])

    def is_unread(self, wanted: WantedPart) -> bool:
        """Whether a part must be read, and is not being read already."""
        is_somewhere = wanted.node.part_to_read(wanted.kind) is not None
        return self.disk is not None and is_somewhere and wanted.key not in self._reading

    def room_for(self, wanted: WantedPart) -> int:
        """Return an upper bound of the memory that reading a part takes; 0 if it is in memory."""
        part = wanted.node.part_to_read(wanted.kind)
        return self.disk.room_for(part) if self.disk is not None and part is not None else 0

    def _begin_reading(self, wanted: WantedPart, waiting: list[HeldPart]) -> bool:
        part, nbytes = wanted.node.part_to_read(wanted.kind), self.room_for(wanted)
        source = self.disk if wanted.kind in wanted.node.files else self.shared
        assert part is not None and source is not None  # noqa: S101, PT018 - callers check
        try:
            self.reserve(nbytes)
        except PoolExhaustedError:
            return False
        reading = _Reading(wanted, part, nbytes, waiting)
        for held in waiting:
            held.nbytes = nbytes
        wanted.node.num_leases += 1
        self._reading[wanted.key] = reading
        source.read(part).add_done_callback(lambda done: self._end_reading(reading, done))
        return True

    def _end_reading(self, reading: _Reading, done: Future[KVPayload]) -> None:
        """Replace reserved room by the part that was read. Runs on a reader's thread."""
        wanted = reading.wanted
        with self.lock:
            del self._reading[wanted.key]
            self.pool.unreserve(reading.nbytes)
            try:
                error = self._take(reading, done)
            except Exception as defect:  # noqa: BLE001 - every waiting future must complete
                _log.exception("cannot keep a block that was read; computing it again")
                error = defect
            payload = wanted.node.payloads.get(wanted.kind)
            self._end_lease(wanted.node)
            self._prefetch_more()
        for held in reading.waiting:
            if error is None and payload is not None:
                held.future.set_result(payload)
            else:
                held.future.set_exception(error or CacheCorruptionError("a block is gone"))

    def _take(self, reading: _Reading, done: Future[KVPayload]) -> BaseException | None:
        wanted = reading.wanted
        error = DrainingError("cancelled") if done.cancelled() else done.exception()
        if isinstance(error, DrainingError):
            self._prefetches.clear()
            return CacheCorruptionError("the server is shutting down")
        if error is not None:
            is_bad = isinstance(error, CacheCorruptionError)
            # A waiting caller may have discarded the file already.
            if is_bad and wanted.node.part_to_read(wanted.kind) is reading.part:
                self.lose_file(wanted)
            return error
        self.counts.restored += 1
        self.counts.restored_bytes += reading.part.nbytes
        try:
            self.keep(wanted.node, [done.result()])  # writes it if its file was deleted meanwhile
        except PoolExhaustedError as full:
            return CacheCorruptionError(f"the file holds more than its size allows: {full.message}")
        for held in reading.waiting:
            self._count(held)
        return None

    def _count(self, held: HeldPart) -> None:
        self.pool.acquire(held.wanted.key)
        held.is_counted = True

    def _end_lease(self, node: BlockNode) -> None:
        node.num_leases -= 1
        self._reconsider(node)

    # -- writing --------------------------------------------------------------------------------

    @property
    def is_writing(self) -> bool:
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
            self.pool.acquire(part.key)
        else:
            self._dirty[part.key] = part

    @property
    def unwritten_bytes(self) -> int:
        """Bytes in memory that are to be on disk, and are not."""
        with self.lock:
            kinds = {*self._dirty, *self._writing}
            nodes = [(self.index.get(name), kind) for name, kind in kinds]
            payloads = [node.payloads.get(kind) for node, kind in nodes if node is not None]
            return sum(payload.nbytes for payload in payloads if payload is not None)

    def offer_again(self) -> None:
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
            if self.shared is not None and file.kind not in node.shared:
                self.shared.offer(file, self._end_upload)
            self.free_tails(node)
            self._free_if_tail(node)
            self.offer_again()

    def _end_upload(self, part: BlockPart) -> None:
        """Record that a part is in the object store. Runs on an upload thread."""
        with self.lock:
            node = self.index.get(part.name)
            if node is not None:
                node.shared[part.kind] = part

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
        self.pool.release(part.key)
        return node

    def is_on_disk(self, pointer: Pointer) -> bool:
        """Whether all blocks up to a pointer are on disk and none of their parts is dirty."""
        chain = self.index.chain_from(pointer.root, pointer.block)
        if not chain:
            return False
        return all(LayerKind.FULL in node.files and not self._is_dirty(node) for node in chain)

    def _is_dirty(self, node: BlockNode) -> bool:
        keys = [(node.name, kind) for kind in node.payloads if kind not in node.files]
        return any(key in self._dirty or key in self._writing for key in keys)

    # -- deleting -------------------------------------------------------------------------------

    def drop_file(self, part: WantedPart, reason: EvictionReason = EvictionReason.UNUSED) -> int:
        """Delete a part's file, if any; returns its bytes. A corrupt file goes to quarantine."""
        file = self.index.pop_file(part.node, part.kind)
        if file is None and reason is EvictionReason.CORRUPT:
            part.node.shared.pop(part.kind, None)  # the shared copy was corrupt
            self.index.version += 1
        if file is not None and self.disk is not None:
            self.counts.evictions["disk", reason.value] += 1
            self.disk.delete([file], is_bad=reason is EvictionReason.CORRUPT)
        self.index.prune(part.node)
        return file.nbytes if file is not None else 0

    def lose_file(self, part: WantedPart) -> None:
        self.counts.corrupt += 1
        self.drop_file(part, EvictionReason.CORRUPT)

    def _victims(self, part: BlockPart, nbytes: int, excess: int, slack: int) -> list[BlockPart]:
        """Evict files for a new one; see `WriteJob.victims`. Runs on the writer's thread."""
        assert self.disk is not None  # noqa: S101 - only the disk tier calls this
        quota = self.disk.limits.tenant_bytes(part.root)
        with self.lock:
            victims: list[BlockPart] = []
            over_quota = 0 if quota is None else self.index.disk_bytes(part.root) + nbytes - quota
            if over_quota > 0:
                victims = evict_files(self.index, over_quota, part, root=part.root)
                self.counts.evictions["disk", EvictionReason.QUOTA.value] += len(victims)
                if not victims:
                    raise CachePersistenceError("the tenant's disk quota is full.")
            excess -= sum(victim.nbytes for victim in victims)
            if excess > 0:
                others = evict_files(self.index, excess, part, slack=slack)
                self.counts.evictions["disk", EvictionReason.BUDGET.value] += len(others)
                victims += others
            return victims

    # -- tails ----------------------------------------------------------------------------------

    def free_tails(self, node: BlockNode) -> None:
        """Drop the tails that `node` replaces; turns that ended in a tail now point into `node`."""
        for tail in self.index.superseded_tails(node):
            full = WantedPart(tail, LayerKind.FULL)
            self.drop_payloads([full])
            if LayerKind.FULL not in tail.payloads:  # False while it is held
                self.drop_file(full)
                node.num_pins = max(node.num_pins, tail.num_pins)
                if self._on_moved is not None:
                    self._on_moved(tail.name, node.name)

    def _free_if_tail(self, node: BlockNode) -> None:
        """Drop a tail that could not be dropped when its longer block was sealed."""
        if self.index.get(node.name) is not node or not node.has(LayerKind.FULL):
            return
        longer = self.index.extension_of(node)
        if longer is not None:
            self.free_tails(longer)

    def _reconsider(self, node: BlockNode) -> None:
        """Remove or free a node after a hold or lease on it has ended."""
        self.index.prune(node)
        self._free_if_tail(node)

    # -- checks ---------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Check the pool, and that payloads and index match it."""
        self.pool.check_integrity()
        keys = {(node.name, kind) for node in self.index for kind in node.payloads}
        if keys != self.pool.keys():
            raise AssertionError("index, payloads and pool differ")
        if not self._writing <= keys:
            raise AssertionError("a part that is being written is not in memory")
        if any(not (n.payloads or n.files or n.shared or n.num_leases) for n in self.index):
            raise AssertionError("a node without parts is in the index")
        self.index.check_integrity()
