"""The KV cache for operators: statistics, and operations on demand."""

import contextlib
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field

from semantic.application.agents.feed import AgentAction, AgentChanged, EventFeed
from semantic.application.agents.ledger import AgentLedger
from semantic.application.agents.running_turns import RunningTurn, TurnWatch
from semantic.application.agents.upkeep import Upkeep
from semantic.application.cache.index import BlockNode
from semantic.application.cache.pace import Pace
from semantic.application.cache.restore_plan import tier_of
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.watch import BlockPage
from semantic.application.cache.writer import DiskTier
from semantic.application.engine.device_thread import DeviceThread
from semantic.domain.agents import Agent, Pointer, Principal, Tier, Turn
from semantic.domain.blocks import BlockName
from semantic.domain.errors import ModelSwapError, SemanticError
from semantic.domain.pool import PoolUsage
from semantic.ports.backend import DeviceMemory
from semantic.ports.inbound import CacheOverview, CheckProgress, StateView
from semantic.ports.telemetry import CacheCounts

_CLOSE_TIMEOUT_S = 5.0
# Unless it is quick, computing `Sharing` is repeated only after this many times its own duration.
_SHARING_COST = 50
_QUICK_S = 0.05
_MAX_AGE_S = 30.0  # until then, an older result is returned while the next one is computed
_BATCH = 16  # agents whose places are read together
_BACKGROUND_SHARE = 0.04  # of a core, to compute it in the background


@dataclass(frozen=True, slots=True)
class ModelCache:
    """The block cache of the loaded model, and its background maintenance."""

    store: AgentCacheStore
    upkeep: Upkeep


