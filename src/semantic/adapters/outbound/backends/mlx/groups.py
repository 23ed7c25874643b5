"""Sequences of like length side by side in shared arrays, so that one operation serves them all.

Attention one row at a time over arrays of their own was tried first and is exact, but MLX pays a
few microseconds for every operation: on an H200 eight rows took 1.8 times as long as one dense
batch, thirty-two five times. A dense batch of everybody pads the short to the longest. So the
capacity of a sequence is one of a series of sizes a quarter apart, and those of one size that
decode together share arrays ``[rows, heads, capacity, dim]``: at most a quarter is padding beyond
the first sizes, and joining or leaving copies the rows of that size only.

The rows that take part in a step are always the first ones. Others that took part a moment ago
stay behind them, so that a row that pauses for a step costs no copy.
"""

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Optional

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.caches import Array, Arrays, Layout, Part, capacity_for
from semantic.adapters.outbound.backends.mlx.cuda import attention as cuda_attention
from semantic.adapters.outbound.backends.mlx.cuda import device as cuda
from semantic.adapters.outbound.backends.mlx.cuda.transfer import Copying
from semantic.adapters.outbound.backends.mlx.sampling import PendingToken

_STAY = 2  # steps a row may miss before it is moved out of its group


@dataclass(slots=True, eq=False)
class MlxSequence:
    """A sequence's tokens, and where its state is.

    Attributes:
        window_start: Before this position window layers hold nothing: it was not restored.
        has_state: Whether recurrent layers hold the state at `length`.
        group: Where its arrays are; None while nothing is held.
        last_token: What was sampled after the last token.
        last_step: The number of the step it took part in last.
        copying: The last copy of it to the host, if one was begun.
    """

    known: list[int]
    length: int = 0
    window_start: int = 0
    has_state: bool = True
    group: Optional["Group"] = None
    last_token: PendingToken | None = None
    last_step: int = 0
    copying: Copying | None = None

    def group_row(self) -> tuple["Group", int]:
        """Its group and its row there."""
        if self.group is None:
            raise ValueError("the sequence holds nothing")
        return self.group, self.group.members.index(self)


@dataclass(slots=True, eq=False)
class Group:
    """Sequences that share arrays.

    Attributes:
        members: By row; None where one has left.
        arrays: By part; rows along the first axis.
        table: Where on a CUDA device they are; None if that is not known, or not any more.
    """

    capacity: int
    arrays: Arrays
    members: list[MlxSequence | None] = field(default_factory=list)
    table: Array | None = None


class RowGroups:
    """Keeps every sequence's arrays, alone or in a group.

    Attributes:
        are_joined: Whether sequences of like length that decode together are brought side by side;
            else each stays where it is.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.are_joined = True
        self._left: list[Group] = []
        self._moved: list[Group] = []
        self._tables: list[Array] = []
        self._table: Array | None = None

    def nbytes(self, sequences: Sequence[MlxSequence]) -> int:
        """Bytes of the groups these sequences are in."""
        groups = {id(s.group): s.group for s in sequences if s.group is not None}
        return sum(self.layout.nbytes(g.capacity) * len(g.members) for g in groups.values())

    def isolate(self, sequence: MlxSequence, capacity: int) -> Group:
        """Give a sequence arrays of its own with this capacity, or more if it has more."""
        if sequence.group is None:
            return _settle_in(sequence, Group(capacity, self.layout.zeros(capacity)))
        group, row = sequence.group_row()
        capacity = max(capacity, group.capacity)
        if len(group.members) > 1:
            arrays = _gather([(group, row)])
            self.remove(sequence)
            group = _settle_in(sequence, Group(group.capacity, arrays))
        group.table = None  # whoever asks is about to change them
        if capacity > group.capacity:
            group.arrays = self.layout.fit(group.arrays, capacity)
            group.capacity = capacity
        return group

    def make_room(self, sequence: MlxSequence, length: int) -> None:
        """Let a sequence that holds something become so long."""
        if length > sequence.group_row()[0].capacity:
            self.isolate(sequence, capacity_for(length))

    def copy(self, source: MlxSequence, target: MlxSequence) -> None:
        """Give `target` the state of `source` up to the target's length.

        A lone source's arrays of the same size are shared until either is written to; but not
        where our own kernel writes, which MLX does not see. There they are copied at once, before
        the source goes on.
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
        _settle_in(target, Group(capacity, fitted))

    def remove(self, sequence: MlxSequence) -> None:
        """Drop a sequence's arrays; those that shared them move together in the next step."""
        if sequence.group is None:
            return
        group, row = sequence.group_row()
        sequence.group = None
        group.members[row] = None
        if any(group.members) and group not in self._left:
            self._left.append(group)

    def assemble(self, sequences: Sequence[MlxSequence], step: int) -> list[Group]:
        """Bring sequences that are about to add a token into groups, where they come first."""
        by_capacity: dict[int, list[MlxSequence]] = {}
        for sequence in sequences:
            self.make_room(sequence, sequence.length + 1)
            by_capacity.setdefault(sequence.group_row()[0].capacity, []).append(sequence)
            sequence.last_step = step
        # Not later: our own kernels are about to write, which whoever gathers would not wait for.
        self._close_up()
        if not self.are_joined:
            return [sequence.group_row()[0] for sequence in sequences]
        return [
            self._assemble(capacity, members, step) for capacity, members in by_capacity.items()
        ]

    def table(self, groups: Sequence[Group]) -> Array:
        """Where the groups' arrays are, by layer and group, for our own kernels on CUDA."""
        for group in groups:
            if group.table is None:
                group.table = cuda_attention.addresses(group.arrays)
        tables = [group.table for group in groups]
        is_known = len(tables) == len(self._tables) and all(map(operator.is_, tables, self._tables))
        if not is_known:
            self._tables, self._table = tables, mx.stack(tables, axis=1)
        return self._table

    def moved_arrays(self) -> list[Array]:
        """Arrays that were moved and are not computed yet; forgets them."""
        arrays = [array for group in self._moved for part in group.arrays for array in part]
        self._moved.clear()
        return arrays

    def _close_up(self) -> None:
        """Take the place of those who left, all of them at once."""
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
            _settle_in(member, joined)
        return joined

    def _keep_rest(self, group: Group, gone: Collection[MlxSequence | None]) -> None:
        rows = [row for row, member in enumerate(group.members) if member not in gone]
        if rows and len(rows) < len(group.members):
            group.arrays = _gather([(group, row) for row in rows])
            group.table = None
            self._moved.append(group)
        group.members = [group.members[row] for row in rows]


