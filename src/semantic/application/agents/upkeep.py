"""Background maintenance: garbage collection, verification, warm-up, expiry and backups.

It works on blocks and ledger rows only; it computes no KV cache and does not block requests.
"""

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

from semantic.application.agents.ledger import AgentLedger
from semantic.application.cache.collector import BlockCollector
from semantic.application.cache.formats import StoredFormats
from semantic.application.cache.pace import Pace
from semantic.application.cache.restore_plan import WantedPart, state_of
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskTier
from semantic.application.prompt.replay import REPLAY_TTL_S
from semantic.domain.agents import Agent, Pointer
from semantic.domain.blocks import TOKEN_BYTES, BlockName, BlockPart, pack_tokens
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError, DrainingError
from semantic.domain.spec import LayerKind
from semantic.ports.inbound import CheckProgress, StateView
from semantic.ports.sharing import SharedBlocksPort
from semantic.ports.storage import BlockFilesPort, LedgerPort, MarkIndexWhole, PutPart, TouchParts

_log = logging.getLogger(__name__)

# Latest turns of each agent that stay resumable, for models whose KV cache cannot be truncated at
# every position.
_RESUMABLE_TURNS = 2
_NUM_WARM, _NUM_REOPENED = 64, 16  # agents whose KV cache is read, and restored, at start
_WARM_SHARE = 0.25
# Share of a core for the comparison of files with the index, while requests run: for a million
# files it takes 20 minutes.
_SCAN_SHARE = 0.1
_LATE_ROUNDS = 5  # a backup older than this many intervals is reported as late
_MAX_TOLD = 3

_T = TypeVar("_T")
# Name of a task, and the tenant and id of the agent it concerns.
_Work: TypeAlias = tuple[str, tuple[str, str] | None]


