"""Linear layers as they are fastest on MLX's CUDA build.

A multiplication with more than one row costs the host some 15 microseconds there, which is what a
step waits for; and small matrices leave the memory idle. So layers that are given the same input
are joined to one, and a few rows are multiplied by a kernel of our own. The model's code stays as
it is: it still calls each layer, and the first call computes for the others.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.cuda import linear as cuda_linear
from semantic.adapters.outbound.backends.mlx.layout import Array
from semantic.adapters.outbound.backends.mlx.runtime import import_library

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class JoinedLinears:
    """The weights of several layers below each other."""

    def __init__(self, whole: Any, sizes: Sequence[int]) -> None:
        self.whole = whole
        self.ends = list(itertools.accumulate(sizes))
        self._input: Array | None = None
        self._outputs: dict[int, Array] = {}

    def output(self, index: int, given: Array) -> Array:
        """What a layer makes of an input; right for any, once for all layers if they share it."""
        if self._input is not given or index not in self._outputs:
            pieces = mx.split(self.whole(given), self.ends[:-1], axis=-1)
            self._input, self._outputs = given, dict(enumerate(pieces))
        output = self._outputs.pop(index)
        if not self._outputs:
            self._input = None  # nothing is kept beyond the last call
        return output


class LinearPart:
    """Stands for one of the layers."""

    def __init__(self, joined: JoinedLinears, index: int) -> None:
        self._joined = joined
        self._index = index

    def __call__(self, given: Array) -> Array:
        """Apply the layer."""
        return self._joined.output(self._index, given)

    @property
    def whole(self) -> Any:
        """The joined layer."""
        return self._joined.whole

    @property
    def weight(self) -> Array:
        """The layer's rows of the joined weights."""
        start, end = [0, *self._joined.ends][self._index : self._index + 2]
        return self._joined.whole.weight[start:end]


def use_own_kernel(model: Any) -> None:
    """Let unquantised layers, the head included, multiply a few rows by our own kernel."""
    kinds = _own_kinds()
    for module in model.modules():
        if type(module) in kinds:
            module.__class__ = kinds[type(module)]


def join_linears(model: Any) -> int:
    """Join what a model keeps apart, one set at a time so that memory does not double.

    Quantised layers stay as they are.

    Returns:
        How many sets were joined.
    """
    # Only those above the layers, so that this list keeps no weights alive.
    parents = [
        (module, names)
        for _, module in model.named_modules()
        for names in _SIBLINGS
        if all(name in module for name in names) and _can_join(module, names)
    ]
    for module, names in parents:
        _join(module, names)
    return len(parents)


def _can_join(module: Any, names: Sequence[str]) -> bool:
    layers = [module[name] for name in names]
    if any(type(layer) is not _linear() for layer in layers):
        return False
    kinds = {(x.weight.shape[1], x.weight.dtype, "bias" in x) for x in layers}
    return len(kinds) == 1


def _join(module: Any, names: Sequence[str]) -> None:
    layers = [module[name] for name in names]
    whole = _linear()(1, 1, bias="bias" in layers[0])
    for name in whole.parameters():
        whole[name] = mx.concatenate([layer[name] for layer in layers])
    mx.eval(whole.parameters())
    joined = JoinedLinears(whole, [layer.weight.shape[0] for layer in layers])
    for index, name in enumerate(names):
        setattr(module, name, LinearPart(joined, index))
    module["_".join(names)] = whole  # among the model's parameters


@functools.cache
def _linear() -> Any:
    return import_library("mlx.nn").Linear


@functools.cache
def _own_kinds() -> dict[type, type]:
    nn = import_library("mlx.nn")

    class FewRowsLinear(nn.Linear):  # type: ignore[misc, name-defined]
        def __call__(self, x: Array) -> Array:
            if not cuda_linear.can_multiply(x, self.weight):
                return super().__call__(x)
            out = cuda_linear.multiply(x, self.weight)
            return out + self.bias if "bias" in self else out

    class FewRowsEmbedding(nn.Embedding):  # type: ignore[misc, name-defined]
        def as_linear(self, x: Array) -> Array:
            if not cuda_linear.can_multiply(x, self.weight):
                return super().as_linear(x)
            return cuda_linear.multiply(x, self.weight)

    return {nn.Linear: FewRowsLinear, nn.Embedding: FewRowsEmbedding}
