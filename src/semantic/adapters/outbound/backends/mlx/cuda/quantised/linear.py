"""Multiplies by quantised weights on MLX's CUDA build: a few rows by a custom kernel.

MLX multiplies two and more rows by quantised weights ten times as slowly as that kernel. Many rows,
those of a prompt, are multiplied by the dequantised matrix: on an H200, 4,096 rows take a quarter
of the time of MLX's quantised multiplication, which MLX also compiles at run time, for half a
minute per number of rows. If a dequantised matrix is too large for the device, MLX's runs.
"""

import functools
import logging
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
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
_ROOM = 64  # a dequantised matrix may take one part in this many of the device's memory
_LEAST_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """Quantised weights ``[outputs, columns]``, as MLX packs them.

    Attributes:
        is_expanded: Whether it is dequantised for many rows.
    """

    weight: Array
    scales: Array
    biases: Array | None
    group_size: int
    bits: int
    mode: str
    is_expanded: bool = False

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
            getattr(module, "is_expanded", False),
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

    def dequantise(self, dtype: Any) -> Array:
        """Return the whole matrix in a number format."""
        return mx.dequantize(
            self.weight,
            self.scales,
            self.biases,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            dtype=dtype,
        )


def can_multiply(given: Array, matrix: QuantisedMatrix) -> bool:
    """Whether the kernel supports these arrays: a few rows in all."""
    return math.prod(given.shape[:-1]) <= MAX_ROWS and has_kernel(matrix, given.dtype)


def is_worth_expanding(given: Array, matrix: QuantisedMatrix) -> bool:
    """Whether there are so many rows that the dequantised matrix multiplies them faster."""
    return matrix.is_expanded and math.prod(given.shape[:-1]) > MAX_ROWS


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
    out = multiply_many(given[:, 0], matrix)
    if is_gated:
        out = linear.swiglu(*mx.split(out, 2, axis=-1))
    return (out if added is None else out + added.reshape(-1, out.shape[-1]))[:, None]


def multiply_many(given: Array, matrix: QuantisedMatrix) -> Array:
    """Multiply any number of rows by the transpose of a matrix, without the custom kernel."""
    if matrix.is_expanded:
        return given @ matrix.dequantise(given.dtype).T
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


def expand_narrow(model: Any) -> None:
    """Dequantise matrices of fewer than 128 columns for good.

    On CUDA, MLX 0.32.4 does not write the products of several rows and 64 columns.
    """
    nn = import_library("mlx.nn")
    plain = {nn.QuantizedLinear: nn.Linear, nn.QuantizedEmbedding: nn.Embedding}
    for module in model.modules():
        kind = plain.get(type(module))
        if kind is None or (matrix := QuantisedMatrix.of(module)).shape[1] >= _LEAST_COLUMNS:
            continue
        module.weight = matrix.dequantise(_dtype_of(matrix))
        for name in ("scales", "biases"):
            module.pop(name, None)
        module.__class__ = kind


def find_wrong_formats(model: Any) -> frozenset[Format]:
    """Return the formats in which the kernel differs from the dequantised matrix, and log them.

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
            _LOG.warning("custom kernel is wrong for weights in %s; disabled", packing)
    return frozenset(wrong)


def _is_right(matrix: QuantisedMatrix) -> bool:
    dtype, expanded = _dtype_of(matrix), replace(matrix, is_expanded=True)
    for num_rows in _CHECKED_ROWS:
        shape = (num_rows, 1, matrix.shape[1])
        given = mx.random.normal(shape, dtype, key=mx.random.key(num_rows))
        found, expected = multiply(given, matrix), multiply_many(given, expanded)
        difference = mx.linalg.norm((found - expected).astype(mx.float32))
        if not (difference <= _TOLERANCE * mx.linalg.norm(expected.astype(mx.float32))).item():
            return False  # also if there are NaNs
    return True


def _dtype_of(matrix: QuantisedMatrix) -> Any:
    """Return the number format of its inputs."""
    return mx.bfloat16 if matrix.is_float else matrix.scales.dtype


def use_custom_linears(model: Any, wrong: Collection[Format] = (), device_bytes: int = 0) -> None:
    """Use the custom kernel for few rows in quantised layers, including the head.

    Args:
        wrong: Formats that keep the library's code.
        device_bytes: The device's memory; many rows are multiplied by dequantised matrices that
            are small beside it.
    """
    kinds = _custom_kinds()
    for module in model.modules():
        if type(module) in kinds and (matrix := QuantisedMatrix.of(module)).packing not in wrong:
            module.__class__ = kinds[type(module)]
            module.is_expanded = 2 * math.prod(matrix.shape) <= device_bytes // _ROOM


def largest_expanded(model: Any) -> int:
    """Return the size of the largest matrix that is dequantised to multiply many rows."""
    matrices = (QuantisedMatrix.of(m) for m in model.modules() if getattr(m, "is_expanded", False))
    return max((2 * math.prod(matrix.shape) for matrix in matrices), default=0)


@functools.cache
def _custom_kinds() -> dict[type, type]:
    nn = import_library("mlx.nn")

    class FewRowsQuantisedLinear(nn.QuantizedLinear):  # type: ignore[misc, name-defined]
        def __call__(self, x: Array) -> Array:
            found = _multiply_any(x, QuantisedMatrix.of(self), self.get("bias"))
            return super().__call__(x) if found is None else found

    class FewRowsQuantisedEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc, name-defined]
        def as_linear(self, x: Array) -> Array:
            found = _multiply_any(x, QuantisedMatrix.of(self), None)
            return super().as_linear(x) if found is None else found

    return {
        nn.QuantizedLinear: FewRowsQuantisedLinear,
        nn.QuantizedEmbedding: FewRowsQuantisedEmbedding,
    }


def _multiply_any(given: Array, matrix: QuantisedMatrix, bias: Array | None) -> Array | None:
    """Multiply rows by the faster method; None if that is the library's code."""
    if can_multiply(given, matrix):
        rows = given.reshape(-1, 1, given.shape[-1])
        return multiply(rows, matrix, added=bias).reshape(*given.shape[:-1], -1)
    if not is_worth_expanding(given, matrix):
        return None
    out = multiply_many(given, matrix)
    return out if bias is None else out + bias
