"""Faster and more exact modules for bfloat16 on a CPU; they replace those of a loaded model.

Decoding reads every weight once per step, so it is bound by memory bandwidth. It becomes faster if
the weights have the layout that the kernels read (prepacked), if small operations are merged into
large ones. Results agree with the original's to bfloat16's rounding.

bfloat16 has eight bits of precision. The residual stream, the sum that all layers add to, loses
what later layers add, and a logit of 25 is a multiple of 1/8, so near ties go to the token with the
lower id. Here the residual stream stays in float32, a norm rounds once, and the highest logits are
computed again in float32.

Modules are recognised by their role (a linear, a gated MLP, a norm), not by the model's name. A
module that is not recognised stays unchanged.
"""

import ctypes
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from semantic.adapters.outbound import host_memory
from semantic.adapters.outbound.backends.torch.grouped import (
    AnyLinear,
    GroupedEmbedding,
    GroupedLinear,
    GroupedWeight,
)
from semantic.adapters.outbound.backends.torch.native.library import Library

_ROWS_HINT = 256  # the packed layout is optimised for this many rows; it works for any number
_ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj")
_MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
_LAYER_NORMS = {"input_layernorm", "post_attention_layernorm"}
_NUM_REFINED = 32
_NUM_STRIPES = 64
_HUGE_PAGE = 1 << 21
_MADV_COLLAPSE = 25
_CACHE_LINE = 64


