"""The head of a model for draft tokens (multi-token prediction, MTP), as PyTorch modules."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from semantic.adapters.outbound.backends.mtp.head import (
    DraftingHead,
    HeadBatch,
    HeadRow,
    HeadSequence,
)
from semantic.adapters.outbound.backends.sampler import sample
from semantic.adapters.outbound.backends.torch.kv.sequences import TORCH_ARRAYS
from semantic.ports.backend import Chunk, SequenceId


class TorchHead(nn.Module, DraftingHead):
    """The modules of a head.

    Args:
        model: The model that it drafts for.
        layer: A decoder layer of the library, which attends.
        norms: Weights of the norms of embeddings, of hidden states, and of outputs.
        projection: Of an embedding and a hidden state to one vector.
    """

    arrays = TORCH_ARRAYS

    def __init__(
        self, model: Any, layer: Any, norms: Sequence[torch.Tensor], projection: nn.Module
    ) -> None:
        super().__init__()
        self.layer, self.projection = layer, projection
        self.embedding_norm, self.hidden_norm, self.norm = (
            _norm(model.base_model.norm, weight) for weight in norms
        )
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


def _norm(like: Any, weight: torch.Tensor) -> Any:
    norm = copy.deepcopy(like)
    norm.weight = nn.Parameter(weight.to(like.weight.dtype), requires_grad=False)
    return norm
