"""What of a known beginning can be restored, and from which parts.

Full-attention layers can be resumed at any token. Window layers need the tokens before it, and
recurrent layers the state that was taken exactly there; where these are missing, the recall falls
back to the last place that has them.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile

from semantic.application.cache.index import BlockNode, Match
from semantic.domain.agents import Tier
from semantic.domain.blocks import BlockName, BlockPart, PartKey
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.inbound import StateView


@dataclass(frozen=True, slots=True)
class WantedPart:
    """A part of a block that a restore needs."""

    node: BlockNode
    kind: LayerKind

    @property
    def key(self) -> PartKey:
        """What tells it from every other part."""
        return (self.node.name, self.kind)

    def near_part(self) -> BlockPart | None:
        """What must be read from disk; None if it is in memory, or elsewhere."""
        return self.node.files.get(self.kind) if self.kind not in self.node.payloads else None

    def far_part(self) -> BlockPart | None:
        """What must be read from the object store; None if it is nearer."""
        return None if self.near_part() else self.node.unread(self.kind)


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """How to bring a new sequence to `end`.

    Attributes:
        parts: FULL parts in order, then WINDOW parts in order, then the STATE part.
        chain: Name of the last block that is used whole.
        num_whole: Positions of whole blocks; sealing goes on from there.
    """

    parts: tuple[WantedPart, ...]
    end: int
    chain: BlockName
    num_whole: int

    @classmethod
    def nothing(cls, root: BlockName) -> "RestorePlan":
        """Everything is to be computed."""
        return cls((), 0, root, 0)


def plan_restore(
    root: BlockName, match: Match, spec: ModelCacheSpec, block_ends: frozenset[BlockName]
) -> RestorePlan:
    """Plan the longest restore a match allows.

    Args:
        root: Where the chain begins.
        match: What is known.
        spec: Which kinds of layers must be restored.
        block_ends: Names of the matched blocks that others may follow: not mere tails.
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


def worth_reading(
    plan: RestorePlan,
    root: BlockName,
    spec: ModelCacheSpec,
    unread_part: Callable[[WantedPart], BlockPart | None],
    is_read_in: Callable[[int, float], bool],
    seconds_per_token: float,
    begun: Collection[PartKey] = (),
) -> RestorePlan:
    """Leave out of a plan what would take longer to read from a tier than to compute.

    Args:
        plan: What can be restored.
        root: Where the chain begins.
        spec: Which kinds of layers must be restored.
        unread_part: What the tier has to read of a part; None if another has it.
        is_read_in: Whether so many bytes are read in so many seconds.
        seconds_per_token: What computing costs.
        begun: Parts that are being read for this plan already: they are not weighed again.
    """
    wanted = [w for w in plan.parts if w.key not in begun]
    unread = [(w.node.start, part) for w in wanted if (part := unread_part(w)) is not None]
    nbytes = sum(part.nbytes for _, part in unread)
    first = min((start for start, _ in unread), default=plan.end)
    if is_read_in(nbytes, (plan.end - first) * seconds_per_token):
        return plan
    if spec.kinds != (LayerKind.FULL,):
        return RestorePlan.nothing(root)
    parts = tuple(w for w in plan.parts if w.node.end <= first)
    return RestorePlan(parts, first, parts[-1].node.name if parts else root, first)


def _restorable_end(match: Match, spec: ModelCacheSpec) -> int:
    """The last place where all kinds of layers can go on."""
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
    """Nodes that end on the matched way, each once."""
    whole = [node for node in match.nodes if node.end <= match.end]
    return list({node.name: node for node in (*whole, *match.boundaries)}.values())


def _window_cover(match: Match, window: int, end: int) -> list[BlockNode] | None:
    """Nodes whose window parts cover the `window` positions before `end`; None if they cannot."""
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
    """Where a node's window part begins."""
    return max(node.start, node.end - window)


def _state_node(match: Match, end: int) -> BlockNode:
    return next(n for n in _enders(match) if n.end == end and n.has(LayerKind.STATE))


def needed_windows(
    nodes: Sequence[BlockNode], boundaries: Sequence[int], window: int
) -> set[BlockName]:
    """Of a chain's nodes, those whose window parts a boundary depends on."""
    return {
        node.name
        for node in nodes
        if any(node.start < end and node.end > end - window for end in boundaries)
    }


def state_of(nodes: Sequence[BlockNode], num_tokens: int) -> StateView:
    """See where the blocks of a chain are, which `num_tokens` were kept in.

    Its last block may hold more: whoever went on from here.
    """
    memory = list(takewhile(lambda node: LayerKind.FULL in node.payloads, nodes))
    disk = list(takewhile(lambda node: LayerKind.FULL in node.files, nodes))
    return StateView(
        tier=Tier.HOT if memory else Tier.WARM if disk else Tier.COLD,
        num_tokens=num_tokens,
        memory_tokens=min(memory[-1].end, num_tokens) if memory else 0,
        disk_tokens=min(disk[-1].end, num_tokens) if disk else 0,
        memory_bytes=sum(node.memory_bytes for node in nodes),
        disk_bytes=sum(node.disk_bytes for node in nodes),
        block=nodes[-1].name if nodes else None,
    )
