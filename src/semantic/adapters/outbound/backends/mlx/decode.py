"""Decodes one token for each of several sequences, with views in place of the model's caches.

The model runs once over ``[rows, 1]``. A view replaces one leaf cache for all rows: it writes each
group's new keys and values into that group's arrays and returns the arrays to attend over. With one
group these are plain arrays and a mask, which any model supports; with several they are a `Groups`
object, for which the library's attention function is wrapped.
"""

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.caches import (
    Array,
    CacheLayout,
    Part,
    concatenate_rows,
    library,
)
from semantic.adapters.outbound.backends.mlx.cuda import device as cuda
from semantic.adapters.outbound.backends.mlx.cuda import prompts
from semantic.adapters.outbound.backends.mlx.cuda.attention import AttentionPlan
from semantic.adapters.outbound.backends.mlx.cuda.decode import KernelStep
from semantic.adapters.outbound.backends.mlx.groups import GroupStep
from semantic.domain.spec import LayerKind

_ATTENTION = "scaled_dot_product_attention"
_MAX_COMPILED = 128  # number of compiled steps to keep, one per size


@dataclass(frozen=True, slots=True)
class Groups:
    """Keys or values of several groups, by group."""

    steps: Sequence[GroupStep]
    arrays: Sequence[Array]


class AttentionView:
    """Replaces a cache of keys and values for all rows of a step."""

    def __init__(
        self, place: int, part: Part, steps: Sequence[GroupStep], offset: Any, kernels: KernelStep
    ) -> None:
        """`offset` is the new token's position, by row; one number if all are equal."""
        self.place = place
        self.kernels = kernels
        self.part = part
        self.steps = steps
        self.offset = offset
        self._fetched: tuple[Any, Any] | None = None

    @property
    def arrays(self) -> list[list[Array]]:
        return [step.group.arrays[self.place] for step in self.steps]

    def make_mask(self, *_: Any, window_size: int | None = None, **__: Any) -> Array | None:
        """Return the mask that the model passes to attention; None if groups have their own.

        Raises:
            ValueError: the model limits attention over all tokens to a window; rows run alone then.
        """
        if window_size and not self.part.window:
            raise ValueError("a window over all tokens cannot be batched")
        return self.steps[0].mask(self.part) if self._is_plain else None

    @property
    def _is_plain(self) -> bool:
        """Whether the model's attention receives plain arrays: one group, no draft tokens."""
        return len(self.steps) == 1 and not self.steps[0].is_drafted

    def is_own(self, mask: Any) -> bool:
        return mask is not None and mask is self.make_mask()

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Any, Any]:
        if self._is_plain:
            self._fetched = self._write(self.steps[0], keys, values)
        else:
            groups = [self._write(s, keys[s.place], values[s.place]) for s in self.steps]
            all_keys, all_values = zip(*groups, strict=True)
            self._fetched = Groups(self.steps, all_keys), Groups(self.steps, all_values)
        return self._fetched

    def keys_and_values(self) -> tuple[Any, Any] | None:
        """Return what an earlier layer has written, for layers that share it."""
        return self._fetched

    def attend(
        self,
        queries: Array,
        groups: Sequence[tuple[Array, Array]],
        scale: float,
        sinks: Array | None,
    ) -> Array:
        """Attend with one query per row; on CUDA by a custom kernel: MLX's have no mask per row."""
        if sinks is None and self.kernels.can_attend(queries, *groups[0]):
            return self.kernels.attend(self.part, queries, self.arrays, scale)
        return concatenate_rows(
            [
                _attend_group(step, self.part, (queries[step.place], *group), scale, sinks)
                for step, group in zip(self.steps, groups, strict=True)
            ]
        )

    def _write(self, step: GroupStep, keys: Array, values: Array) -> tuple[Array, Array]:
        written = step.write(self.part, step.group.arrays[self.place], (keys, values))
        return written[0], written[1]


class RecurrentView(library.ArraysCache):  # type: ignore[misc]
    """Replaces a cache of recurrent arrays for all rows of a step."""

    lengths = None
    left_padding = None

    def __init__(self, place: int, part: Part, steps: Sequence[GroupStep]) -> None:
        self._place = place
        self._slots = part.slots
        self._steps = steps

    def __getitem__(self, slot: int) -> Array | None:
        if slot not in self._slots:
            return None
        index = self._slots.index(slot)
        pieces = [
            step.group.arrays[self._place][index][: len(step.positions)] for step in self._steps
        ]
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)

    def __setitem__(self, slot: int, value: Array) -> None:
        index = self._slots.index(slot)
        for step in self._steps:
            arrays = step.group.arrays[self._place]
            new = value if len(self._steps) == 1 else mx.contiguous(value[step.place])
            rest = arrays[index][len(step.positions) :]
            arrays[index] = mx.concatenate([new, rest]) if rest.shape[0] else new

    def make_mask(self, *_: Any, **__: Any) -> None:
        """Return None: no row is padded."""

    def advance(self, num_tokens: int) -> None:
        """Do nothing: `MlxSequence` stores the lengths."""


