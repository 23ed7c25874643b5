"""Attention of a decode step by the custom CUDA kernel, all groups of rows together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.caches import Array, Part
from semantic.adapters.outbound.backends.mlx.cuda import attention as cuda_attention
from semantic.adapters.outbound.backends.mlx.cuda import device as cuda
from semantic.adapters.outbound.backends.mlx.cuda import rope as cuda_rope
from semantic.adapters.outbound.backends.mlx.cuda.attention import AttentionPlan, make_plan
from semantic.adapters.outbound.backends.mlx.cuda.rope import HeadNorms, Held
from semantic.adapters.outbound.backends.mlx.groups import Group, GroupStep


class KernelStep:
    """Data that all layers of a step share: the attention plan, addresses and RoPE angles."""

    def __init__(
        self,
        steps: Sequence[GroupStep],
        positions: Array,
        find: Callable[[Sequence[Group]], Array],
        plans: Mapping[tuple[int, int], AttentionPlan] | None = None,
    ) -> None:
        """Create a step; plans are made on demand.

        Args:
            positions: Of the new token, by row.
            find: Returns the addresses of groups' arrays; see `RowGroups.table`.
            plans: Existing plans, by window and number of key heads.
        """
        self._steps = steps
        self.positions = positions
        self._find = find
        self._known_plans = dict(plans or {})
        self._known_table: Array | None = None
        self._known_angles: dict[int, Array] = {}

    @property
    def table(self) -> Array:
        """Addresses of the groups' arrays, by layer and group."""
        if self._known_table is None:
            self._known_table = self._find([step.group for step in self._steps])
        return self._known_table

    def can_attend(self, queries: Array, keys: Array, values: Array) -> bool:
        return cuda.is_available() and cuda_attention.can_attend(queries, keys, values)

    def attend(
        self, part: Part, queries: Array, groups: Sequence[Sequence[Array]], scale: float
    ) -> Array:
        """Attend with one query per row over keys and values, each group's whole arrays."""
        num_key_heads = groups[0][0].shape[1]
        table = cuda_attention.addresses(groups)[None]
        held = Held(table, 0, num_key_heads)
        return cuda_attention.attend(queries, held, self.plan(part, num_key_heads), scale)

    def keep_and_attend(
        self,
        place: int,
        part: Part,
        heads: Array,
        rope: Any,
        norms: HeadNorms | None,
        scale: float,
    ) -> Array:
        """Store the new keys and values, and attend with the new queries.

        Not for rings: other rows may still attend to the token that a ring's new token replaces.
        `heads` are queries, keys and values ``[rows, all heads, 1, dim]`` as the layer computes
        them; `place` is the index of the part.
        """
        held = Held(self.table, place, part.shapes[0][0])
        plan, angles = self.plan(part, held.num_key_heads), self._angles(rope, heads.shape[-1])
        if plan.places is None:
            return cuda_attention.keep_and_attend(heads, angles, norms, held, plan, scale)
        queries = cuda_rope.keep(heads, angles, norms, held, plan.places)
        return cuda_attention.attend(queries, held, plan, scale)

    def _angles(self, rope: Any, dim: int) -> Array:
        if id(rope) not in self._known_angles:
            self._known_angles[id(rope)] = cuda_rope.angles_at(rope, self.positions, dim)
        return self._known_angles[id(rope)]

    def plan(self, part: Part, num_key_heads: int) -> AttentionPlan:
        key = (part.window, num_key_heads)
        if key not in self._known_plans:
            lengths = [step.lengths(part) for step in self._steps]
            rows = [step.rows for step in self._steps]
            is_drafted = any(step.is_drafted for step in self._steps)
            plan = make_plan(lengths, num_key_heads, rows, has_few_sizes=is_drafted)
            if is_drafted:
                where = [
                    (group, row, position, 0)
                    for group, step in enumerate(self._steps)
                    for row, position in zip(step.rows, step.all_positions, strict=True)
                ]
                plan = replace(plan, places=mx.array(where, mx.int32))
            self._known_plans[key] = plan
        return self._known_plans[key]
