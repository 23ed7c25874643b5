"""Rearranges a loaded model for speed on MLX's CUDA build, up to whole layers.

A decode step there is bound by the host, which pays for every operation. The library's code of one
layer takes about thirty operations, the custom kernels six. They replace layers that are known to
compute exactly this, and only for one token each of a few rows. All other cases, prompts included,
run the library's code.
"""

import functools
import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.caches import Array
from semantic.adapters.outbound.backends.mlx.cuda import attention as cuda_attention
from semantic.adapters.outbound.backends.mlx.cuda import device as cuda
from semantic.adapters.outbound.backends.mlx.cuda import linear as cuda_linear
from semantic.adapters.outbound.backends.mlx.cuda import recurrent as cuda_recurrent
from semantic.adapters.outbound.backends.mlx.cuda import rope as cuda_rope
from semantic.adapters.outbound.backends.mlx.cuda.linear import (
    MAX_ROWS,
    MAX_STEP_ROWS,
    LinearPart,
    Norm,
)
from semantic.adapters.outbound.backends.mlx.cuda.quantised import linear as cuda_quantised
from semantic.adapters.outbound.backends.mlx.cuda.quantised.kernel import Format
from semantic.adapters.outbound.backends.mlx.cuda.quantised.linear import QuantisedMatrix
from semantic.adapters.outbound.backends.mlx.cuda.quantised.widening import widen
from semantic.adapters.outbound.backends.mlx.cuda.rope import HeadNorms
from semantic.adapters.outbound.backends.mlx.decode import AttentionView
from semantic.adapters.outbound.backends.mlx.runtime import import_library

_LOG = logging.getLogger(__name__)

_FAMILIES = ("llama", "qwen2", "qwen3")  # their layers differ only in biases and head norms
_Matrix: TypeAlias = Array | QuantisedMatrix
_FAR = 12_345  # a position at which different RoPE modules give different angles


def tune(model: Any, device_bytes: int) -> str:
    """On CUDA, join linears and install the custom kernels, where measurements favour them.

    Args:
        device_bytes: What the server may use of the device's memory.

    Returns:
        Why the model runs slower than it could; empty if it does not.
    """
    if cuda.is_in_use():
        cuda_quantised.expand_narrow(model)
    if cuda.is_available():
        widen(model, device_bytes)
    if cuda.is_in_use():
        cuda_linear.mend_experts(model)
        cuda_recurrent.use_custom_recurrence()
        cuda_linear.join_linears(model)
    if cuda.is_available():
        wrong = cuda_quantised.find_wrong_formats(model)
        cuda_linear.use_custom_linears(model)
        cuda_quantised.use_custom_linears(model, wrong, device_bytes)
        use_custom_layers(model, wrong)
        if wrong:
            formats = ", ".join(sorted(map(str, wrong)))
            return f"MLX multiplies weights in {formats}: the custom kernel gives other results"
    return ""


def untune(model: Any) -> int:
    """Restore the library's code in all layers; returns the number of restored layers."""
    libraries = {own: base for base, own in _custom_kinds().items()}
    ours = [module for module in model.modules() if type(module) in libraries]
    for module in ours:
        module.__class__ = libraries[type(module)]
        del module.custom_weights
    return len(ours)


