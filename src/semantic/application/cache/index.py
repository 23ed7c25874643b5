"""The tree of known blocks, searched for the longest known prefix of a prompt.

A node is a block. Its parts, one per kind of layer, are in memory, on disk, or both. A node may
also represent a boundary inside a longer block; it then has window or state parts only. The index
holds token ids, names and positions; it reads no files and enforces no budget. Not thread-safe: the
owner holds the lock.
"""

import time
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from semantic.domain.blocks import (
    TOKEN_BYTES,
    BlockName,
    BlockPart,
    common_prefix,
    packed_block_name,
)
from semantic.domain.spec import LayerKind
from semantic.ports.backend import KVPayload

_MAX_CHANGES = 4096  # changes kept; a watcher that is further behind lists all blocks again
_OLDER_S = 30.0  # using a node again counts as a change for watchers only after this time


@dataclass(slots=True, eq=False)
class BlockNode:
    """A known block.

    Attributes:
        tokens: Its token ids, packed.
        payloads: Parts in memory.
        files: Parts on disk.
        shared: Parts known to be in the shared tier.
        num_leases: Readers that depend on its files.
        num_pins: Pinned agents it belongs to.
        last_kept: When its window or state part was last used, or last needed by a boundary.
    """

    root: BlockName
    name: BlockName
    parent: BlockName
    start: int
    tokens: bytes
    payloads: dict[LayerKind, KVPayload] = field(default_factory=dict)
    files: dict[LayerKind, BlockPart] = field(default_factory=dict)
    shared: dict[LayerKind, BlockPart] = field(default_factory=dict)
    num_leases: int = 0
    num_pins: int = 0
    last_used: float = 0.0
    last_kept: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def has(self, kind: LayerKind) -> bool:
        return kind in self.payloads or kind in self.files or kind in self.shared

    def part_to_read(self, kind: LayerKind) -> BlockPart | None:
        """The part to read, preferably from disk; None if it is in memory or nowhere."""
        if kind in self.payloads:
            return None
        return self.files.get(kind) or self.shared.get(kind)

    @property
    def memory_bytes(self) -> int:
        """Bytes of its parts in memory. Safe while other threads add and remove parts."""
        if not self.payloads:  # as most are
            return 0
        return sum([payload.nbytes for payload in tuple(self.payloads.values())])

    @property
    def disk_bytes(self) -> int:
        """Bytes of its files. Safe while other threads write and delete files."""
        return sum([part.nbytes for part in tuple(self.files.values())])

    def part(self, kind: LayerKind) -> BlockPart:
        return BlockPart(
            self.root, self.name, self.parent, kind, self.start, self.tokens, 0, self.last_used
        )


