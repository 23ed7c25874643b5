"""One token for each of several sequences: what a model is given in place of its caches.

The model runs once over ``[rows, 1]``. A view stands for one leaf cache of all rows: it writes
each group's new keys and values into that group's arrays and hands back what to attend over.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.cuda import attention as cuda_attention
from semantic.adapters.outbound.backends.mlx.cuda import rope as cuda_rope
from semantic.adapters.outbound.backends.mlx.cuda.plan import MAX_GROUPS, Plan, make_plan
from semantic.adapters.outbound.backends.mlx.cuda.rope import HeadNorms
from semantic.adapters.outbound.backends.mlx.group_step import GroupStep
from semantic.adapters.outbound.backends.mlx.layout import Array, Layout, Part, library
from semantic.domain.spec import LayerKind


@dataclass(frozen=True, slots=True)
class Groups:
    """Keys or values of several groups, by group."""

    steps: Sequence[GroupStep]
    arrays: Sequence[Array]


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A call of our attention kernel.

    Attributes:
        groups: That it takes.
        rows: Theirs in the batch; None if these are all.
    """

    groups: slice
    rows: slice | None
    plan: Plan

    def rows_of(self, array: Array) -> Array:
        """Its rows of an array of the batch."""
        return array if self.rows is None else array[self.rows]


@dataclass(slots=True, eq=False)
class Shared:
    """What all views of a step have in common.

    Attributes:
        positions: Of the new token, by row.
        offset: The same, one number where all are equal.
        calls: Of our attention kernel, by window and number of key heads.
        angles: By the module that turns by them.
    """

    steps: Sequence[GroupStep]
    positions: Array
    offset: Any
    calls: dict[tuple[int, int], list[KernelCall]] = field(default_factory=dict)
    angles: dict[int, Array] = field(default_factory=dict)


class AttentionView:
    """Stands for a cache of keys and values of all rows of a step."""

    def __init__(self, place: int, part: Part, shared: Shared) -> None:
        self._place = place
        self._shared = shared
        self.part = part
        self.steps = shared.steps
        self.offset = shared.offset

    def make_mask(self, *_: Any, **__: Any) -> Array | None:
        """What the model passes on to attention; groups have masks of their own."""
        return self.steps[0].mask(self.part) if len(self.steps) == 1 else None

    def is_own(self, mask: Any) -> bool:
        """Whether the model passed on the mask it was given, and there is one."""
        return mask is not None and mask is self.make_mask()

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Any, Any]:
        """Keep the new token's keys and values and return all there are."""
        if len(self.steps) == 1:
            return self._write(self.steps[0], keys, values)
        groups = [self._write(s, keys[s.place], values[s.place]) for s in self.steps]
        all_keys, all_values = zip(*groups, strict=True)
        return Groups(self.steps, all_keys), Groups(self.steps, all_values)

    def attend(self, queries: Array, groups: Sequence[tuple[Array, Array]], scale: float) -> Array:
        """One query a row by our own kernel, groups together."""
        return joined(
            [
                cuda_attention.attend(call.rows_of(queries), groups[call.groups], call.plan, scale)
                for call in self._calls(groups[0][0].shape[1])
            ]
        )

    def keep_and_attend(
        self, heads: Array, rope: Any, norms: HeadNorms | None, scale: float
    ) -> Array:
        """The same with heads as a layer makes them, whose keys and values are kept on the way.

        Not for rings: what a ring's new token takes the place of may still be looked at.

        Args:
            heads: Queries, keys and values ``[rows, all heads, 1, dim]``.
            rope: The library's module that turns the first two.
            norms: Of the first two, before that.
            scale: Of the scores.
        """
        groups = [step.group.arrays[self._place] for step in self.steps]
        angles = self._angles(rope, heads.shape[-1])
        return joined(
            [
                cuda_attention.keep_and_attend(
                    call.rows_of(heads),
                    call.rows_of(angles),
                    norms,
                    groups[call.groups],
                    call.plan,
                    scale,
                )
                for call in self._calls(groups[0][0].shape[1])
            ]
        )

    def _angles(self, rope: Any, dim: int) -> Array:
        angles = self._shared.angles
        if id(rope) not in angles:
            angles[id(rope)] = cuda_rope.angles_at(rope, self._shared.positions, dim)
        return angles[id(rope)]

    def _calls(self, num_key_heads: int) -> list[KernelCall]:
        """How our kernel goes about the step."""
        calls, key = self._shared.calls, (self.part.window, num_key_heads)
        if key not in calls:
            calls[key] = [
                self._call(slice(first, first + MAX_GROUPS), num_key_heads)
                for first in range(0, len(self.steps), MAX_GROUPS)
            ]
        return calls[key]

    def _call(self, groups: slice, num_key_heads: int) -> KernelCall:
        steps = self.steps[groups]
        rows = slice(steps[0].place.start, steps[-1].place.stop)
        plan = make_plan([step.lengths(self.part) for step in steps], num_key_heads)
        return KernelCall(groups, None if len(steps) == len(self.steps) else rows, plan)

    def _write(self, step: GroupStep, keys: Array, values: Array) -> tuple[Array, Array]:
        written = step.write(self.part, step.group.arrays[self._place], (keys, values))
        return written[0], written[1]


class StateView:
    """Stands for a cache of recurrent arrays of all rows of a step."""

    lengths = None
    left_padding = None

    def __init__(self, place: int, steps: Sequence[GroupStep]) -> None:
        self._place = place
        self._steps = steps

    def __getitem__(self, index: int) -> Array:
        pieces = [
            step.group.arrays[self._place][index][: len(step.positions)] for step in self._steps
        ]
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)

    def __setitem__(self, index: int, value: Array) -> None:
        for step in self._steps:
            arrays = step.group.arrays[self._place]
            new = value if len(self._steps) == 1 else mx.contiguous(value[step.place])
            rest = arrays[index][len(step.positions) :]
            arrays[index] = mx.concatenate([new, rest]) if rest.shape[0] else new

    def make_mask(self, *_: Any, **__: Any) -> None:
        """No row is padded."""

    def advance(self, num_tokens: int) -> None:
        """Lengths are kept elsewhere."""


def views(layout: Layout, caches: Sequence[Any], steps: Sequence[GroupStep]) -> list[Any]:
    """One view for each of the model's caches, nested as the library nests them."""
    positions = [position for step in steps for position in step.positions]
    array = mx.array(positions)
    shared = Shared(steps, array, positions[0] if len(set(positions)) == 1 else array)
    flat: list[Any] = []
    for place, part in enumerate(layout.parts):
        if part.kind is LayerKind.STATE:
            flat.append(StateView(place, steps))
        else:
            flat.append(AttentionView(place, part, shared))
    nested: list[Any] = []
    for cache in caches:
        size = len(cache.caches) if isinstance(cache, library.CacheList) else 0
        nested.append(tuple(flat[:size]) if size else flat[0])
        del flat[: max(1, size)]
    return nested


def joined(outputs: list[Array]) -> Array:
    """Rows below each other."""
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
