"""Candidates for the order of eviction: each ranks a block by what is known at that time.

`Policy` itself is LRU as the store has it. The value of a block is the chance per second that its
conversation returns, times the cost to compute the block, divided by its bytes. A position's cost
grows with the context that attention reads there.
"""

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

from experiments.retention.traces import GRAIN, TraceTurn
from semantic.application.cache.index import BlockNode
from semantic.domain.blocks import BlockName

_ATTENTION = 16_384  # tokens of context at which attention costs as much as the rest of a 1B model


def cost(start: int, end: int) -> float:
    """Return the cost to compute tokens at these positions; 1 is that of the first token."""
    return (end - start) * (1 + (start + end) / (2 * _ATTENTION))


class Policy:
    """Ranks blocks: those with the lowest rank are evicted first. This one is LRU."""

    is_lru = True
    grain = GRAIN

    def price(self, node: BlockNode) -> float:
        """Return the cost of a block's tokens per token, which is per byte."""
        start, end = node.start * self.grain, node.end * self.grain
        return cost(start, end) / (end - start)

    def note_victim(self, node: BlockNode) -> None:
        """Note that a block was evicted."""

    def begin(self, turn: TraceTurn, nodes: Sequence[BlockNode]) -> None:
        """Note that a turn uses these blocks."""

    def end(self, turn: TraceTurn, chain: Sequence[BlockNode]) -> None:
        """Note that a turn has ended with this chain."""

    def rank(self, node: BlockNode, now: float) -> float:
        raise NotImplementedError


class Lru2(Policy):
    """LRU by the last use but one."""

    is_lru = False

    def __init__(self) -> None:
        self._uses: dict[BlockName, tuple[float, float]] = {}

    def end(self, turn: TraceTurn, chain: Sequence[BlockNode]) -> None:
        for node in chain:
            last = self._uses.get(node.name, (0.0, 0.0))[1]
            if last != turn.at:
                self._uses[node.name] = (last, turn.at)

    def rank(self, node: BlockNode, now: float) -> float:
        before, last = self._uses.get(node.name, (now, now))
        return before + last * 1e-9


class Gdsf(Policy):
    """Greedy dual-size frequency: uses x cost / bytes, plus the clock at the last use."""

    is_lru = False

    def __init__(self) -> None:
        self._clock = 0.0
        self._uses: Counter[BlockName] = Counter()
        self._ranks: dict[BlockName, float] = {}

    def end(self, turn: TraceTurn, chain: Sequence[BlockNode]) -> None:  # noqa: ARG002
        for node in chain:
            self._uses[node.name] += 1
            self._ranks[node.name] = self._clock + self._uses[node.name] * self.price(node)

    def note_victim(self, node: BlockNode) -> None:
        self._clock = max(self._clock, self._ranks.get(node.name, 0.0))

    def rank(self, node: BlockNode, now: float) -> float:  # noqa: ARG002
        return self._ranks.get(node.name, self._clock + self.price(node))


_FLOOR_S = 4.0  # pauses up to this count as the same
_NUM_SPANS = 18  # each twice as long as the one before: up to six days
_NUM_CLASSES = 6
_HEAD = 1024  # tokens at the beginning of conversations that count as alike
_CENTURY_S = 3e9
_PRIOR = 4.0  # conversations that the more general statistics count for


def _span(seconds: float) -> int:
    return min(_NUM_SPANS - 1, max(0, int(math.log2(max(seconds, _FLOOR_S) / _FLOOR_S))))


Kind: TypeAlias = tuple[Hashable, ...]  # from the general to the special


class ReturnTable:
    """The chance that a conversation returns before its pause has doubled.

    A kind with few conversations borrows from the more general kind, its key without the last item.
    """

    def __init__(
        self, returned: Counter[tuple[Kind, int]], waited: Counter[tuple[Kind, int]]
    ) -> None:
        """Count, for each kind, conversations that returned or still wait in each span."""
        self._returned, self._waited = (_for_all_levels(counts) for counts in (returned, waited))
        self._chances: dict[Kind, list[float]] = {}

    def chances(self, kind: Kind) -> list[float]:
        known = self._chances.get(kind)
        if known is None:
            prior = self.chances(kind[:-1]) if kind else [0.5] * _NUM_SPANS
            returned, waited = self._returned.get(kind, _NONE), self._waited.get(kind, _NONE)
            known = self._chances[kind] = [
                (returned[span] + _PRIOR * prior[span])
                / (sum(returned[span:]) + sum(waited[span + 1 :]) + _PRIOR)
                for span in range(_NUM_SPANS)
            ]
        return known

    def rate(self, kind: Kind, age: float) -> float:
        """Return the chance of a return per second, after a pause of `age` seconds."""
        return self.chances(kind)[_span(age)] / max(age, _FLOOR_S)

    def within(self, kind: Kind, age: float, horizon: float) -> float:
        """Return the chance of a return within a time, after a pause of `age` seconds."""
        chances, age = self.chances(kind), max(age, _FLOOR_S)
        stays, left = 1.0, horizon
        for span in range(_span(age), _NUM_SPANS):
            share = min(1.0, left / age)
            stays *= 1 - chances[span] * share
            left, age = left - age, 2 * age
            if left <= 0:
                break
        return 1 - stays


_NONE = [0] * _NUM_SPANS


def _for_all_levels(counts: Counter[tuple[Kind, int]]) -> dict[Kind, list[int]]:
    found: dict[Kind, list[int]] = {}
    for (kind, span), count in counts.items():
        for length in range(len(kind) + 1):
            found.setdefault(kind[:length], [0] * _NUM_SPANS)[span] += count
    return found


