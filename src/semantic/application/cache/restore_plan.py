"""Plans how much of a known prefix can be restored, and from which parts.

Full-attention layers can resume at any token. Window layers need the tokens before that position,
and recurrent layers need a state taken exactly there. Where these are missing, the plan falls back
to the last position that has them. Parts that take longer to read than to compute are left out.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import takewhile

from semantic.application.cache.index import BlockNode, Match
from semantic.domain.agents import Tier
from semantic.domain.blocks import BlockName, BlockPart, PartKey
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.backend import KVPayload
from semantic.ports.inbound import StateView

_DECAY = 0.9  # weight of earlier measurements at each new one
_HALF_LIFE_S = 60.0  # without new measurements, the estimated read time halves in this time


@dataclass(frozen=True, slots=True)
class WantedPart:
    """A part of a block that a restore needs."""

    node: BlockNode
    kind: LayerKind

    @property
    def key(self) -> PartKey:
        return (self.node.name, self.kind)

    def disk_part(self) -> BlockPart | None:
        """Return the part to read from disk; None if it is in memory or not on disk."""
        return self.node.files.get(self.kind) if self.kind not in self.node.payloads else None

    def shared_part(self) -> BlockPart | None:
        """Return the part to read from the object store; None if it is in memory or on disk."""
        return None if self.disk_part() else self.node.part_to_read(self.kind)


@dataclass(slots=True, eq=False)
class HeldPart:
    """A part that stays in memory, or is being read into it, until `BlockTiers.release`.

    Attributes:
        nbytes: Upper bound of the memory it takes.
        future: Its payload; fails with `CacheCorruptionError` if the part cannot be read.
        is_counted: Whether the pool holds it; False while it is being read or if reading failed.
        was_in_memory: Whether it needed no read. A quick read may be done at once as well.
    """

    wanted: WantedPart
    nbytes: int = 0
    future: Future[KVPayload] = field(default_factory=Future)
    is_counted: bool = False
    was_in_memory: bool = False


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """How to restore a new sequence up to position `end`.

    Attributes:
        parts: FULL parts in order, then WINDOW parts in order, then the STATE part.
        chain: Name of the last block that is used whole.
        num_whole: Positions covered by whole blocks; sealing continues from there.
    """

    parts: tuple[WantedPart, ...]
    end: int
    chain: BlockName
    num_whole: int

    @classmethod
    def nothing(cls, root: BlockName) -> "RestorePlan":
        return cls((), 0, root, 0)


def plan_restore(
    root: BlockName, match: Match, spec: ModelCacheSpec, block_ends: frozenset[BlockName]
) -> RestorePlan:
    """Plan the longest restore that a match allows.

    `block_ends` names the matched blocks that other blocks may follow, which excludes tails.
    """
    end = _restorable_end(match, spec)
    nodes = [node for node in match.nodes if node.start < end]
    if not nodes:
        return RestorePlan.nothing(root)
    parts = [WantedPart(node, LayerKind.FULL) for node in nodes]
    if spec.num_window:
        cover = _window_cover(match, spec.window, end) or ()
        parts += [WantedPart(node, LayerKind.WINDOW) for node in cover]
    if spec.num_state:
        parts.append(WantedPart(_state_node(match, end), LayerKind.STATE))
    last = nodes[-1]
    if last.end == end and last.name in block_ends:
        return RestorePlan(tuple(parts), end, last.name, end)
    return RestorePlan(tuple(parts), end, last.parent, last.start)


class ReadCost:
    """Estimates the duration of reads from earlier reads. Thread-safe."""

    def __init__(
        self, num_ignored: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Ignore the first `num_ignored` reads, because they also open connections."""
        self._lock = threading.Lock()
        self._num_ignored = num_ignored
        self._clock = clock
        self._num_reading = 0
        self._seconds = 0.0
        self._bytes = 0.0
        self._measured_at = 0.0

    @contextlib.contextmanager
    def measured(self, nbytes: int) -> Iterator[None]:
        """Measure a read; failed reads do not count."""
        with self._lock:
            self._num_reading += 1
            num_reading = self._num_reading
        started = self._clock()
        try:
            yield
        except BaseException:
            with self._lock:
                self._num_reading -= 1
            raise
        ended = self._clock()
        elapsed = ended - started
        with self._lock:
            num_reading = max(num_reading, self._num_reading)
            self._num_reading -= 1
            if self._num_ignored:
                self._num_ignored -= 1
                return
            # Weighted by bytes: many small files must not make large ones look slow. Concurrent
            # reads share the elapsed time.
            self._seconds = self._seconds * _DECAY + elapsed / num_reading
            self._bytes = self._bytes * _DECAY + nbytes
            self._measured_at = ended

    def seconds_to_read(self, nbytes: int) -> float:
        """Estimate the duration of a read in seconds; 0 before the first measurement.

        The estimate decays with its age. Otherwise a disk once found too slow would not be read,
        hence not be measured, and never be tried again.
        """
        with self._lock:
            age_s = self._clock() - self._measured_at
            belief = math.exp2(-age_s / _HALF_LIFE_S)
            return nbytes * self._seconds / max(self._bytes, 1) * belief


@dataclass(frozen=True, slots=True)
class ReadCosts:
    """Estimate the seconds to read a number of bytes from each tier; None without such a tier."""

    disk: Callable[[int], float] | None
    shared: Callable[[int], float] | None


