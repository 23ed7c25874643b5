"""Groups sequences of similar length in shared arrays, so that one operation computes all of them.

Attention per row over separate arrays was tried first. It is exact, but MLX pays a few microseconds
per operation: on an H200, eight rows took 1.8 times as long as one dense batch, thirty-two rows
five times. One dense batch of all rows pads short ones to the longest. Therefore the capacity of a
sequence is one of a series of sizes a quarter apart, and sequences of one size that decode together
share arrays ``[rows, heads, capacity, dim]``: beyond the first sizes at most a quarter is padding,
and joining or leaving copies the rows of that size only.

The rows that take part in a step are always the first ones. Rows that took part a few steps ago
stay behind them, so that a row that pauses for a step causes no copy.
"""

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Optional

import mlx.core as mx

from semantic.adapters.outbound.backends.drafting import Checkpoint
from semantic.adapters.outbound.backends.mlx.caches import (
    MLX_ARRAYS,
    Array,
    Arrays,
    CacheLayout,
    Part,
    capacity_for,
)
from semantic.adapters.outbound.backends.mlx.cuda import attention as cuda_attention
from semantic.adapters.outbound.backends.mlx.cuda import device as cuda
from semantic.adapters.outbound.backends.mlx.cuda.transfer import Copying
from semantic.adapters.outbound.backends.mlx.sampling import LoopRun, LoopTokens, PendingToken
from semantic.adapters.outbound.backends.mtp.state import HeadState

_STAY = 2  # a row may miss this many steps before it is moved out of its group


@dataclass(slots=True, eq=False)
class MlxSequence:
    """A sequence's tokens, and the location of its KV cache.

    Attributes:
        group: The group with its arrays; None while it holds no KV cache.
        last_token: The token sampled after the last one.
        copying: The last copy of its KV cache to the host, if any.
        lag: How far the position of its next token lags behind its index, because of images.
        ahead: See `DraftedSequence`, like `checkpoint`, whose arrays are by part.
        looped: Where the tokens of a loop begin in `known`, and these tokens; there are none
            in `known` until they are needed.
        begun: The last loop that writes after the sequence's end, and may not be adopted.
    """

    known: list[int]
    length: int = 0
    window_start: int = 0
    has_state: bool = True
    group: Optional["Group"] = None
    last_token: PendingToken | None = None
    last_step: int = 0
    copying: Copying | None = None
    lag: int = 0
    ahead: HeadState = field(default_factory=lambda: HeadState(MLX_ARRAYS))
    checkpoint: Checkpoint | None = None
    looped: tuple[int, LoopTokens] | None = None
    begun: LoopRun | None = None

    def read_looped(self) -> None:
        """Wait for the tokens of a loop, and fill them in."""
        if self.looped is not None:
            start, tokens = self.looped
            for place in range(start, min(start + len(tokens), len(self.known))):
                self.known[place] = tokens[place - start]
            self.looped = None

    def group_row(self) -> tuple["Group", int]:
        if self.group is None:
            raise ValueError("the sequence holds no KV cache")
        return self.group, self.group.members.index(self)


@dataclass(slots=True, eq=False)
class Group:
    """Sequences that share arrays.

    Attributes:
        members: By row; None where a sequence has left.
        arrays: By part; rows along the first axis.
        table: Addresses of the arrays on a CUDA device; None if unknown or outdated.
    """

    capacity: int
    arrays: Arrays
    members: list[MlxSequence | None] = field(default_factory=list)
    table: Array | None = None


