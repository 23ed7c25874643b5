"""What is done beside serving: collect garbage, verify, warm up, forget who expired, back up.

Works on what agents reach; it computes nothing and never stands in a request's way.
"""

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

from semantic.application.agents.ledger import AgentLedger
from semantic.application.cache.index import BlockNode
from semantic.application.cache.old_boundaries import KEPT_TURNS, OldBoundaries
from semantic.application.cache.restore_plan import WantedPart
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskTier
from semantic.application.prompt.replay import REPLAY_TTL_S
from semantic.domain.agents import Agent, Pointer, Tier, Turn
from semantic.domain.blocks import BlockName, BlockPart, pack_tokens
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError, DrainingError
from semantic.domain.spec import LayerKind
from semantic.ports.cache import CheckProgress
from semantic.ports.inbound import StateView
from semantic.ports.persistence import (
    BlockFilesPort,
    LedgerPort,
    MarkIndexWhole,
    PutPart,
    TouchParts,
)

_log = logging.getLogger(__name__)

_WARM_SHARE = 0.25
_LATE_ROUNDS = 5  # a backup that is so many rounds old is late
_MAX_TOLD = 3

_T = TypeVar("_T")
# What is done, and the tenant and id of the agent it is done for.
_Work: TypeAlias = tuple[str, tuple[str, str] | None]


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
        self._boundaries = OldBoundaries(store, now)
        self._touched_at = now()
        self._has_pins = False
        self._is_stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._interval_s = math.inf
        self._backed_up_at = now()
        self._failures: dict[_Work, str] = {}

    @property
    def problem(self) -> str:
        """What could not be done, and that the backup is late; empty while all is well."""
        failed = [
            f"housekeeping: {name}{f' of agent {key[1]}' if key else ''} failed: {reason}"
            for (name, key), reason in tuple(self._failures.items())
            if key is None or self._agents.find(*key)
        ]
        told = failed[:_MAX_TOLD]
        if len(failed) > len(told):
            told.append(f"and {len(failed) - len(told)} more")
        age_s = self._now() - self._backed_up_at
        if age_s > _LATE_ROUNDS * self._interval_s:
            told.append(f"the ledger was last backed up {age_s / 60:.0f} minutes ago")
        return "; ".join(told)

    # -- agents ---------------------------------------------------------------------------------

    def footprint(self, agent: Agent) -> StateView:
        """See where an agent's state is."""
        pointer = self._pointer(agent)
        nodes = self._known(agent, pointer)
        with self._store.lock:
            memory = _leading(nodes, lambda node: LayerKind.FULL in node.payloads)
            disk = _leading(nodes, lambda node: LayerKind.FULL in node.files)
            tier = Tier.HOT if memory else Tier.WARM if disk else Tier.COLD
            return StateView(
                tier=tier,
                num_tokens=pointer.num_tokens if pointer else 0,
                memory_tokens=memory[-1].end if memory else 0,
                disk_tokens=disk[-1].end if disk else 0,
                memory_bytes=sum(p.nbytes for n in nodes for p in n.payloads.values()),
                disk_bytes=sum(f.nbytes for n in nodes for f in n.files.values()),
            )

    def prefetch(self, agent: Agent) -> int:
        """Begin to read what an agent's next turn needs; returns how many parts that are."""
        return len(self._store.prefetch(self._next_parts(agent)))

    def evict(self, agent: Agent, *, is_cold: bool = False) -> int:
        """Drop an agent's own state from memory, and from disk too if it is to be cold.

        What other agents share stays, and so does what is not on disk yet, unless it is to be cold.
        Returns how many parts went from memory.
        """
        pointer = self._pointer(agent)
        if pointer is None:
            return 0
        if is_cold and self._disk is not None:
            self._disk.flush(timeout_s=30)  # what is being written would come back
        shared = self._reached(self._ledger_pointers(but=agent))
        chain = self._known(agent, pointer)
        with self._store.lock:
            known = {node.name: node for node in (*chain, *self._store.index.path(pointer.block))}
            own = [node for name, node in known.items() if name not in shared]
            parts = [WantedPart(node, kind) for node in own[::-1] for kind in LayerKind]
            if self._disk is not None and not is_cold:
                parts = [wanted for wanted in parts if wanted.kind in wanted.node.files]
            num_dropped = self._store.drop_payloads(parts)
            if is_cold:
                self._store.drop_files(parts)
            return num_dropped

    def pin(self, agent: Agent, *, is_pinned: bool) -> None:
        """Keep an agent's state on disk whatever the budget, or let it go again."""
        self._agents.update(
            agent.tenant, agent.id, lambda known: replace(known, is_pinned=is_pinned)
        )
        self.refresh_pins()

    def refresh_pins(self) -> None:
        """Pin what pinned agents reach by now."""
        pinned = [agent for agent in self._agents.recent() if agent.is_pinned]
        if not pinned and not self._has_pins:
            return
        pointers = [pointer for pointer in self._each("pinning", pinned, self._pointer) if pointer]
        with self._store.lock:
            for node in self._store.index:
                node.num_pins = 0
            for pointer in pointers:
                for node in self._store.index.path(pointer.block):
                    node.num_pins += 1
        self._has_pins = bool(pinned)

    # -- garbage --------------------------------------------------------------------------------

    def collect(self, *, orphan_age_s: float | None = None) -> int:
        """Delete what no agent reaches and nobody used for a while; returns the bytes freed.

        So goes what has been in quarantine for that long.
        """
        age = self._orphan_ttl_s if orphan_age_s is None else orphan_age_s
        before = self._now() - age
        self._agents.expire()
        if self._disk is not None:
            self._disk.flush(timeout_s=30)  # what was committed is reached from now on
        self._ledger.forget_unreachable(before=before, replays_before=self._now() - REPLAY_TTL_S)
        reached = self._reached(self._ledger.pointers()) | self._partly_reached()
        with self._store.lock:
            orphans = [
                node
                for node in self._store.index
                if node.name not in reached and node.last_used < before and not node.num_pins
            ]
            parts = [WantedPart(node, kind) for node in orphans for kind in LayerKind]
            freed = self._store.drop_files(parts)
            self._store.drop_payloads(parts)
        if self._files is not None:
            freed += self._files.empty_quarantine(before=before)
        return freed + self._drop_boundaries(before)

    def verify(self) -> Iterator[CheckProgress]:
        """Read every file; what is bad is set aside and made anew when it is needed."""
        with self._store.lock:
            parts = [WantedPart(n, kind) for n in self._store.index for kind in tuple(n.files)]
        num_bad = 0
        yield CheckProgress(0, len(parts), 0)
        for count, wanted in enumerate(parts, start=1):
            part = wanted.node.files.get(wanted.kind)
            if part is not None and self._disk is not None:
                try:
                    self._disk.read(part).result()
                except DrainingError:
                    return  # it says nothing of the file
                except CacheCorruptionError as error:
                    if wanted.node.files.get(wanted.kind) is not part:
                        continue  # it was deleted meanwhile, as it may be
                    _log.warning("block %s is bad: %s", part.name.short, error.message)
                    num_bad += 1
                    self._store.discard([wanted])
            yield CheckProgress(count, len(parts), num_bad)

    # -- the background -------------------------------------------------------------------------

    def start(self, interval_s: float, *, is_index_lost: bool = False) -> None:
        """Warm up, then look after things every so often.

        A lost index is read from the files first, before this returns.
        """
        if is_index_lost:
            self._guarded("reading the index", self.reconcile)
        self._guarded("pinning", self.refresh_pins)
        self._interval_s, self._backed_up_at = interval_s, self._now()
        first = {"warming up": self.warm_up}
        if not is_index_lost:
            first["reading the index"] = self.reconcile
        self._thread = threading.Thread(
            target=self._run, args=(interval_s, first), name="semantic-housekeeping", daemon=True
        )
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the background work."""
        self._is_stopping.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def warm_up(self) -> None:
        """Read the heads of the agents used last, within a share of the memory."""
        agents = self._agents.recent(limit=64)
        found = self._each("warming up", agents, self._next_parts)
        parts = [part for parts in found for part in parts or ()]
        self._store.prefetch(parts, int(self._store.usage().total * _WARM_SHARE))

    def reconcile(self) -> None:
        """Compare the index with the files: a crash may have come between the two."""
        if self._files is None or self._disk is None:
            return
        with self._store.lock:
            unseen = {part.key: part for node in self._store.index for part in node.files.values()}
        unknown = [part for part in self._files.scan() if unseen.pop(part.key, None) is None]
        with self._store.lock:
            # Those that were written while the files were read are known by now.
            unknown = [part for part in unknown if not self._is_known(part)]
            self._store.restore_index(unknown)
            nodes = [(self._store.index.get(name), kind) for name, kind in unseen]
            self._store.lose_files([WantedPart(node, kind) for node, kind in nodes if node])
        self._disk.change(*(PutPart(part) for part in unknown), MarkIndexWhole())

    def tick(self) -> None:
        """Write down what was used, forget who expired, and back up the ledger.

        What fails holds up nothing else.
        """
        self._guarded("forgetting who expired", self._agents.expire)
        self._guarded("pinning", self.refresh_pins)
        self._guarded("writing what was not written", self._store.offer_again)
        before = self._now() - self._orphan_ttl_s
        self._guarded("dropping old boundaries", lambda: self._drop_boundaries(before))
        self._guarded("noting what was used", self._write_touches)
        self._guarded("backing up the ledger", self._back_up)

    def _run(self, interval_s: float, first: Mapping[str, Callable[[], None]]) -> None:
        for name, work in first.items():
            self._guarded(name, work)
        num_ticks = 0
        while not self._is_stopping.wait(interval_s):
            self.tick()
            num_ticks += 1
            if num_ticks % 10 == 0:
                self._guarded("collecting garbage", self.collect)

    def _guarded(self, name: str, work: Callable[[], _T], agent: Agent | None = None) -> _T | None:
        """Do something; if it fails, that is told and goes no further: the next round tries again.

        Returns None if it failed.
        """
        key = (name, (agent.tenant, agent.id) if agent else None)
        try:
            done = work()
        except CachePersistenceError as error:
            self._failures[key] = error.message
            _log.warning("housekeeping: %s failed: %s", name, error.message)
        except Exception as error:  # noqa: BLE001 - one agent's trouble is not the others'
            self._failures[key] = repr(error)
            _log.exception("housekeeping: %s failed", name)
        else:
            self._failures.pop(key, None)
            return done
        return None

    def _each(
        self, name: str, agents: Iterable[Agent], work: Callable[[Agent], _T]
    ) -> Iterator[_T | None]:
        """Do something for each agent; None stands for those for whom it failed."""
        for agent in agents:
            yield self._guarded(name, functools.partial(work, agent), agent)

    def _drop_boundaries(self, unused_since: float) -> int:
        def latest(agent: Agent) -> list[Turn]:
            return self._agents.turns(agent, limit=KEPT_TURNS)

        found = self._each("reading turns", self._agents.recent(), latest)
        return self._boundaries.drop((turns or () for turns in found), unused_since=unused_since)

    def _back_up(self) -> None:
        self._ledger.back_up()
        self._backed_up_at = self._now()

    # -- inside ---------------------------------------------------------------------------------

    def _pointer(self, agent: Agent) -> Pointer | None:
        return self._agents.place(agent).pointer

    def _known(self, agent: Agent, pointer: Pointer | None) -> list[BlockNode]:
        """What is known of the blocks that lead to an agent's head, from the first on."""
        if pointer is None:
            return []
        with self._store.lock:
            chain = self._store.index.chain(pointer.block)
        if chain and chain[0].parent == pointer.root:
            return chain
        # Its end is gone: what is left is found as a prompt would find it.
        packed = pack_tokens(self._agents.tokens(agent))
        with self._store.lock:
            block_tokens = self._store.spec.block_tokens
            match = self._store.index.match(pointer.root, packed, block_tokens)
            return [node for node in match.nodes if node.end <= match.end]

    def _partly_reached(self) -> set[BlockName]:
        """Blocks of agents whose last blocks were evicted."""

        def known(agent: Agent) -> list[BlockNode]:
            pointer = self._pointer(agent)
            is_whole = pointer is None or self._store.index.get(pointer.block) is not None
            return [] if is_whole else self._known(agent, pointer)

        found = self._each("finding the blocks", self._agents.recent(), known)
        return {node.name for nodes in found for node in nodes or ()}

    def _next_parts(self, agent: Agent) -> tuple[WantedPart, ...]:
        """What an agent's next turn will start from."""
        pointer = self._pointer(agent)
        if pointer is None or pointer.root not in self._store.roots:
            return ()
        tokens = self._agents.tokens(agent)
        return self._store.plan(pointer.root, tokens, is_used=False).parts

    def _is_known(self, part: BlockPart) -> bool:
        node = self._store.index.get(part.name)
        return node is not None and part.kind in node.files

    def _reached(self, pointers: Sequence[Pointer]) -> set[BlockName]:
        """Blocks that lead to a pointer, and the boundaries inside them."""
        with self._store.lock:
            return self._store.index.reached(pointer.block for pointer in pointers)

    def _ledger_pointers(self, *, but: Agent) -> list[Pointer]:
        others = [
            agent
            for agent in self._agents.recent()
            if (agent.tenant, agent.id) != (but.tenant, but.id)
        ]
        found = self._each("finding the blocks", others, self._pointer)
        return [pointer for pointer in found if pointer is not None]

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
