"""What is done beside serving: collect garbage, verify, warm up, forget who expired, back up.

Works on what agents reach; it computes nothing and never stands in a request's way.
"""

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias, TypeVar

from semantic.application.agents.ledger import AgentLedger
from semantic.application.cache.remote import RemoteTier
from semantic.application.cache.restore_plan import WantedPart
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskTier
from semantic.application.prompt.replay import REPLAY_TTL_S
from semantic.domain.agents import Agent, Pointer
from semantic.domain.blocks import BlockName
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError, DrainingError
from semantic.ports.inbound import CheckProgress, StateView
from semantic.ports.storage import BlockFilesPort, LedgerPort, MarkIndexWhole, PutPart, TouchParts

_log = logging.getLogger(__name__)

_RESUMABLE_TURNS = 2  # of each agent, for models that cannot be cut anywhere
_WARM_SHARE = 0.25
_SCAN_FILES, _SCAN_PAUSE_S = 16, 0.002  # read at a stretch beside requests, and the rest after it
_LATE_ROUNDS = 5  # a backup that is so many rounds old is late
_MAX_TOLD = 3

_T = TypeVar("_T")
# What is done, and the tenant and id of the agent it is done for.
_Work: TypeAlias = tuple[str, tuple[str, str] | None]


class Upkeep:
    """Looks after one store and one ledger. Safe on any thread.

    Attributes:
        remote: What all servers share; None if there is but this one.
        trim_memory: Returns memory that was freed to the system.
    """

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
        self._has_pins = False
        self._is_stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._interval_s = math.inf
        self._backed_up_at = now()
        self._failures: dict[_Work, str] = {}
        self.remote: RemoteTier | None = None
        self.trim_memory: Callable[[], None] = lambda: None

    @property
    def problem(self) -> str:
        """What could not be done, and that the backup is late; empty while all is well."""
        failed = [
            f"upkeep: {name}{f' of agent {key[1]}' if key else ''} failed: {reason}"
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
        if pointer is None:
            return StateView()
        return self._store.footprint(pointer, lambda: self._agents.tokens(agent))

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
        return self._store.evict(
            pointer,
            lambda: self._agents.tokens(agent),
            spared=self._store.reachable(self._ledger_pointers(but=agent)),
            is_cold=is_cold,
        )

    def refresh_pins(self) -> None:
        """Keep on disk, whatever the budget, what pinned agents reach by now, and nothing else."""
        pinned = [agent for agent in self._agents.recent() if agent.is_pinned]
        if not pinned and not self._has_pins:
            return
        pointers = [pointer for pointer in self._each("pinning", pinned, self._pointer) if pointer]
        self._store.pin(pointers)
        self._has_pins = bool(pinned)

    # -- garbage --------------------------------------------------------------------------------

    def collect(self, *, orphan_age_s: float | None = None) -> int:
        """Delete what no agent reaches and nobody used for a while; returns the bytes freed.

        So goes what has been in quarantine for that long.
        """
        age = self._orphan_ttl_s if orphan_age_s is None else orphan_age_s
        before = self._now() - age
        if self.remote is not None:
            return self._collect_shared(before, age)
        self._agents.expire()
        if self._disk is not None:
            self._disk.flush(timeout_s=30)  # what was committed is reached from now on
        self._ledger.forget_unreachable(before=before, replays_before=self._now() - REPLAY_TTL_S)
        reachable = self._store.reachable(self._ledger.pointers()) | self._partly_reachable()
        freed = self._store.drop_orphans(reachable, unused_since=before)
        if self._files is not None:
            freed += self._files.empty_quarantine(before=before)
        return freed + self._drop_boundaries(before)

    def _collect_shared(self, before: float, age_s: float) -> int:
        """Drop this machine's copies that nobody used; what is shared goes if no agent reaches it.

        One server at a time does the latter.
        """
        freed = self._store.drop_orphans((), unused_since=before)
        if self._files is not None:
            freed += self._files.empty_quarantine(before=before)
        assert self.remote is not None  # noqa: S101 - the caller has looked
        self._ledger.forget_unreachable(before=before, replays_before=self._now() - REPLAY_TTL_S)
        return freed + self.remote.collect(unused_s=age_s)

    def verify(self) -> Iterator[CheckProgress]:
        """Read every file; bad ones go to quarantine and are computed again when needed."""
        parts = [WantedPart(n, kind) for n in self._store.nodes() for kind in tuple(n.files)]
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
            first["reading the index"] = functools.partial(self.reconcile, _SCAN_PAUSE_S)
        self._thread = threading.Thread(
            target=self._run, args=(interval_s, first), name="semantic-upkeep", daemon=True
        )
        self._thread.start()

    def begin_warm_up(self) -> None:
        """Warm up for another model, in the background."""
        work = functools.partial(self._guarded, "warming up", self.warm_up)
        threading.Thread(target=work, name="semantic-warm-up", daemon=True).start()

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

    def reconcile(self, pause_s: float = 0.0) -> None:
        """Compare the index with the files: a crash may have come between the two.

        Args:
            pause_s: A rest after every few files; without it, requests wait for the interpreter.
        """
        if self._files is None or self._disk is None:
            return
        missing = {(n.name, kind): n for n in self._store.nodes() for kind in tuple(n.files)}
        new = []
        for count, part in enumerate(self._files.scan(), 1):
            if self._is_stopping.wait(0.0 if count % _SCAN_FILES else pause_s):
                return  # the next start compares them again
            if missing.pop(part.key, None) is None:
                new.append(part)
        unknown = self._store.reconcile(new, missing)
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
                self._guarded("giving memory back", self.trim_memory)

    def _guarded(self, name: str, work: Callable[[], _T], agent: Agent | None = None) -> _T | None:
        """Do something; if it fails, that is told and goes no further: the next round tries again.

        Returns None if it failed.
        """
        key = (name, (agent.tenant, agent.id) if agent else None)
        try:
            done = work()
        except CachePersistenceError as error:
            self._failures[key] = error.message
            _log.warning("upkeep: %s failed: %s", name, error.message)
        except Exception as error:  # noqa: BLE001 - one agent's trouble is not the others'
            self._failures[key] = repr(error)
            _log.exception("upkeep: %s failed", name)
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
        def latest(agent: Agent) -> list[tuple[Pointer, int]]:
            turns = self._agents.turns(agent, limit=_RESUMABLE_TURNS)
            return [(turn.pointer, turn.usage.prompt_tokens) for turn in turns if turn.pointer]

        turns = self._each("reading turns", self._agents.recent(), latest)
        ends = (end for ends in turns for end in ends or ())
        return self._store.drop_old_boundaries(ends, unused_since=unused_since)

    def _back_up(self) -> None:
        self._ledger.back_up()
        self._backed_up_at = self._now()

    # -- inside ---------------------------------------------------------------------------------

    def _pointer(self, agent: Agent) -> Pointer | None:
        return self._agents.place(agent).pointer

    def _partly_reachable(self) -> set[BlockName]:
        """Blocks of agents whose last blocks were evicted."""

        def names(agent: Agent) -> list[BlockName]:
            pointer = self._pointer(agent)
            if pointer is None or self._store.get(pointer.block) is not None:
                return []
            nodes = self._store.lineage(pointer, lambda: self._agents.tokens(agent))
            return [node.name for node in nodes]

        found = self._each("finding the blocks", self._agents.recent(), names)
        return {name for names in found for name in names or ()}

    def _next_parts(self, agent: Agent) -> tuple[WantedPart, ...]:
        """What an agent's next turn will start from."""
        pointer = self._pointer(agent)
        if pointer is None or pointer.root not in self._store.roots:
            return ()
        tokens = self._agents.tokens(agent)
        return self._store.plan(pointer.root, tokens, is_used=False).parts

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
        keys = self._store.used_files(since)
        if keys:
            self._disk.change(TouchParts(tuple(keys), self._touched_at))
