"""Less rounding for models in bfloat16 on a CPU, where it costs little.

With eight bits a number, the sum that all layers add to loses what the later ones add, and a logit
of 25 is a multiple of 1/8, so that near ties go to whichever token has the lower number. Here that
sum (the residual stream) is kept in float32, a norm rounds once, and the highest logits are
computed again in float32. All of it works by a module's role, not by the model's name; whatever is
not recognised stays as it was.
"""

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from semantic.adapters.outbound.backends.torch.linear import children

_LAYER_NORMS = {"input_layernorm", "post_attention_layernorm"}
_NUM_REFINED = 32
_NUM_STRIPES = 64


def round_less(model: Any) -> None:
    """Replace modules of a bfloat16 model on a CPU; mutates it. Linears stay to be packed."""
    replace_norms(model)
    if _has_norms_before_all(model.base_model):
        _widen_input(model.base_model.layers[0])
    if _is_tied(model):
        model.set_output_embeddings(RefinedHead(model.get_output_embeddings()))


class RMSNorm(nn.Module):
    """RMS norm of float32 or bfloat16, rounded once, to the weight's format; in few operations."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        size, wide = weight.shape[0], weight.detach().float()
        self.dtype, self.size, self.eps = weight.dtype, size, eps
        self.both_weights, self.signs = torch.stack([wide, wide]), torch.tensor([[1.0], [-1.0]])
        # Relative to a vector's length, whose square is its size times the mean's.
        self.length_weight, self.length_eps = wide * size**0.5, torch.tensor(eps * size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        is_one = x.numel() == self.size
        return self._of_one(x) if is_one else self._of_many(x.float())

    def _of_one(self, x: torch.Tensor) -> torch.Tensor:
        """The layer norm of (x, -x), whose mean is 0: fewest calls, but slow for many rows."""
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
    """A head whose highest logits are those of a multiplication in float32."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head
        self.rows = head.weight.detach()  # remains when the head is packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply; returns float32."""
        logits: torch.Tensor = self.head(x).float()
        best = _highest(logits, min(_NUM_REFINED, logits.shape[-1]))
        rows = functional.embedding(best, self.rows).float()
        return logits.scatter_(-1, best, (rows @ x.float()[..., None]).squeeze(-1))


def replace_norms(model: nn.Module) -> None:
    """Put our norm in place of each that computes the same; mutates the model."""
    for parent, name, child in list(children(model)):
        if (norm := _same_norm(child)) is not None:
            setattr(parent, name, norm)


def _same_norm(module: nn.Module) -> RMSNorm | None:
    """Our form of an RMS norm, if it computes the same."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not type(module).__name__.endswith("RMSNorm") or weight is None or eps is None:
        return None
    norm = RMSNorm(weight, eps)
    sample = torch.linspace(-3, 5, 2 * weight.shape[0], dtype=weight.dtype).view(2, -1)
    with torch.inference_mode():
        is_same = torch.allclose(norm(sample), module(sample), rtol=2e-2, atol=2e-2)
    return norm if is_same else None


def _is_tied(model: Any) -> bool:
    """Whether the embedding keeps the head's weights as they were: packed rows cannot be read."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_plain = type(head) is nn.Linear and getattr(head, "bias", None) is None
    return is_plain and head.weight is embedding.weight


def _has_norms_before_all(decoder: nn.Module) -> bool:
    """Whether all that reads the residual stream is a norm of ours, which takes float32."""
    layers, last = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(last, RMSNorm):
        return False
    return all(_norms_of(layer) == _LAYER_NORMS for layer in layers)


def _norms_of(layer: nn.Module) -> set[str]:
    """The names of a layer's norms; none if not all of them are ours."""
    norms = {n: m for n, m in layer.named_children() if type(m).__name__.endswith("Norm")}
    return set(norms) if all(isinstance(norm, RMSNorm) for norm in norms.values()) else set()


def _widen_input(layer: nn.Module) -> None:
    """Make the first layer take float32; adding bfloat16 to it, as all layers do, keeps it so."""
    layer.__class__ = _widened(type(layer))  # type: ignore[arg-type]  # a class is hashable


@cache
def _widened(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, hidden_states.float(), *args, **kwargs)

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": forward})


def _highest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Where each row's highest logits are."""
    size = logits.shape[-1]
    if size % _NUM_STRIPES or size < _NUM_STRIPES * count:
        return logits.topk(count, sorted=False).indices
    # They lie in as many columns of stripes: found in a third of the time that `topk` takes for
    # eight rows. numpy looks through a row before torch has woken its threads.
    num_columns = size // _NUM_STRIPES
    stripes = logits.numpy().reshape(*logits.shape[:-1], _NUM_STRIPES, num_columns)
    highest = torch.from_numpy(stripes.max(axis=-2))
    columns = highest.topk(count, sorted=False).indices[..., None, :]
    places = (columns + torch.arange(0, size, num_columns)[:, None]).flatten(-2)
    return places.gather(-1, logits.gather(-1, places).topk(count, sorted=False).indices)
