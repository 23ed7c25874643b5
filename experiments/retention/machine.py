"""The real store, pool, index and eviction code, driven by a trace; a byte is a token.

Under LRU nothing of them is replaced. For a candidate, the order of eviction is: blocks with the
lowest rank first, and never a block before those that follow it. Only the disk is simulated.
"""

import functools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from experiments.retention.policies import Policy, cost
from experiments.retention.traces import GRAIN, TraceTurn
from semantic.adapters.outbound.backends.fake import fake_spec
from semantic.application.cache.index import BlockIndex, BlockNode
from semantic.application.cache.restore_plan import ReadCost
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskLimits, WriteJob
from semantic.domain.blocks import BlockName, BlockNamespace, BlockPart, PartKey, block_end
from semantic.domain.errors import CachePersistenceError
from semantic.domain.pool import BlockPool
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.backend import HostBuffer, KVPayload

BLOCK_TOKENS = 1024  # of a simulated block; smaller ones take longer and change little
ROOT = BlockNamespace("simulated", "tokens").root()
_SLACK = 0.02  # as the writer frees in advance


class SimulatedDisk:
    """A disk of so many tokens, without threads: `drain` writes what was offered."""

    def __init__(self, budget: int) -> None:
        self.cost = ReadCost()
        self.limits = DiskLimits(budget, budget)
        self._jobs: deque[WriteJob] = deque()
        self._content: dict[PartKey, KVPayload] = {}
        self._used = 0
        self.num_read = 0

    def offer(self, job: WriteJob) -> bool:
        self._jobs.append(job)
        return True

    def drain(self) -> None:
        while self._jobs:
            job = self._jobs.popleft()
            budget, nbytes, written = self.limits.budget_bytes, job.payload.nbytes, None
            excess = self._used + nbytes - budget
            try:
                self.delete(job.victims(job.part, nbytes, excess, int(budget * _SLACK)))
            except CachePersistenceError:
                excess = nbytes
            if self._used + nbytes <= budget:
                written = replace(job.part, nbytes=nbytes)
                self._content[job.part.key] = job.payload
                self._used += nbytes
            job.on_end(job.part, written)

    def read(self, part: BlockPart) -> Future[KVPayload]:
        done: Future[KVPayload] = Future()
        self.num_read += part.nbytes
        done.set_result(self._content[part.key])
        return done

    def room_for(self, part: BlockPart) -> int:
        return part.nbytes

    def delete(self, parts: Iterable[BlockPart], *, is_bad: bool = False) -> None:  # noqa: ARG002
        for part in parts:
            self._used -= self._content.pop(part.key).nbytes


@dataclass
class Tally:
    """Tokens of prompts that a machine computed, their cost, and tokens that it read from disk."""

    computed: int = 0
    cost: float = 0.0
    read: int = 0