class ServedCache:
    """Holds the cache of the loaded model; there is none until the first model is loaded."""

    def __init__(self) -> None:
        self.loaded: ModelCache | None = None

    def get(self) -> ModelCache:
        """Return the cache; raises ModelSwapError if no model is loaded yet."""
        if self.loaded is None:
            raise ModelSwapError("the model is loading.", retry_after_s=2)
        return self.loaded

    def is_on_disk(self, pointer: Pointer) -> bool:
        """Whether the KV cache up to a pointer is on disk; False until a model is loaded."""
        return self.loaded is not None and self.loaded.store.is_on_disk(pointer)

    def learn(self, root: BlockName, tokens: Sequence[int]) -> None:
        """Look up blocks of a prompt that other servers stored."""
        self.get().store.learn(root, tokens)


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Current usage in bytes. The memory figures are zero until a model is loaded.

    Attributes:
        disk: Everything in the directory: blocks of all models, quarantine, ledger and backup.
    """

    memory: PoolUsage
    disk: int
    disk_budget: int
    queue: int
    device: DeviceMemory | None = None


@dataclass(frozen=True, slots=True)
class Sharing:
    """How much state agents reach and share, and how much of it is on disk.

    Attributes:
        logical_bytes: Sum over all agents; a shared block counts once per agent.
        unique_bytes: Sum over all blocks; a shared block counts once.
        tiers: Number of agents whose next turn starts from each tier.
        num_files: Files of all blocks.
        disk_bytes: Bytes of these files.
    """

    logical_bytes: int = 0
    unique_bytes: int = 0
    tiers: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    num_files: int = 0
    disk_bytes: int = 0


class RecentSharing:
    """The latest `Sharing`: computed at each request if that is quick, else now and then.

    A result that is due is replaced in the background; requests wait only for the first one, and
    for one that would be older than `_MAX_AGE_S`. Thread-safe.
    """

    def __init__(self, read: Callable[[Callable[[], object]], Sharing]) -> None:
        """`read` calls its argument after each piece of work, which may pause."""
        self._read = read
        self._reading = threading.Lock()
        self._is_awaited = threading.Event()  # ends the pauses of a computation
        self._latest = Sharing()
        self._due = self._too_old = 0.0  # by the monotonic clock

    def get(self) -> Sharing:
        now = time.monotonic()
        if now < self._due:
            return self._latest
        if now < self._too_old:
            if not self._reading.locked():
                work = self._refresh_later
                threading.Thread(target=work, name="semantic-sharing", daemon=True).start()
            return self._latest
        self._is_awaited.set()
        return self.refresh(1.0)

    def refresh(self, share: float) -> Sharing:
        """Compute it, unless another thread has done so meanwhile; waits for that thread.

        Takes a share of a core until a request waits for the result.
        """
        with self._reading:
            self._is_awaited.clear()
            if time.monotonic() >= self._due:
                started = time.thread_time()
                latest = self._read(Pace(self._is_awaited.wait, share))
                elapsed, now = time.thread_time() - started, time.monotonic()
                is_quick = elapsed < _QUICK_S
                self._latest = latest
                self._due = 0.0 if is_quick else now + elapsed * _SHARING_COST
                self._too_old = 0.0 if is_quick else max(now + _MAX_AGE_S, self._due)
            return self._latest

    def _refresh_later(self) -> None:
        with contextlib.suppress(SemanticError):  # a request reports it once the result is too old
            self.refresh(_BACKGROUND_SHARE)


class _Reach:
    """Walks back from the heads of agents, visiting a shared block only once.

    What it has passed is in arrays: garbage collection would scan a million tuples for 0.5 s.
    """

    def __init__(self, get: Callable[[BlockName], BlockNode | None]) -> None:
        self.num_bytes = 0
        self._get = get
        self._passed: dict[BlockName, int] = {}  # where a block is in the next two
        self._nbytes, self._first_places = array("q"), array("q")
        self._firsts: list[BlockNode] = []

    def back_from(self, name: BlockName) -> tuple[BlockNode | None, int]:
        """Return the earliest block that connects to `name` without a gap, and the bytes between.

        The bytes include both ends. Without any such block, returns (None, 0).
        """
        way: list[BlockNode] = []
        while name not in self._passed and (node := self._get(name)) is not None:
            way.append(node)
            name = node.parent
        place = self._passed.get(name)
        if place is not None:
            nbytes, first_place = self._nbytes[place], self._first_places[place]
        elif way:
            nbytes, first_place = 0, len(self._firsts)
            self._firsts.append(way[-1])
        else:
            return None, 0
        for node in reversed(way):
            own = max(node.memory_bytes, node.disk_bytes)
            nbytes += own
            self.num_bytes += own
            self._passed[node.name] = len(self._nbytes)
            self._nbytes.append(nbytes)
            self._first_places.append(first_place)
        return self._firsts[first_place], nbytes


class CacheService:
    """Statistics of and operations on the KV cache of all agents.

    Thread-safe; methods may read from disk. Methods raise AgentNotFoundError if the agent does not
    exist, and ModelSwapError while no model is loaded. `state`, `change`, `repin`, `sample`, `use`
    and `running` work without a model.
    """

    def __init__(
        self,
        cache: Callable[[], ModelCache],
        agents: AgentLedger,
        device: DeviceThread,
        watch: TurnWatch,
        feed: EventFeed,
        disk: DiskTier | None,
    ) -> None:
        self._cache = cache
        self._agents = agents
        self._device = device
        self._watch = watch
        self._feed = feed
        self._disk = disk
        self._sharing = RecentSharing(self._read_sharing)

    def state(self, agent: Agent) -> StateView:
        """Return where an agent's KV cache is; an empty view while no model is loaded."""
        with contextlib.suppress(ModelSwapError):
            return self._cache().upkeep.footprint(agent)
        return StateView()

    def change(self, before: Turn | None, turn: Turn) -> str:
        """Return why a turn could not reuse the KV cache of the turn before it; empty if it could.

        Also empty while no model is loaded.
        """
        if before is None or before.pointer is None or turn.pointer is None:
            return ""
        with contextlib.suppress(ModelSwapError):
            formats = self._cache().upkeep.formats
            return formats.describe(before.pointer.root, turn.pointer.root)
        return ""

    def repin(self) -> None:
        with contextlib.suppress(ModelSwapError):  # loading a model sets the pins
            self._cache().upkeep.refresh_pins()

    def prefetch(self, principal: Principal, agent_id: str) -> int:
        agent = self._agents.get(principal.tenant, agent_id)
        return self._cache().upkeep.prefetch(agent)

    def evict(self, principal: Principal, agent_id: str, *, is_cold: bool) -> StateView:
        """Evict blocks that only this agent uses, and its idle sequences; `is_cold` from disk too.

        Raises:
            ModelSwapError: no model is loaded, or the device is busy.
        """
        agent = self._agents.get(principal.tenant, agent_id)
        upkeep = self._cache().upkeep
        closing = self._device.close_idle(f"{agent.tenant}/{agent.id}")
        try:
            closing.result(_CLOSE_TIMEOUT_S)
        except FutureTimeoutError as error:
            raise ModelSwapError("the device is busy.", retry_after_s=2) from error
        if self._disk is not None:
            self._disk.flush(_CLOSE_TIMEOUT_S)  # a part that is being written cannot be evicted
        upkeep.evict(agent, is_cold=is_cold)
        self._feed.publish(AgentChanged(agent.tenant, agent.id, AgentAction.EVICTED))
        return self.state(agent)

    def collect(self, orphan_age_s: float | None) -> int:
        """Delete unused blocks that no agent reaches; returns the bytes freed.

        Raises:
            CachePersistenceError: the ledger cannot be changed now.
        """
        return self._cache().upkeep.collect(orphan_age_s=orphan_age_s)

    def verify(self) -> Iterator[CheckProgress]:
        return self._cache().upkeep.verify()

    def sample(self) -> tuple[dict[str, int], str]:
        """Return the cache counters and the memory pressure; cheap enough for polling.

        While no model is loaded, the counters are zero and the pressure is `none`.
        """
        try:
            store = self._cache().store
        except ModelSwapError:
            return CacheCounts().totals, "none"
        return store.counts.totals, store.usage().pressure.name.lower()

    def use(self) -> CacheUse:
        """Return the current memory and disk usage; cheap enough for polling."""
        memory = PoolUsage(0, 0, 0, 0, 0)
        with contextlib.suppress(ModelSwapError):
            memory = self._cache().store.usage()
        disk = self._disk
        model = self._device.model
        device = model.backend.device_memory() if model else None
        if disk is None:
            return CacheUse(memory, 0, 0, 0, device)
        budget, queued = disk.limits.budget_bytes, disk.queued_bytes
        return CacheUse(memory, disk.used_bytes, budget, queued, device)

    def sharing(self) -> Sharing:
        """Return how much state all agents reach and share, and how much is on disk.

        With many agents the result may be `_MAX_AGE_S` old, which bounds the cost of polling.
        """
        self._cache()  # raises if no model is loaded
        return self._sharing.get()

    def count_sharing(self) -> None:
        """Count what `sharing` returns beforehand; pauses often, to leave requests the CPU."""
        self._sharing.refresh(_BACKGROUND_SHARE)

    def _read_sharing(self, pause: Callable[[], object]) -> Sharing:
        cache = self._cache()
        num_files, disk_bytes = cache.store.files_on_disk()
        reach = _Reach(cache.store.get)
        logical, tiers = 0, Counter(dict.fromkeys(Tier, 0))
        agents = self._agents.recent()
        for start in range(0, len(agents), _BATCH):
            some = agents[start : start + _BATCH]
            for agent, place in zip(some, self._agents.places(some), strict=True):
                pause()
                pointer = place.pointer
                first, nbytes = reach.back_from(pointer.block) if pointer else (None, 0)
                logical += nbytes
                if pointer and cache.upkeep.is_lost(agent, pointer):
                    tiers[Tier.COLD] += 1  # a prefix shared with other agents is not looked up here
                elif pointer and first and first.parent == pointer.root:
                    tiers[tier_of(first)] += 1
                else:  # the last blocks were evicted: find the remaining prefix by its tokens
                    tiers[cache.upkeep.footprint(agent).tier] += 1
        return Sharing(logical, reach.num_bytes, dict(tiers), num_files, disk_bytes)

    def running(self, principal: Principal) -> list[RunningTurn]:
        return self._watch.running(principal.tenant)

    def blocks(self, after: str, limit: int) -> BlockPage:
        return self._cache().store.watch.page(after, limit)

    def changed_blocks(self, since: int, limit: int) -> BlockPage:
        """Return the blocks added, changed or removed since the mark of an earlier page."""
        return self._cache().store.watch.changes(since, limit)

    def overview(self) -> CacheOverview:
        cache = self._cache()
        usage = cache.store.usage()
        counters, pressure = self.sample()
        requests, model = self._watch.counts, self._device.model
        shared = self.sharing()
        return CacheOverview(
            memory_budget=usage.total,
            memory_used=usage.used,
            memory_working=usage.working,
            pressure=pressure,
            num_blocks=usage.num_blocks,
            disk_budget=self._disk.limits.budget_bytes if self._disk else 0,
            disk_used=shared.disk_bytes,
            disk_other=self._disk.other_bytes if self._disk else 0,
            num_files=shared.num_files,
            queue_budget=self._disk.limits.queue_bytes if self._disk else 0,
            queue_used=self._disk.queued_bytes if self._disk else 0,
            tiers=tuple(shared.tiers.items()),
            logical_bytes=shared.logical_bytes,
            unique_bytes=shared.unique_bytes,
            num_replies=requests.replies,
            reuse=requests.reuse,
            counters=counters,
            num_live=self._device.num_live,
            problem=self._disk.problem if self._disk else "",
            device=model.backend.device_memory() if model else None,
        )