class _Siblings:
    __slots__ = ("by_tokens", "lengths", "ordered")

    def __init__(self, first: BlockNode) -> None:
        # Most nodes have no siblings, and a start creates a million of these.
        self.by_tokens = {first.tokens: first}
        self.ordered = [first.tokens]
        self.lengths = {len(first.tokens): 1}  # how many nodes have each

    def add(self, node: BlockNode) -> None:
        insort(self.ordered, node.tokens)
        self._count(node)

    def append(self, node: BlockNode) -> None:
        """Add one of many nodes; `ordered` must be sorted after the last."""
        self.ordered.append(node.tokens)
        self._count(node)

    def _count(self, node: BlockNode) -> None:
        length = len(node.tokens)
        self.lengths[length] = self.lengths.get(length, 0) + 1
        self.by_tokens[node.tokens] = node

    def remove(self, node: BlockNode) -> None:
        if self.by_tokens.pop(node.tokens, None) is not None:
            del self.ordered[bisect_left(self.ordered, node.tokens)]
            self.lengths[len(node.tokens)] -= 1
            if not self.lengths[len(node.tokens)]:
                del self.lengths[len(node.tokens)]

    def prefixes(self, rest: bytes) -> list[BlockNode]:
        """Return nodes whose tokens are a prefix of `rest`, the longest first."""
        lengths = sorted((n for n in self.lengths if n <= len(rest)), reverse=True)
        found = (self.by_tokens.get(rest[:length]) for length in lengths)
        return [node for node in found if node is not None]

    def longest_run(self, rest: bytes) -> tuple[BlockNode, int] | None:
        """Return the node with FULL state that shares the longest prefix with `rest`, and how long.

        In sorted order, that node is next to the position where `rest` would be inserted.
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
    """The longest known prefix of a prompt.

    Attributes:
        nodes: Blocks that hold it, in order; all but the last are used whole.
        end: Number of positions it covers.
        boundaries: Nodes that end within the prefix, including those without FULL state.
    """

    nodes: tuple[BlockNode, ...]
    end: int
    boundaries: tuple[BlockNode, ...]


class BlockIndex:
    """All known blocks, found by name, by parent or by tokens.

    Attributes:
        version: Grows when a node, file or payload is added or removed.
        num_files: Files of all nodes.
        written: Nodes with a new file since files are compared with the index; None at other times.
    """

    def __init__(self) -> None:
        self.version = self.num_files = 0
        self.written: set[BlockName] | None = None
        # Least recently used first; within a chain, the end before the beginning.
        self._nodes: OrderedDict[BlockName, BlockNode] = OrderedDict()
        self._followers: dict[BlockName, _Siblings] = {}
        self._disk_bytes: Counter[BlockName] = Counter()
        self._changed: deque[BlockName] = deque(maxlen=_MAX_CHANGES)
        # Starts at the current time, so that a mark of another index or process is not valid here.
        self._mark = time.time_ns() // 1000

    @property
    def mark(self) -> int:
        return self._mark

    def note_change(self, name: BlockName) -> None:
        self._mark += 1
        self._changed.append(name)

    def changed_since(self, mark: int) -> list[BlockName] | None:
        """Return nodes added, changed or removed since a mark; None if the mark is too old."""
        num_changes = self._mark - mark
        if not 0 <= num_changes <= len(self._changed):
            return None
        return list(dict.fromkeys(islice(reversed(self._changed), num_changes)))

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[BlockNode]:
        """Iterate over all nodes, the least recently used first."""
        return iter(self._nodes.values())

    def get(self, name: BlockName) -> BlockNode | None:
        return self._nodes.get(name)

    def touch(self, chain: Sequence[BlockNode], at: float) -> None:
        """Mark the nodes of a chain, given from its beginning, as just used."""
        for node in reversed(chain):
            is_older = at - node.last_used >= _OLDER_S
            node.last_used = at
            if is_older:
                self.note_change(node.name)
            if node.name in self._nodes:
                self._nodes.move_to_end(node.name)

    def sort_by_age(self) -> None:
        """Sort nodes by `last_used`, and within equal times the end of a chain first."""
        nodes = sorted(self._nodes.values(), key=lambda node: (node.last_used, -node.start))
        self._nodes = OrderedDict((node.name, node) for node in nodes)

    def disk_bytes(self, root: BlockName) -> int:
        return self._disk_bytes[root]

    @property
    def all_disk_bytes(self) -> int:
        return self._disk_bytes.total()

    def has_file(self, part: BlockPart) -> bool:
        """Whether a part's file is known, by a row that is not damaged."""
        node = self._nodes.get(part.name)
        known = node.files.get(part.kind) if node is not None else None
        return known is not None and known.is_same_block(part)

    def put_payloads(self, node: BlockNode, payloads: Mapping[LayerKind, KVPayload]) -> None:
        node.payloads.update(payloads)
        self.version += len(payloads)
        self.note_change(node.name)

    def pop_payload(self, node: BlockNode, kind: LayerKind) -> None:
        del node.payloads[kind]
        self.version += 1
        self.note_change(node.name)

    def put_file(self, node: BlockNode, part: BlockPart) -> None:
        if part.kind in node.files:
            self.pop_file(node, part.kind)
        node.files[part.kind] = part
        if self.written is not None:
            self.written.add(node.name)
        self.num_files += 1
        self.version += 1
        self.note_change(node.name)
        self._disk_bytes[node.root] += part.nbytes

    def pop_file(self, node: BlockNode, kind: LayerKind) -> BlockPart | None:
        part = node.files.pop(kind, None)
        if part is not None:
            self.num_files -= 1
            self.version += 1
            self.note_change(node.name)
            self._disk_bytes[node.root] -= part.nbytes
        return part

    def add(self, root: BlockName, parent: BlockName, start: int, tokens: bytes) -> BlockNode:
        """Return the node with this parent and these tokens; create it if it is unknown."""
        name = packed_block_name(parent, tokens)
        node, siblings = self._nodes.get(name), self._followers.get(parent)
        listed = siblings.by_tokens.get(tokens) if siblings is not None else None
        if node is not None and node is listed:
            return node
        for damaged in (node, listed):
            if damaged is not None:
                self._forget(damaged)
        node = self._nodes[name] = BlockNode(root, name, parent, start, tokens)
        if parent in self._followers:
            self._followers[parent].add(node)
        else:
            self._followers[parent] = _Siblings(node)
        self.version += 1
        return node

    def restore(self, parts: Iterable[BlockPart]) -> None:
        """Add many files, and sort all nodes by age.

        A name is not compared with the tokens, although rows of the ledger may be damaged: that
        would take as long as everything else. Damage is found when the file is read, when the same
        block is added, and when the files are compared with the index.
        """
        others = [part for part in parts if not self._restore_node(part)]
        for siblings in self._followers.values():
            siblings.ordered.sort()
        for part in others:
            node = self._nodes.get(part.name)
            if node is None or (node.parent, node.tokens) != (part.parent, part.tokens):
                node = self.add(part.root, part.parent, part.start, part.tokens)
            self.put_file(node, part)
            node.last_used = max(node.last_used, part.last_used)
        self.sort_by_age()

    def _restore_node(self, part: BlockPart) -> bool:
        """Add a node for a file; False if there is one of its name or of its tokens."""
        name, parent, tokens = part.name, part.parent, part.tokens
        siblings = self._followers.get(parent)
        if name in self._nodes or (siblings is not None and tokens in siblings.by_tokens):
            return False
        node = BlockNode(part.root, name, parent, part.start, tokens, last_used=part.last_used)
        self._nodes[name] = node
        if siblings is None:
            self._followers[parent] = _Siblings(node)
        else:
            siblings.append(node)
        self.put_file(node, part)
        return True

    def _forget(self, node: BlockNode) -> None:
        """Remove a node that a damaged row described; its file is compared with the index later."""
        for kind in tuple(node.files):
            self.pop_file(node, kind)
        self.remove(node)

    def remove(self, node: BlockNode) -> None:
        """Remove a node. Its followers stay, because the same block may be added again."""
        if self._nodes.pop(node.name, None) is None:
            return
        self.version += 1
        self.note_change(node.name)
        siblings = self._followers[node.parent]
        siblings.remove(node)
        if not siblings.by_tokens:
            del self._followers[node.parent]

    def prune(self, node: BlockNode) -> None:
        """Remove a node that has no payload, no file and no lease.

        If the block is also in the shared tier, a prompt that needs it finds it there again.
        """
        is_known = self._nodes.get(node.name) is node  # not a newer node of the same name
        if is_known and not (node.payloads or node.files or node.num_leases):
            self.remove(node)

    def followers(self, name: BlockName) -> Iterable[BlockNode]:
        siblings = self._followers.get(name)
        return siblings.by_tokens.values() if siblings else ()

    def chain(self, name: BlockName) -> list[BlockNode]:
        """Return the nodes up to `name`, starting after the last unknown ancestor."""
        nodes: list[BlockNode] = []
        while (node := self._nodes.get(name)) is not None:
            nodes.append(node)
            name = node.parent
        return nodes[::-1]

    def chain_from(self, root: BlockName, name: BlockName) -> list[BlockNode] | None:
        """Return the nodes from a root to `name`; None if one of them is unknown."""
        chain = self.chain(name)
        return chain if (chain[0].parent if chain else name) == root else None

    def path(self, name: BlockName) -> list[BlockNode]:
        """Return the chain up to `name`, followed by the boundaries inside its blocks."""
        chain = self.chain(name)
        return [*chain, *(tail for node in chain for tail in self.prefixes_of(node))]

    def reachable(self, names: Iterable[BlockName]) -> set[BlockName]:
        """Return the blocks in the chains up to any of `names`, and the boundaries inside them."""
        reachable: set[BlockName] = set()
        for end in names:
            name = end
            while name not in reachable and (node := self._nodes.get(name)) is not None:
                reachable.add(name)
                reachable.update(tail.name for tail in self.prefixes_of(node))
                name = node.parent
        return reachable

    def prefixes_of(self, node: BlockNode) -> list[BlockNode]:
        """Return siblings without followers whose tokens are a prefix of the node's tokens."""
        siblings = self._followers[node.parent].prefixes(node.tokens)
        return [other for other in siblings if other is not node and not self.has_followers(other)]

    def extension_of(self, node: BlockNode) -> BlockNode | None:
        """Return a sibling with FULL state whose tokens extend the node's tokens, if any."""
        siblings = self._followers[node.parent]
        place = bisect_left(siblings.ordered, node.tokens) + 1
        for tokens in islice(siblings.ordered, place, None):
            if not tokens.startswith(node.tokens):
                return None
            if siblings.by_tokens[tokens].has(LayerKind.FULL):
                return siblings.by_tokens[tokens]
        return None

    def superseded_tails(self, node: BlockNode) -> list[BlockNode]:
        """Return the tails that `node` replaces, except those with readers.

        A tail is a short block in which a turn ended; `node` begins with its tokens. A tail's file
        stays until `node` has a file too, because writing that file may fail.
        """
        return [
            tail
            for tail in self.prefixes_of(node)
            if tail.has(LayerKind.FULL)
            and not tail.num_leases
            and (LayerKind.FULL in node.files or LayerKind.FULL not in tail.files)
        ]

    def has_followers(self, node: BlockNode) -> bool:
        return node.name in self._followers

    def pin(self, names: Iterable[BlockName]) -> None:
        before = {node.name for node in self if node.num_pins}
        for node in self:
            node.num_pins = 0
        for name in names:
            for node in self.path(name):
                node.num_pins += 1
        for name in before ^ {node.name for node in self if node.num_pins}:
            self.note_change(name)

    def check_integrity(self) -> None:
        """Recount the bytes on disk, and check that every node can be found through its parent."""
        counted: Counter[BlockName] = Counter()
        for node in self:
            counted[node.root] += node.disk_bytes
            if self._followers[node.parent].by_tokens.get(node.tokens) is not node:
                raise AssertionError("a node is not listed under its parent")
        if any(counted[root] != nbytes for root, nbytes in self._disk_bytes.items()):
            raise AssertionError("bytes on disk do not add up")
        if sum(len(node.files) for node in self) != self.num_files:
            raise AssertionError("the number of files is wrong")
        if sum(len(siblings.by_tokens) for siblings in self._followers.values()) != len(self):
            raise AssertionError("a removed node is still listed under its parent")

    def match(self, root: BlockName, tokens: bytes, block_tokens: int) -> Match:
        boundaries: list[BlockNode] = []
        end, last = 0, None
        # Chains may cut the same tokens at different positions, so the search follows all of them.
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