def worth_reading(
    plan: RestorePlan,
    root: BlockName,
    spec: ModelCacheSpec,
    costs: ReadCosts,
    seconds_per_token: float,
    begun: Collection[PartKey] = (),
) -> RestorePlan:
    """Remove from a plan the parts that take longer to read than to compute.

    Decides for the object store first, then for the disk.

    Args:
        seconds_per_token: Time to compute one token; 0 if it is not known yet.
        begun: Parts that are already being read for this plan; their cost is not counted again.
    """
    if not seconds_per_token:
        return plan
    for seconds_to_read, part_to_read in (
        (costs.shared, WantedPart.shared_part),
        (costs.disk, WantedPart.disk_part),
    ):
        if seconds_to_read is None:
            continue
        wanted = [w for w in plan.parts if w.key not in begun]
        unread = [(w.node.start, part) for w in wanted if (part := part_to_read(w)) is not None]
        nbytes = sum(part.nbytes for _, part in unread)
        first = min((start for start, _ in unread), default=plan.end)
        if seconds_to_read(nbytes) > (plan.end - first) * seconds_per_token:
            plan = _cut_at(plan, root, spec, first)
    return plan


def _cut_at(plan: RestorePlan, root: BlockName, spec: ModelCacheSpec, end: int) -> RestorePlan:
    """Shorten a plan to the blocks before `end`; to nothing if the model cannot resume there."""
    if spec.kinds != (LayerKind.FULL,):
        return RestorePlan.nothing(root)
    parts = tuple(w for w in plan.parts if w.node.end <= end)
    return RestorePlan(parts, end, parts[-1].node.name if parts else root, end)


def _restorable_end(match: Match, spec: ModelCacheSpec) -> int:
    if spec.kinds == (LayerKind.FULL,):
        return match.end
    if spec.num_state:
        ends = {node.end for node in _enders(match) if node.has(LayerKind.STATE)}
    else:
        ends = {match.end, *(node.end for node in _enders(match))}
    for end in sorted(ends, reverse=True):
        if not spec.num_window or _window_cover(match, spec.window, end) is not None:
            return end
    return 0


def _enders(match: Match) -> list[BlockNode]:
    whole = [node for node in match.nodes if node.end <= match.end]
    return list({node.name: node for node in (*whole, *match.boundaries)}.values())


def _window_cover(match: Match, window: int, end: int) -> list[BlockNode] | None:
    """Return nodes whose window parts cover the `window` positions before `end`, if possible."""
    nodes = {node.name: node for node in (*match.nodes, *match.boundaries)}.values()
    known = [node for node in nodes if node.has(LayerKind.WINDOW)]
    cover: list[BlockNode] = []
    position = end
    while position > max(0, end - window):
        fitting = [
            node
            for node in known
            if _window_start(node, window) < position
            and (node.end == position or (node.end > position and not cover))
        ]
        if not fitting:
            return None
        cover.append(min(fitting, key=lambda node: _window_start(node, window)))
        position = _window_start(cover[-1], window)
    return cover[::-1]


def _window_start(node: BlockNode, window: int) -> int:
    return max(node.start, node.end - window)


def _state_node(match: Match, end: int) -> BlockNode:
    return next(n for n in _enders(match) if n.end == end and n.has(LayerKind.STATE))


def needed_windows(
    nodes: Sequence[BlockNode], boundaries: Sequence[int], window: int
) -> set[BlockName]:
    """Return those nodes of a chain whose window parts are needed to resume at a boundary."""
    return {
        node.name
        for node in nodes
        if any(node.start < end and node.end > end - window for end in boundaries)
    }


def tier_of(first: BlockNode) -> Tier:
    """Return the tier from which a chain that begins with this block is read."""
    if LayerKind.FULL in first.payloads:
        return Tier.HOT
    return Tier.WARM if LayerKind.FULL in first.files else Tier.COLD


def state_of(plan: RestorePlan, num_tokens: int) -> StateView:
    """Summarize where the blocks of a plan are, for a conversation of `num_tokens` tokens.

    The last block may hold more tokens, if another conversation continued from it. A conversation
    of which less than half can be reused, such as a chat marker shared with others, is cold.
    """
    nodes = [wanted.node for wanted in plan.parts if wanted.kind is LayerKind.FULL]
    memory = list(takewhile(lambda node: LayerKind.FULL in node.payloads, nodes))
    disk = list(takewhile(lambda node: LayerKind.FULL in node.files, nodes))
    return StateView(
        tier=tier_of(nodes[0]) if nodes and 2 * plan.end >= num_tokens else Tier.COLD,
        num_tokens=num_tokens,
        memory_tokens=min(memory[-1].end, plan.end) if memory else 0,
        disk_tokens=min(disk[-1].end, plan.end) if disk else 0,
        reusable_tokens=plan.end,
        memory_bytes=sum(_used_bytes(node, node.payloads, plan.end) for node in nodes),
        disk_bytes=sum(_used_bytes(node, node.files, plan.end) for node in nodes),
        block=nodes[-1].name if nodes else None,
    )


def _used_bytes(node: BlockNode, parts: Mapping[LayerKind, KVPayload | BlockPart], end: int) -> int:
    """Return the bytes of a block's parts; of a FULL part those of the positions before `end`."""
    num_used = min(node.end, end) - node.start
    return sum(
        part.nbytes * num_used // node.num_tokens if kind is LayerKind.FULL else part.nbytes
        for kind, part in tuple(parts.items())
    )
