"""The cache as operators see it: figures, and operations that are asked for."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

from semantic.application.agents.feed import AgentAction, AgentChanged, EventFeed
from semantic.application.agents.ledger import AgentLedger
from semantic.application.agents.turns import RunningTurn, TurnWatch
from semantic.application.agents.upkeep import Upkeep
from semantic.application.cache.index import BlockNode, BlockPage
from semantic.application.cache.restore_plan import state_of
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskTier
from semantic.application.engine.device_thread import DeviceThread
from semantic.domain.agents import Agent, Principal, Tier
from semantic.domain.blocks import BlockName
from semantic.domain.errors import ModelSwapError
from semantic.domain.pool import PoolUsage
from semantic.ports.inbound import CacheOverview, CheckProgress, StateView
from semantic.ports.telemetry import CacheCounts

_CLOSE_TIMEOUT_S = 5.0
# What agents share is read again after so many times as long as that took, unless it was quick.
_SHARING_COST = 50
_QUICK_S = 0.05


@dataclass(frozen=True, slots=True)
class ModelCache:
    """The blocks of the loaded model, and who looks after them."""

    store: AgentCacheStore
    upkeep: Upkeep


@dataclass(frozen=True, slots=True)
class CacheUse:
    """How much is used now, in bytes; zeros before a model is loaded.

    Attributes:
        disk: Everything in the directory: blocks of all models, quarantine, ledger and backup.
    """

    memory: PoolUsage
    disk: int
    disk_budget: int
    queue: int


@dataclass(frozen=True, slots=True)
class Sharing:
    """What agents reach.

    Attributes:
        logical_bytes: Counted for each of them.
        unique_bytes: Counted once.
        tiers: How many of them start from which tier.
    """

    logical_bytes: int
    unique_bytes: int
    tiers: dict[Tier, int]


class _Reach:
    """Walks back from where agents stand; a block that many of them reach is passed once.

    Attributes:
        num_bytes: Of all blocks it passed.
    """

    def __init__(self, nodes: Iterable[BlockNode]) -> None:
        self.num_bytes = 0
        self._nodes = {node.name: node for node in nodes}
        self._passed: dict[BlockName, tuple[BlockNode | None, int]] = {}

    def back_from(self, name: BlockName) -> tuple[BlockNode | None, int]:
        """The first block that is known without a gap, and the bytes from it to `name`."""
        way: list[BlockNode] = []
        while name not in self._passed and (node := self._nodes.get(name)) is not None:
            way.append(node)
            name = node.parent
        first, nbytes = self._passed.get(name, (None, 0))
        for node in reversed(way):
            first, own = first or node, max(node.memory_bytes, node.disk_bytes)
            nbytes += own
            self.num_bytes += own
            self._passed[node.name] = first, nbytes
        return first, nbytes


class CacheService:
    """The KV cache of all agents. Any thread; may read from disk.

    Methods raise AgentNotFoundError where the agent is not there, and, but for `state`, `repin`,
    `sample` and `use`, ModelSwapError until the model, whose state it is, is loaded.
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
        self._sharing = Sharing(0, 0, dict.fromkeys(Tier, 0))
        self._sharing_due = 0.0

    def state(self, agent: Agent) -> StateView:
        """See where an agent's state is; nowhere before the model is loaded."""
        with contextlib.suppress(ModelSwapError):
            return self._cache().upkeep.footprint(agent)
        return StateView()

    def repin(self) -> None:
        """Let pins follow the agents that are pinned now."""
        with contextlib.suppress(ModelSwapError):  # they are set when it is loaded
            self._cache().upkeep.refresh_pins()

    def prefetch(self, principal: Principal, agent_id: str) -> int:
        """Begin to read an agent's state into memory; returns how many parts that are."""
        agent = self._agents.get(principal.tenant, agent_id)
        return self._cache().upkeep.prefetch(agent)

    def evict(self, principal: Principal, agent_id: str, *, is_cold: bool) -> StateView:
        """Drop an agent's own state from memory, working copies too, and from disk if asked."""
        agent = self._agents.get(principal.tenant, agent_id)
        upkeep = self._cache().upkeep
        closing = self._device.close_idle(f"{agent.tenant}/{agent.id}")
        try:
            closing.result(_CLOSE_TIMEOUT_S)
        except FutureTimeoutError as error:
            raise ModelSwapError("the device is busy.", retry_after_s=2) from error
        if self._disk is not None:
            self._disk.flush(_CLOSE_TIMEOUT_S)  # what is being written cannot be dropped
        upkeep.evict(agent, is_cold=is_cold)
        self._feed.publish(AgentChanged(agent.tenant, agent.id, AgentAction.EVICTED))
        return self.state(agent)

    def collect(self, orphan_age_s: float | None) -> int:
        """Delete what no agent reaches and nobody used for a while; returns the bytes freed.

        Raises:
            CachePersistenceError: the ledger cannot be changed now.
        """
        return self._cache().upkeep.collect(orphan_age_s=orphan_age_s)

    def verify(self) -> Iterator[CheckProgress]:
        """Read and check every file; bad ones are dropped."""
        return self._cache().upkeep.verify()

    def sample(self) -> tuple[dict[str, int], str]:
        """Read the counters and the memory's pressure, cheaply; zeros before the model is there."""
        try:
            store = self._cache().store
        except ModelSwapError:
            return CacheCounts().totals, "none"
        return store.counts.totals, store.usage().pressure.name.lower()

    def use(self) -> CacheUse:
        """Read how much is used now, cheaply."""
        memory = PoolUsage(0, 0, 0, 0, 0)
        with contextlib.suppress(ModelSwapError):
            memory = self._cache().store.usage()
        disk = self._disk
        if disk is None:
            return CacheUse(memory, 0, 0, 0)
        return CacheUse(memory, disk.used_bytes, disk.limits.budget_bytes, disk.queued_bytes)

    def sharing(self) -> Sharing:
        """See what all agents reach; where there are many, as it was a few seconds ago.

        Raises:
            ModelSwapError: no model is loaded.
        """
        cache = self._cache()
        if time.monotonic() >= self._sharing_due:
            started = time.thread_time()
            self._sharing = self._read_sharing(cache)
            elapsed = time.thread_time() - started
            is_quick = elapsed < _QUICK_S
            self._sharing_due = 0.0 if is_quick else time.monotonic() + elapsed * _SHARING_COST
        return self._sharing

    def _read_sharing(self, cache: ModelCache) -> Sharing:
        """Look once at each agent and at each block."""
        reach = _Reach(cache.store.nodes())
        logical, tiers = 0, Counter(dict.fromkeys(Tier, 0))
        for agent in self._agents.recent():
            pointer = self._agents.place(agent).pointer
            first, nbytes = reach.back_from(pointer.block) if pointer else (None, 0)
            logical += nbytes
            if pointer and first and first.parent == pointer.root:
                tiers[state_of([first], 0).tier] += 1
            else:  # its end is gone: what is left is found by its tokens
                tiers[cache.upkeep.footprint(agent).tier] += 1
        return Sharing(logical, reach.num_bytes, dict(tiers))

    def running(self, principal: Principal) -> list[RunningTurn]:
        """A tenant's requests that wait or run."""
        return self._watch.running(principal.tenant)

    def blocks(self, after: str, limit: int) -> BlockPage:
        """List all blocks, a page at a time."""
        return self._cache().store.watch.page(after, limit)

    def changed_blocks(self, since: int, limit: int) -> BlockPage:
        """List the blocks that came, changed or went since a mark."""
        return self._cache().store.watch.changes(since, limit)

    def overview(self) -> CacheOverview:
        """Read all figures, of all tenants together."""
        cache = self._cache()
        usage = cache.store.usage()
        counters, pressure = self.sample()
        requests, model = self._watch.counts, self._device.model
        shared = self.sharing()
        nodes = cache.store.nodes()
        files = [part.nbytes for node in nodes for part in tuple(node.files.values())]
        return CacheOverview(
            memory_budget=usage.total,
            memory_used=usage.used,
            memory_working=usage.working,
            pressure=pressure,
            num_blocks=usage.num_blocks,
            disk_budget=self._disk.limits.budget_bytes if self._disk else 0,
            disk_used=sum(files),
            disk_other=self._disk.other_bytes if self._disk else 0,
            num_files=len(files),
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
