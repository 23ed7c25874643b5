"""One token for each of several sequences: what a model is given in place of its caches.

The model runs once over ``[rows, 1]``. A view stands for one leaf cache of all rows: it writes
each group's new keys and values into that group's arrays and hands back what to attend over. With
one group these are plain arrays and a mask, which any model understands. With several it is a
`Groups` object that only the library's attention function takes, which is wrapped for that.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound import mlx_cuda, mlx_cuda_attention, mlx_cuda_rope
from semantic.adapters.outbound.mlx_cuda_attention import MAX_GROUPS, Plan
from semantic.adapters.outbound.mlx_cuda_rope import HeadNorms
from semantic.adapters.outbound.mlx_groups import Group
from semantic.adapters.outbound.mlx_layout import Array, Layout, Part, library
from semantic.domain.spec import LayerKind

_ATTENTION = "scaled_dot_product_attention"


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
    _slots: dict[int, Array] = field(default_factory=dict)
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

    def slots(self, part: Part) -> list[int]:
        """Where each row's new token is kept."""
        ring = part.window or self.group.capacity
        return [position % ring for position in self.positions]

    def write(self, part: Part, arrays: list[Array], news: Sequence[Array]) -> list[Array]:
        """Put the new token's keys and values in their places; returns what to attend over."""
        num_rows, slots = len(self.positions), self.slots(part)
        for i, new in enumerate(news):
            if len(set(slots)) == 1:
                arrays[i][:num_rows, :, slots[0] : slots[0] + 1] = new
            elif num_rows == arrays[i].shape[0]:
                places = mx.broadcast_to(self._places(part)[:, None, None, None], new.shape)
                arrays[i] = mx.put_along_axis(arrays[i], places, new, 2)
            else:
                arrays[i][mx.arange(num_rows), :, self._places(part)] = new[:, :, 0]
        size = self.size(part)
        is_whole = num_rows == arrays[0].shape[0] and size == arrays[0].shape[2]
        return arrays if is_whole else [array[:num_rows, :, :size] for array in arrays]

    def _places(self, part: Part) -> Array:
        if part.window not in self._slots:
            self._slots[part.window] = mx.array(self.slots(part))
        return self._slots[part.window]


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

    def angles(self, rope: Any, dim: int) -> Array:
        """By which a library's module turns heads at the rows' positions, computed once a step."""
        angles = self._shared.angles
        if id(rope) not in angles:
            angles[id(rope)] = mlx_cuda_rope.angles_at(rope, self._shared.positions, dim)
        return angles[id(rope)]

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Any, Any]:
        """Keep the new token's keys and values and return all there are."""
        groups = self.keep(keys, values)
        if len(groups) == 1:
            return groups[0]
        all_keys, all_values = zip(*groups, strict=True)
        return Groups(self.steps, all_keys), Groups(self.steps, all_values)

    def keep(self, keys: Array, values: Array) -> list[tuple[Array, Array]]:
        """Keep the new token's keys and values and return all there are, by group."""
        if len(self.steps) == 1:
            return [self._write(self.steps[0], keys, values)]
        return [self._write(s, keys[s.place], values[s.place]) for s in self.steps]

    def attend(self, queries: Array, groups: Sequence[tuple[Array, Array]], scale: float) -> Array:
        """One query a row by our own kernel, groups together."""
        return _joined(
            [
                mlx_cuda_attention.attend(
                    call.rows_of(queries), groups[call.groups], call.plan, scale
                )
                for call in self._calls(groups[0][0].shape[1])
            ]
        )

    def keep_and_attend(
        self, heads: Array, angles: Array, norms: HeadNorms | None, scale: float
    ) -> Array:
        """The same with heads as a layer makes them, whose keys and values are kept on the way."""
        groups: list[tuple[Array, Array]] = []
        for step in self.steps:
            keys, values = step.group.arrays[self._place]
            groups.append((keys, values))
        return _joined(
            [
                mlx_cuda_attention.keep_and_attend(
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
        plan = mlx_cuda_attention.make_plan(
            [step.lengths(self.part) for step in steps],
            [slot for step in steps for slot in step.slots(self.part)],
            num_key_heads,
        )
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


def wrap_attention() -> None:
    """Let the library's attention function take `Groups`, in every model that is imported."""
    for name, module in list(sys.modules.items()):
        original = getattr(module, _ATTENTION, None) if name.startswith("mlx_lm.models") else None
        if original is not None and not getattr(original, "takes_groups", False):
            setattr(module, _ATTENTION, _wrapped(original))


def _wrapped(original: Any) -> Any:
    def attention(
        queries: Array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Array | None,
        sinks: Array | None = None,
    ) -> Array:
        if isinstance(keys, Groups):
            return _attend(cache, queries, (keys.arrays, values.arrays), scale, sinks)
        if isinstance(cache, AttentionView) and cache.is_own(mask):
            return _attend(cache, queries, ([keys], [values]), scale, sinks)
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    attention.takes_groups = True  # type: ignore[attr-defined]
    return attention


def _attend(
    view: AttentionView,
    queries: Array,
    fetched: tuple[Sequence[Array], Sequence[Array]],
    scale: float,
    sinks: Array | None,
) -> Array:
    """One query a row. CUDA's kernels take no mask of ours, so there we bring our own."""
    keys, values = fetched
    groups = list(zip(keys, values, strict=True))
    if (
        sinks is None
        and mlx_cuda.is_available()
        and mlx_cuda_attention.can_attend(queries, *groups[0])
    ):
        return view.attend(queries, groups, scale)
    return _joined(
        [
            _attend_group(step, view.part, (queries[step.place], *group), scale, sinks)
            for step, group in zip(view.steps, groups, strict=True)
        ]
    )


def _attend_group(
    step: GroupStep,
    part: Part,
    attended: tuple[Array, Array, Array],
    scale: float,
    sinks: Array | None,
) -> Array:
    mask = step.mask(part)
    if mask is None or sinks is not None or not mx.cuda.is_available():
        return mx.fast.scaled_dot_product_attention(*attended, scale=scale, mask=mask, sinks=sinks)
    # CUDA's fused kernels are slower with a mask than the same written out.
    queries, keys, values = attended
    num_rows, num_heads, _, dim = queries.shape
    # Heads that share keys become query rows, so that keys are read once.
    folded = (queries * scale).reshape(num_rows, keys.shape[1], -1, dim)
    scores = mx.where(mask, folded @ keys.swapaxes(-1, -2), -mx.inf)
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights @ values).reshape(num_rows, num_heads, 1, values.shape[-1])


def _joined(outputs: list[Array]) -> Array:
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
