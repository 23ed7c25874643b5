"""Loads one rank's share of a model: some heads and hidden units of each layer.

The transformers library's tensor-parallel plan decides how each linear is divided. A linear divided
by rows keeps the rank's rows. A linear divided by columns keeps the rank's columns, and an
all-reduce adds the products of all ranks. Each rank reads only its own share from the files.
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

from semantic.adapters.outbound.backends.torch.reading import empty_model, load_rest
from semantic.domain.errors import InvalidRequestError

_BY_ROWS, _BY_COLUMNS = "colwise", "rowwise"  # the library's names; the stored weight is transposed
_WHOLE = {"replicated_with_grad_allreduce", "replicated", "sequence_parallel"}


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of a model this process holds. The process group is already initialised."""

    rank: int
    num_ranks: int

    def slice_of(self, length: int, name: str) -> slice:
        """Return the rank's part of an axis.

        Raises:
            InvalidRequestError: the axis cannot be divided evenly.
        """
        if length % self.num_ranks:
            reason = f"{name} has {length} rows or columns, not a multiple of {self.num_ranks}"
            raise InvalidRequestError(f"cannot shard the model: {reason}", param="shards")
        size = length // self.num_ranks
        return slice(self.rank * size, (self.rank + 1) * size)


class _SummedLinear(nn.Linear):
    """Holds some columns of a weight; an all-reduce adds the products of all ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = functional.linear(x, self.weight)
        distributed.all_reduce(product)
        bias: torch.Tensor | None = self.bias
        return product if bias is None else product + bias


def load_share(directory: Path, dtype: torch.dtype, share: Share) -> Any:
    """Load a rank's share of a model.

    Raises:
        InvalidRequestError: the library has no plan for the model, or its weights do not match.
    """
    model = empty_model(directory, dtype)
    styles = _styles(model)
    slices: dict[str, tuple[slice, ...]] = {}
    for name, module in model.named_modules():
        if style := styles.get(name):
            slices |= _divide(name, module, style, share)
    load_rest(model, dict(_tensors(directory, slices, dtype)), is_assigned=True)
    return model.requires_grad_(False)


def _styles(model: Any) -> Mapping[str, str]:
    """Return how the library's plan divides each linear.

    Raises:
        InvalidRequestError: there is no plan, or it uses an unsupported style.
    """
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    unknown = sorted(set(plan.values()) - {_BY_ROWS, _BY_COLUMNS} - _WHOLE)
    if not plan or unknown:
        reason = f"divides it by {unknown[0]}" if unknown else "has no plan for it"
        raise InvalidRequestError(
            f"cannot shard {model.config.model_type}: transformers {reason}", param="shards"
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
    """Reduce a linear to the rank's share; returns which slices of its tensors to read."""
    if not isinstance(module, nn.Linear):
        raise InvalidRequestError(
            f"cannot shard the model: {name} is not a linear layer", param="shards"
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
