"""Plans how much of a known prefix can be restored, and from which parts.

Full-attention layers can resume at any token. Window layers need the tokens before that position,
and recurrent layers need a state taken exactly there. Where these are missing, the plan falls back
to the last position that has them.
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
        """Unique key of the part."""
        return (self.node.name, self.kind)

    def near_part(self) -> BlockPart | None:
        """Return the part to read from disk; None if it is in memory or not on disk."""
        return self.node.files.get(self.kind) if self.kind not in self.node.payloads else None

    def far_part(self) -> BlockPart | None:
        """Return the part to read from the object store; None if it is in memory or on disk."""
        return None if self.near_part() else self.node.unread(self.kind)


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
        """Make a plan that restores nothing: all tokens must be computed."""
        return cls((), 0, root, 0)


def plan_restore(
    root: BlockName, match: Match, spec: ModelCacheSpec, block_ends: frozenset[BlockName]
) -> RestorePlan:
    """Plan the longest restore that a match allows.

    Args:
        root: Root of the chain.
        match: The longest known prefix of the prompt.
        spec: Says which kinds of layers must be restored.
        block_ends: Names of matched blocks that other blocks may follow, which excludes tails.
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
    """Remove from a plan the parts that take longer to read from a tier than to compute.

    Args:
        plan: What can be restored.
        root: Root of the chain.
        spec: Says which kinds of layers must be restored.
        unread_part: Returns what the tier must read for a part; None if another tier has it.
        is_read_in: Whether the tier reads a number of bytes within a number of seconds.
        seconds_per_token: Time to compute one token.
        begun: Parts that are already being read for this plan; their cost is not counted again.
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
    """Return the last position at which layers of all kinds can resume."""
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
    """Return nodes that end within the matched prefix, without duplicates."""
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
        memory_bytes=sum(node.memory_bytes for node in nodes),
        disk_bytes=sum(node.disk_bytes for node in nodes),
        block=nodes[-1].name if nodes else None,
    )
