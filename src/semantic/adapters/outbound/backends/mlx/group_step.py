"""The rows of a group that take part in a step: where their new token goes, what they look at."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.groups import Group
from semantic.adapters.outbound.backends.mlx.layout import Array, Part


@dataclass(slots=True, eq=False)
class GroupStep:
    """The first rows of a group, which take part in a step.

    Attributes:
        positions: Of the new token, by row.
        start: The first row's place in the step's batch.
    """

    group: Group
    positions: tuple[int, ...]
    start: int
    _known_places: dict[int, Array] = field(default_factory=dict)
    _masks: dict[int, Array | None] = field(default_factory=dict)

    @property
    def place(self) -> slice:
        """Where the rows are in the batch."""
        return slice(self.start, self.start + len(self.positions))

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
        """How many of those each row looks at."""
        size = self.size(part)
        return [min(position + 1, size) for position in self.positions]

    def write(self, part: Part, arrays: list[Array], news: Sequence[Array]) -> list[Array]:
        """Put the new token's keys and values in their places; returns what to attend over."""
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

    def _slots(self, part: Part) -> list[int]:
        """Where each row's new token is kept."""
        ring = part.window or self.group.capacity
        return [position % ring for position in self.positions]

    def _places(self, part: Part) -> Array:
        """The same on the device, by window."""
        if part.window not in self._known_places:
            self._known_places[part.window] = mx.array(self._slots(part))
        return self._known_places[part.window]