def views(
    layout: CacheLayout,
    caches: Sequence[Any],
    steps: Sequence[GroupStep],
    kernels: KernelStep,
) -> list[Any]:
    """Create one view for each of the model's caches, nested as the library nests them."""
    positions = [position for step in steps for position in step.all_positions]
    offset = positions[0] if len(set(positions)) == 1 else mx.array(positions)
    flat: list[Any] = []
    for place, part in enumerate(layout.parts):
        if part.kind is LayerKind.STATE:
            flat.append(RecurrentView(place, part, steps))
        else:
            flat.append(AttentionView(place, part, steps, offset, kernels))
    nested: list[Any] = []
    for cache in caches:
        size = len(cache.caches) if isinstance(cache, library.CacheList) else 0
        nested.append(tuple(flat[:size]) if size else flat[0])
        del flat[: max(1, size)]
    return nested


class CompiledSteps:
    """Compiled steps of models whose layers all run on the custom kernels.

    Building a step's graph in Python takes as long as computing it. Steps with the same number of
    rows differ only in their input arrays, which include array addresses and the attention plan, so
    `mx.compile` can reuse the graph.
    """

    def __init__(self, model: Any, layout: CacheLayout, nesting: Sequence[Any]) -> None:
        self._model = model
        self._layout = layout
        self._nesting = nesting
        self._known: OrderedDict[tuple[int, ...], Any] = OrderedDict()
        self._met: set[tuple[int, ...]] = set()

    def release(self) -> None:
        self._known.clear()
        self._model = None

    def run(self, kernels: KernelStep, tokens: Array) -> Array:
        part = self._layout.parts[0]
        plan = kernels.plan(part, part.shapes[0][0])
        given = _given(tokens, kernels.positions, plan, kernels.table)
        key = _sizes(given)
        if plan.places is not None and key not in self._known and key not in self._met:
            # Compiling takes longer than building once, and this size may not occur again.
            if len(self._met) > _MAX_COMPILED:
                self._met.clear()
            self._met.add(key)
            return self._step(*given)
        return self._remembered(key)(*given)

    def prepare(self, num_rows: int, num_chunks: int, table: Array) -> None:
        """Compile steps with draft tokens, or short prompts; `table` is of a non-empty sequence."""
        rows = [chunk * num_rows // num_chunks for chunk in range(num_chunks)]
        firsts = [sum(row < r for row in rows) for r in range(num_rows + 1)]
        chunks = mx.array([(row, 0, 1, 0) for row in rows], mx.int32)
        places, zeros = mx.zeros((num_rows, 4), mx.int32), mx.zeros(num_rows, mx.int32)
        given = _given(
            zeros, zeros, AttentionPlan(chunks, mx.array(firsts, mx.int32), places), table
        )
        mx.eval(self._remembered(_sizes(given))(*given))

    def _remembered(self, key: tuple[int, ...]) -> Any:
        if key not in self._known:
            self._known[key] = mx.compile(self._step)
            if len(self._known) > _MAX_COMPILED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    def _step(
        self,
        tokens: Array,
        positions: Array,
        chunks: Array,
        firsts: Array,
        table: Array,
        places: Array | None = None,
    ) -> Array:
        """Compute a step from its inputs alone, without references to sequences."""
        part = self._layout.parts[0]
        plans = {(part.window, part.shapes[0][0]): AttentionPlan(chunks, firsts, places)}
        kernels = KernelStep((), positions, lambda _: table, plans)
        caches = views(self._layout, self._nesting, (), kernels)
        return self._model(tokens[:, None], cache=caches)[:, -1]


def _given(tokens: Array, positions: Array, plan: AttentionPlan, table: Array) -> list[Array]:
    places = [] if plan.places is None else [plan.places]
    return [tokens, positions, plan.chunks, plan.firsts, table, *places]


def _sizes(given: Sequence[Array]) -> tuple[int, ...]:
    """Return the sizes that determine the compiled graph."""
    tokens, _, chunks, _, table, *places = given
    return tokens.shape[0], table.shape[1], chunks.shape[0], len(places)


# -- the model's head ------------------------------------------------------------------------------


@dataclass(slots=True)
class LastToken:
    """Marks the last real token of the model's input.

    Attributes:
        num_padding: Tokens that follow it.
        num_kept: Tokens up to and including it that the head computes logits for.
        passed: The hidden states of each pass, ``[tokens, size]``, in order; None keeps none.
    """

    num_padding: int = 0
    num_kept: int = 1
    passed: list[Array] | None = None

    def take_passed(self) -> Array:
        """Return and forget the hidden states of the last passes."""
        passed = self.passed or []
        self.passed = []
        return concatenate_rows(passed)


def keep_last_token(model: Any, last: LastToken) -> Callable[..., Array] | None:
    """Pass only the last tokens' hidden states from the layers to the head; mutates the model.

    The library's models compute logits after every token: for a prompt of 512 tokens and a
    vocabulary of 150,000 these take 150 MB, and for small models a large part of the work.

    Returns:
        The original layers, if the model has the usual structure: a module that holds the layers
        inside one with the head. Other models compute all logits as before.
    """
    body = body_of(model)
    if body is None:
        return None
    kind = type(body)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = kind.__call__(self, *args, **kwargs)
        is_many = isinstance(hidden, mx.array) and hidden.ndim == 3 and hidden.shape[1] > 1
        end = hidden.shape[1] - last.num_padding if is_many else 1
        if last.passed is not None:
            last.passed.append(hidden[:, :end].reshape(-1, hidden.shape[-1]))
        return hidden[:, end - last.num_kept : end] if is_many else hidden

    body.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    return functools.partial(kind.__call__, body)


def keep_all_tokens(model: Any) -> None:
    """Undo `keep_last_token`."""
    body = body_of(model)
    if body is not None:
        body.__class__ = type(body).__mro__[1]


def body_of(model: Any) -> Any:
    """Return the module that holds a model's layers; None if there is none inside the model."""
    return next((m for m in model.modules() if m is not model and "layers" in m), None)


# -- the library's attention function ----------------------------------------------------------


def wrap_attention() -> None:
    """Make the attention function of every imported library model accept `Groups`."""
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
            groups = list(zip(keys.arrays, values.arrays, strict=True))
            return cache.attend(queries, groups, scale, sinks)
        if isinstance(cache, AttentionView) and cache.is_own(mask):
            return cache.attend(queries, [(keys, values)], scale, sinks)
        is_prompt = type(cache) is library.KVCache and isinstance(mask, str) and sinks is None
        if is_prompt and prompts.can_attend(queries, cache.keys, cache.offset):
            return prompts.attend(queries, cache.keys, cache.values, cache.offset, scale)
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    attention.takes_groups = True  # type: ignore[attr-defined]
    return attention


def _attend_group(
    step: GroupStep,
    part: Part,
    attended: tuple[Array, Array, Array],
    scale: float,
    sinks: Array | None,
) -> Array:
    if step.is_drafted:
        return _attend_drafted(step, part, attended, scale, sinks)
    mask = step.mask(part)
    if mask is None or sinks is not None or not cuda.is_in_use():
        return mx.fast.scaled_dot_product_attention(*attended, scale=scale, mask=mask, sinks=sinks)
    # On CUDA, fused kernels with a mask are slower than separate operations.
    queries, keys, values = attended
    num_rows, num_heads, _, dim = queries.shape
    # Fold heads that share keys into query rows, so that keys are read once.
    folded = (queries * scale).reshape(num_rows, keys.shape[1], -1, dim)
    scores = mx.where(mask, folded @ keys.swapaxes(-1, -2), -mx.inf)
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights @ values).reshape(num_rows, num_heads, 1, values.shape[-1])


def _attend_drafted(
    step: GroupStep,
    part: Part,
    attended: tuple[Array, Array, Array],
    scale: float,
    sinks: Array | None,
) -> Array:
    """Attend with the new tokens' rows together, then with each row's draft tokens."""
    queries, keys, values = attended
    num_rows, plain = len(step.positions), GroupStep(step.group, step.positions, 0)
    held = [array[:num_rows, :, : plain.size(part)] for array in (keys, values)]
    outputs = [_attend_group(plain, part, (queries[:num_rows], held[0], held[1]), scale, sinks)]
    for row, place in step.draft_places():
        end = step.all_positions[place.stop - 1] + 1
        outputs.append(
            mx.fast.scaled_dot_product_attention(
                queries[place].swapaxes(0, 2),
                *(array[row : row + 1, :, :end] for array in (keys, values)),
                scale=scale,
                mask="causal",
                sinks=sinks,
            ).swapaxes(0, 2)
        )
    return mx.concatenate(outputs)
