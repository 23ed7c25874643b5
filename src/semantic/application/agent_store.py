"""Attention state that outlives its sequence: sealed blocks, in memory and on disk.

Finds the longest known beginning of a prompt, and keeps the blocks that sequences leave behind. It
moves payloads between the engine, the pool's budget and the disk; it does not know what is in them.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

from semantic.application.block_index import BlockIndex, BlockNode
from semantic.application.disk_eviction import choose_victims
from semantic.application.disk_tier import DiskTier
from semantic.application.recall import (
    RestorePlan,
    WantedPart,
    kept_windows,
    plan_restore,
)
from semantic.domain.agents import Pointer
from semantic.domain.block_pool import BlockPool, PoolUsage
from semantic.domain.blocks import BlockName, BlockPart, KVBlock, PartKey, pack_tokens
from semantic.domain.errors import CacheCorruptionError, PoolExhaustedError
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.outbound import KVPayload


@dataclass(slots=True)
class CacheCounters:
    """What happened since the start; only ever grows."""

    sealed: int = 0
    evicted: int = 0
    read: int = 0
    written: int = 0
    corrupt: int = 0
    unwritten: int = 0


class AgentCacheStore:
    """Sealed blocks by content, within the budgets of memory and disk.

    Thread-safe; the engine's thread seals and recalls, readers and the writer bring parts and take
    them away, any thread may ask.

    Attributes:
        lock: Guards the index.
        index: All known blocks.
        roots: Those whose blocks were sealed or asked for: the served model's.
        counters: What happened since the start.
    """

    def __init__(
        self,
        pool: BlockPool,
        disk: DiskTier | None = None,
        *,
        on_moved: Callable[[BlockName, BlockName], object] | None = None,
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
        self._on_moved = on_moved
        self._now = now
        self.roots: set[BlockName] = set()
        self.lock = threading.RLock()
        self.index = BlockIndex()
        self._resident: dict[BlockName, WantedPart] = {}  # by the name the pool knows
        self._reading: dict[PartKey, Future[KVPayload]] = {}
        self._dirty: dict[BlockName, WantedPart] = {}  # the writer had no room for these
        self.counters = CacheCounters()

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

    def fetch(self, wanted: WantedPart) -> Future[KVPayload]:
        """Get a part: at once if it is in memory, else when it is read.

        The future fails with `CacheCorruptionError` if the part cannot be had after all.
        """
        node, kind = wanted.node, wanted.kind
        with self.lock:
            payload = node.payloads.get(kind)
            if payload is not None:
                return _done(payload)
            if (name := (node.name, kind)) in self._reading:
                return self._reading[name]
            part = node.files.get(kind)
            if part is None or self._disk is None:
                return _failed(CacheCorruptionError(f"block {node.name.short} is gone"))
            future = self._disk.read(part)
            node.num_leases += 1
            self._reading[name] = future
        future.add_done_callback(lambda done: self._end_reading(wanted, part, done))
        return future

    def discard(self, parts: Iterable[WantedPart]) -> None:
        """Drop parts that could not be loaded, so that they are made anew."""
        with self.lock:
            for wanted in parts:
                evicted = self._pool.discard([_pool_name(wanted.node.name, wanted.kind)])
                self._forget(evicted)
                if evicted or wanted.kind in wanted.node.files:
                    self.counters.corrupt += 1
                self._drop_file(wanted.node, wanted.kind)

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
            chain = self.index.chain(parent)
            if not self._is_unbroken(root, parent, chain):
                return None  # without its beginning the block is of no use
            start = chain[-1].end if chain else 0
            node = self.index.add(root, parent, start, packed)
            node.last_used = self._now()  # its files say so
            is_kept = self._keep(node, payloads, chain)
            self._touch([WantedPart(link, LayerKind.FULL) for link in (*chain, node)])
            if not is_kept:
                self._prune(node)
                return None
            self.counters.sealed += 1
            self._supersede(node)
            return node.name

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
                    self._write(node, LayerKind.WINDOW)
                elif node in nodes and not node.last_kept:
                    self._forget(self._pool.discard([_pool_name(node.name, LayerKind.WINDOW)]))

    # -- memory ---------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> None:
        """Take room for live sequences, evicting blocks if need be.

        Raises:
            PoolExhaustedError: there is not that much.
        """
        with self.lock:
            self._forget(self._pool.reserve(nbytes))

    def release(self, nbytes: int) -> None:
        """Give room back."""
        self._pool.release(nbytes)

    @property
    def spec(self) -> ModelCacheSpec:
        """The geometry of the model whose blocks are kept."""
        return self._pool.spec

    def usage(self) -> PoolUsage:
        """Read the pool's counters."""
        return self._pool.usage()

    # -- what the disk tells --------------------------------------------------------------------

    def restore_index(self, parts: Iterable[BlockPart]) -> None:
        """Take over what a directory holds, at the start."""
        with self.lock:
            for part in parts:
                node = self.index.add(part.root, part.parent, part.start, part.tokens)
                self.index.put_file(node, part)
                node.last_used = max(node.last_used, part.last_used)
            self.index.sort_by_age()

    def end_writing(self, part: BlockPart, *, is_written: bool) -> None:
        """Note that a part is on disk, or that it could not be written."""
        name = _pool_name(part.name, part.kind)
        with self.lock:
            self._pool.free([name])
            node = self.index.get(part.name)
            if node is None:
                return
            if not is_written:
                self.counters.unwritten += 1
                self._dirty[name] = WantedPart(node, part.kind)
                return
            self.counters.written += 1
            self.index.put_file(node, part)
            self._supersede_by_longer(node)
            self.offer_again()

    def offer_again(self) -> None:
        """Hand over what the writer had no room for, as far as it is still in memory."""
        with self.lock:
            waiting, self._dirty = self._dirty, {}
            for wanted in waiting.values():
                self._write(wanted.node, wanted.kind)

    def is_on_disk(self, pointer: Pointer) -> bool:
        """Whether all that leads to a place is on disk, and none of it is still to be written."""
        with self.lock:
            chain = self.index.chain(pointer.block)
            if not chain or chain[0].parent != pointer.root:
                return False
            return all(
                LayerKind.FULL in node.files and not self._is_unwritten(node) for node in chain
            )

    def disk_bytes(self, root: BlockName) -> int:
        """Bytes of the files of one root's blocks."""
        with self.lock:
            return self.index.disk_bytes(root)

    def victims(
        self, nbytes: int, incoming: BlockPart, root: BlockName | None = None
    ) -> list[BlockPart]:
        """Choose files to delete, as `choose_victims` does, and forget them.

        Those that `incoming` follows are spared.
        """
        with self.lock:
            spared = {node.name for node in self.index.chain(incoming.parent)}
            chosen: list[BlockPart] = []
            for node in choose_victims(self.index, nbytes, spared=spared, root=root):
                parts = [self.index.pop_file(node, kind) for kind in tuple(node.files)]
                chosen += [part for part in parts if part is not None]
                self._prune(node)
            return chosen

    def drop_files(self, parts: Iterable[WantedPart]) -> int:
        """Delete parts from disk that nobody counts on; returns the bytes freed."""
        freed = 0
        with self.lock:
            for wanted in parts:
                part = wanted.node.files.get(wanted.kind)
                if part is not None and not wanted.node.num_leases:
                    freed += part.nbytes
                    self._drop_file(wanted.node, wanted.kind)
        return freed

    def drop_payloads(self, parts: Iterable[WantedPart]) -> int:
        """Drop parts from memory that are not in use; returns how many went."""
        with self.lock:
            before = len(self._resident)
            names = [_pool_name(wanted.node.name, wanted.kind) for wanted in parts]
            self._forget(self._pool.discard(names))
            return before - len(self._resident)

    # -- readings -------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Check the pool, and that payloads and index match it.

        Raises:
            AssertionError: they do not.
        """
        self._pool.check_integrity()
        with self.lock:
            held = {_pool_name(n.name, kind) for n in self.index for kind in n.payloads}
            if held != set(self._resident) or not all(self._pool.get(name) for name in held):
                raise AssertionError("index, payloads and pool do not match")
            if any(not (node.payloads or node.files or node.num_leases) for node in self.index):
                raise AssertionError("a node without parts is in the index")
            if not set(self._dirty) <= set(self._resident):
                raise AssertionError("what is to be written is not in memory")
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
        """Take parts into memory, sparing the block's others and its chain; False without room."""
        new = [payload for payload in payloads if payload.kind not in node.payloads]
        blocks = [
            KVBlock(_pool_name(node.name, payload.kind), node.parent, (), payload.nbytes)
            for payload in new
        ]
        own = [_pool_name(node.name, kind) for kind in node.payloads]
        names = [*(link.name for link in chain), *own]
        spared = [found for name in names if (found := self._pool.get(name)) is not None]
        try:
            self._forget(self._pool.allocate([*spared, *blocks]))
        except PoolExhaustedError:
            return all(node.has(payload.kind) for payload in new)
        # Nobody holds a sealed block as such. Freed together, tails go before what they follow.
        self._pool.free([block.name for block in (*spared, *blocks)])
        for payload, block in zip(new, blocks, strict=True):
            node.payloads[payload.kind] = payload
            self._resident[block.name] = WantedPart(node, payload.kind)
            if payload.kind is LayerKind.STATE:
                node.last_kept = self._now()
            if payload.kind is not LayerKind.WINDOW:
                self._write(node, payload.kind)
        return True

    def _write(self, node: BlockNode, kind: LayerKind) -> None:
        """Hand a part to the writer; it stays in memory until it is on disk."""
        if self._disk is None or kind in node.files:
            return
        name = _pool_name(node.name, kind)
        if self._pool.num_refs(name):
            return  # the writer has it
        if self._disk.offer(node.part(kind), node.payloads[kind]):
            self._pool.acquire([name])
        else:
            self._dirty[name] = WantedPart(node, kind)

    def _is_unwritten(self, node: BlockNode) -> bool:
        """Whether a part of a node waits to be written."""
        names = [_pool_name(node.name, k) for k in node.payloads if k not in node.files]
        return any(name in self._dirty or self._pool.num_refs(name) for name in names)

    def _supersede(self, node: BlockNode) -> None:
        """Free the tails that `node` begins with; their turns point into it from now on."""
        for tail in self.index.begun_by(node):
            if not tail.has(LayerKind.FULL) or tail.num_leases:
                continue
            self._forget(self._pool.discard([tail.name]))
            if LayerKind.FULL not in tail.payloads:
                self._drop_file(tail, LayerKind.FULL)
                node.num_pins = max(node.num_pins, tail.num_pins)
                if self._on_moved is not None:
                    self._on_moved(tail.name, node.name)

    def _supersede_by_longer(self, node: BlockNode) -> None:
        """Free a tail that could not be freed when what it begins was sealed."""
        longer = self.index.continued_by(node) if node.has(LayerKind.FULL) else None
        if longer is not None:
            self._supersede(longer)

    def _end_reading(self, wanted: WantedPart, part: BlockPart, done: Future[KVPayload]) -> None:
        error = CancelledError() if done.cancelled() else done.exception()
        with self.lock:
            node, kind = wanted.node, wanted.kind
            del self._reading[(node.name, kind)]
            node.num_leases -= 1
            if done.cancelled():
                return  # the server stops
            if error is None:
                self.counters.read += 1
                self._keep(node, [done.result()])
            elif isinstance(error, CacheCorruptionError) and node.files.get(kind) is part:
                # Unless whoever waited for it was faster, and discarded it.
                self.counters.corrupt += 1
                self._drop_file(node, kind)
            self._prune(node)
            if self.index.get(node.name) is node:
                self._supersede_by_longer(node)

    def _drop_file(self, node: BlockNode, kind: LayerKind) -> None:
        part = self.index.pop_file(node, kind)
        if part is not None and self._disk is not None:
            self._disk.delete([part])
        self._prune(node)

    def _touch(self, parts: Sequence[WantedPart]) -> None:
        """Mark parts as just used, of a chain the end first."""
        now = self._now()
        self._pool.touch(_pool_name(wanted.node.name, wanted.kind) for wanted in parts)
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

    def _forget(self, evicted: Iterable[KVBlock]) -> None:
        for block in evicted:
            wanted = self._resident.pop(block.name)
            self._dirty.pop(block.name, None)
            del wanted.node.payloads[wanted.kind]
            self.counters.evicted += 1
            self._prune(wanted.node)

    def _prune(self, node: BlockNode) -> None:
        if not (node.payloads or node.files or node.num_leases):
            self.index.remove(node)


def _pool_name(name: BlockName, kind: LayerKind) -> BlockName:
    """What the pool calls a part: the block's own name for the part every block has."""
    if kind is LayerKind.FULL:
        return name
    return BlockName(hashlib.sha256(name + kind.value.encode()).digest())


def _done(payload: KVPayload) -> Future[KVPayload]:
    future: Future[KVPayload] = Future()
    future.set_result(payload)
    return future


def _failed(error: Exception) -> Future[KVPayload]:
    future: Future[KVPayload] = Future()
    future.set_exception(error)
    return future
