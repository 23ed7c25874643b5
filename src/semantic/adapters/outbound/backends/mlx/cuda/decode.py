"""A decode step's attention by our own kernel for MLX's CUDA build, all groups of rows together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.caches import Array, Part, concatenate_rows
from semantic.adapters.outbound.backends.mlx.cuda import attention as cuda_attention
from semantic.adapters.outbound.backends.mlx.cuda import device as cuda
from semantic.adapters.outbound.backends.mlx.cuda import rope as cuda_rope
from semantic.adapters.outbound.backends.mlx.cuda.attention import MAX_GROUPS, Plan, make_plan
from semantic.adapters.outbound.backends.mlx.cuda.rope import HeadNorms
from semantic.adapters.outbound.backends.mlx.groups import GroupStep


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A call of our attention kernel.

    Attributes:
        groups: That it takes.
        rows: Theirs in the batch; None if these are all.
        places: See `cuda_rope.keep`; None where each row is a sequence of its own.
    """

    groups: slice
    rows: slice | None
    plan: Plan
    places: Array | None = None

    def taken(self, groups: Sequence[Sequence[Array]]) -> list[Sequence[Array]]:
        """Its groups, and the first again up to as many as the kernel takes: there is one alone."""
        taken = list(groups[self.groups])
        return [*taken, *taken[:1] * (MAX_GROUPS - len(taken))]

    def rows_of(self, array: Array) -> Array:
        """Its rows of an array of the batch."""
        return array if self.rows is None else array[self.rows]


class KernelStep:
    """What the layers of a step have in common: who reads what, and by which angles heads turn."""

    def __init__(
        self,
        steps: Sequence[GroupStep],
        positions: Array,
        calls: Mapping[tuple[int, int], list[KernelCall]] | None = None,
    ) -> None:
        """Plan nothing yet.

        Args:
            steps: All groups of the step.
            positions: Of the new token, by row.
            calls: What is planned already, by window and number of key heads.
        """
        self._steps = steps
        self._positions = positions
        self._known_calls = dict(calls or {})
        self._known_angles: dict[int, Array] = {}

    def can_attend(self, queries: Array, keys: Array, values: Array) -> bool:
        """Whether the kernel runs here and takes such arrays."""
        return cuda.is_available() and cuda_attention.can_attend(queries, keys, values)

    def attend(
        self, part: Part, queries: Array, groups: Sequence[Sequence[Array]], scale: float
    ) -> Array:
        """One query a row over keys and values, by group."""
        return concatenate_rows(
            [
                cuda_attention.attend(call.rows_of(queries), call.taken(groups), call.plan, scale)
                for call in self.calls(part, groups[0][0].shape[1])
            ]
        )

    def keep_and_attend(
        self,
        part: Part,
        groups: Sequence[Sequence[Array]],
        heads: Array,
        rope: Any,
        norms: HeadNorms | None,
        scale: float,
    ) -> Array:
        """The same with heads as a layer makes them, whose keys and values are kept on the way.

        Not for rings: what a ring's new token takes the place of may still be looked at.

        Args:
            part: Not a ring.
            groups: Its arrays, by group.
            heads: Queries, keys and values ``[rows, all heads, 1, dim]``.
            rope: The library's module that turns the first two.
            norms: Of the first two, before that.
            scale: Of the scores.
        """
        angles = self._angles(rope, heads.shape[-1])
        outputs = []
        for call in self.calls(part, groups[0][0].shape[1]):
            taken, turns, given = call.rows_of(heads), call.rows_of(angles), call.taken(groups)
            if call.places is None:
                more = (norms, given, call.plan, scale)
                outputs.append(cuda_attention.keep_and_attend(taken, turns, *more))
            else:
                queries = cuda_rope.keep(taken, turns, norms, given, call.places)
                outputs.append(cuda_attention.attend(queries, given, call.plan, scale))
        return concatenate_rows(outputs)

    def _angles(self, rope: Any, dim: int) -> Array:
        if id(rope) not in self._known_angles:
            self._known_angles[id(rope)] = cuda_rope.angles_at(rope, self._positions, dim)
        return self._known_angles[id(rope)]

    def calls(self, part: Part, num_key_heads: int) -> list[KernelCall]:
        """How our kernel goes about the step, by window and number of key heads."""
        key = (part.window, num_key_heads)
        if key not in self._known_calls:
            self._known_calls[key] = [
                self._call(part, slice(first, first + MAX_GROUPS), num_key_heads)
                for first in range(0, len(self._steps), MAX_GROUPS)
            ]
        return self._known_calls[key]

    def _call(self, part: Part, groups: slice, num_key_heads: int) -> KernelCall:
        steps = self._steps[groups]
        rows = slice(steps[0].place.start, steps[-1].place.stop)
        lengths, places = [step.lengths(part) for step in steps], [step.rows for step in steps]
        plan = make_plan(lengths, num_key_heads, places)
        kept = None
        if any(step.is_drafted for step in self._steps):
            where = [
                (n, place, end - 1, 0)
                for n, (given, ends) in enumerate(zip(places, lengths, strict=True))
                for place, end in zip(given, ends, strict=True)
            ]
            kept = mx.array(where, mx.int32)
        return KernelCall(groups, None if len(steps) == len(self._steps) else rows, plan, kept)
