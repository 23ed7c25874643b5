"""What is done beside serving: collect garbage, verify, warm up, forget who expired, back up.

Works on what agents reach; it computes nothing and never stands in a request's way.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from semantic.application.agent_ledger import AgentLedger
from semantic.application.agent_store import AgentCacheStore
from semantic.application.block_index import BlockNode
from semantic.application.disk_tier import DiskTier
from semantic.application.recall import WantedPart, kept_windows
from semantic.domain.agents import Agent, Pointer, Tier, Turn
from semantic.domain.blocks import BlockName
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError
from semantic.domain.spec import LayerKind
from semantic.ports.persistence import (
    BlockFilesPort,
    LedgerChange,
    LedgerPort,
    MarkIndexWhole,
    PutPart,
    TouchParts,
)

_log = logging.getLogger(__name__)

_KEPT_TURNS = 2  # ends of so many turns can be resumed by models with window or state layers
_WARM_SHARE = 0.25
_ALL = 10**9


@dataclass(frozen=True, slots=True)
class Footprint:
    """Where an agent's attention state is, in tokens and bytes."""

    num_tokens: int
    memory_tokens: int
    disk_tokens: int
    memory_bytes: int
    disk_bytes: int

    @property
    def tier(self) -> Tier:
        """The tier its next turn starts from."""
        if self.memory_tokens:
            return Tier.HOT
        return Tier.WARM if self.disk_tokens else Tier.COLD


@dataclass(frozen=True, slots=True)
class VerifyProgress:
    """How far a check of all files has come."""

    num_checked: int
    num_total: int
    num_bad: int


