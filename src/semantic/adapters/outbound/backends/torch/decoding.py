"""Runs whole steps of a model in one call of the C library.

`can_decode` checks that the layers of a loaded model consist of norms, attention with RoPE, and a
gated MLP or a mixture of experts; `Decoder` then describes them in the library's structures. These
are the models of Llama, Mistral, Qwen 2 and 3, Qwen 3 MoE, Gemma 3 (text) and GPT-OSS, and others
with the same parts. Before the backend uses a decoder, it compares the results with those of the
model's own code.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from semantic.adapters.outbound.backends.sampler import Logits
from semantic.adapters.outbound.backends.torch.experts import Experts
from semantic.adapters.outbound.backends.torch.grouped import AnyLinear, GroupedLinear
from semantic.adapters.outbound.backends.torch.kv.sequences import ChunkSpan
from semantic.adapters.outbound.backends.torch.native.library import (
    CLAMPED,
    FULL,
    GELU_TANH,
    SILU,
    Activation,
    Library,
    Matrix,
    Mlp,
    NativeLayer,
    NativeModel,
)
from semantic.adapters.outbound.backends.torch.vision.merging import (
    merged_embeddings,
    row_positions,
)
from semantic.domain.spec import ModelCacheSpec

_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_BASE_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
# Gemma's layers also normalise what attention and the MLP add.
_OUTPUT_NORMS = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_NORMS_PLUS_ONE = {"Gemma3RMSNorm"}  # they multiply by 1 + weight
_ACTIVATIONS = {"SiLU": SILU, "SiLUActivation": SILU, "GELUTanh": GELU_TANH}
_ROUTERS = {"Qwen3MoeTopKRouter", "GptOssTopKRouter"}
_HALF_ROTARY = "GptOssRotaryEmbedding"  # it returns each angle once, others twice
_LANES = 4  # the library requires sizes that are multiples of it


# -- recognising ----------------------------------------------------------------------------------


def can_decode(model: Any) -> bool:
    """Whether a model consists only of parts that the C library supports."""
    base, config = model.base_model, model.config
    if _parts(base) != _BASE_PARTS or not isinstance(model.get_output_embeddings(), AnyLinear):
        return False
    if getattr(config, "final_logit_softcapping", None):
        return False
    if not all(_is_known_layer(layer) for layer in base.layers) or not _has_full_rope(base):
        return False
    return len({_activation_name(layer.mlp) for layer in base.layers}) == 1


def _parts(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _has_full_rope(base: Any) -> bool:
    dim = getattr(base.layers[0].self_attn, "head_dim", None)
    positions = torch.zeros(1, 1, dtype=torch.int64)
    tables = (_angles(base.rotary_emb, kind, positions)[0] for kind in _ropes(base))
    return all(table.shape[-1] == dim for table in tables)


def _is_known_layer(layer: Any) -> bool:
    if _parts(layer) - _OUTPUT_NORMS != _LAYER_PARTS:
        return False
    norms = [getattr(layer, name) for name in _parts(layer) - {"self_attn", "mlp"}]
    has_known_norms = len(norms) in (2, 4) and all(map(_is_norm, norms))
    return has_known_norms and _is_known_attention(layer.self_attn) and _is_known_mlp(layer)


def _is_known_attention(attention: Any) -> bool:
    parts = _parts(attention)
    if parts - _HEAD_NORMS != _ATTENTION_PARTS:
        return False
    if getattr(attention, "attn_logit_softcapping", None) or not getattr(
        attention, "is_causal", True
    ):
        return False
    linears = [getattr(attention, name) for name in _ATTENTION_PARTS]
    norms = [getattr(attention, name) for name in _HEAD_NORMS & parts]
    return all(map(_is_usable, linears)) and all(map(_is_norm, norms))


def _is_known_mlp(layer: Any) -> bool:
    mlp = layer.mlp
    if isinstance(getattr(mlp, "experts", None), Experts):
        return _are_known_experts(mlp) and not hasattr(layer, "post_feedforward_layernorm")
    if _parts(mlp) != _MLP_PARTS or _activation_name(mlp) not in _ACTIVATIONS:
        return False
    linears = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return all(map(_is_usable, linears)) and len(_forms(linears[:2])) == 1


def _are_known_experts(mlp: Any) -> bool:
    experts, router = mlp.experts, _router(mlp)
    if type(router).__name__ not in _ROUTERS or router.weight.dtype != torch.float32:
        return False
    inputs, downs = [*experts.gates, *experts.ups], [*experts.downs]
    are_alike = len(_forms(inputs)) == len(_forms(downs)) == 1
    return are_alike and all(map(_is_usable, inputs + downs))


def _router(mlp: Any) -> Any:
    """Return the module beside a layer's experts; None unless there is exactly one."""
    others = [child for child in mlp.children() if child is not mlp.experts]
    return others[0] if len(others) == 1 else None