class RowGroups:
    """Holds every sequence's arrays, alone or in a group.

    Attributes:
        are_joined: Whether sequences of equal capacity that decode together move into shared
            arrays; if not, each keeps its own.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.are_joined = True
        self._left: list[Group] = []
        self._moved: list[Group] = []
        self._tables: list[Array] = []
        self._table: Array | None = None

    def nbytes(self, sequences: Sequence[MlxSequence]) -> int:
        """Return the bytes of the groups that contain these sequences."""
        groups = {id(s.group): s.group for s in sequences if s.group is not None}
        return sum(self.layout.nbytes(g.capacity) * len(g.members) for g in groups.values())

    def isolate(self, sequence: MlxSequence, capacity: int) -> Group:
        """Give a sequence its own arrays with at least this capacity."""
        if sequence.group is None:
            return _add_to_group(sequence, Group(capacity, self.layout.zeros(capacity)))
        group, row = sequence.group_row()
        capacity = max(capacity, group.capacity)
        if len(group.members) > 1:
            arrays = _gather([(group, row)])
            self.remove(sequence)
            group = _add_to_group(sequence, Group(group.capacity, arrays))
        group.table = None  # the caller is about to change the arrays
        if capacity > group.capacity:
            group.arrays = self.layout.fit(group.arrays, capacity)
            group.capacity = capacity
        return group

    def make_room(self, sequence: MlxSequence, length: int) -> None:
        if length > sequence.group_row()[0].capacity:
            self.isolate(sequence, capacity_for(length))

    def copy(self, source: MlxSequence, target: MlxSequence) -> None:
        """Copy the KV cache of `source` up to the target's length to `target`.

        If the source is alone and has the same capacity, the arrays are shared until either is
        written to. On CUDA they are copied at once, before the source continues, because the custom
        kernel writes in place without MLX's knowledge.
        """
        group, row = source.group_row()
        capacity = capacity_for(target.length)
        is_alone = len(group.members) == 1
        arrays = [[a[row : row + 1] for a in part] for part in group.arrays]
        if cuda.is_in_use():
            fitted = [
                [_copied(array, cut) for array, cut in zip(*both, strict=True)]
                for both in zip(arrays, self.layout.fit(arrays, capacity), strict=True)
            ]
            mx.async_eval(fitted)
        else:
            fitted = self.layout.fit(arrays if is_alone else _gather([(group, row)]), capacity)
        _add_to_group(target, Group(capacity, fitted))

    def remove(self, sequence: MlxSequence) -> None:
        """Drop a sequence's arrays; the next step compacts the rest of its group."""
        if sequence.group is None:
            return
        group, row = sequence.group_row()
        sequence.group = None
        group.members[row] = None
        if any(group.members) and group not in self._left:
            self._left.append(group)

    def assemble(self, sequences: Sequence[MlxSequence], step: int) -> list[Group]:
        """Move sequences that are about to add a token into groups, as their first rows."""
        by_capacity: dict[int, list[MlxSequence]] = {}
        for sequence in sequences:
            self.make_room(sequence, sequence.length + 1)
            by_capacity.setdefault(sequence.group_row()[0].capacity, []).append(sequence)
            sequence.last_step = step
        # Now, before the custom kernels write: a later gather would not wait for their writes.
        self._compact()
        if not self.are_joined:
            return [sequence.group_row()[0] for sequence in sequences]
        return [
            self._assemble(capacity, members, step) for capacity, members in by_capacity.items()
        ]

    def table(self, groups: Sequence[Group]) -> Array:
        """Return the addresses of the groups' arrays, by layer and group, for the CUDA kernels."""
        for group in groups:
            if group.table is None:
                group.table = cuda_attention.addresses(group.arrays)
        tables = [group.table for group in groups]
        is_known = len(tables) == len(self._tables) and all(map(operator.is_, tables, self._tables))
        if not is_known:
            self._tables, self._table = tables, mx.stack(tables, axis=1)
        return self._table

    def moved_arrays(self) -> list[Array]:
        """Return and forget arrays that were moved and are not evaluated yet."""
        arrays = [array for group in self._moved for part in group.arrays for array in part]
        self._moved.clear()
        return arrays

    def _compact(self) -> None:
        for group in self._left:
            self._keep_rest(group, {None})
        self._left.clear()

    def _assemble(self, capacity: int, members: list[MlxSequence], step: int) -> Group:
        base = members[0].group_row()[0]
        if set(base.members[: len(members)]) == set(members):
            return base
        groups = {id(m.group): m.group_row()[0] for m in members}
        base = max(groups.values(), key=lambda group: len(group.members))
        wanted = set(members)
        kept = [m for m in base.members if m is not None and m in wanted]
        added = [m for m in members if m.group is not base]
        others = [m for m in base.members if m is not None and m not in wanted]
        paused = [m for m in others if step - m.last_step <= _STAY]
        together = [*kept, *added, *paused]
        arrays = _gather([m.group_row() for m in together])
        joined = Group(capacity, arrays)
        for group in groups.values():
            self._keep_rest(group, {None, *together})
        for member in together:
            _add_to_group(member, joined)
        return joined

    def _keep_rest(self, group: Group, gone: Collection[MlxSequence | None]) -> None:
        rows = [row for row, member in enumerate(group.members) if member not in gone]
        if rows and len(rows) < len(group.members):
            group.arrays = _gather([(group, row) for row in rows])
            group.table = None
            self._moved.append(group)
        group.members = [group.members[row] for row in rows]


def _add_to_group(sequence: MlxSequence, group: Group) -> Group:
    group.members.append(sequence)
    sequence.group = group
    return group


def _gather(places: Sequence[tuple[Group, int]]) -> Arrays:
    """Copy rows of any groups side by side; the copy does not keep the originals in memory."""
    runs: list[tuple[Group, slice]] = []
    for group, row in places:
        if runs and runs[-1][0] is group and runs[-1][1].stop == row:
            runs[-1] = (group, slice(runs[-1][1].start, row + 1))
        else:
            runs.append((group, slice(row, row + 1)))
    first = places[0][0].arrays
    return [
        [_joined([g.arrays[place][i][run] for g, run in runs]) for i in range(len(part))]
        for place, part in enumerate(first)
    ]