class Probation(Policy):
    """LRU, but conversations of one turn go first once they have paused for five minutes."""

    is_lru = False
    _YOUNG_S = 300.0

    def __init__(self) -> None:
        self._turns: Counter[str] = Counter()
        self._returned: set[BlockName] = set()

    def end(self, turn: TraceTurn, chain: Sequence[BlockNode]) -> None:
        self._turns[turn.agent] += 1
        if self._turns[turn.agent] > 1:
            self._returned.update(node.name for node in chain)

    def rank(self, node: BlockNode, now: float) -> float:
        is_safe = node.name in self._returned or now - node.last_used < self._YOUNG_S
        return node.last_used + (_CENTURY_S if is_safe else 0.0)


class ExpectedValue(Policy):
    """Value by the number of turns and the pause so far.

    The chance is that of a return within the horizon: the time after which blocks are evicted,
    or an instant.
    """

    is_lru = False
    refresh_s = 300.0

    def __init__(self, *, is_instant: bool = False, has_cost: bool = True) -> None:
        self._is_instant, self._has_cost = is_instant, has_cost
        self._turns: Counter[str] = Counter()
        self._last: dict[str, tuple[float, Kind]] = {}
        self._returned: Counter[tuple[Kind, int]] = Counter()
        self._table = ReturnTable(Counter(), Counter())
        self._built_at = -math.inf
        self._now, self._horizon = 0.0, 3600.0
        self.kinds: dict[BlockName, Kind] = {}

    def kind(self, turn: TraceTurn) -> Kind:
        """Return what is known about a conversation after a turn, from general to special."""
        return (min(_NUM_CLASSES - 1, self._turns[turn.agent].bit_length()),)

    def begin(self, turn: TraceTurn, nodes: Sequence[BlockNode]) -> None:  # noqa: ARG002
        last = self._last.get(turn.agent)
        if last is not None:
            self._returned[last[1], _span(turn.at - last[0])] += 1
        self._turns[turn.agent] += 1
        self._last[turn.agent] = (turn.at, self.kind(turn))
        self._now = turn.at
        if turn.at - self._built_at > self.refresh_s:
            self._built_at = turn.at
            waited = Counter((kind, _span(turn.at - at)) for at, kind in self._last.values())
            self._table = ReturnTable(self._returned, waited)

    def end(self, turn: TraceTurn, chain: Sequence[BlockNode]) -> None:
        kind = self.kind(turn)
        for node in chain:
            known = self.kinds.get(node.name, (0,))
            if kind[0] >= known[0]:  # type: ignore[operator]
                self.kinds[node.name] = kind

    def note_victim(self, node: BlockNode) -> None:
        self._horizon += 0.02 * (self._now - node.last_used - self._horizon)

    def rank(self, node: BlockNode, now: float) -> float:
        kind, age = self.kinds.get(node.name), now - node.last_used
        if kind is None:
            return math.inf  # of the turn that runs
        table = self._table
        is_instant = self._is_instant
        chance = table.rate(kind, age) if is_instant else table.within(kind, age, self._horizon)
        return chance * self.price(node) if self._has_cost else chance


class HeadValue(ExpectedValue):
    """As `ExpectedValue`, learned apart for conversations that begin with the same tokens."""

    def kind(self, turn: TraceTurn) -> Kind:
        return (*super().kind(turn), turn.prompt[: _HEAD // self.grain])


class AgentValue(ExpectedValue):
    """As `ExpectedValue`, with each agent's own pauses, and the hours of agents alike."""

    def __init__(self, *, has_cost: bool = True) -> None:
        super().__init__(has_cost=has_cost)
        self._hours: dict[Hashable, list[int]] = defaultdict(lambda: [0] * 24)

    def kind(self, turn: TraceTurn) -> Kind:
        return (*super().kind(turn), turn.prompt[: _HEAD // self.grain], turn.agent)

    def begin(self, turn: TraceTurn, nodes: Sequence[BlockNode]) -> None:
        self._hours[turn.prompt[: _HEAD // self.grain]][int(turn.at / 3600) % 24] += 1
        super().begin(turn, nodes)

    def rank(self, node: BlockNode, now: float) -> float:
        value, kind = super().rank(node, now), self.kinds.get(node.name)
        if kind is None:
            return value
        hours, age = self._hours[kind[1]], now - node.last_used
        ahead = range(1 + min(23, int(age / 3600)))
        share = sum(hours[(int(now / 3600) + hour) % 24] for hour in ahead) / len(ahead)
        return value * (share + 2) / (sum(hours) / 24 + 2)


class Oracle(Policy):
    """Knows when each block is used next: cost / bytes / seconds until then."""

    is_lru = False

    def __init__(self, uses: dict[BlockName, list[float]]) -> None:
        self._uses = uses

    def rank(self, node: BlockNode, now: float) -> float:
        times = self._uses.get(node.name, ())
        place = bisect.bisect_right(times, now)
        if place == len(times):
            return 0.0
        return self.price(node) / (times[place] - now)


class Recorder(Policy):
    """LRU that notes when each block is used, for `Oracle`."""

    def __init__(self) -> None:
        self.uses: dict[BlockName, list[float]] = defaultdict(list)

    def begin(self, turn: TraceTurn, nodes: Sequence[BlockNode]) -> None:
        for node in nodes:
            self.uses[node.name].append(turn.at)


CANDIDATES: dict[str, Callable[[], Policy]] = {
    "LRU": Policy,
    "LRU-2": Lru2,
    "GDSF": Gdsf,
    "probation": Probation,
    "value": ExpectedValue,
    "value at once": lambda: ExpectedValue(is_instant=True),
    "value without cost": lambda: ExpectedValue(has_cost=False),
    "value by head": lambda: HeadValue(has_cost=False),
    "value by agent and hour": lambda: AgentValue(has_cost=False),
}
