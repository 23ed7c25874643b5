"""Which blocks are known, and what is known of a prompt: the tree that recall walks.

A node is a block; what it has of each kind of layers is in memory, on disk, or both. A node may
also stand for a mere boundary inside a longer block: then it has window or state parts alone. The
index knows token ids, names and positions; it reads no file and counts no bytes. Not thread-safe:
its owner has the lock.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from semantic.domain.blocks import (
    TOKEN_BYTES,
    BlockName,
    BlockPart,
    packed_block_name,
)
from semantic.domain.spec import LayerKind
from semantic.ports.outbound import KVPayload


@dataclass(slots=True, eq=False)
class BlockNode:
    """A known block.

    Attributes:
        start: Position of its first token.
        tokens: Its ids, packed.
        payloads: Parts that are in memory.
        files: Parts that are on disk.
        num_leases: Readers that count on its files.
        num_pins: Pinned agents it belongs to.
    """

    root: BlockName
    name: BlockName
    parent: BlockName
    start: int
    tokens: bytes
    payloads: dict[LayerKind, KVPayload] = field(default_factory=dict)
    files: dict[LayerKind, BlockPart] = field(default_factory=dict)
    num_leases: int = 0
    num_pins: int = 0
    last_used: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of the block."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.num_tokens

    def has(self, kind: LayerKind) -> bool:
        """Whether a part can be had, from memory or disk."""
        return kind in self.payloads or kind in self.files

    def part(self, kind: LayerKind) -> BlockPart:
        """Describe a part that is to be written."""
        return BlockPart(
            self.root, self.name, self.parent, kind, self.start, self.tokens, 0, self.last_used
        )


class _Siblings:
    """Blocks that follow the same one, by their tokens."""

    __slots__ = ("by_tokens", "lengths", "ordered")

    def __init__(self) -> None:
        self.by_tokens: dict[bytes, BlockNode] = {}
        self.ordered: list[bytes] = []
        self.lengths: Counter[int] = Counter()

    def add(self, node: BlockNode) -> None:
        if node.tokens not in self.by_tokens:
            insort(self.ordered, node.tokens)
            self.lengths[len(node.tokens)] += 1
        self.by_tokens[node.tokens] = node

    def remove(self, node: BlockNode) -> None:
        if self.by_tokens.pop(node.tokens, None) is not None:
            del self.ordered[bisect_left(self.ordered, node.tokens)]
            self.lengths[len(node.tokens)] -= 1
            if not self.lengths[len(node.tokens)]:
                del self.lengths[len(node.tokens)]

    def beginnings(self, rest: bytes) -> list[BlockNode]:
        """Nodes whose tokens `rest` begins with, the longest first."""
        lengths = sorted((n for n in self.lengths if n <= len(rest)), reverse=True)
        found = (self.by_tokens.get(rest[:length]) for length in lengths)
        return [node for node in found if node is not None]

    def longest_run(self, rest: bytes) -> tuple[BlockNode, int] | None:
        """The node with FULL state that shares most tokens with `rest`, and how many.

        In sorted order that is a neighbour of where `rest` would stand.
        """
        place = bisect_left(self.ordered, rest)
        best: tuple[BlockNode, int] | None = None
        for step in (-1, 1):
            index = place - 1 if step < 0 else place
            while 0 <= index < len(self.ordered):
                tokens = self.ordered[index]
                num_shared = _common_tokens(tokens, rest)
                if not num_shared or (best is not None and num_shared <= best[1]):
                    break
                if self.by_tokens[tokens].has(LayerKind.FULL):
                    best = (self.by_tokens[tokens], num_shared)
                    break
                index += step
        return best


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known beginning of a prompt.

    Attributes:
        nodes: Blocks that hold it, in order; all but the last are used whole.
        end: Positions it covers.
        boundaries: Nodes that end somewhere on the way, also those with no FULL state.
    """

    nodes: tuple[BlockNode, ...]
    end: int
    boundaries: tuple[BlockNode, ...]