def _forms(linears: Iterable[Any]) -> set[bool | None]:
    """Return the forms of input that matrices read: 8 bits, fewer bits, or None for float32."""
    return {
        linear.grouped.bits == 8 if isinstance(linear, GroupedLinear) else None
        for linear in linears
    }


def _is_usable(linear: nn.Module) -> bool:
    if isinstance(linear, GroupedLinear):
        return linear.out_features % _LANES == 0
    if not isinstance(linear, nn.Linear) or linear.weight.dtype != torch.float32:
        return False
    return linear.in_features % _LANES == linear.out_features % _LANES == 0


def _is_norm(module: nn.Module) -> bool:
    name = type(module).__name__
    return name in _NORMS_PLUS_ONE or (
        name.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
    )


def _activation_name(mlp: Any) -> str:
    if isinstance(experts := getattr(mlp, "experts", None), Experts):
        return "SiLUActivation" if experts.clamped is None else repr(experts.clamped)
    return type(getattr(mlp, "act_fn", None)).__name__


def _ropes(base: Any) -> list[str | None]:
    config = getattr(base, "config", None)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    has_own = bool(kinds) and all(hasattr(base.rotary_emb, f"{kind}_inv_freq") for kind in kinds)
    return [*kinds] if has_own else [None]


def _angles(
    rotary: Any, kind: str | None, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of positions, ``[1, positions, dim]`` each."""
    like = torch.empty(0)
    cos, sin = rotary(like, positions) if kind is None else rotary(like, positions, kind)
    if type(rotary).__name__ == _HALF_ROTARY:
        cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)
    return cos, sin


# -- running --------------------------------------------------------------------------------------


class Decoder:
    """Runs steps of a model that `can_decode`, its grouped linears packed for the library."""

    def __init__(self, model: Any, spec: ModelCacheSpec, library: Library) -> None:
        base, config = model.base_model, model.config
        self._library, self._num_threads = library, torch.get_num_threads()
        self._embed, self._rotary, self._ropes = base.embed_tokens, base.rotary_emb, _ropes(base)
        self._kept: list[Any] = [model]  # the library reads its weights by address
        layers = [
            self._layer(layer, shape.window, self._rope_of(base, index))
            for index, (layer, shape) in enumerate(zip(base.layers, spec.layers, strict=True))
        ]
        self._kept += layers
        attention = base.layers[0].self_attn
        dim = int(attention.head_dim)
        self._model = NativeModel(
            layers=(NativeLayer * len(layers))(*layers),
            norm=self._norm(base.norm),
            head=self._matrix(model.get_output_embeddings()),
            activation=_activation(base.layers[0].mlp),
            num_layers=len(layers),
            hidden=config.hidden_size,
            heads=layers[0].output.columns // dim,
            kv_heads=int(config.num_key_value_heads),
            dim=dim,
            eps=_eps(base.norm),
            scaling=float(attention.scaling),
        )

    def step(self, spans: Sequence[ChunkSpan], last: Sequence[int]) -> Logits:
        """Run the model over the tokens of spans; returns the logits after the tokens at `last`."""
        rows = np.array(list(_rows(spans)), np.int64)
        wanted = np.array(last, np.int32)
        positions = row_positions(spans)
        with torch.inference_mode():
            hidden = merged_embeddings(spans, self._embed).contiguous()
            tables = [_angles(self._rotary, kind, positions) for kind in self._ropes]
            cos, sin = (torch.cat(table).contiguous() for table in zip(*tables, strict=True))
        logits = np.empty((len(wanted), self._model.head.rows), np.float32)
        # Always all threads: the library's threads take over work from those without a core, and
        # sleep while they wait.
        self._library.step(
            self._model,
            rows.ctypes.data,
            len(rows),
            cos.data_ptr(),
            sin.data_ptr(),
            wanted.ctypes.data,
            len(wanted),
            hidden.data_ptr(),
            logits.ctypes.data,
            self._num_threads,
        )
        return logits

    def _rope_of(self, base: Any, index: int) -> int:
        return 0 if len(self._ropes) == 1 else self._ropes.index(base.config.layer_types[index])

    def _layer(self, layer: Any, window: int | None, rope: int) -> NativeLayer:
        attention, mlp = layer.self_attn, layer.mlp
        inputs = [self._matrix(getattr(attention, f"{name}_proj")) for name in "qkv"]
        has_output_norms = hasattr(layer, "post_feedforward_layernorm")
        before_mlp = "pre_feedforward_layernorm" if has_output_norms else "post_attention_layernorm"
        sinks = getattr(attention, "sinks", None)
        described = NativeLayer(
            norm=self._norm(layer.input_layernorm),
            mlp_norm=self._norm(getattr(layer, before_mlp)),
            query_norm=self._norm(getattr(attention, "q_norm", None)),
            key_norm=self._norm(getattr(attention, "k_norm", None)),
            sinks=None if sinks is None else self._floats(sinks),
            inputs=(Matrix * 3)(*inputs),
            output=self._matrix(attention.o_proj),
            num_inputs=len(inputs),
            window=window or 0,
            rope=rope,
        )
        if has_output_norms:
            described.output_norm = self._norm(layer.post_attention_layernorm)
            described.mlp_output_norm = self._norm(layer.post_feedforward_layernorm)
        if isinstance(experts := getattr(mlp, "experts", None), Experts):
            self._add_experts(described, mlp, experts)
        else:
            described.mlps = (Mlp * 1)(self._mlp(mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        return described

    def _add_experts(self, described: NativeLayer, mlp: Any, experts: Experts) -> None:
        router = _router(mlp)
        linears = zip(experts.gates, experts.ups, experts.downs, strict=True)
        mlps = [self._mlp(*three) for three in linears]
        described.mlps = (Mlp * len(mlps))(*mlps)
        bias = getattr(router, "bias", None)
        described.router = Matrix(
            self._floats(router.weight),
            None if bias is None else self._floats(bias),
            FULL,
            *router.weight.shape,
            1.0,
        )
        described.num_experts, described.num_chosen = len(mlps), int(router.top_k)
        # A softmax over the chosen scores equals one over all scores, divided by the chosen sum.
        described.is_normalised = int(getattr(router, "norm_topk_prob", True))

    def _mlp(self, gate: Any, up: Any, down: Any) -> Mlp:
        return Mlp(self._matrix(gate), self._matrix(up), self._matrix(down))

    def _matrix(self, linear: AnyLinear) -> Matrix:
        if isinstance(linear, GroupedLinear):
            return linear.native_matrix()
        given: torch.Tensor | None = linear.bias
        bias = None if given is None else self._floats(given)
        size = (linear.out_features, linear.in_features)
        return Matrix(self._floats(linear.weight), bias, FULL, *size, 1.0)

    def _norm(self, norm: Any) -> int | None:
        if norm is None:
            return None
        weight = norm.weight.detach().float()
        return self._floats(weight + 1 if type(norm).__name__ in _NORMS_PLUS_ONE else weight)

    def _floats(self, tensor: torch.Tensor) -> int:
        """Return the address of a tensor's float32 data, and keep that data alive."""
        wide = tensor.detach().float().contiguous()
        self._kept.append(wide)
        return wide.data_ptr()


def _eps(norm: Any) -> float:
    return float(norm.eps if type(norm).__name__ in _NORMS_PLUS_ONE else norm.variance_epsilon)


def _activation(mlp: Any) -> Activation:
    experts = getattr(mlp, "experts", None)
    if isinstance(experts, Experts) and experts.clamped is not None:
        return Activation(CLAMPED, experts.clamped.alpha, experts.clamped.limit)
    return Activation(_ACTIVATIONS[_activation_name(mlp)], 0.0, 0.0)


def _rows(spans: Sequence[ChunkSpan]) -> Iterator[tuple[int, int, int, int]]:
    for span in spans:
        sequence = span.sequence
        [(keys, values)] = sequence.buffers
        start = (keys.data_ptr(), values.data_ptr(), sequence.capacity)
        for position in range(sequence.length, span.end):
            yield (*start, position)