class Upkeep:
    """Maintains one block store and one ledger. Thread-safe.

    Attributes:
        shared: Block parts that several servers share; None on a single server.
        survey: Counts blocks and agents for reports, once the index is there.
        reopen: Restores the sequence of an agent's conversation, given its root and tokens, as soon
            as no request runs.
        trim_memory: Returns freed memory to the operating system.
        formats: The models and formats that computed the stored blocks.
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
        self._collector = BlockCollector(store, now)
        self._agents = agents
        self._ledger = ledger
        self._disk = disk
        self._files = files
        self._orphan_ttl_s = orphan_ttl_s
        self._now = now
        self._touched_at = now()
        self._has_pins = False
        self._is_stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._interval_s = math.inf
        self._backed_up_at = now()
        self._failures: dict[_Work, str] = {}
        self.shared: SharedBlocksPort | None = None
        self.survey: Callable[[], None] = lambda: None
        self.reopen: Callable[[Agent, BlockName, tuple[int, ...]], None] = lambda *_: None
        self.trim_memory: Callable[[], None] = lambda: None
        self.formats = StoredFormats()

    @property
    def problem(self) -> str:
        """Description of failed tasks and of a late backup; empty if there is no problem."""
        failed = [
            f"upkeep: {name}{f' of agent {key[1]}' if key else ''} failed: {reason}"
            for (name, key), reason in tuple(self._failures.items())
            if key is None or self._agents.find_agent(*key)
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
        """Return the KV cache that an agent's next turn can reuse, found by the engine's lookup."""
        pointer = self._pointer(agent)
        if pointer is None:
            return StateView()
        root = self.formats.root_for(agent, pointer)
        chain = self._store.chain(pointer.block) if root == pointer.root else []
        if chain and chain[0].parent == root:
            packed = b"".join(node.tokens for node in chain)[: pointer.num_tokens * TOKEN_BYTES]
        else:  # the last blocks are evicted, or in another format: find the prefix by its tokens
            packed = pack_tokens(self._agents.tokens(agent))
        state = state_of(self._store.find_prefix(root, packed), pointer.num_tokens)
        note = self.formats.note(agent.tenant, pointer.root) if root != pointer.root else ""
        return replace(state, note=note)

    def is_lost(self, agent: Agent, pointer: Pointer) -> bool:
        """Whether an agent's next turn cannot find the blocks of its latest turn.

        That is so if it looks below another root, as after a change of model or KV format. Reads
        no blocks.
        """
        return self.formats.root_for(agent, pointer) != pointer.root

    def prefetch(self, agent: Agent) -> int:
        """Start reading the parts an agent's next turn needs into memory; returns their number."""
        return len(self._store.prefetch(self._next_parts(agent)))

    def evict(self, agent: Agent, *, is_cold: bool = False) -> int:
        """Evict an agent's blocks from memory, and with `is_cold` from disk too.

        Blocks that other agents reach stay. Without `is_cold`, parts that are not on disk yet stay
        as well. Returns the number of parts evicted from memory.
        """
        pointer = self._pointer(agent)
        if pointer is None:
            return 0
        if is_cold and self._disk is not None:
            self._disk.flush(timeout_s=30)  # a part that is being written would reappear
        return self._collector.evict(
            pointer,
            lambda: self._agents.tokens(agent),
            spared=self._collector.reachable(self._ledger_pointers(but=agent)),
            is_cold=is_cold,
        )

    def refresh_pins(self) -> None:
        """Pin the blocks that pinned agents reach now, and unpin all others.

        Pinned blocks stay on disk even if the disk budget is exceeded.
        """
        pinned = [agent for agent in self._agents.recent() if agent.is_pinned]
        if not pinned and not self._has_pins:
            return
        pointers = [pointer for pointer in self._each("pinning", pinned, self._pointer) if pointer]
        self._collector.pin(pointers)
        self._has_pins = bool(pinned)

    # -- garbage collection ---------------------------------------------------------------------

    def collect(self, *, orphan_age_s: float | None = None) -> int:
        """Delete unused turns and blocks that no agent reaches; returns the bytes freed.

        Files that have been in quarantine for that time are deleted too.

        Args:
            orphan_age_s: Minimum time since the last use; None applies the configured time.
        """
        age = self._orphan_ttl_s if orphan_age_s is None else orphan_age_s
        before = self._now() - age
        if self.shared is not None:
            return self._collect_shared(self.shared, before, age)
        self._agents.expire()
        if self._disk is not None:
            self._disk.flush(timeout_s=30)  # so that committed turns count as reachable
        self._forget_unreachable(before)
        reachable = self._collector.reachable(self._ledger.pointers()) | self._partly_reachable()
        freed = self._collector.drop_orphans(reachable, unused_since=before)
        if self._files is not None:
            freed += self._files.empty_quarantine(before=before)
        return freed + self._drop_boundaries(before)

    def _collect_shared(self, shared: SharedBlocksPort, before: float, age_s: float) -> int:
        freed = self._collector.drop_orphans((), unused_since=before)
        if self._files is not None:
            freed += self._files.empty_quarantine(before=before)
        self._forget_unreachable(before)
        return freed + shared.collect(unused_s=age_s)

    def _forget_unreachable(self, before: float) -> None:
        self._ledger.forget_unreachable(before=before, replays_before=self._now() - REPLAY_TTL_S)
        if self._agents.storage is not None:
            self._agents.storage.refresh()

    def verify(
        self, on_bad: Callable[[BlockPart, str], None] | None = None
    ) -> Iterator[CheckProgress]:
        """Check every block file; damaged ones go to quarantine and are recomputed when needed.

        Args:
            on_bad: Called with each damaged part and the reason; None logs them.
        """
        parts = [WantedPart(n, kind) for n in self._store.nodes() for kind in tuple(n.files)]
        num_bad = 0
        yield CheckProgress(0, len(parts), 0)
        for count, wanted in enumerate(parts, start=1):
            part = wanted.node.files.get(wanted.kind)
            if part is not None and self._disk is not None:
                try:
                    self._disk.read(part).result()
                except DrainingError:
                    return  # shutting down; the file may be intact
                except CacheCorruptionError as error:
                    if wanted.node.files.get(wanted.kind) is not part:
                        continue  # deleted meanwhile, which is no damage
                    if on_bad is not None:
                        on_bad(part, error.message)
                    else:
                        _log.warning("block %s is damaged: %s", part.name.short, error.message)
                    num_bad += 1
                    self._store.discard([wanted])
            yield CheckProgress(count, len(parts), num_bad)

    # -- background thread ----------------------------------------------------------------------

    def start(self, interval_s: float, *, is_index_lost: bool = False) -> None:
        """Start the background threads: one warms up, then runs `tick` every `interval_s`.

        Another one compares the files with the index. If the index is lost, it is rebuilt from the
        files before this method returns instead.
        """
        if is_index_lost:
            self._guarded("reading the index", self.reconcile)
        self._guarded("pinning", self.refresh_pins)
        self._interval_s, self._backed_up_at = interval_s, self._now()
        self._threads = [_begin("semantic-upkeep", functools.partial(self._run, interval_s))]
        if not is_index_lost:
            scan = functools.partial(self.reconcile, _SCAN_SHARE)
            work = functools.partial(self._guarded, "reading the index", scan)
            self._threads.append(_begin("semantic-scan", work))

    def begin_warm_up(self) -> None:
        """Start `warm_up` in the background, after another model was loaded."""
        work = functools.partial(self._guarded, "warming up", self.warm_up)
        _begin("semantic-warm-up", work)

    def stop(self, timeout_s: float) -> None:
        self._is_stopping.set()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def warm_up(self) -> None:
        """Prefetch the KV cache of the most recently used agents, within a share of the memory.

        The first of them are also reopened.
        """
        agents = self._agents.recent(limit=_NUM_WARM)
        parts: list[WantedPart] = []
        latest: list[tuple[Agent, BlockName, tuple[int, ...]]] = []  # not all, which are large
        for agent, stored in zip(
            agents, self._each("warming up", agents, self._stored), strict=True
        ):
            if stored is not None:
                parts += self._parts_of(*stored)
                latest += [(agent, *stored)] if len(latest) < _NUM_REOPENED else []
        self._store.prefetch(parts, int(self._store.usage().total * _WARM_SHARE))
        for agent, root, tokens in latest:
            self.reopen(agent, root, tokens)

    def reconcile(self, share: float = 1.0) -> None:
        """Make the index match the files; a crash may have updated only one of them.

        Args:
            share: Of a core's time, so that the scan does not starve request threads of the
                interpreter lock.
        """
        if self._files is None or self._disk is None:
            return
        pace = Pace(self._is_stopping.wait, share)
        self._files.count(pace)
        # Only names: garbage collection would scan a million parts, and halt all turns meanwhile.
        missing: dict[LayerKind, dict[BlockName, None]] = {kind: {} for kind in LayerKind}
        for node in _paced(self._store.begin_comparison(), pace):
            for kind in tuple(node.files):
                missing[kind][node.name] = None
        new = []
        for part in _paced(self._files.scan(), pace):
            missing[part.kind].pop(part.name, None)
            if not self._store.has_file(part):
                new.append(part)
        if self._is_stopping.is_set():
            return  # the next start runs it again
        unknown = self._store.reconcile(new, [(n, kind) for kind in missing for n in missing[kind]])
        self._disk.change(*(PutPart(part) for part in unknown), MarkIndexWhole())

    def tick(self) -> None:
        """Run the periodic tasks: expiry, pins, retried writes, usage times, ledger backup.

        A failed task does not stop the others.
        """
        self._guarded("deleting expired agents", self._agents.expire)
        self._guarded("pinning", self.refresh_pins)
        self._guarded("retrying block writes", self._store.offer_again)
        before = self._now() - self._orphan_ttl_s
        self._guarded("dropping unused turn boundaries", lambda: self._drop_boundaries(before))
        self._guarded("writing usage times", self._write_touches)
        self._guarded("backing up the ledger", self._back_up)

    def _run(self, interval_s: float) -> None:
        self._guarded("warming up", self.warm_up)
        self._guarded("counting blocks", self.survey)
        num_ticks = 0
        while not self._is_stopping.wait(interval_s):
            self.tick()
            num_ticks += 1
            if num_ticks % 10 == 0:
                self._guarded("collecting garbage", self.collect)
                self._guarded("returning free memory to the system", self.trim_memory)

    def _guarded(self, name: str, work: Callable[[], _T], agent: Agent | None = None) -> _T | None:
        """Run a task; log and record a failure, and return None then. The next round retries."""
        key = (name, (agent.tenant, agent.id) if agent else None)
        try:
            done = work()
        except CachePersistenceError as error:
            self._failures[key] = error.message
            _log.warning("upkeep: %s failed: %s", name, error.message)
        except Exception as error:  # noqa: BLE001 - a failure must not affect other tasks
            self._failures[key] = repr(error)
            _log.exception("upkeep: %s failed", name)
        else:
            self._failures.pop(key, None)
            return done
        return None

    def _each(
        self, name: str, agents: Iterable[Agent], work: Callable[[Agent], _T]
    ) -> Iterator[_T | None]:
        for agent in agents:
            yield self._guarded(name, functools.partial(work, agent), agent)

    def _drop_boundaries(self, unused_since: float) -> int:
        def latest(agent: Agent) -> list[tuple[Pointer, int]]:
            turns = self._agents.turns(agent, limit=_RESUMABLE_TURNS)
            return [(turn.pointer, turn.usage.prompt_tokens) for turn in turns if turn.pointer]

        turns = self._each("reading turns", self._agents.recent(), latest)
        ends = (end for ends in turns for end in ends or ())
        return self._collector.drop_old_boundaries(ends, unused_since=unused_since)

    def _back_up(self) -> None:
        self._ledger.back_up()
        self._backed_up_at = self._now()

    # -- inside ---------------------------------------------------------------------------------

    def _pointer(self, agent: Agent) -> Pointer | None:
        return self._agents.place(agent).pointer

    def _pointers(self, agents: Sequence[Agent]) -> Callable[[Agent], Pointer | None]:
        """Read where agents are, all at once, or each when it is asked for if that fails."""
        try:
            places = self._agents.places(agents)
        except CachePersistenceError:
            return self._pointer
        read = {(a.tenant, a.id): place.pointer for a, place in zip(agents, places, strict=True)}
        return lambda agent: read[agent.tenant, agent.id]

    def _partly_reachable(self) -> set[BlockName]:
        """Return the remaining blocks of agents whose last blocks were evicted."""
        agents = self._agents.recent()
        pointer_of = self._pointers(agents)

        def names(agent: Agent) -> list[BlockName]:
            pointer = pointer_of(agent)
            if pointer is None or self._store.get(pointer.block) is not None:
                return []
            nodes = self._collector.lineage(pointer, lambda: self._agents.tokens(agent))
            return [node.name for node in nodes]

        found = self._each("finding the blocks", agents, names)
        return {name for names in found for name in names or ()}

    def _next_parts(self, agent: Agent) -> tuple[WantedPart, ...]:
        stored = self._stored(agent)
        return self._parts_of(*stored) if stored else ()

    def _stored(self, agent: Agent) -> tuple[BlockName, tuple[int, ...]] | None:
        """Return the root and the tokens of a conversation with the served model."""
        pointer = self._pointer(agent)
        if pointer is None:
            return None
        root = self.formats.root_for(agent, pointer)
        return (root, tuple(self._agents.tokens(agent))) if root in self._store.roots else None

    def _parts_of(self, root: BlockName, tokens: Sequence[int]) -> tuple[WantedPart, ...]:
        return self._store.find_prefix(root, pack_tokens(tokens)).parts

    def _ledger_pointers(self, *, but: Agent) -> list[Pointer]:
        others = [
            agent
            for agent in self._agents.recent()
            if (agent.tenant, agent.id) != (but.tenant, but.id)
        ]
        found = self._each("finding the blocks", others, self._pointers(others))
        return [pointer for pointer in found if pointer is not None]

    def _write_touches(self) -> None:
        if self._disk is None:
            return
        since, self._touched_at = self._touched_at, self._now()
        keys = self._store.used_files(since)
        if keys:
            self._disk.change(TouchParts(tuple(keys), self._touched_at))


def _begin(name: str, work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def _paced(items: Iterable[_T], pace: Pace) -> Iterator[_T]:
    """Yield items, with pauses; ends early when the server stops."""
    for item in items:
        yield item
        if pace():
            return
