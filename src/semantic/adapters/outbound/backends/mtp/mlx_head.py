"""The head of a model for draft tokens (multi-token prediction, MTP), as modules of mlx-lm.

mlx-lm drops the weights of heads. Here they are taken out of what it reads, and become the layer of
a model of the same class with one layer. Draft tokens that the device samples feed the next pass
without the host: a draft waits for the device once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count, takewhile
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from numpy.typing import NDArray

from semantic.adapters.outbound.backends.mlx.caches import MLX_ARRAYS, Array
from semantic.adapters.outbound.backends.mlx.decode import body_of
from semantic.adapters.outbound.backends.mlx.runtime import import_library
from semantic.adapters.outbound.backends.mlx.sampling import (
    PendingToken,
    draw_rows,
    input_tokens,
)
from semantic.adapters.outbound.backends.mtp.head import DraftingHead, HeadBatch, HeadRow
from semantic.adapters.outbound.backends.mtp.names import HeadNames
from semantic.ports.backend import SequenceId

_FIRST = "model.layers.0."
_NORMS = ("embedding_norm", "hidden_norm", "norm")
# Arguments of a model whose only layer is like the head's: with experts, and with full attention.
_ONE_LAYER: Mapping[str, Any] = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "full_attention_interval": 1,
    "mlp_only_layers": [],
}


class HeadWeights:
    """The weights of a head, taken out of those that mlx-lm reads."""

    def __init__(self, names: HeadNames) -> None:
        self._names = names
        self._taken: dict[str, Array] = {}

    def classes(self, config: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return mlx-lm's classes for a config; its model then does not see the head's weights."""
        kind, arguments = import_library("mlx_lm.utils")._get_classes(config)
        prefix, taken = self._names.prefix, self._taken

        def sanitize(self: Any, weights: dict[str, Array]) -> dict[str, Array]:
            taken.update({n: weights.pop(n) for n in [*weights] if n.startswith(prefix)})
            sane: dict[str, Array] = kind.sanitize(self, weights)
            return sane

        return type(kind.__name__, (kind,), {"sanitize": sanitize}), arguments

    def build(self, model: Any) -> "HeadModules":
        """Make the modules of the head beside a loaded model.

        Raises:
            ValueError: weights are missing.
        """
        names, taken = self._names, self._taken
        offset = 0.0 if names.is_converted else names.norm_offset
        first, second, pair, last = names.others
        weights = {
            f"{owner}.weight": taken.pop(name) + offset
            for owner, name in zip(_NORMS, (first, second, last), strict=True)
        }
        stem = pair.removesuffix("weight")
        weights |= {
            f"projection.{name.removeprefix(stem)}": taken.pop(name)
            for name in [name for name in taken if name.startswith(stem)]
        }
        named = {_FIRST + name.removeprefix(names.layer): w for name, w in taken.items()}
        taken.clear()
        text = _text_model(model)
        changed = {name: value for name, value in _ONE_LAYER.items() if hasattr(text.args, name)}
        single = type(text)(replace(text.args, **changed))
        sane = single.sanitize({**named})
        for name, weight in named.items():
            # mlx-lm adds the offset only to models with layers that this one does not have.
            if name.endswith("norm.weight") and sane.get(name) is weight:
                sane[name] = weight + offset
        inner = _stacked({name.removeprefix(_FIRST): weight for name, weight in sane.items()})
        layer = single.model.layers[0]
        # Files repeat the embedding and the output layer there.
        own = {name: weight for name, weight in inner.items() if name.split(".")[0] in layer}
        weights |= {f"layer.{name}": weight for name, weight in own.items()}
        return HeadModules(layer, weights, body_of(model).norm.eps)


def _stacked(weights: dict[str, Array]) -> dict[str, Array]:
    """Give experts mlx-lm's names and layout; some files have them fused, others one by one."""
    if (fused := weights.pop("mlp.experts.gate_up_proj", None)) is not None:
        gate, up = mx.split(fused, 2, axis=-2)
        parts = {"gate": gate, "up": up, "down": weights.pop("mlp.experts.down_proj")}
        weights |= {f"mlp.switch_mlp.{name}_proj.weight": part for name, part in parts.items()}
    for part in ("gate", "up", "down"):
        each = (f"mlp.experts.{number}.{part}_proj.weight" for number in count())
        found = [weights.pop(name) for name in takewhile(weights.__contains__, each)]
        if found:
            weights[f"mlp.switch_mlp.{part}_proj.weight"] = mx.stack(found)
    return weights


class HeadModules(nn.Module):  # type: ignore[misc]
    """The modules of a head; part of its model, and converted with it."""

    def __init__(self, layer: Any, weights: Mapping[str, Array], eps: float) -> None:
        """Load the weights; modules whose weights are quantised become so."""
        super().__init__()
        size = weights["norm.weight"].shape[0]
        self.layer = layer
        self.embedding_norm, self.hidden_norm, self.norm = (nn.RMSNorm(size, eps) for _ in _NORMS)
        self.projection = nn.Linear(2 * size, size, bias=False)
        infer = import_library("mlx_lm.utils").infer_quant_config

        def quantised(path: str, module: Any) -> Any:
            return f"{path}.scales" in weights and infer(path, module, weights)

        nn.quantize(self, class_predicate=quantised)
        self.load_weights([*weights.items()])


class MlxHead(DraftingHead):
    """Drafts with the modules of a head."""

    arrays = MLX_ARRAYS

    def __init__(self, model: Any, modules: HeadModules) -> None:
        self._modules = modules
        embedding, text = body_of(model).embed_tokens, _text_model(model)
        self._embed: Callable[[Array], Array] = embedding
        self._unembed: Callable[[Array], Array] = (
            text.lm_head if "lm_head" in text else embedding.as_linear
        )

    @property
    def hidden_bytes(self) -> int:
        return int(self._modules.norm.weight.nbytes)

    def _run(
        self, tokens: Array, hidden: Array, offsets: NDArray[np.int64], batch: HeadBatch
    ) -> Array:
        modules = self._modules
        embedded = modules.embedding_norm(self._embed(tokens))
        pair = mx.concatenate([embedded, modules.hidden_norm(hidden)], axis=-1)
        mask = mx.array(batch.mask(tokens.shape[1]))
        cache = _Cache(batch, mx.array(offsets.astype(np.int32)))
        return modules.norm(modules.layer(modules.projection(pair), mask, cache))

    def _sample(self, hidden: Array, rows: Sequence[HeadRow], number: int) -> Array:
        seq = SequenceId(0)
        pending = [PendingToken(row.draw, seq, row.known, row.end + number) for row in rows]
        draw_rows(self._unembed(hidden), pending)
        for row, token in zip(rows, pending, strict=True):
            if token.device is None:
                row.known.append(token.token_if_known())
        return input_tokens(pending)[:, None]


def _text_model(model: Any) -> Any:
    """Return the model of text inside one that also accepts images, or the model itself."""
    return model.language_model if "language_model" in model else model


class _Cache:
    """A cache of the library.

    Attributes:
        offset: The position of each row's first token.
    """

    def __init__(self, batch: HeadBatch, offset: Array) -> None:
        self.update_and_fetch = batch.update
        self.offset = offset
