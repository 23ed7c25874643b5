"""Multiplies a few rows by quantised weights on MLX's CUDA build, and checks that against MLX.

MLX multiplies two and more rows by quantised weights ten times as slowly as the custom kernel.
"""

import functools
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.caches import Array
from semantic.adapters.outbound.backends.mlx.cuda import linear
from semantic.adapters.outbound.backends.mlx.cuda.linear import MAX_ROWS, Norm
from semantic.adapters.outbound.backends.mlx.cuda.quantised.kernel import (
    CHUNK,
    Format,
    form_of,
    make_kernel,
)
from semantic.adapters.outbound.backends.mlx.runtime import import_library

_LOG = logging.getLogger(__name__)
_BITS = (4, 8)
_GROUPS = (32, 64, 128)
_MXFP4 = ("mxfp4", 4, 32)
_CHECKED_ROWS = (1, 8, MAX_ROWS)  # with these numbers of rows, the kernel has different forms
_TOLERANCE = 0.03  # of the norm of a product; rounding to bfloat16 and another order take 0.004


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """Quantised weights ``[outputs, columns]``, as MLX packs them."""

    weight: Array
    scales: Array
    biases: Array | None
    group_size: int
    bits: int
    mode: str

    @classmethod
    def of(cls, module: Any) -> "QuantisedMatrix":
        """Return the weights of a quantised layer of MLX."""
        return cls(
            module.weight,
            module.scales,
            module.get("biases"),
            module.group_size,
            module.bits,
            module.mode,
        )

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.weight.shape[0]), int(self.weight.shape[1]) * 32 // self.bits

    @property
    def is_float(self) -> bool:
        return (self.mode, self.bits, self.group_size) == _MXFP4

    @property
    def packing(self) -> Format:
        return Format(self.bits, self.group_size, self.is_float)


def can_multiply(given: Array, matrix: QuantisedMatrix) -> bool:
    """Whether the kernel supports these arrays: one token each for a few rows."""
    return (
        given.ndim == 3
        and given.shape[1] == 1
        and given.shape[0] <= MAX_ROWS
        and has_kernel(matrix, given.dtype)
    )


def has_kernel(matrix: QuantisedMatrix, dtype: Any) -> bool:
    """Whether the kernel supports weights of this format, for inputs of a number format."""
    is_affine = (
        matrix.mode == "affine"
        and matrix.bits in _BITS
        and matrix.group_size in _GROUPS
        and matrix.biases is not None
        and matrix.scales.dtype == matrix.biases.dtype == dtype
    )
    return (
        dtype in (mx.bfloat16, mx.float16)
        and (is_affine or matrix.is_float)
        and matrix.shape[1] % CHUNK == 0
    )


