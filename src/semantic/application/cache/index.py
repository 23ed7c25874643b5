"""Which blocks are known, and what is known of a prompt: the tree that recall walks.

A node is a block; what it has of each kind of layers is in memory, on disk, or both. A node may
also stand for a mere boundary inside a longer block: then it has window or state parts alone. The
index knows token ids, names and positions; it reads no file and counts no bytes. Not thread-safe:
its owner has the lock.
"""

import threading
import time
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from semantic.domain.blocks import (
    TOKEN_BYTES,
    BlockName,
    BlockPart,
    PartKey,
    common_prefix,
    packed_block_name,
)
from semantic.domain.spec import LayerKind
from semantic.ports.backend import KVPayload

_MAX_CHANGES = 4096  # that those who watch may be behind
_OLDER_S = 30.0  # a node that was used again looks younger from here on


@dataclass(slots=True, eq=False)
class BlockNode:
    """A known block.

    Attributes:
        start: Position of its first token.
        tokens: Its ids, packed.
        payloads: Parts that are in memory.
        files: Parts that are on disk.
        remote: Parts that are in the object store, as far as that is known.
        num_leases: Readers that count on its files.
        num_pins: Pinned agents it belongs to.
        last_kept: When its window or state part was last worth keeping, or used.
    """

    root: BlockName
    name: BlockName
    parent: BlockName
    start: int
    tokens: bytes
    payloads: dict[LayerKind, KVPayload] = field(default_factory=dict)
    files: dict[LayerKind, BlockPart] = field(default_factory=dict)
    remote: dict[LayerKind, BlockPart] = field(default_factory=dict)
    num_leases: int = 0
    num_pins: int = 0
    last_used: float = 0.0
    last_kept: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of the block."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.num_tokens

    def has(self, kind: LayerKind) -> bool:
        """Whether a part is in memory, on disk or in the object store."""
        return kind in self.payloads or kind in self.files or kind in self.remote

    def unread(self, kind: LayerKind) -> BlockPart | None:
        """The part as it would have to be read: from disk if it is there; None if in memory."""
        if kind in self.payloads:
            return None
        return self.files.get(kind) or self.remote.get(kind)

    @property
    def memory_bytes(self) -> int:
        """Bytes of its parts in memory, which other threads may bring and take away meanwhile."""
        return sum([payload.nbytes for payload in tuple(self.payloads.values())])

    @property
    def disk_bytes(self) -> int:
        """Bytes of its files, which other threads may write and delete meanwhile."""
        return sum([part.nbytes for part in tuple(self.files.values())])

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

    def prefixes(self, rest: bytes) -> list[BlockNode]:
        """Nodes whose tokens `rest` begins with, the longest first."""
        lengths = sorted((n for n in self.lengths if n <= len(rest)), reverse=True)
        found = (self.by_tokens.get(rest[:length]) for length in lengths)
        return [node for node in found if node is not None]

    def longest_run(self, rest: bytes) -> tuple[BlockNode, int] | None:
        """The node with FULL state that shares most tokens with `rest`, and how many.

        In sorted order that is a neighbour of where `rest` would stand.
        """
        whole = self.by_tokens.get(rest)
        if whole is not None and whole.has(LayerKind.FULL):
            return whole, whole.num_tokens
        place, wanted = bisect_left(self.ordered, rest), memoryview(rest).cast("I")
        best: tuple[BlockNode, int] | None = None
        for step in (-1, 1):
            index = place - 1 if step < 0 else place
            while 0 <= index < len(self.ordered):
                tokens = self.ordered[index]
                num_shared = common_prefix(memoryview(tokens).cast("I"), wanted)
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
    """All known blocks, found by name, by parent or by what they hold.

    Attributes:
        version: Grows when a node, a file or, by whoever keeps it there, a payload comes or goes.
    """

    def __init__(self) -> None:
        self.version = 0
        # The least recently used first; of a chain, its end before its beginning.
        self._nodes: OrderedDict[BlockName, BlockNode] = OrderedDict()
        self._followers: dict[BlockName, _Siblings] = {}
        self._disk_bytes: Counter[BlockName] = Counter()
        self._changed: deque[BlockName] = deque(maxlen=_MAX_CHANGES)
        # No mark of another index, or of another process, is taken for one of these.
        self._mark = time.time_ns() // 1000

    @property
    def mark(self) -> int:
        """Names this moment for `changed_since`."""
        return self._mark

    def note_change(self, name: BlockName) -> None:
        """Let those who watch know that a node, or what is where of it, changed."""
        self._mark += 1
        self._changed.append(name)

    def changed_since(self, mark: int) -> list[BlockName] | None:
        """Nodes that came, changed or went since a moment; None if that is not known any more."""
        num_changes = self._mark - mark
        if not 0 <= num_changes <= len(self._changed):
            return None
        return list(dict.fromkeys(islice(reversed(self._changed), num_changes)))

    def __len__(self) -> int:
        """How many nodes there are."""
        return len(self._nodes)

    def __iter__(self) -> Iterator[BlockNode]:
        """All nodes, the least recently used first."""
        return iter(self._nodes.values())

    def get(self, name: BlockName) -> BlockNode | None:
        """Find a node by its name."""
        return self._nodes.get(name)

    def touch(self, chain: Sequence[BlockNode], at: float) -> None:
        """Mark nodes, of which the first begins the chain, as just used."""
        for node in reversed(chain):
            is_older = at - node.last_used >= _OLDER_S
            node.last_used = at
            if is_older:
                self.note_change(node.name)
            if node.name in self._nodes:
                self._nodes.move_to_end(node.name)

    def sort_by_age(self) -> None:
        """Bring nodes into the order in which they were used, as far as that is known."""
        nodes = sorted(self._nodes.values(), key=lambda node: (node.last_used, -node.start))
        self._nodes = OrderedDict((node.name, node) for node in nodes)

    def disk_bytes(self, root: BlockName) -> int:
        """Bytes of the files of one root's blocks."""
        return self._disk_bytes[root]

    def has_file(self, key: PartKey) -> bool:
        """Whether a part is on disk."""
        node = self._nodes.get(key[0])
        return node is not None and key[1] in node.files

    def put_file(self, node: BlockNode, part: BlockPart) -> None:
        """Note a node's part on disk."""
        self.pop_file(node, part.kind)
        node.files[part.kind] = part
        self.version += 1
        self.note_change(node.name)
        self._disk_bytes[node.root] += part.nbytes

    def pop_file(self, node: BlockNode, kind: LayerKind) -> BlockPart | None:
        """Forget a node's part on disk, and return it."""
        part = node.files.pop(kind, None)
        if part is not None:
            self.version += 1
            self.note_change(node.name)
            self._disk_bytes[node.root] -= part.nbytes
        return part

    def add(self, root: BlockName, parent: BlockName, start: int, tokens: bytes) -> BlockNode:
        """Find a node by what it holds, or make it."""
        name = packed_block_name(parent, tokens)
        node = self._nodes.get(name)
        if node is None:
            node = BlockNode(root, name, parent, start, tokens)
            self._nodes[name] = node
            self.version += 1
            self._followers.setdefault(parent, _Siblings()).add(node)
        return node

    def remove(self, node: BlockNode) -> None:
        """Forget a node; those that follow it stay, for it may be made again."""
        if self._nodes.pop(node.name, None) is None:
            return
        self.version += 1
        self.note_change(node.name)
        siblings = self._followers[node.parent]
        siblings.remove(node)
        if not siblings.by_tokens:
            del self._followers[node.parent]

    def prune(self, node: BlockNode) -> None:
        """Forget a node of which nothing is left here and that nobody counts on.

        If it is in the object store, that is asked again when it is needed.
        """
        is_known = self._nodes.get(node.name) is node  # and not one that was made since
        if is_known and not (node.payloads or node.files or node.num_leases):
            self.remove(node)

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

    def chain_from(self, root: BlockName, name: BlockName) -> list[BlockNode] | None:
        """The nodes that lead from a root to `name`; None if one of them is not known."""
        chain = self.chain(name)
        return chain if (chain[0].parent if chain else name) == root else None

    def path(self, name: BlockName) -> list[BlockNode]:
        """The chain up to `name`, then the boundaries inside its blocks."""
        chain = self.chain(name)
        return [*chain, *(tail for node in chain for tail in self.prefixes_of(node))]

    def reachable(self, names: Iterable[BlockName]) -> set[BlockName]:
        """Blocks that lead to any of `names`, and the boundaries inside them."""
        reachable: set[BlockName] = set()
        for end in names:
            name = end
            while name not in reachable and (node := self._nodes.get(name)) is not None:
                reachable.add(name)
                reachable.update(tail.name for tail in self.prefixes_of(node))
                name = node.parent
        return reachable

    def prefixes_of(self, node: BlockNode) -> list[BlockNode]:
        """Siblings whose tokens `node` begins with and that nothing follows."""
        siblings = self._followers[node.parent].prefixes(node.tokens)
        return [other for other in siblings if other is not node and not self.has_followers(other)]

    def extension_of(self, node: BlockNode) -> BlockNode | None:
        """A sibling with FULL state that begins with a node's tokens and goes on."""
        siblings = self._followers[node.parent]
        place = bisect_left(siblings.ordered, node.tokens) + 1
        for tokens in islice(siblings.ordered, place, None):
            if not tokens.startswith(node.tokens):
                return None
            if siblings.by_tokens[tokens].has(LayerKind.FULL):
                return siblings.by_tokens[tokens]
        return None

    def has_followers(self, node: BlockNode) -> bool:
        """Whether a block goes on from here."""
        return node.name in self._followers

    def pin(self, names: Iterable[BlockName]) -> None:
        """Pin what leads to these blocks, and nothing else."""
        before = {node.name for node in self if node.num_pins}
        for node in self:
            node.num_pins = 0
        for name in names:
            for node in self.path(name):
                node.num_pins += 1
        for name in before ^ {node.name for node in self if node.num_pins}:
            self.note_change(name)

    def check_integrity(self) -> None:
        """Recount the bytes on disk, and look for nodes that cannot be found.

        Raises:
            AssertionError: something does not add up.
        """
        counted: Counter[BlockName] = Counter()
        for node in self:
            counted[node.root] += node.disk_bytes
            if self._followers[node.parent].by_tokens.get(node.tokens) is not node:
                raise AssertionError("a node is not among those that follow its parent")
        if any(counted[root] != nbytes for root, nbytes in self._disk_bytes.items()):
            raise AssertionError("bytes on disk do not add up")
        if sum(len(siblings.by_tokens) for siblings in self._followers.values()) != len(self):
            raise AssertionError("a node that was removed is still followed to")

    def match(self, root: BlockName, tokens: bytes, block_tokens: int) -> Match:
        """Find the longest known beginning of `tokens`, which are packed."""
        boundaries: list[BlockNode] = []
        end, last = 0, None
        # Chains may be cut in different places: every way that goes on is followed.
        ways = [(root, 0)] if root in self._followers else []
        while ways:
            parent, position = ways.pop()
            siblings = self._followers[parent]
            rest = tokens[position * TOKEN_BYTES : (position + block_tokens) * TOKEN_BYTES]
            run = siblings.longest_run(rest)
            if run is not None and position + run[1] > end:
                end, last = position + run[1], run[0]
            beginnings = siblings.prefixes(rest)
            boundaries += beginnings
            for node in reversed(beginnings):
                if not node.has(LayerKind.FULL) or not self.has_followers(node):
                    continue
                ways.append((node.name, node.end))
                if node.end >= end:
                    end, last = node.end, node
        nodes = self.chain(last.name) if last is not None else ()
        return Match(tuple(nodes), end, tuple(b for b in boundaries if b.end <= end))


