"""Weights that stay quantised: groups of integers as stored in the files, and kernels for them.

A row's weights are integers of 4, 5, 6 or 8 bits; each group of them has a scale and a bias, and a
weight is ``integer * scale + bias``. mlx-lm writes models in this format, and GGUF files are
imported into it. GPT-OSS's experts are in MXFP4 instead: four-bit codes for unevenly spaced
multiples of a power of two. These are multiples of the smallest one, and therefore integers too.
The native library (see `native/`) multiplies them as they are. Without it, or where full weights
are requested, the model is loaded as if it had never been quantised.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from semantic.adapters.outbound.backends.torch.native.library import MXFP4, Library, Matrix

BITS = (4, 5, 6, 8)
GROUP = 32  # of weights quantised here; the kernels need groups that are multiples of it
_SMALLEST_STEP = 1e-30
# Value of each MXFP4 code, in halves, with an offset of 12.
_MXFP4_VALUES = torch.tensor(
    [12 + half for half in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)],
    dtype=torch.uint8,
)
_HALF_EXPONENT = 15  # exponent of the largest float16 numbers


class GroupedWeight:
    """A matrix of integers with a scale and a bias for each group of a row."""

    def __init__(
        self,
        packed: torch.Tensor,
        scales: torch.Tensor,
        biases: torch.Tensor | None,
        num_columns: int,
    ) -> None:
        """Take the arrays of a file.

        Args:
            packed: Words or bytes; a row is a stream of bits, the first integer in the lowest.
            scales: ``[rows, groups]``; for MXFP4 their exponents, as bytes.
            biases: ``[rows, groups]``; None for MXFP4.
        """
        self.packed, self.num_columns = packed.view(torch.uint8), num_columns
        self.scales, self.biases = scales, biases
        self.bits = self.packed.shape[1] * 8 // num_columns
        self.group = num_columns // scales.shape[1]

    @property
    def kind(self) -> tuple[int, int, bool]:
        """Bits, group size and format; only matrices of equal kind can be joined."""
        return self.bits, self.group, self.biases is None

    @property
    def greatest(self) -> int:
        """The greatest integer that `integers` may return."""
        return 24 if self.biases is None else 2**self.bits - 1

    @staticmethod
    def quantised(weight: torch.Tensor, bits: int) -> "GroupedWeight":
        """Quantise a matrix whose row length is a multiple of the group size."""
        groups = weight.detach().float().view(len(weight), -1, GROUP)
        low, high = groups.amin(dim=2), groups.amax(dim=2)
        scales = ((high - low) / (2**bits - 1)).clamp_min(1e-8)
        steps = (groups - low[..., None]) / scales[..., None]
        integers = steps.round().clamp(0, 2**bits - 1).to(torch.uint8).flatten(1)
        return GroupedWeight(_packed(integers, bits), scales, low, weight.shape[1])

    @staticmethod
    def joined(weights: Sequence["GroupedWeight"]) -> "GroupedWeight":
        packed = torch.cat([weight.packed for weight in weights])
        scales = torch.cat([weight.scales for weight in weights])
        biases = [weight.biases for weight in weights if weight.biases is not None]
        joined = torch.cat(biases) if biases else None
        return GroupedWeight(packed, scales, joined, weights[0].num_columns)

    def integers(self, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """Return the integers of some rows, one byte each."""
        integers = _unpacked(self.packed[rows], self.bits)
        return integers if self.biases is not None else _MXFP4_VALUES[integers.int()]

    def steps(self, rows: slice | torch.Tensor = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scales and biases of some rows, in float32."""
        scales = self.scales[rows].float()
        if self.biases is not None:
            return scales, self.biases[rows].float()
        halves = torch.exp2(scales - 128)
        return halves, -12 * halves

    def expanded(self, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """Return the weights of some rows, in float32."""
        scales, biases = self.steps(rows)
        groups = self.integers(rows).view(*scales.shape, -1).float()
        return torch.addcmul(biases[..., None], groups, scales[..., None]).flatten(-2)


def _packed(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack each row's integers into a stream of bits, the first in the lowest."""
    places = _places(bits)
    runs = integers.reshape(*integers.shape[:-1], -1, len(places))
    packed = integers.new_zeros(*runs.shape[:-1], len(places) * bits // 8)
    for index, (byte, shift) in enumerate(places):
        packed[..., byte] |= runs[..., index] << shift
        if shift + bits > 8:
            packed[..., byte + 1] |= runs[..., index] >> (8 - shift)
    return packed.flatten(-2)


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 8:
        return packed
    places = _places(bits)
    runs = packed.reshape(*packed.shape[:-1], -1, len(places) * bits // 8)
    integers = packed.new_empty(*runs.shape[:-1], len(places))
    for index, (byte, shift) in enumerate(places):
        value = runs[..., byte] >> shift
        if shift + bits > 8:
            value |= runs[..., byte + 1] << (8 - shift)
        integers[..., index] = value & (2**bits - 1)
    return integers.flatten(-2)


def _places(bits: int) -> list[tuple[int, int]]:
    """Byte and lowest bit of each of the integers that fill whole bytes together."""
    return [divmod(bits * index, 8) for index in range(8 // math.gcd(bits, 8))]


class GroupedLinear(nn.Module):
    """A linear over a grouped weight; `pack` converts it to the native library's layout."""

    def __init__(self, weight: GroupedWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.grouped, self.bias = weight, None if bias is None else bias.detach()
        self.in_features, self.out_features = weight.num_columns, len(weight.scales)
        self._packed: PackedMatrix | None = None

    @property
    def kind(self) -> tuple[int, int, bool]:
        return self.grouped.kind

    def packed_size(self, library: Library) -> int:
        return library.packed_size(self.out_features, self.in_features, native_kind(self.grouped))

    def pack(self, library: Library, memory: torch.Tensor | None = None) -> None:
        """Convert the weights to the library's layout and free their original form.

        Args:
            memory: Of `packed_size` bytes; None allocates it.
        """
        if memory is None:
            memory = torch.empty(self.packed_size(library), dtype=torch.uint8)
        self._packed = PackedMatrix(self.grouped, library, memory)
        del self.grouped

    def packed_matrix(self) -> "PackedMatrix":
        if self._packed is None:
            raise TypeError("the linear is not packed for the native library")
        return self._packed

    def native_matrix(self) -> Matrix:
        """Describe the packed linear to the library."""
        return self.packed_matrix().with_bias(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        result = self.packed_matrix().multiply(rows).view(*x.shape[:-1], self.out_features)
        return result if self.bias is None else result + self.bias


class FixedLinear(nn.Linear):
    """A linear over an existing weight; does not initialise one."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        given = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.register_parameter("bias", given)


AnyLinear = nn.Linear | GroupedLinear


class GroupedEmbedding(nn.Module):
    """An embedding that expands only the rows it looks up.

    If it is tied to a head that is packed for the native library, `share` makes it read the head's
    packed weights, so that the model has them once.
    """

    def __init__(
        self, weight: GroupedWeight, dtype: torch.dtype, scale: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.grouped, self.dtype = weight, dtype
        self.scale = scale  # Gemma scales its embeddings
        self._expand: Callable[[torch.Tensor], torch.Tensor] = weight.expanded

    def share(self, head: GroupedLinear) -> None:
        """Read the weights of a head that is packed for the native library; frees the own ones."""
        self._expand = head.packed_matrix().expanded
        del self.grouped

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self._expand(ids).to(self.dtype)
        return found if self.scale is None else found * self.scale.to(self.dtype)


class PackedMatrix:
    """A matrix in the native library's layout, which rounds activations to 16 bits.

    Scales and biases are stored as float16 multiples of a power of two, so that the 16-bit values
    of a file stay exact. Sums within a group are exact.
    """

    def __init__(self, weight: GroupedWeight, library: Library, memory: torch.Tensor) -> None:
        self._library, self._packed = library, memory
        size, kind = (len(weight.scales), weight.num_columns), native_kind(weight)
        packed, (scales, biases) = weight.packed.contiguous(), weight.steps()
        scales, biases = scales.contiguous(), biases.contiguous()
        largest = float((weight.greatest + 1) * scales.abs().max() + biases.abs().max())
        unit = 2.0 ** (math.ceil(math.log2(max(largest, _SMALLEST_STEP))) - _HALF_EXPONENT)
        library.pack(
            [array.data_ptr() for array in (packed, scales, biases)],
            (*size, weight.group, kind),
            unit,
            self._packed.data_ptr(),
        )
        self._matrix = Matrix(self._packed.data_ptr(), None, kind, *size, unit)

    def with_bias(self, bias: torch.Tensor | None) -> Matrix:
        self._bias = None if bias is None else bias.float().contiguous()
        address = None if self._bias is None else self._bias.data_ptr()
        matrix = self._matrix
        size = (matrix.rows, matrix.columns)
        return Matrix(matrix.data, address, matrix.kind, *size, matrix.unit)

    def expanded(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the weights of some rows, in float32."""
        numbers, columns = rows.to(torch.int64).contiguous(), self._matrix.columns
        found = torch.empty(*rows.shape, columns)
        self._library.rows(self._matrix, numbers.data_ptr(), numbers.numel(), found.data_ptr())
        return found

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply contiguous rows of float32, ``[rows, columns]``."""
        product = x.new_empty(len(x), self._matrix.rows)
        num_threads = torch.get_num_threads()
        self._library.linear(self._matrix, x.data_ptr(), len(x), product.data_ptr(), num_threads)
        return product


def native_kind(weight: GroupedWeight) -> int:
    """Return the kind of matrix that the native library has for a weight."""
    return MXFP4 if weight.biases is None else weight.bits


def quantise_linears(model: nn.Module, bits: int) -> None:
    """Replace a model's linears by grouped ones where rows divide into whole groups."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and module.in_features % GROUP == 0:
            weight = GroupedWeight.quantised(module.weight, bits)
            model.set_submodule(name, GroupedLinear(weight, module.bias))