def multiply(
    given: Array,
    matrix: QuantisedMatrix,
    *,
    norm: Norm | None = None,
    added: Array | None = None,
    is_gated: bool = False,
) -> Array:
    """Multiply ``[rows, 1, columns]`` by the transpose of a matrix; see `linear.multiply`."""
    num_rows = given.shape[0]
    if norm is not None and not linear.can_norm(given):
        given, norm = mx.fast.rms_norm(given, norm.factors, norm.eps), None
    if num_rows > MAX_ROWS:
        return _multiply_many(given, matrix, added, is_gated=is_gated)
    num_outputs = matrix.shape[0] // 2 if is_gated else matrix.shape[0]
    form = form_of(matrix.packing, matrix.shape[0], num_rows, is_normed=norm is not None)
    num_strips = -(-num_outputs // (form.height // 2 if is_gated else form.height))
    is_bias = added is not None and added.ndim == 1
    eps = None if norm is None else norm.eps
    optional = [matrix.biases, norm and norm.factors, added]
    template = {
        "T": given.dtype,
        "TILES": linear.num_tiles(num_rows),
        "BITS": matrix.bits,
        "GROUP": matrix.group_size,
    }
    kernel = make_kernel(
        form,
        eps,
        is_float=matrix.is_float,
        is_added=added is not None,
        is_bias=is_bias,
        is_gated=is_gated,
    )
    (out,) = kernel(
        inputs=[given, matrix.weight, matrix.scales, *(x for x in optional if x is not None)],
        template=template,
        grid=(num_strips * 32 * form.warps, 1, 1),
        threadgroup=(32 * form.warps, 1, 1),
        outputs=[((num_rows, 1, num_outputs), given.dtype)],
        numbers=(num_rows, *matrix.shape),
    )
    return out


def _multiply_many(
    given: Array, matrix: QuantisedMatrix, added: Array | None, *, is_gated: bool
) -> Array:
    out = _by_library(given[:, 0], matrix)
    if is_gated:
        out = linear.swiglu(*mx.split(out, 2, axis=-1))
    return (out if added is None else out + added.reshape(-1, out.shape[-1]))[:, None]


def _by_library(given: Array, matrix: QuantisedMatrix) -> Array:
    return mx.quantized_matmul(
        given,
        matrix.weight,
        matrix.scales,
        matrix.biases,
        group_size=matrix.group_size,
        bits=matrix.bits,
        mode=matrix.mode,
    )


# -- a model's layers ----------------------------------------------------------------------------


def find_wrong_formats(model: Any) -> frozenset[Format]:
    """Return the formats in which the kernel differs from MLX's multiplication, and log them.

    For each format of the model, it multiplies the matrix with the fewest rows and that with the
    most, for which the kernel divides the work differently.
    """
    by_format: dict[Format, list[QuantisedMatrix]] = {}
    for module in model.modules():
        if type(module) in _custom_kinds():
            matrix = QuantisedMatrix.of(module)
            if has_kernel(matrix, _dtype_of(matrix)):
                by_format.setdefault(matrix.packing, []).append(matrix)
    wrong = set()
    for packing, matrices in by_format.items():
        matrices.sort(key=lambda matrix: matrix.shape)
        if not all(map(_is_right, (matrices[0], matrices[-1]))):
            wrong.add(packing)
            _LOG.warning("custom kernel differs from MLX's for weights in %s; disabled", packing)
    return frozenset(wrong)


def _is_right(matrix: QuantisedMatrix) -> bool:
    dtype = _dtype_of(matrix)
    for num_rows in _CHECKED_ROWS:
        shape = (num_rows, 1, matrix.shape[1])
        given = mx.random.normal(shape, dtype, key=mx.random.key(num_rows))
        found, expected = multiply(given, matrix), _by_library(given[:, 0], matrix)[:, None]
        difference = mx.linalg.norm((found - expected).astype(mx.float32))
        if not (difference <= _TOLERANCE * mx.linalg.norm(expected.astype(mx.float32))).item():
            return False  # also if there are NaNs
    return True


def _dtype_of(matrix: QuantisedMatrix) -> Any:
    """Return the number format of its inputs."""
    return mx.bfloat16 if matrix.is_float else matrix.scales.dtype


def use_custom_linears(model: Any, wrong: Collection[Format] = ()) -> None:
    """Use the custom kernel for few rows in quantised layers, including the head.

    `wrong` formats keep the library's code.
    """
    kinds = _custom_kinds()
    for module in model.modules():
        if type(module) in kinds and QuantisedMatrix.of(module).packing not in wrong:
            module.__class__ = kinds[type(module)]


@functools.cache
def _custom_kinds() -> dict[type, type]:
    nn = import_library("mlx.nn")

    class FewRowsQuantisedLinear(nn.QuantizedLinear):  # type: ignore[misc, name-defined]
        def __call__(self, x: Array) -> Array:
            matrix = QuantisedMatrix.of(self)
            if not can_multiply(x, matrix):
                return super().__call__(x)
            return multiply(x, matrix, added=self.get("bias"))

    class FewRowsQuantisedEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc, name-defined]
        def as_linear(self, x: Array) -> Array:
            matrix = QuantisedMatrix.of(self)
            return multiply(x, matrix) if can_multiply(x, matrix) else super().as_linear(x)

    return {
        nn.QuantizedLinear: FewRowsQuantisedLinear,
        nn.QuantizedEmbedding: FewRowsQuantisedEmbedding,
    }