def _copied(array: Array, cut: Array) -> Array:
    """Return `cut`, made from `array`, in separate memory; cutting several heads has copied."""
    is_copy = cut is not array and (cut.shape[2] > array.shape[2] or array.shape[1] > 1)
    return cut if is_copy else cut[mx.array([0])]


def _joined(pieces: list[Array]) -> Array:
    return mx.contiguous(pieces[0]) if len(pieces) == 1 else mx.concatenate(pieces)


# -- a step ----------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class GroupStep:
    """The first rows of a group, which take part in a step.

    Draft tokens follow the new tokens, as further rows of the batch.

    Attributes:
        positions: Of the new token, by row.
        start: Index of the first row in the step's batch.
        drafts: Number of draft tokens by row; empty if there are none.
    """

    group: Group
    positions: tuple[int, ...]
    start: int
    drafts: tuple[int, ...] = ()
    num_padding: int = 0
    _known_places: dict[int, Array] = field(default_factory=dict)
    _masks: dict[int, Array | None] = field(default_factory=dict)
    rows: list[int] = field(init=False)
    all_positions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        drafted = [(r, d) for r, size in enumerate(self.drafts) for d in range(1, size + 1)]
        self.rows = [*range(len(self.positions)), *(row for row, _ in drafted)]
        self.all_positions = [*self.positions, *(self.positions[r] + d for r, d in drafted)]

    def pad(self, num_rows: int) -> bool:
        """Add unused rows, which write to the position of the next token.

        Only for the custom kernels, and only once. Returns False if there is no room for the next
        token.
        """
        position = self.all_positions[-1] + 1
        if position >= self.group.capacity:
            return False
        self.num_padding = num_rows
        self.rows += [self.rows[-1]] * num_rows
        self.all_positions += [position] * num_rows
        return True

    @property
    def is_drafted(self) -> bool:
        return len(self.rows) > len(self.positions)

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + len(self.rows))

    def draft_places(self) -> list[tuple[int, slice]]:
        """Return the group's rows that have draft tokens, and the slice of these in the step."""
        places, start = [], len(self.positions)
        for row, size in enumerate(self.drafts):
            if size:
                places.append((row, slice(start, start + size)))
            start += size
        return places

    def size(self, part: Part) -> int:
        """Return the number of tokens of a part that the longest row attends to."""
        return min(max(self.positions) + 1, part.size(self.group.capacity))

    def mask(self, part: Part) -> Array | None:
        """Return which of these tokens each row attends to; None if every row attends to all."""
        size = self.size(part)
        if size not in self._masks:
            is_full = min(self.positions) + 1 >= size
            ends = None if is_full else mx.array(self.positions)[:, None]
            mask = None if is_full else (mx.arange(size)[None] <= ends)[:, None, None]
            self._masks[size] = mask
        return self._masks[size]

    def lengths(self, part: Part) -> list[int]:
        """Return how many tokens each row of the batch attends to, draft tokens included."""
        size = part.size(self.group.capacity)
        wanted = self.all_positions[: len(self.all_positions) - self.num_padding]
        return [*(min(position + 1, size) for position in wanted), *[1] * self.num_padding]

    def write(self, part: Part, arrays: list[Array], news: Sequence[Array]) -> list[Array]:
        """Write the new tokens' keys and values; returns the arrays to attend over."""
        self.group.table = None
        if self.is_drafted:
            return self._write_drafted(part, arrays, news)
        num_rows, slots = len(self.positions), self._slots(part)
        is_even = len(set(slots)) == 1
        for i, new in enumerate(news):
            if is_even:
                arrays[i][:num_rows, :, slots[0] : slots[0] + 1] = new
            elif num_rows == arrays[i].shape[0]:
                places = mx.broadcast_to(self._places(part)[:, None, None, None], new.shape)
                arrays[i] = mx.put_along_axis(arrays[i], places, new, 2)
            else:
                arrays[i][mx.arange(num_rows), :, self._places(part)] = new[:, :, 0]
        size = self.size(part)
        is_whole = num_rows == arrays[0].shape[0] and size == arrays[0].shape[2]
        return arrays if is_whole else [array[:num_rows, :, :size] for array in arrays]

    def _write_drafted(self, part: Part, arrays: list[Array], news: Sequence[Array]) -> list[Array]:
        """Write with draft tokens; returns the whole arrays."""
        rows = mx.array(self.rows)
        for i, new in enumerate(news):
            arrays[i][rows, :, self._places(part)] = new[:, :, 0]
        return arrays

    def _slots(self, part: Part) -> list[int]:
        ring = part.window or self.group.capacity
        return [position % ring for position in self.all_positions]

    def _places(self, part: Part) -> Array:
        if part.window not in self._known_places:
            self._known_places[part.window] = mx.array(self._slots(part))
        return self._known_places[part.window]