class Machine:
    """A server without a model: looks prompts up, computes nothing, and keeps blocks."""

    def __init__(
        self,
        policy: Policy,
        memory: int,
        disk: int = 0,
        *,
        grain: int = GRAIN,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        """Keep `memory` tokens in memory and `disk` tokens on disk; `grain` as in the trace."""
        self.now = 0.0
        self.policy = policy
        self._grain, self._block = grain, block_tokens // grain
        self._disk = SimulatedDisk(disk) if disk else None
        self._tally = Tally()
        spec = fake_spec(block_tokens=self._block)
        policy.grain = grain
        pool = BlockPool(spec, memory) if policy.is_lru else RankedPool(spec, memory, self)
        self.store = AgentCacheStore(pool, self._disk, now=lambda: self.now)  # type: ignore[arg-type]
        if not policy.is_lru:
            self.store.tiers.index = self.store._index = RankedIndex(self)

    def run(self, turns: Sequence[TraceTurn]) -> Tally:
        """Take the turns of a trace."""
        for turn in turns:
            self._turn(turn)
        self._tally.read = self._disk.num_read if self._disk else 0
        return self._tally

    def _turn(self, turn: TraceTurn) -> None:
        """Take a turn as the engine does: look up, reserve, restore, compute, seal."""
        self.now = turn.at
        store, prompt = self.store, turn.prompt
        plan = store.plan(ROOT, prompt[:-1])
        self.policy.begin(turn, [part.node for part in plan.parts])
        working = (len(prompt) + len(turn.reply) + self._block) * self._grain
        store.reserve(working)
        plan = store.plan(ROOT, prompt[:-1])
        for wanted in plan.parts:
            if store.tiers.is_unread(wanted):
                held = store.tiers.acquire(wanted)
                assert held is not None
                store.tiers.release(held)
        self._tally.computed += (len(prompt) - plan.end) * self._grain
        self._tally.cost += cost(plan.end * self._grain, len(prompt) * self._grain)
        last = self._seal(turn, plan.chain, plan.num_whole)
        store.touch_chain(last)
        store.unreserve(working)
        self.policy.end(turn, store.chain(last))
        self._drain()

    def _seal(self, turn: TraceTurn, chain: BlockName, start: int) -> BlockName:
        tokens = (*turn.prompt, *turn.reply)[:-1]  # the last sampled token is not computed
        while start < len(tokens):
            end = min(block_end(start, self._block, [turn.num_head]), len(tokens))
            content = _zeros((end - start) * self._grain)
            payload = KVPayload("tokens", LayerKind.FULL, start, end, (content,))
            name = self.store.seal(ROOT, chain, tokens[start:end], [payload])
            self._drain()
            if name is None:
                break
            chain, start = name, end
        return chain

    def _drain(self) -> None:
        if self._disk is not None:
            self._disk.drain()

    def ranked(self, nodes: Iterable[BlockNode]) -> list[BlockNode]:
        """Sort nodes for eviction; a block ranks at least as high as those that follow it."""
        ranks: dict[BlockName, float] = {}
        ordered = sorted(nodes, key=lambda node: -node.start)
        for node in ordered:
            rank = max(ranks.get(node.name, 0.0), self.policy.rank(node, self.now))
            ranks[node.name] = rank
            ranks[node.parent] = max(ranks.get(node.parent, 0.0), rank)
        return sorted(ordered, key=lambda node: (ranks[node.name], -node.start))


@functools.cache
def _zeros(nbytes: int) -> HostBuffer:
    return HostBuffer("full", (nbytes,), "u8", bytes(nbytes))


class RankedPool(BlockPool):
    """Evicts in the order of a policy's ranks, sorted once a turn."""

    def __init__(self, spec: ModelCacheSpec, budget: int, machine: Machine) -> None:
        super().__init__(spec, budget)
        self._machine = machine
        self._order: deque[PartKey] = deque()
        self._sorted_at = -1.0

    def _next_victims(self, excess: int, spared: Collection[PartKey] = ()) -> list[PartKey]:
        if excess <= 0:
            return []
        if self._sorted_at != self._machine.now:
            self._sort()
        victims = self._first(excess, spared)
        if sum(self._entries[key].nbytes for key in victims) < excess:
            self._sort()  # parts that were added or released since are needed too
            victims = self._first(excess, spared)
        return victims

    def _first(self, excess: int, spared: Collection[PartKey]) -> list[PartKey]:
        while self._order and self._order[0] not in self._idle:
            self._order.popleft()
        victims: list[PartKey] = []
        for key in self._order:
            if excess <= 0:
                break
            if key in self._idle and key not in spared:
                victims.append(key)
                excess -= self._entries[key].nbytes
        return victims

    def _sort(self) -> None:
        self._sorted_at = self._machine.now
        index = self._machine.store.tiers.index
        nodes = [index.get(name) for name, _ in self._idle]
        ranked = self._machine.ranked(node for node in nodes if node is not None)
        self._order = deque((node.name, LayerKind.FULL) for node in ranked)

    def _make_room(self, nbytes: int, spared: Collection[PartKey] = ()) -> list[PartKey]:
        evicted = super()._make_room(nbytes, spared)
        if evicted:
            last = self._machine.store.tiers.index.get(evicted[-1][0])
            assert last is not None
            self._machine.policy.note_victim(last)
        return evicted


class RankedIndex(BlockIndex):
    """Lists nodes in the order of a policy's ranks, which is the order of eviction from disk."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __iter__(self) -> Iterator[BlockNode]:
        return iter(self._machine.ranked(self._nodes.values()))
