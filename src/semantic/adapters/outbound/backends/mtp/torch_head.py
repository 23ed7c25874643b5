"""The head of a model for draft tokens (multi-token prediction, MTP), as PyTorch modules.

transformers drops the weights of heads. Here the head's layer is read as one more layer of the
model, in all formats that transformers reads, and then taken out of it.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import nn

from semantic.adapters.outbound.backends.mtp.head import (
    DraftingHead,
    HeadBatch,
    HeadRow,
    HeadSequence,
)
from semantic.adapters.outbound.backends.mtp.names import HeadNames
from semantic.adapters.outbound.backends.sampler import sample
from semantic.adapters.outbound.backends.torch.kv.sequences import TORCH_ARRAYS
from semantic.ports.backend import Chunk, SequenceId


class TorchHead(nn.Module, DraftingHead):
    """The modules of a head."""

    arrays = TORCH_ARRAYS

    def __init__(self, model: Any, directory: Path, names: HeadNames) -> None:
        """Take the last layer of a model, which was read as one more, out of it."""
        super().__init__()
        base = model.base_model
        self.layer = base.layers[-1]
        base.layers = base.layers[:-1]
        # Its attention is that of the library, whatever the model's own layers use.
        config = copy.deepcopy(model.config)
        config._attn_implementation = "sdpa"
        self.layer.self_attn.config = config
        model.config.num_hidden_layers -= 1
        first, second, pair, last = _read(directory, names.others)
        self.embedding_norm, self.hidden_norm, self.norm = (
            _norm(base.norm, weight) for weight in (first, second, last)
        )
        dtype = base.norm.weight.dtype
        size, both = pair.shape
        self.projection = nn.Linear(both, size, bias=False, device="meta")
        self.projection.weight = nn.Parameter(pair.to(dtype), requires_grad=False)
        self._shared = (model,)  # in a tuple, so that the model is no part of this module
        self.eval()

    @property
    def hidden_bytes(self) -> int:
        return int(self.norm.weight.nbytes)

    @torch.inference_mode()
    def draft(
        self, chunks: Sequence[Chunk], sequences: Mapping[SequenceId, HeadSequence], count: int
    ) -> list[tuple[int, ...]]:
        return super().draft(chunks, sequences, count)

    def _run(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        offsets: NDArray[np.int64],
        batch: HeadBatch,
    ) -> torch.Tensor:
        base, num_tokens = self._shared[0].base_model, tokens.shape[1]
        pair = (self.embedding_norm(base.embed_tokens(tokens)), self.hidden_norm(hidden))
        entries = self.projection(torch.cat(pair, dim=-1))
        positions = (torch.from_numpy(offsets)[:, None] + torch.arange(num_tokens)).clamp(min=0)
        output = self.layer(
            entries,
            position_embeddings=base.rotary_emb(entries, positions),
            position_ids=positions,
            attention_mask=torch.from_numpy(batch.mask(num_tokens)),
            past_key_values=_Cache(batch),
        )
        normed: torch.Tensor = self.norm(output[0] if isinstance(output, tuple) else output)
        return normed

    def _sample(self, hidden: torch.Tensor, rows: Sequence[HeadRow], number: int) -> torch.Tensor:  # noqa: ARG002
        logits = self._shared[0].get_output_embeddings()(hidden).float().cpu().numpy()
        for row, scores in zip(rows, logits, strict=True):
            row.known.append(sample(scores, row.draw, row.known)[0])
        return torch.tensor([row.known[-1:] for row in rows])


class _Cache:
    """A cache of the library."""

    def __init__(self, batch: HeadBatch) -> None:
        self.update = batch.update
        self._batch = batch

    def get_seq_length(self, *_args: Any) -> int:
        return self._batch.num_done


def _read(directory: Path, wanted: Sequence[str]) -> list[torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in {*wanted} & {*file.keys()}}
    return [found[name] for name in wanted]


def _norm(like: Any, weight: torch.Tensor) -> Any:
    norm = copy.deepcopy(like)
    norm.weight = nn.Parameter(weight.to(like.weight.dtype), requires_grad=False)
    return norm
