"""Calls of a model's modules without the machinery for hooks, of which nobody sets any here.

With one row an operation takes microseconds, and calling its module takes as long: a decode step
makes several hundred of these calls. What is computed stays the library's.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn


def shorten_calls(model: nn.Module) -> None:
    """Give each module a class whose call is its `forward`; mutates the model."""
    for module in model.modules():
        # Found here, children are not searched for among parameters and buffers first.
        vars(module).update(module.named_children())
        module.__class__ = _direct(type(module))  # type: ignore[arg-type]  # a class is hashable


class _Direct:
    """Calls `forward` and nothing else."""

    forward: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


@cache
def _direct(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_Direct, kind), {"__module__": kind.__module__})
