"""What a model keeps of every token, in numbers: layers, heads, dimensions and bytes.

Bytes are those of the payload alone; the scales of a quantised format are its codec's business.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from semantic.domain.model_families import ConfigAttributes, LayerKind, LayerSpec, read_layers

__all__ = ["DEFAULT_BLOCK_TOKENS", "Compute", "LayerKind", "LayerSpec", "ModelCacheSpec"]

DEFAULT_BLOCK_TOKENS = 256

_BITS = (4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class ModelCacheSpec:
    """The geometry of a model's KV cache.

    Attributes:
        model_type: The architecture as the config names it; of a multimodal model, its text part.
        layers: First to last.
        vocab_size: Token ids are below this.
        max_context: The longest sequence the model was made for.
        block_tokens: Tokens in a full block.

    Raises:
        ValueError: A number is not positive, or there is no layer.
    """

    model_type: str
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    max_context: int
    block_tokens: int = DEFAULT_BLOCK_TOKENS

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a model has at least one layer")
        for name, value in (
            ("vocab_size", self.vocab_size),
            ("max_context", self.max_context),
            ("block_tokens", self.block_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name} must be positive, not {value}")

    @classmethod
    def from_config(
        cls, config: Mapping[str, object], *, block_tokens: int = DEFAULT_BLOCK_TOKENS
    ) -> Self:
        """Read a model's parsed ``config.json``.

        >>> spec = ModelCacheSpec.from_config({
        ...     "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576,
        ...     "num_attention_heads": 9, "num_key_value_heads": 3,
        ...     "vocab_size": 49152, "max_position_embeddings": 8192,
        ... })
        >>> spec.num_layers, spec.bytes_per_context(1), spec.bytes_per_context(1000, bits=8)
        (30, 23040, 11520000)

        Raises:
            InvalidRequestError: An attribute is missing or wrong, or it is not known what this
                model keeps between tokens.
            ValueError: ``block_tokens`` is not positive.
        """
        attributes = ConfigAttributes.from_config(config)
        return cls(
            model_type=attributes.model_type,
            layers=read_layers(attributes),
            vocab_size=attributes.integer("vocab_size"),
            max_context=attributes.integer("max_position_embeddings"),
            block_tokens=block_tokens,
        )

    @property
    def num_layers(self) -> int:
        """Layers of all kinds."""
        return len(self.layers)

    @property
    def num_window(self) -> int:
        """Layers that need the last tokens only."""
        return len(self._of_kind(LayerKind.WINDOW))

    @property
    def num_state(self) -> int:
        """Layers with a recurrent state."""
        return len(self._of_kind(LayerKind.STATE))

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers the model has, in the order they are declared."""
        return tuple(kind for kind in LayerKind if self._of_kind(kind))

    @property
    def window(self) -> int:
        """The longest window of all layers; 0 without WINDOW layers."""
        return max((layer.window for layer in self.layers), default=0)

    def bytes_per_context(self, num_tokens: int, bits: int = 16) -> int:
        """What a context of so many tokens takes at rest."""
        return sum(self.kind_bytes(kind, num_tokens, bits) for kind in LayerKind)

    def kind_bytes(self, kind: LayerKind, num_tokens: int, bits: int = 16) -> int:
        """One kind of layers' part of that, packed, and rounded up to whole bytes."""
        if num_tokens < 0:
            raise ValueError(f"num_tokens must not be negative, but is {num_tokens}")
        if bits not in _BITS:
            raise ValueError(f"bits must be one of {_BITS}, not {bits}")
        elements = sum(layer.elements(num_tokens) for layer in self._of_kind(kind))
        return -(-elements * bits // 8)

    def tokens_within(self, nbytes: int, bits: int = 16) -> int:
        """The longest context that takes no more than so many bytes; 0 if none does."""
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
        num_threads: 0 where the device schedules its own.
        kernels: What multiplies.
        reason: Why this dtype.
    """

    device: str
    dtype: str
    num_threads: int
    kernels: str
    reason: str

    @property
    def summary(self) -> str:
        """In half a line, for people.

        >>> Compute("cpu", "float32", 2, "PyTorch", "it was asked for").summary
        'float32 on cpu, 2 threads'
        """
        plural = "" if self.num_threads == 1 else "s"
        threads = f", {self.num_threads} thread{plural}" if self.num_threads else ""
        return f"{self.dtype} on {self.device}{threads}"
