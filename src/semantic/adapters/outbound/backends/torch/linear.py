"""Faster modules for bfloat16 on a CPU, put in place of a loaded model's own.

Decoding reads every weight once a step, so it is bound by memory; what counts is that weights lie
as the kernels want them (prepacked), that small operations are merged into large ones, and, if
asked for, that weights are stored in fewer bits while few rows are computed. All of it works by a
module's role (a linear, a gated MLP), not by the model's name; whatever is not recognised stays as
it was. Results agree with the original's to bfloat16's rounding.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from semantic.adapters.outbound.backends.torch.huge_pages import collapse

Weights = Literal["full", "int8", "int4"]

_ROWS_HINT = 256  # rows the packed layout is chosen for; it serves any number
_MAX_FEW_ROWS = 4  # quantised weights win up to here, packed ones beyond
_GROUP = 32
_ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj")
_MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")


def is_supported() -> bool:
    """Whether this CPU multiplies bfloat16 at all."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def speed_up(model: nn.Module, weights: Weights = "full") -> None:
    """Replace modules of a bfloat16 model on a CPU; mutates it, frees what it replaces."""
    for parent in list(model.modules()):
        if all(isinstance(getattr(parent, name, None), nn.Linear) for name in _ATTENTION_INPUTS):
            _merge_attention_inputs(parent, weights)
        elif _is_gated_mlp(parent):
            _fuse_mlp(parent, weights)
    _pack_linears(model, weights)
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.use_huge_pages()


class PackedLinear(nn.Module):
    """A linear whose weights lie as oneDNN reads them, and in fewer bits for few rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, weights: Weights) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)
        self.bias = None if bias is None else bias.detach()
        self.few = _quantise(weight.detach(), weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        if self.few is None or x.numel() > _MAX_FEW_ROWS * x.shape[-1]:
            packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.packed, self.bias, "none", [], ""
            )
            return packed
        rows = self.few.multiply(x.reshape(-1, x.shape[-1]).contiguous())
        result = rows.view(*x.shape[:-1], -1)
        return result if self.bias is None else result + self.bias

    def use_huge_pages(self) -> None:
        """Lay the packed weights into huge pages; when all are made, as some share a page."""
        of_packed = torch.ops.mkldnn
        collapse(of_packed.data_ptr(self.packed), of_packed._nbytes(self.packed))


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` with gate and up in one multiplication.

    Activation and product inside of two multiplications would make prompts faster by some
    percent, and decode steps slower: each multiplication wakes the other threads.
    """

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, weights: Weights) -> None:
        super().__init__()
        self.size = gate.out_features
        self.inner = _joined([gate, up], weights)
        self.down = _joined([down], weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the three linears."""
        inner = self.inner(x)
        gated = functional.silu(inner[..., : self.size]).mul_(inner[..., self.size :])
        result: torch.Tensor = self.down(gated)
        return result


class _MergedLinears:
    """Linears with one input, multiplied at once when the first of them is asked."""

    def __init__(self, linears: Sequence[nn.Linear], weights: Weights) -> None:
        self.sizes = [linear.out_features for linear in linears]
        self.joined = _joined(linears, weights)
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    def output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if self._input is not x:
            self._input, self._outputs = x, self.joined(x).split(self.sizes, dim=-1)
        output = self._outputs[index]
        if index == len(self.sizes) - 1:
            self._input, self._outputs = None, ()  # nothing outlives the layer
        return output


class _MergedPart(nn.Module):
    """One of several merged linears."""

    def __init__(self, merged: _MergedLinears, index: int) -> None:
        super().__init__()
        self._merged, self._index = merged, index
        self.joined = merged.joined  # where whoever walks through the model finds it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply, or take what was multiplied with the first part."""
        return self._merged.output(self._index, x)


# -- quantised weights ----------------------------------------------------------------------------


class _Int8Weight:
    """Eight bits a weight, one scale a row."""

    def __init__(self, weight: torch.Tensor) -> None:
        wide = weight.float()
        scale = (wide.abs().amax(dim=1) / 127).clamp_min(1e-8)
        self._values = (wide / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        self._scale = scale.to(weight.dtype)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x, self._values, self._scale)
        return result


class _Int4Weight:
    """Four bits a weight, a scale and a zero for every 32 of a row."""

    def __init__(self, weight: torch.Tensor) -> None:
        num_rows, num_columns = weight.shape
        groups = weight.float().view(num_rows, num_columns // _GROUP, _GROUP)
        low, high = groups.amin(dim=2), groups.amax(dim=2)
        scale = ((high - low) / 15).clamp_min(1e-8)
        values = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15)
        flat = values.view(num_rows, num_columns).to(torch.int32)
        self._values = torch.ops.aten._convert_weight_to_int4pack_for_cpu(flat, 1)
        # The kernel reads a weight as (value - 8) * scale + zero.
        zero = low + 8 * scale
        pairs = torch.stack([scale, zero], dim=2).transpose(0, 1).contiguous()
        self._scales_and_zeros = pairs.to(weight.dtype)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self._values, _GROUP, self._scales_and_zeros
        )
        return result


def _quantise(weight: torch.Tensor, weights: Weights) -> _Int8Weight | _Int4Weight | None:
    num_rows, num_columns = weight.shape
    # The kernels read past the end of rows of other lengths, and crash.
    if weights == "full" or num_columns % _GROUP:
        return None
    if weights == "int4" and num_rows % 16 == 0:
        return _Int4Weight(weight)
    return _Int8Weight(weight)


# -- finding what to replace ----------------------------------------------------------------------


def children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Every module below another, which comes first, and its name there."""
    for parent in model.modules():
        for name, child in parent.named_children():
            yield parent, name, child


def _joined(linears: Sequence[nn.Linear], weights: Weights) -> PackedLinear:
    """Linears with one input as a single one; all or none of them have a bias."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases: list[torch.Tensor | None] = [linear.bias for linear in linears]
    given = [bias.detach() for bias in biases if bias is not None]
    return PackedLinear(weight, torch.cat(given) if given else None, weights)


def _can_join(linears: Sequence[nn.Linear]) -> bool:
    return len({linear.bias is None for linear in linears}) == 1


def _merge_attention_inputs(attention: nn.Module, weights: Weights) -> None:
    linears = [getattr(attention, name) for name in _ATTENTION_INPUTS]
    if not _can_join(linears):
        return
    merged = _MergedLinears(linears, weights)
    for index, name in enumerate(_ATTENTION_INPUTS):
        setattr(attention, name, _MergedPart(merged, index))


def _is_gated_mlp(module: nn.Module) -> bool:
    children = dict(module.named_children())
    if children.keys() != {*_MLP_LINEARS, "act_fn"}:
        return False
    linears = [child for name in _MLP_LINEARS if isinstance(child := children[name], nn.Linear)]
    is_silu = type(children["act_fn"]).__name__ in ("SiLU", "SiLUActivation")
    return len(linears) == len(_MLP_LINEARS) and is_silu and _can_join(linears[:2])


def _fuse_mlp(mlp: nn.Module, weights: Weights) -> None:
    """Make a gated MLP compute in fused form, in its place and with its other attributes."""
    gate, up, down = (getattr(mlp, name) for name in _MLP_LINEARS)
    mlp.fused = GatedMLP(gate, up, down, weights)
    for name in _MLP_LINEARS:
        delattr(mlp, name)
    mlp.forward = mlp.fused.forward


def _pack_linears(model: nn.Module, weights: Weights) -> None:
    for parent, name, child in list(children(model)):
        if type(child) is nn.Linear:
            setattr(parent, name, PackedLinear(child.weight, child.bias, weights))
