"""The size of a model's KV cache: layers, heads, dimensions and bytes.

A model's config tells most of it, for planning; what holds is the spec of the loaded model, which
its backend reads from the caches of the library that runs it.

Byte counts cover the payload only; the codec of a quantized format accounts for its scales.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from semantic.domain.model_families import ConfigAttributes, LayerKind, LayerSpec, read_layers

__all__ = [
    "DEFAULT_BLOCK_TOKENS",
    "Compute",
    "ComputeHint",
    "LayerKind",
    "LayerSpec",
    "ModelCacheSpec",
]

DEFAULT_BLOCK_TOKENS = 256

_BITS = (4, 8, 16, 32)
_UNSTATED_CONTEXT = 32_768  # for configs that state no context length, such as Mamba's


@dataclass(frozen=True, slots=True)
class ModelCacheSpec:
    """The geometry of a model's KV cache.

    Attributes:
        model_type: The architecture as named in the config; for a multimodal model, its text part.
        layers: First to last; empty if only the loaded model tells them.
        vocab_size: Token ids are less than this; 0 if only the loaded model tells it.
    """

    model_type: str
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    max_context: int
    block_tokens: int = DEFAULT_BLOCK_TOKENS

    def __post_init__(self) -> None:
        for name, value, minimum in (
            ("vocab_size", self.vocab_size, 1 if self.layers else 0),
            ("max_context", self.max_context, 1),
            ("block_tokens", self.block_tokens, 1),
        ):
            if value < minimum:
                raise ValueError(f"{name} must be at least {minimum}, got {value}")

    @classmethod
    def from_config(
        cls, config: Mapping[str, object], *, block_tokens: int = DEFAULT_BLOCK_TOKENS
    ) -> Self:
        """Read a model's parsed ``config.json``, as far as it tells the geometry.

        >>> spec = ModelCacheSpec.from_config({
        ...     "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576,
        ...     "num_attention_heads": 9, "num_key_value_heads": 3,
        ...     "vocab_size": 49152, "max_position_embeddings": 8192,
        ... })
        >>> spec.num_layers, spec.bytes_per_context(1), spec.bytes_per_context(1000, bits=8)
        (30, 23040, 11520000)

        Raises:
            InvalidRequestError: The config has no model type, or an attribute is invalid.
            ValueError: ``block_tokens`` is not positive.
        """
        attributes = ConfigAttributes.from_config(config)
        vocab_size = attributes.integer_or("vocab_size", 0)
        return cls(
            model_type=attributes.model_type,
            layers=read_layers(attributes) if vocab_size else (),
            vocab_size=vocab_size,
            max_context=attributes.integer_or("max_position_embeddings", _UNSTATED_CONTEXT),
            block_tokens=block_tokens,
        )

    @property
    def is_known(self) -> bool:
        """Whether the layers are known; if not, the backend completes the spec."""
        return bool(self.layers)

    def completed(self, layers: Iterable[LayerSpec], vocab_size: int = 0) -> Self:
        """Return the spec of the loaded model.

        Args:
            layers: What the library that runs the model keeps, first to last.
            vocab_size: Used if the config states none.
        """
        return replace(self, layers=tuple(layers), vocab_size=self.vocab_size or vocab_size)

    def layout_tag(self, planned: Self) -> str:
        """Return a suffix of the KV ABI for layers that differ from those that the config tells.

        Backends and versions of their libraries may keep different geometries of one model. The ABI
        is part of every block name, so KV cache of one geometry is never used with another.
        """
        if self.layers == planned.layers:
            return ""
        return f".g{hashlib.sha256(repr(self.layers).encode()).hexdigest()[:8]}"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_window(self) -> int:
        return len(self._of_kind(LayerKind.WINDOW))

    @property
    def num_state(self) -> int:
        return len(self._of_kind(LayerKind.STATE))

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers in the model, in the order of `LayerKind`."""
        return tuple(kind for kind in LayerKind if self._of_kind(kind))

    @property
    def window(self) -> int:
        """The longest window of all layers; 0 without WINDOW layers."""
        return max((layer.window for layer in self.layers), default=0)

    def bytes_per_context(self, num_tokens: int, bits: int = 16) -> int:
        """Return the size of the KV cache of `num_tokens` tokens, in bytes."""
        return sum(self.kind_bytes(kind, num_tokens, bits) for kind in LayerKind)

    def kind_bytes(self, kind: LayerKind, num_tokens: int, bits: int = 16) -> int:
        """Return the share of one kind of layer in that, packed and rounded up to whole bytes."""
        if num_tokens < 0:
            raise ValueError(f"num_tokens must not be negative, got {num_tokens}")
        if bits not in _BITS:
            raise ValueError(f"bits must be one of {_BITS}, got {bits}")
        elements = sum(layer.elements(num_tokens) for layer in self._of_kind(kind))
        return -(-elements * bits // 8)

    def tokens_within(self, nbytes: int, bits: int = 16) -> int:
        lengths = range(self.max_context + 1)
        fitting = bisect_right(lengths, nbytes, key=lambda n: self.bytes_per_context(n, bits))
        return max(0, fitting - 1)

    def _of_kind(self, kind: LayerKind) -> list[LayerSpec]:
        return [layer for layer in self.layers if layer.kind is kind]


@dataclass(frozen=True, slots=True)
class Compute:
    """How a model is computed, for the log and for `/health`.

    Attributes:
        dtype: The number format of activations and the KV cache.
        num_threads: 0 if the device schedules its own.
        kernels: The library or kernels that multiply matrices.
        reason: Why this dtype was chosen.
        slow: Why it is slower than possible and how to fix that; empty if it is not.
    """

    device: str
    dtype: str
    num_threads: int
    kernels: str
    reason: str
    slow: str = ""

    @property
    def summary(self) -> str:
        """A short description for logs and messages.

        >>> Compute("cpu", "float32", 2, "PyTorch", "requested").summary
        'float32 on cpu, 2 threads'
        """
        plural = "" if self.num_threads == 1 else "s"
        threads = f", {self.num_threads} thread{plural}" if self.num_threads else ""
        return f"{self.dtype} on {self.device}{threads}"


@dataclass(frozen=True, slots=True)
class ComputeHint:
    """Records of earlier starts of a model on this machine, used to choose its dtype.

    Attributes:
        known: How it was computed with the same settings, CPU and libraries; None if it never was.
        stored_dtypes: Dtypes of its stored KV cache, the one with the most files first.
    """

    known: Compute | None = None
    stored_dtypes: tuple[str, ...] = ()