def has_only_custom_layers(model: Any, num_layers: int) -> bool:
    """Whether all layers run on the custom kernels."""
    kinds = set(_custom_kinds().values())
    return sum(type(module) in kinds for module in model.modules()) == num_layers


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The parameters of a layer.

    Attributes:
        rope: The library's module; the same object in all layers with equal angles.
    """

    first_norm: Norm
    heads: _Matrix
    heads_bias: Array | None
    head_norms: HeadNorms | None
    rope: Any
    num_heads: int
    num_key_heads: int
    scale: float
    attended: _Matrix
    second_norm: Norm
    inner: _Matrix
    outer: _Matrix

    @property
    def formats(self) -> set[Format]:
        """Formats of the quantised matrices."""
        matrices = (self.heads, self.attended, self.inner, self.outer)
        return {m.packing for m in matrices if isinstance(m, QuantisedMatrix)}

    @property
    def dim(self) -> int:
        return int(self.heads.shape[0]) // (self.num_heads + 2 * self.num_key_heads)


def run_layer(weights: LayerWeights, given: Array, view: AttentionView) -> Array:
    """Compute one layer for one token each of some rows ``[rows, 1, hidden]``."""
    w = weights
    heads = multiply(given, w.heads, norm=w.first_norm, added=w.heads_bias)
    heads = heads.reshape(given.shape[0], -1, 1, w.dim)
    attended = view.kernels.keep_and_attend(
        view.place, view.part, heads, w.rope, w.head_norms, w.scale
    )
    hidden = multiply(attended.reshape(given.shape[0], 1, -1), w.attended, added=given)
    inner = multiply(hidden, w.inner, norm=w.second_norm, is_gated=True)
    return multiply(inner, w.outer, added=hidden)


def multiply(
    given: Array,
    matrix: _Matrix,
    *,
    norm: Norm | None = None,
    added: Array | None = None,
    is_gated: bool = False,
) -> Array:
    """Multiply rows by a matrix, quantised or not; see `linear.multiply`."""
    if isinstance(matrix, QuantisedMatrix):
        return cuda_quantised.multiply(given, matrix, norm=norm, added=added, is_gated=is_gated)
    return cuda_linear.multiply(given, matrix, norm=norm, added=added, is_gated=is_gated)


def use_custom_layers(model: Any, wrong: Collection[Format] = ()) -> int:
    """Run supported layers on the custom kernels; returns the number of such layers.

    Layers with weights in `wrong` formats keep the library's code.
    """
    ropes: list[Any] = []
    found = 0
    for module in model.modules():
        kind = _custom_kinds().get(type(module))
        weights = None if kind is None else _supported_weights(module)
        if weights is not None and not weights.formats & set(wrong):
            module.__class__ = kind
            module.custom_weights = replace(weights, rope=_shared_rope(ropes, weights))
            found += 1
    return found


def _supported_weights(layer: Any) -> LayerWeights | None:
    try:
        weights = _weights_of(layer)
        return weights if weights is not None and _can_run(weights) else None
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        _LOG.debug("custom kernels do not support a layer: %s", error)
        return None


def _weights_of(layer: Any) -> LayerWeights | None:
    attention, mlp = layer.self_attn, layer.mlp
    heads, inner = attention.q_proj, mlp.gate_proj
    if "q_norm" in attention and attention.q_norm.eps != attention.k_norm.eps:
        return None
    if not (isinstance(heads, LinearPart) and isinstance(inner, LinearPart)):
        return None
    if any("bias" in linear for linear in (attention.o_proj, inner.whole, mlp.down_proj)):
        return None
    norms = (
        HeadNorms(attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps)
        if "q_norm" in attention
        else None
    )
    return LayerWeights(
        first_norm=_norm(layer.input_layernorm),
        heads=_matrix(heads.whole),
        heads_bias=heads.whole.get("bias"),
        head_norms=norms,
        rope=attention.rope,
        num_heads=attention.n_heads,
        num_key_heads=attention.n_kv_heads,
        scale=attention.scale,
        attended=_matrix(attention.o_proj),
        second_norm=_norm(layer.post_attention_layernorm),
        inner=_matrix(inner.whole),
        outer=_matrix(mlp.down_proj),
    )


def _can_run(weights: LayerWeights) -> bool:
    w, dtype = weights, weights.first_norm.factors.dtype
    queries, keys = (mx.zeros((1, n, 1, w.dim), dtype) for n in (w.num_heads, w.num_key_heads))
    vectors = [w.first_norm.factors, w.second_norm.factors, w.heads_bias]
    if w.head_norms is not None:
        vectors += [w.head_norms.query_factors, w.head_norms.key_factors]
    return (
        all(vector is None or vector.dtype == dtype for vector in vectors)
        and cuda_attention.can_attend(queries, keys, keys)
        and all(_can_multiply(m, dtype) for m in (w.heads, w.attended, w.inner, w.outer))
        and _matches_rope(w)
    )


def _can_multiply(matrix: _Matrix, dtype: Any) -> bool:
    if isinstance(matrix, QuantisedMatrix):
        return cuda_quantised.has_kernel(matrix, dtype)
    return cuda_linear.can_multiply(mx.zeros((MAX_ROWS, 1, matrix.shape[1]), dtype), matrix)


def _matrix(module: Any) -> _Matrix:
    return QuantisedMatrix.of(module) if "scales" in module else module.weight


def _matches_rope(weights: LayerWeights) -> bool:
    """Whether the library's RoPE rotates heads as the kernel does with its angles."""
    positions = mx.array([1, _FAR])
    heads = mx.random.normal((2, 1, 1, weights.dim), key=mx.random.key(0))
    angles = cuda_rope.angles_at(weights.rope, positions, weights.dim)
    expected = weights.rope(heads[...], offset=positions)
    return bool(mx.allclose(cuda_rope.apply_rope(angles, heads), expected, atol=1e-3).item())


def _shared_rope(ropes: list[Any], weights: LayerWeights) -> Any:
    """Return the first known module with the same angles."""
    positions = mx.array([1, _FAR])

    def angles(rope: Any) -> Array:
        return cuda_rope.angles_at(rope, positions, weights.dim)

    for rope in ropes:
        if mx.array_equal(angles(rope), angles(weights.rope)).item():
            return rope
    ropes.append(weights.rope)
    return weights.rope


def _norm(module: Any) -> Norm:
    return Norm(module.weight, module.eps)


@functools.cache
def _custom_kinds() -> dict[type, type]:
    return {base: _custom_kind(base) for base in map(_library_kind, _FAMILIES)}


def _library_kind(family: str) -> Any:
    return import_library(f"mlx_lm.models.{family}").TransformerBlock


def _custom_kind(base: Any) -> type:
    class FewRowsBlock(base):  # type: ignore[misc]
        custom_weights: LayerWeights

        def __call__(self, x: Array, mask: Any = None, cache: Any = None) -> Array:
            is_step = isinstance(cache, AttentionView) and not cache.part.window
            if is_step and x.shape[0] <= MAX_STEP_ROWS and x.shape[1] == 1:
                return run_layer(self.custom_weights, x, cache)
            return super().__call__(x, mask, cache)

    return FewRowsBlock
