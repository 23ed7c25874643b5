"""Runs whole steps of Llama-like models in one call of the C library.

`is_plain` checks that the layers of a loaded model consist of norms, attention with RoPE and a
gated MLP; `Decoder` then describes them in the library's structures. Before the backend uses a
decoder, it compares the results with those of the model's own code.
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from semantic.adapters.outbound.backends.sampler import Logits
from semantic.adapters.outbound.backends.torch.attention import Span
from semantic.adapters.outbound.backends.torch.grouped import GroupedLinear
from semantic.adapters.outbound.backends.torch.native.library import (
    FULL,
    Layer,
    Library,
    Matrix,
    Model,
)
from semantic.domain.spec import ModelCacheSpec

_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_BASE_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LINEARS = nn.Linear | GroupedLinear
_LANES = 4  # the library requires sizes that are multiples of it


def is_plain(model: Any) -> bool:
    """Whether a model consists only of parts that the C library supports."""
    base = model.base_model
    if _parts(base) != _BASE_PARTS or not isinstance(model.get_output_embeddings(), _LINEARS):
        return False
    return all(_is_plain_layer(layer) for layer in base.layers)


def _parts(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _is_plain_layer(layer: Any) -> bool:
    if _parts(layer) != _LAYER_PARTS or _parts(layer.mlp) != _MLP_PARTS:
        return False
    attention = layer.self_attn
    if _parts(attention) - _HEAD_NORMS != _ATTENTION_PARTS:
        return False
    linears = [getattr(attention, name) for name in sorted(_ATTENTION_PARTS)]
    linears += [getattr(layer.mlp, name) for name in sorted(_MLP_PARTS - {"act_fn"})]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in _HEAD_NORMS & _parts(attention)]
    is_silu = type(layer.mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
    return is_silu and all(map(_is_usable, linears)) and all(map(_is_norm, norms))


def _is_usable(linear: nn.Module) -> bool:
    if isinstance(linear, GroupedLinear):
        return linear.out_features % _LANES == 0
    if not isinstance(linear, nn.Linear) or linear.weight.dtype != torch.float32:
        return False
    return linear.in_features % _LANES == linear.out_features % _LANES == 0


def _is_norm(module: nn.Module) -> bool:
    has_eps = hasattr(module, "variance_epsilon")
    return has_eps and type(module).__name__.endswith("RMSNorm")


class Decoder:
    """Runs steps of one model, whose grouped linears must be packed for the library."""

    def __init__(self, model: Any, spec: ModelCacheSpec, library: Library) -> None:
        """Describe a plain model to the library."""
        base, config = model.base_model, model.config
        self._library, self._num_threads = library, torch.get_num_threads()
        self._embed, self._rotary = base.embed_tokens, base.rotary_emb
        self._kept: list[Any] = []
        windows = [layer.window for layer in spec.layers]
        layers = [self._layer(*pair) for pair in zip(base.layers, windows, strict=True)]
        attention = base.layers[0].self_attn
        self._layers = (Layer * len(layers))(*layers)
        self._kept += [model]  # the library reads its weights by address
        dim = int(attention.head_dim)
        heads = layers[0].output.columns // dim
        self._model = Model(
            ctypes.addressof(self._layers),
            self._floats(base.norm.weight),
            self._matrix(model.get_output_embeddings()),
            *(len(layers), config.hidden_size, layers[0].down.columns),
            *(heads, int(config.num_key_value_heads), dim),
            *(float(base.norm.variance_epsilon), float(attention.scaling)),
        )

    def step(self, spans: Sequence[Span], last: Sequence[int]) -> Logits:
        """Run the model over the tokens of spans; returns the logits after the tokens at `last`."""
        tokens = [token for span in spans for token in span.tokens]
        rows = np.array(list(_rows(spans)), np.int64)
        wanted = np.array(last, np.int32)
        with torch.inference_mode():
            hidden = self._embed(torch.tensor([tokens])).contiguous()
            cos, sin = self._rotary(hidden, torch.from_numpy(rows[:, 3][None]))
            cos, sin = cos.contiguous(), sin.contiguous()
        logits = np.empty((len(wanted), self._model.head.rows), np.float32)
        # Always all threads: the library's threads take over work from those without a core, and
        # sleep while they wait.
        self._library.step(
            self._model,
            *(rows.ctypes.data, len(rows), cos.data_ptr(), sin.data_ptr()),
            *(wanted.ctypes.data, len(wanted), hidden.data_ptr(), logits.ctypes.data),
            self._num_threads,
        )
        return logits

    def _layer(self, layer: Any, window: int | None) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        inputs = [self._matrix(getattr(attention, f"{name}_proj")) for name in "qkv"]
        others = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        return Layer(
            self._floats(layer.input_layernorm.weight),
            self._floats(layer.post_attention_layernorm.weight),
            *(None if norm is None else self._floats(norm.weight) for norm in norms),
            (Matrix * 3)(*inputs),
            *(self._matrix(linear) for linear in others),
            len(inputs),
            window or 0,
        )

    def _matrix(self, linear: nn.Linear | GroupedLinear) -> Matrix:
        if isinstance(linear, GroupedLinear):
            return linear.native_matrix()
        given: torch.Tensor | None = linear.bias
        bias = None if given is None else self._floats(given)
        size = (linear.out_features, linear.in_features)
        return Matrix(self._floats(linear.weight), bias, FULL, *size, 1.0)

    def _floats(self, tensor: torch.Tensor) -> int:
        """Return the address of a tensor's float32 data, and keep that data alive."""
        wide = tensor.detach().float().contiguous()
        self._kept.append(wide)
        return wide.data_ptr()


def _rows(spans: Sequence[Span]) -> Iterator[tuple[int, int, int, int]]:
    for span in spans:
        sequence = span.sequence
        start = (sequence.keys.data_ptr(), sequence.values.data_ptr(), sequence.capacity)
        for position in range(sequence.length, span.end):
            yield (*start, position)