def has_bfloat16() -> bool:
    """Whether this CPU can multiply bfloat16 matrices."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def speed_up(model: nn.Module) -> None:
    """Replace linears of a bfloat16 model on a CPU; mutates the model and frees the originals."""
    _merge(model, nn.Linear)
    _pack_linears(model)
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.use_huge_pages()


def pack_grouped(model: nn.Module, library: Library, *, is_merged: bool = True) -> None:
    """Pack a model's grouped linears for the native library; mutates the model.

    `is_merged` first joins linears that share an input.
    """
    if is_merged:
        _merge(model, GroupedLinear)
    linears = [module for module in model.modules() if isinstance(module, GroupedLinear)]
    heads = {id(linear.grouped): linear for linear in linears}
    _pack_together(linears, library)
    for module in model.modules():
        if isinstance(module, GroupedEmbedding) and id(module.grouped) in heads:
            module.share(heads[id(module.grouped)])


def _pack_together(linears: Sequence[GroupedLinear], library: Library) -> None:
    """Pack all weights into one allocation, in huge pages where Linux provides them.

    Decoding reads all weights in each step: two threads read 16 GB/s with 4 KB pages and 21 GB/s
    with huge pages.
    """
    sizes = [-(-linear.packed_size(library) // _CACHE_LINE) * _CACHE_LINE for linear in linears]
    if not linears:
        return
    memory = torch.frombuffer(host_memory.plain_pages(sum(sizes)), dtype=torch.uint8)
    for linear, part in zip(linears, torch.split(memory, sizes), strict=True):
        linear.pack(library, part)


class PackedLinear(nn.Module):
    """A linear with weights in oneDNN's layout."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.packed, self.bias, "none", [], ""
        )
        return product

    def use_huge_pages(self) -> None:
        """Move the packed weights into huge pages.

        Call it after all linears are packed, since some share a page.
        """
        of_packed = torch.ops.mkldnn
        collapse(of_packed.data_ptr(self.packed), of_packed._nbytes(self.packed))


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` with gate and up in one multiplication.

    Fusing activation and product into two multiplications would make prefill some percent faster
    and decode steps slower, because each multiplication wakes the other threads.
    """

    def __init__(self, gate: AnyLinear, up: AnyLinear, down: AnyLinear) -> None:
        super().__init__()
        self.size = gate.out_features
        self.inner = _joined([gate, up])
        self.down = _joined([down])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.inner(x)
        gated = functional.silu(inner[..., : self.size]).mul_(inner[..., self.size :])
        result: torch.Tensor = self.down(gated)
        return result


class _MergedLinears:
    """Linears with the same input; the first call multiplies for all of them."""

    def __init__(self, linears: Sequence[AnyLinear]) -> None:
        self.sizes = [linear.out_features for linear in linears]
        self.joined = _joined(linears)
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    def output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if self._input is not x:
            self._input, self._outputs = x, self.joined(x).split(self.sizes, dim=-1)
        output = self._outputs[index]
        if index == len(self.sizes) - 1:
            self._input, self._outputs = None, ()  # keep no tensors beyond the layer
        return output


class _MergedPart(nn.Module):
    def __init__(self, merged: _MergedLinears, index: int) -> None:
        super().__init__()
        self._merged, self._index = merged, index
        self.joined = merged.joined  # a submodule, so that `model.modules()` finds it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._merged.output(self._index, x)


# -- finding what to replace ----------------------------------------------------------------------


def children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield each submodule as (parent, name, child); a parent comes before its children."""
    for parent in model.modules():
        for name, child in parent.named_children():
            yield parent, name, child


def _joined(linears: Sequence[AnyLinear]) -> PackedLinear | GroupedLinear:
    """Concatenate linears of one kind with the same input; either all or none have a bias."""
    biases: list[torch.Tensor | None] = [linear.bias for linear in linears]
    given = [bias.detach() for bias in biases if bias is not None]
    bias = torch.cat(given) if given else None
    if grouped := [linear.grouped for linear in linears if isinstance(linear, GroupedLinear)]:
        return GroupedLinear(GroupedWeight.joined(grouped), bias)
    plain = [linear.weight.detach() for linear in linears if isinstance(linear, nn.Linear)]
    return PackedLinear(torch.cat(plain), bias)


def _can_join(linears: Sequence[AnyLinear]) -> bool:
    kinds = {linear.kind if isinstance(linear, GroupedLinear) else None for linear in linears}
    return len(kinds) == 1 and len({linear.bias is None for linear in linears}) == 1


def _merge(model: nn.Module, kind: type[AnyLinear]) -> None:
    for parent in list(model.modules()):
        if all(isinstance(getattr(parent, name, None), kind) for name in _ATTENTION_INPUTS):
            _merge_attention_inputs(parent)
        elif _is_gated_mlp(parent, kind):
            _fuse_mlp(parent)


def _merge_attention_inputs(attention: nn.Module) -> None:
    linears = [getattr(attention, name) for name in _ATTENTION_INPUTS]
    if not _can_join(linears):
        return
    merged = _MergedLinears(linears)
    for index, name in enumerate(_ATTENTION_INPUTS):
        setattr(attention, name, _MergedPart(merged, index))


def _is_gated_mlp(module: nn.Module, kind: type[AnyLinear]) -> bool:
    children = dict(module.named_children())
    if children.keys() != {*_MLP_LINEARS, "act_fn"}:
        return False
    linears = [child for name in _MLP_LINEARS if isinstance(child := children[name], kind)]
    is_silu = type(children["act_fn"]).__name__ in ("SiLU", "SiLUActivation")
    return len(linears) == len(_MLP_LINEARS) and is_silu and _can_join(linears[:2])


def _fuse_mlp(mlp: nn.Module) -> None:
    """Replace the forward of a gated MLP in place; its other attributes stay."""
    gate, up, down = (getattr(mlp, name) for name in _MLP_LINEARS)
    mlp.fused = GatedMLP(gate, up, down)
    for name in _MLP_LINEARS:
        delattr(mlp, name)
    mlp.forward = mlp.fused.forward


def _pack_linears(model: nn.Module) -> None:
    for parent, name, child in list(children(model)):
        if type(child) is nn.Linear:
            setattr(parent, name, PackedLinear(child.weight, child.bias))


def collapse(address: int, num_bytes: int) -> None:
    """Move memory into 2 MB pages, including data that shares the first and last page.

    The content does not change. Decoding streams through all weights, and with 4 KB pages address
    translation adds waiting time. Linux supports this from 6.1 on; elsewhere it has no effect.
    """
    if sys.platform != "linux":
        return
    start = address // _HUGE_PAGE * _HUGE_PAGE
    end = -(-(address + num_bytes) // _HUGE_PAGE) * _HUGE_PAGE
    # Best effort: the kernel refuses ranges with holes, and older kernels refuse all.
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(_MADV_COLLAPSE)
    )


# -- less rounding --------------------------------------------------------------------------------


def reduce_rounding(model: Any) -> None:
    """Make a bfloat16 model on a CPU more exact; mutates it. Linears stay, to be packed later."""
    replace_norms(model)
    if _has_norms_before_all(model.base_model):
        _widen_input(model.base_model.layers[0])
    if _is_tied(model):
        model.set_output_embeddings(RefinedHead(model.get_output_embeddings()))


class RMSNorm(nn.Module):
    """RMS norm of float32 or bfloat16; rounds once, to the weight's dtype, in few operations."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        size, wide = weight.shape[0], weight.detach().float()
        self.dtype, self.size, self.eps = weight.dtype, size, eps
        self.both_weights, self.signs = torch.stack([wide, wide]), torch.tensor([[1.0], [-1.0]])
        # The squared length of a vector is its size times its mean square.
        self.length_weight, self.length_eps = wide * size**0.5, torch.tensor(eps * size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_one = x.numel() == self.size
        return self._of_one(x) if is_one else self._of_many(x.float())

    def _of_one(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer norm of (x, -x), whose mean is 0: fewest calls, but slow for many."""
        both = torch.layer_norm(
            x.unsqueeze(-2) * self.signs, (2, self.size), self.both_weights, None, self.eps
        )
        return both[..., 0, :].to(self.dtype)

    def _of_many(self, x: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self.length_eps, length, length).rsqrt_()
        normalised: torch.Tensor = (x * self.length_weight).mul_(scale)
        return normalised.to(self.dtype)


class RefinedHead(nn.Module):
    """A head that recomputes its highest logits in float32 and returns float32."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head
        self.rows = head.weight.detach()  # still readable after the head is packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(x).float()
        best = _highest(logits, min(_NUM_REFINED, logits.shape[-1]))
        rows = functional.embedding(best, self.rows).float()
        return logits.scatter_(-1, best, (rows @ x.float()[..., None]).squeeze(-1))


def replace_norms(model: nn.Module) -> None:
    """Replace each norm that `RMSNorm` reproduces; mutates the model."""
    for parent, name, child in list(children(model)):
        if (norm := _same_norm(child)) is not None:
            setattr(parent, name, norm)


def _same_norm(module: nn.Module) -> RMSNorm | None:
    """Return the `RMSNorm` of a module if its results on a sample match."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not type(module).__name__.endswith("RMSNorm") or weight is None or eps is None:
        return None
    norm = RMSNorm(weight, eps)
    sample = torch.linspace(-3, 5, 2 * weight.shape[0], dtype=weight.dtype).view(2, -1)
    with torch.inference_mode():
        is_same = torch.allclose(norm(sample), module(sample), rtol=2e-2, atol=2e-2)
    return norm if is_same else None


def _is_tied(model: Any) -> bool:
    """Whether the embedding holds the head's unpacked weights: packed rows cannot be read."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_plain = type(head) is nn.Linear and getattr(head, "bias", None) is None
    return is_plain and head.weight is embedding.weight


def _has_norms_before_all(decoder: nn.Module) -> bool:
    """Whether only `RMSNorm`, which accepts float32, reads the residual stream."""
    layers, last = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(last, RMSNorm):
        return False
    return all(_norms_of(layer) == _LAYER_NORMS for layer in layers)


def _norms_of(layer: nn.Module) -> set[str]:
    """Return the names of a layer's norms; none unless all of them are `RMSNorm`."""
    norms = {n: m for n, m in layer.named_children() if type(m).__name__.endswith("Norm")}
    return set(norms) if all(isinstance(norm, RMSNorm) for norm in norms.values()) else set()


def _widen_input(layer: nn.Module) -> None:
    """Make the first layer convert its input to float32; later additions of bfloat16 keep it."""
    layer.__class__ = _widened(type(layer))  # type: ignore[arg-type]  # a class is hashable


@cache
def _widened(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, hidden_states.float(), *args, **kwargs)

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": forward})


def _highest(logits: torch.Tensor, count: int) -> torch.Tensor:
    size = logits.shape[-1]
    if size % _NUM_STRIPES or size < _NUM_STRIPES * count:
        return logits.topk(count, sorted=False).indices
    # The `count` highest lie in at most `count` columns of stripes; for eight rows this takes a
    # third of the time of `topk`. numpy scans a row before torch has woken its threads.
    num_columns = size // _NUM_STRIPES
    stripes = logits.numpy().reshape(*logits.shape[:-1], _NUM_STRIPES, num_columns)
    highest = torch.from_numpy(stripes.max(axis=-2))
    columns = highest.topk(count, sorted=False).indices[..., None, :]
    places = (columns + torch.arange(0, size, num_columns)[:, None]).flatten(-2)
    return places.gather(-1, logits.gather(-1, places).topk(count, sorted=False).indices)