def _settle_in(sequence: MlxSequence, group: Group) -> Group:
    group.members.append(sequence)
    sequence.group = group
    return group


def _gather(places: Sequence[tuple[Group, int]]) -> Arrays:
    """Copy rows of any groups side by side; the copy does not keep the others in memory."""
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
    """What was made of an array, in memory of its own; several heads were cut by copying them."""
    is_copy = cut is not array and (cut.shape[2] > array.shape[2] or array.shape[1] > 1)
    return cut if is_copy else cut[mx.array([0])]


def _joined(pieces: list[Array]) -> Array:
    return mx.contiguous(pieces[0]) if len(pieces) == 1 else mx.concatenate(pieces)


# -- a step ----------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class GroupStep:
    """The first rows of a group, which take part in a step.

    After their new tokens come guesses of what follows, as rows of the batch of their own.

    Attributes:
        positions: Of the new token, by row.
        start: The first row's place in the step's batch.
        drafts: How many guesses follow the new token, by row; none where it is empty.
        num_padding: Rows at the end that nobody wants.
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
        guesses = [(r, g) for r, size in enumerate(self.drafts) for g in range(1, size + 1)]
        self.rows = [*range(len(self.positions)), *(row for row, _ in guesses)]
        self.all_positions = [*self.positions, *(self.positions[r] + g for r, g in guesses)]

    def pad(self, num_rows: int) -> bool:
        """Add rows that nobody wants, which write where the next token will be written.

        Only for our own kernels, and once. False if there is no room for the next token.
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
        """Whether there are guesses."""
        return len(self.rows) > len(self.positions)

    @property
    def place(self) -> slice:
        """Where the rows are in the batch."""
        return slice(self.start, self.start + len(self.rows))

    def draft_places(self) -> list[tuple[int, slice]]:
        """Rows of the group that have guesses, and where these are among the step's rows."""
        places, start = [], len(self.positions)
        for row, size in enumerate(self.drafts):
            if size:
                places.append((row, slice(start, start + size)))
            start += size
        return places

    def size(self, part: Part) -> int:
        """Tokens of a part that the longest row looks at."""
        return min(max(self.positions) + 1, part.size(self.group.capacity))

    def mask(self, part: Part) -> Array | None:
        """Which of those each row may look at; None where all rows look at all."""
        size = self.size(part)
        if size not in self._masks:
            is_full = min(self.positions) + 1 >= size
            ends = None if is_full else mx.array(self.positions)[:, None]
            mask = None if is_full else (mx.arange(size)[None] <= ends)[:, None, None]
            self._masks[size] = mask
        return self._masks[size]

    def lengths(self, part: Part) -> list[int]:
        """How many each row of the batch looks at, guesses included."""
        size = part.size(self.group.capacity)
        wanted = self.all_positions[: len(self.all_positions) - self.num_padding]
        return [*(min(position + 1, size) for position in wanted), *[1] * self.num_padding]

    def write(self, part: Part, arrays: list[Array], news: Sequence[Array]) -> list[Array]:
        """Put new tokens' keys and values in their places; returns what to attend over."""
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
        """The same with guesses; returns the whole arrays."""
        rows = mx.array(self.rows)
        for i, new in enumerate(news):
            arrays[i][rows, :, self._places(part)] = new[:, :, 0]
        return arrays

    def _slots(self, part: Part) -> list[int]:
        """Where each new token is kept, by row of the batch."""
        ring = part.window or self.group.capacity
        return [position % ring for position in self.all_positions]

    def _places(self, part: Part) -> Array:
        """The same on the device, by window."""
        if part.window not in self._known_places:
            self._known_places[part.window] = mx.array(self._slots(part))
        return self._known_places[part.window]
