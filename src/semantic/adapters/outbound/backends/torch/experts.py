"""Mixtures of experts as separate linears, which can be grouped and which the C library runs.

transformers stores all experts of a layer in three-dimensional tensors. `separate_experts` replaces
its modules by `Experts`. Supported are the layout that most models share (rows of gate, then rows
of up) and that of GPT-OSS (transposed, columns of gate and up alternate, with biases).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from semantic.adapters.outbound.backends.torch.grouped import AnyLinear, FixedLinear

_SILU_EXPERTS, _CLAMPED_EXPERTS = "Qwen3MoeExperts", "GptOssExperts"


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """GPT-OSS's activation: clamps both inputs and adds 1 to the second."""

    alpha: float
    limit: float


class Experts(nn.Module):
    """The experts of a layer; each row is computed only by the experts chosen for it.

    Attributes:
        clamped: None if the experts compute ``down(silu(gate(x)) * up(x))``.
    """

    def __init__(
        self,
        gates: Sequence[AnyLinear],
        ups: Sequence[AnyLinear],
        downs: Sequence[AnyLinear],
        clamped: ClampedGate | None,
    ) -> None:
        super().__init__()
        self.gates, self.ups = nn.ModuleList(gates), nn.ModuleList(ups)
        self.downs, self.clamped = nn.ModuleList(downs), clamped

    def forward(
        self, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        result = torch.zeros_like(hidden_states)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, places = torch.where(chosen == expert)
            output = self._compute(expert, hidden_states[rows]) * weights[rows, places, None]
            result.index_add_(0, rows, output.to(result.dtype))
        return result

    def _compute(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        gate, up = self.gates[expert](rows), self.ups[expert](rows)
        if (clamped := self.clamped) is None:
            gated = functional.silu(gate) * up
        else:
            gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
            gated = (up + 1) * gate * torch.sigmoid(gate * clamped.alpha)
        result: torch.Tensor = self.downs[expert](gated)
        return result


def is_stacked(module: nn.Module) -> bool:
    """Whether a module holds experts with gates in one of the layouts of transformers."""
    both = getattr(module, "gate_up_proj", None)
    return isinstance(both, nn.Parameter) and both.ndim == 3


def is_silu(stacked: Any) -> bool:
    """Whether experts compute what `Experts` does: their gates use SiLU, clamped or not."""
    activation = getattr(stacked, "act_fn", None)
    is_plain = activation is None or type(activation).__name__ in ("SiLU", "SiLUActivation")
    return is_plain or _is_clamped(stacked)


def _is_clamped(stacked: Any) -> bool:
    return type(stacked).__name__ == _CLAMPED_EXPERTS


def clamped_gate(stacked: Any) -> ClampedGate | None:
    """Return the clamping of a transformers module's activation; None if there is none."""
    if not _is_clamped(stacked):
        return None
    return ClampedGate(float(stacked.alpha), float(stacked.limit))


def expert_sizes(stacked: Any) -> tuple[int, int]:
    """Return the hidden and the intermediate size of a transformers module."""
    _, rows, columns = stacked.down_proj.shape
    return (columns, rows) if _is_clamped(stacked) else (rows, columns)


def separate_experts(model: nn.Module) -> None:
    """Replace a model's stacked experts by `Experts`; mutates the model."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ in (_SILU_EXPERTS, _CLAMPED_EXPERTS):
            gates, ups, downs = zip(*_linears(module), strict=True)
            model.set_submodule(name, Experts(gates, ups, downs, clamped_gate(module)))


def _linears(stacked: Any) -> Iterator[tuple[FixedLinear, FixedLinear, FixedLinear]]:
    both, downs = stacked.gate_up_proj.detach(), stacked.down_proj.detach()
    if not _is_clamped(stacked):
        for joined, down in zip(both, downs, strict=True):
            gate, up = joined.chunk(2)
            yield FixedLinear(gate, None), FixedLinear(up, None), FixedLinear(down, None)
        return
    biases = zip(stacked.gate_up_proj_bias.detach(), stacked.down_proj_bias.detach(), strict=True)
    for joined, down, (bias, down_bias) in zip(both, downs, biases, strict=True):
        gate, up = (joined[:, first::2].t().contiguous() for first in (0, 1))
        gate_bias, up_bias = (bias[first::2].contiguous() for first in (0, 1))
        last = FixedLinear(down.t().contiguous(), down_bias)
        yield FixedLinear(gate, gate_bias), FixedLinear(up, up_bias), last


def write_stacked(
    stacked: Any,
    weights: Sequence[Sequence[torch.Tensor]],
    biases: Sequence[torch.Tensor] | None,
) -> list[str]:
    """Write experts into a transformers module; returns the names of the written parameters.

    Args:
        weights: Of gate, up and down: a matrix of each expert.
        biases: Of gate, up and down, ``[experts, rows]``.
    """
    with torch.no_grad():
        for index, (gate, up, down) in enumerate(zip(*weights, strict=True)):
            if not _is_clamped(stacked):
                stacked.gate_up_proj[index] = torch.cat([gate, up])
                stacked.down_proj[index] = down
            else:
                stacked.gate_up_proj[index] = torch.stack([gate, up], dim=1).flatten(0, 1).t()
                stacked.down_proj[index] = down.t()
        if biases is None:
            return ["gate_up_proj", "down_proj"]
        stacked.gate_up_proj_bias[:] = torch.stack([biases[0], biases[1]], dim=2).flatten(1)
        stacked.down_proj_bias[:] = biases[2]
    return ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"]
