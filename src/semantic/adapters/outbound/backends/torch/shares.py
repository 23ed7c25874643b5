"""A rank's share of a model: some heads and hidden units of each layer, as the library plans.

Linears that the library's plan divides by rows keep a rank's rows; those it divides by columns keep
its columns, and the products of all ranks are added. Only a rank's share is ever read from files.
"""

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import distributed, nn
from torch.nn import functional

from semantic.adapters.outbound.backends.torch.grouped import empty_model, load_rest
from semantic.domain.errors import InvalidRequestError

_BY_ROWS, _BY_COLUMNS = "colwise", "rowwise"  # of the stored weight, which is transposed
_WHOLE = {"replicated_with_grad_allreduce", "replicated", "sequence_parallel"}


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of a model a process holds; its group of processes is set up."""

    rank: int
    num_ranks: int

    def slice_of(self, length: int, name: str) -> slice:
        """A rank's part of an axis.

        Raises:
            InvalidRequestError: it cannot be divided.
        """
        if length % self.num_ranks:
            reason = f"{name} has {length} rows or columns, which {self.num_ranks} do not divide"
            raise InvalidRequestError(f"the model cannot be sharded: {reason}", param="shards")
        size = length // self.num_ranks
        return slice(self.rank * size, (self.rank + 1) * size)


class _SummedLinear(nn.Linear):
    """Holds some columns of a weight; what all ranks make of theirs is added up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply, and add up."""
        product = functional.linear(x, self.weight)
        distributed.all_reduce(product)
        bias: torch.Tensor | None = self.bias
        return product if bias is None else product + bias


def load_share(directory: Path, dtype: torch.dtype, attention: str, share: Share) -> Any:
    """Load a rank's share of a model.

    Raises:
        InvalidRequestError: the library does not say how to divide it, or its weights do not fit.
    """
    model = empty_model(directory, dtype, attention)
    styles = _styles(model)
    slices: dict[str, tuple[slice, ...]] = {}
    for name, module in model.named_modules():
        if style := styles.get(name):
            slices |= _divide(name, module, style, share)
    load_rest(model, dict(_tensors(directory, slices, dtype)), is_assigned=True)
    return model.requires_grad_(False)


def _styles(model: Any) -> Mapping[str, str]:
    """How the library divides each linear.

    Raises:
        InvalidRequestError: it does not say, or in a way that is not known here.
    """
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    unknown = sorted(set(plan.values()) - {_BY_ROWS, _BY_COLUMNS} - _WHOLE)
    if not plan or unknown:
        reason = f"divides it by {unknown[0]}" if unknown else "does not say how to divide it"
        raise InvalidRequestError(
            f"{model.config.model_type} cannot be sharded: the library {reason}", param="shards"
        )
    prefix = model.base_model_prefix
    found = {}
    for name, _ in model.named_modules():
        inner = name.removeprefix(f"{prefix}.")
        style = next((s for pattern, s in plan.items() if fnmatch.fnmatch(inner, pattern)), None)
        if style in (_BY_ROWS, _BY_COLUMNS):
            found[name] = style
    return found


def _divide(name: str, module: nn.Module, style: str, share: Share) -> dict[str, tuple[slice, ...]]:
    """Make a linear that of a rank; returns which part of each of its tensors is read."""
    if not isinstance(module, nn.Linear):
        raise InvalidRequestError(
            f"the model cannot be sharded: {name} is no linear layer", param="shards"
        )
    slices: dict[str, tuple[slice, ...]]
    if style == _BY_ROWS:
        rows = share.slice_of(module.out_features, name)
        slices = {f"{name}.weight": (rows,), f"{name}.bias": (rows,)}
    else:
        columns = share.slice_of(module.in_features, name)
        slices = {f"{name}.weight": (slice(None), columns)}
        module.__class__ = _SummedLinear
    for key, parameter in module.named_parameters():
        if cut := slices.get(f"{name}.{key}"):
            part = nn.Parameter(parameter.detach()[cut].to("meta"), requires_grad=False)
            setattr(module, key, part)
    module.out_features, module.in_features = module.weight.shape
    return slices


def _tensors(
    directory: Path, slices: Mapping[str, tuple[slice, ...]], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                part = file.get_slice(name)[slices.get(name, (slice(None),))]
                yield name, part.to(dtype).contiguous()