class Housekeeping:
    """Looks after one store and one ledger. Safe on any thread."""

    def __init__(
        self,
        store: AgentCacheStore,
        agents: AgentLedger,
        ledger: LedgerPort,
        disk: DiskTier | None,
        *,
        files: BlockFilesPort | None = None,
        orphan_ttl_s: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._agents = agents
        self._ledger = ledger
        self._disk = disk
        self._files = files
        self._orphan_ttl_s = orphan_ttl_s
        self._now = now
        self._touched_at = now()
        self._is_stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # -- agents ---------------------------------------------------------------------------------

    def footprint(self, agent: Agent) -> Footprint:
        """See where an agent's state is."""
        pointer = self._pointer(agent)
        with self._store.lock:
            nodes = self._store.index.chain(pointer.block) if pointer else []
            memory = _leading(nodes, lambda node: LayerKind.FULL in node.payloads)
            disk = _leading(nodes, lambda node: LayerKind.FULL in node.files)
            return Footprint(
                num_tokens=pointer.num_tokens if pointer else 0,
                memory_tokens=memory[-1].end if memory else 0,
                disk_tokens=disk[-1].end if disk else 0,
                memory_bytes=sum(p.nbytes for n in nodes for p in n.payloads.values()),
                disk_bytes=sum(f.nbytes for n in nodes for f in n.files.values()),
            )

    def prefetch(self, agent: Agent) -> int:
        """Begin to read an agent's state into memory; returns how many parts that are."""
        pointer = self._pointer(agent)
        return self._fetch(pointer) if pointer else 0

    def evict(self, agent: Agent, *, is_cold: bool = False) -> int:
        """Drop an agent's own state from memory, and from disk too if it is to be cold.

        What other agents share stays. Returns how many parts went.
        """
        pointer = self._pointer(agent)
        if pointer is None:
            return 0
        shared = self._reached(self._ledger_pointers(but=agent))
        with self._store.lock:
            chain = self._store.index.chain(pointer.block)
            own = [node for node in chain if node.name not in shared]
            parts = [WantedPart(node, kind) for node in own[::-1] for kind in LayerKind]
            num_dropped = self._store.drop_payloads(parts)
            if is_cold:
                self._store.drop_files(parts)
            return num_dropped

    def pin(self, agent: Agent, *, is_pinned: bool) -> None:
        """Keep an agent's state on disk whatever the budget, or let it go again."""
        pointer = self._pointer(agent)
        with self._store.lock:
            for node in self._store.index.chain(pointer.block) if pointer else ():
                node.num_pins = max(0, node.num_pins + (1 if is_pinned else -1))

    def repin(self) -> None:
        """Pin what pinned agents reach now, and nothing else."""
        pinned = [agent for agent in self._agents.recent(limit=_ALL) if agent.is_pinned]
        pointers = [self._pointer(agent) for agent in pinned]
        with self._store.lock:
            for node in self._store.index:
                node.num_pins = 0
            for pointer in pointers:
                for node in self._store.index.chain(pointer.block) if pointer else ():
                    node.num_pins += 1

    # -- garbage --------------------------------------------------------------------------------

    def collect(self, *, orphan_age_s: float | None = None) -> int:
        """Delete what no agent reaches and nobody used for a while; returns the bytes freed."""
        age = self._orphan_ttl_s if orphan_age_s is None else orphan_age_s
        before = self._now() - age
        self._agents.expire()
        if self._disk is not None:
            self._disk.flush(timeout_s=30)  # what was committed is reached from now on
        self._ledger.forget_unreachable(before=before)
        reached = self._reached(self._ledger.pointers())
        with self._store.lock:
            orphans = [
                node
                for node in self._store.index
                if node.name not in reached and node.last_used < before and not node.num_pins
            ]
            parts = [WantedPart(node, kind) for node in orphans for kind in LayerKind]
            freed = self._store.drop_files(parts)
            self._store.drop_payloads(parts)
        return freed + self._drop_old_boundaries(before)

    def verify(self) -> Iterator[VerifyProgress]:
        """Read every file; what is bad is dropped and made anew when it is needed."""
        with self._store.lock:
            parts = [WantedPart(n, kind) for n in self._store.index for kind in tuple(n.files)]
        num_bad = 0
        yield VerifyProgress(0, len(parts), 0)
        for count, wanted in enumerate(parts, start=1):
            part = wanted.node.files.get(wanted.kind)
            if part is not None and self._disk is not None:
                try:
                    self._disk.read(part).result()
                except CacheCorruptionError as error:
                    _log.warning("block %s is bad: %s", part.name.short, error.message)
                    num_bad += 1
                    self._store.discard([wanted])
            yield VerifyProgress(count, len(parts), num_bad)

    # -- the background -------------------------------------------------------------------------

    def start(self, interval_s: float, *, is_index_lost: bool = False) -> None:
        """Warm up, then look after things every so often.

        A lost index is read from the files first, before this returns.
        """
        if is_index_lost:
            self._guarded(self.reconcile)
        self._thread = threading.Thread(
            target=self._run, args=(interval_s,), name="semantic-housekeeping", daemon=True
        )
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the background work."""
        self._is_stopping.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def warm_up(self) -> None:
        """Read the heads of the agents used last, within a share of the memory."""
        room = self._store.usage().total * _WARM_SHARE
        for agent in self._agents.recent(limit=64):
            pointer = self._pointer(agent)
            if pointer is None:
                continue
            room -= self.footprint(agent).disk_bytes
            if room < 0:
                return
            self._fetch(pointer)

    def reconcile(self) -> None:
        """Compare the index with the files: a crash may have come between the two."""
        if self._files is None or self._disk is None:
            return
        with self._store.lock:
            unseen = {part.key: part for node in self._store.index for part in node.files.values()}
        changes: list[LedgerChange] = []
        for part in self._files.scan():
            if unseen.pop(part.key, None) is None:
                self._store.restore_index([part])
                changes.append(PutPart(part))
        with self._store.lock:
            nodes = [(self._store.index.get(name), kind) for name, kind in unseen]
            self._store.drop_files([WantedPart(node, kind) for node, kind in nodes if node])
        self._disk.change(*changes, MarkIndexWhole())

    def tick(self) -> None:
        """Write down what was used, forget who expired, and back up the ledger."""
        self._agents.expire()
        self.repin()
        self._write_touches()
        self._ledger.back_up()

    def _run(self, interval_s: float) -> None:
        self._guarded(self.repin)
        self._guarded(self.warm_up)
        self._guarded(self.reconcile)
        num_ticks = 0
        while not self._is_stopping.wait(interval_s):
            self._guarded(self.tick)
            num_ticks += 1
            if num_ticks % 10 == 0:
                self._guarded(self.collect)

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except CachePersistenceError as error:
            _log.warning("housekeeping failed: %s", error.message)
        except Exception:  # noqa: BLE001 - the next round may do better
            _log.exception("housekeeping failed")

    # -- inside ---------------------------------------------------------------------------------

    def _pointer(self, agent: Agent) -> Pointer | None:
        return self._agents.place(agent).pointer

    def _fetch(self, pointer: Pointer) -> int:
        with self._store.lock:
            nodes = self._store.index.chain(pointer.block)
            wanted = [
                WantedPart(node, kind)
                for node in nodes
                for kind in node.files
                if kind not in node.payloads
            ]
        for part in wanted:
            self._store.fetch(part)
        return len(wanted)

    def _reached(self, pointers: Sequence[Pointer]) -> set[BlockName]:
        """Blocks that lead to a pointer, and the boundaries inside the last of them."""
        reached: set[BlockName] = set()
        with self._store.lock:
            for pointer in pointers:
                name = pointer.block
                while name not in reached and (node := self._store.index.get(name)) is not None:
                    reached.add(name)
                    reached.update(tail.name for tail in self._store.index.begun_by(node))
                    name = node.parent
        return reached

    def _ledger_pointers(self, *, but: Agent) -> list[Pointer]:
        others = [
            agent
            for agent in self._agents.recent(limit=_ALL)
            if (agent.tenant, agent.id) != (but.tenant, but.id)
        ]
        return [pointer for agent in others if (pointer := self._pointer(agent)) is not None]

    def _drop_old_boundaries(self, before: float) -> int:
        """Drop window and state parts that no kept boundary needs and nobody used for a while."""
        kept: set[BlockName] = set()
        for agent in self._agents.recent(limit=_ALL):
            for turn in self._agents.turns(agent, limit=_KEPT_TURNS):
                kept |= self._needed_by(turn)
        with self._store.lock:
            parts = [
                WantedPart(node, kind)
                for node in self._store.index
                for kind in (LayerKind.WINDOW, LayerKind.STATE)
                if node.name not in kept and node.last_used < before
            ]
            freed = self._store.drop_files(parts)
            self._store.drop_payloads(parts)
        return freed

    def _needed_by(self, turn: Turn) -> set[BlockName]:
        """Blocks whose window and state parts let a turn be continued, or its reply made anew."""
        if turn.pointer is None:
            return set()
        spec = self._store.spec
        with self._store.lock:
            chain = self._store.index.chain(turn.pointer.block)
            # Heads that agents share end in blocks that were cut short.
            heads = [node.end for node in chain[:-1] if node.num_tokens < spec.block_tokens]
            ends = [turn.pointer.num_tokens, turn.usage.prompt_tokens, *heads]
            inner = [tail for node in chain for tail in self._store.index.begun_by(node)]
            needed = kept_windows(chain, ends, spec.window)
            return needed | {node.name for node in (*chain, *inner) if node.end in ends}

    def _write_touches(self) -> None:
        if self._disk is None:
            return
        since, self._touched_at = self._touched_at, self._now()
        with self._store.lock:
            keys = [
                (node.name, kind)
                for node in self._store.index
                if node.last_used >= since
                for kind in node.files
            ]
        if keys:
            self._disk.change(TouchParts(tuple(keys), self._touched_at))


def _leading(nodes: Sequence[BlockNode], is_there: Callable[[BlockNode], bool]) -> list[BlockNode]:
    """The nodes from the first one on that satisfy a condition without a gap."""
    found: list[BlockNode] = []
    for node in nodes:
        if not is_there(node):
            break
        found.append(node)
    return found