class BlockIndex:
    """All known blocks, found by name, by parent or by what they hold."""

    def __init__(self) -> None:
        self._nodes: dict[BlockName, BlockNode] = {}
        self._followers: dict[BlockName, _Siblings] = {}

    def __len__(self) -> int:
        """How many nodes there are."""
        return len(self._nodes)

    def __iter__(self) -> Iterator[BlockNode]:
        """All nodes, in no particular order."""
        return iter(self._nodes.values())

    def get(self, name: BlockName) -> BlockNode | None:
        """Find a node by its name."""
        return self._nodes.get(name)

    def add(self, root: BlockName, parent: BlockName, start: int, tokens: bytes) -> BlockNode:
        """Find a node by what it holds, or make it."""
        name = packed_block_name(parent, tokens)
        node = self._nodes.get(name)
        if node is None:
            node = BlockNode(root, name, parent, start, tokens)
            self._nodes[name] = node
            self._followers.setdefault(parent, _Siblings()).add(node)
        return node

    def remove(self, node: BlockNode) -> None:
        """Forget a node; those that follow it stay, for it may be made again."""
        if self._nodes.pop(node.name, None) is None:
            return
        siblings = self._followers[node.parent]
        siblings.remove(node)
        if not siblings.by_tokens:
            del self._followers[node.parent]

    def followers(self, name: BlockName) -> Iterable[BlockNode]:
        """The nodes that follow a block."""
        siblings = self._followers.get(name)
        return siblings.by_tokens.values() if siblings else ()

    def chain(self, name: BlockName) -> list[BlockNode]:
        """The nodes up to `name`, from the first one that is known without a gap."""
        nodes: list[BlockNode] = []
        while (node := self._nodes.get(name)) is not None:
            nodes.append(node)
            name = node.parent
        return nodes[::-1]

    def reached(self, names: Iterable[BlockName]) -> set[BlockName]:
        """Blocks that lead to any of `names`, and the boundaries inside them."""
        reached: set[BlockName] = set()
        for end in names:
            name = end
            while name not in reached and (node := self._nodes.get(name)) is not None:
                reached.add(name)
                reached.update(tail.name for tail in self.begun_by(node))
                name = node.parent
        return reached

    def begun_by(self, node: BlockNode) -> list[BlockNode]:
        """Siblings whose tokens `node` begins with and that nothing follows."""
        siblings = self._followers[node.parent].beginnings(node.tokens)
        return [other for other in siblings if other is not node and not self.has_followers(other)]

    def continued_by(self, node: BlockNode) -> BlockNode | None:
        """A sibling that begins with a node's tokens and goes on."""
        siblings = self._followers[node.parent]
        place = bisect_left(siblings.ordered, node.tokens) + 1
        if place < len(siblings.ordered) and siblings.ordered[place].startswith(node.tokens):
            return siblings.by_tokens[siblings.ordered[place]]
        return None

    def has_followers(self, node: BlockNode) -> bool:
        """Whether a block goes on from here."""
        return node.name in self._followers

    def match(self, root: BlockName, tokens: bytes, block_tokens: int) -> Match:
        """Find the longest known beginning of `tokens`, which are packed."""
        path: list[BlockNode] = []
        boundaries: list[BlockNode] = []
        best: tuple[int, list[BlockNode]] = (0, [])
        parent, position = root, 0
        while (siblings := self._followers.get(parent)) is not None:
            first = position * TOKEN_BYTES
            rest = tokens[first : first + block_tokens * TOKEN_BYTES]
            beginnings = siblings.beginnings(rest) if rest else []
            boundaries += beginnings
            run = siblings.longest_run(rest) if rest else None
            if run is not None and position + run[1] > best[0]:
                best = (position + run[1], [*path, run[0]])
            leading = (n for n in beginnings if n.has(LayerKind.FULL) and self.has_followers(n))
            onward = next(leading, None)
            if onward is None:
                break
            path.append(onward)
            parent, position = onward.name, onward.end
            if position >= best[0]:
                best = (position, list(path))
        end, nodes = best
        return Match(tuple(nodes), end, tuple(b for b in boundaries if b.end <= end))


def _common_tokens(left: bytes, right: bytes) -> int:
    """Leading tokens that are equal."""
    low, high = 0, min(len(left), len(right)) // TOKEN_BYTES
    if left[: high * TOKEN_BYTES] == right[: high * TOKEN_BYTES]:
        return high
    # Halving compares slices in C; a walk would compare them in Python.
    while high - low > 1:
        middle = (low + high) // 2
        if left[: middle * TOKEN_BYTES] == right[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low