@dataclass(frozen=True, slots=True)
class BlockPage:
    """Some blocks.

    Attributes:
        mark: Asks for what changed since.
        num_blocks: All there are.
        gone: Blocks that are not known any more.
        cursor: Asks for the next page; None on the last one.
        is_stale: What changed is not known any more: read all pages again.
    """

    mark: int
    num_blocks: int
    blocks: tuple[BlockNode, ...] = ()
    gone: tuple[BlockName, ...] = ()
    cursor: str | None = None
    is_stale: bool = False


class BlockWatch:
    """All blocks as those see them who draw a map: a page at a time, then only what changed.

    It changes nothing, and holds the lock only to look names up, so that a map of 50,000 blocks
    costs the engine nothing: what of a block is where is read when it is drawn. Thread-safe.
    """

    def __init__(self, index: BlockIndex, lock: threading.RLock) -> None:
        self._index = index
        self._lock = lock

    def page(self, after: str, limit: int) -> BlockPage:
        """List blocks in the order of their names, from the one after `after`, a cursor, on."""
        with self._lock:
            mark, nodes = self._index.mark, list(self._index)
        rest = [node for node in nodes if node.name.hex() > after] if after else nodes
        rest.sort(key=lambda node: node.name)
        shown = rest[:limit]
        cursor = shown[-1].name.hex() if len(rest) > len(shown) else None
        return BlockPage(mark, len(nodes), tuple(shown), cursor=cursor)

    def changes(self, since: int, limit: int) -> BlockPage:
        """List the blocks that came, changed or went since a mark; stale if they are too many."""
        with self._lock:
            mark, num_blocks = self._index.mark, len(self._index)
            names = self._index.changed_since(since)
            if names is None or len(names) > limit:
                return BlockPage(mark, num_blocks, is_stale=True)
            nodes = [self._index.get(name) for name in names]
        gone = tuple(name for name, node in zip(names, nodes, strict=True) if node is None)
        return BlockPage(mark, num_blocks, tuple(filter(None, nodes)), gone)
