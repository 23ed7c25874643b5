"""Merges the features of images with the embeddings of the tokens around them, for a packed row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from semantic.adapters.outbound.backends.torch.kv.sequences import ChunkSpan
from semantic.domain.images.spans import is_image_id


@dataclass(frozen=True, slots=True)
class DeepFeatures:
    """What the first layers add to the positions of images (DeepStack).

    Attributes:
        places: The positions, in the packed row.
        added: For each of the layers, ``[positions, hidden]``.
    """

    places: torch.Tensor
    added: tuple[torch.Tensor, ...]


def row_ids(spans: Sequence[ChunkSpan]) -> torch.Tensor:
    """Return the token ids of the row, ``[1, tokens]``."""
    return torch.tensor([[token for span in spans for token in span.tokens]])


def row_positions(spans: Sequence[ChunkSpan]) -> torch.Tensor:
    """Return the positions of the row: ``[1, tokens]``, or ``[3, 1, tokens]`` for M-RoPE."""
    indices = [np.arange(span.sequence.length, span.end) for span in spans]
    if all(span.positions is None for span in spans):
        return torch.from_numpy(np.concatenate(indices)[None])
    whole = [
        np.broadcast_to(index, (3, len(index))) if span.positions is None else span.positions
        for span, index in zip(spans, indices, strict=True)
    ]
    return torch.from_numpy(np.concatenate(whole, axis=1)[:, None])


def merged_embeddings(
    spans: Sequence[ChunkSpan],
    embed: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the inputs of the first layer, ``[1, tokens, hidden]``."""
    if all(span.features is None for span in spans):
        return embed(row_ids(spans))
    ids = [0 if is_image_id(token) else token for span in spans for token in span.tokens]
    merged = embed(torch.tensor([ids])).clone()
    for span in spans:
        if span.features is not None:
            rows = span.features.rows + span.offset
            merged[0, rows] = span.features.embeddings.to(merged.dtype)
    return merged


def deep_features(spans: Sequence[ChunkSpan]) -> DeepFeatures | None:
    """Return the features for further layers; None if the model has none."""
    deep = [(span.offset, span.features) for span in spans if span.features and span.features.deep]
    if not deep:
        return None
    places = torch.cat([features.rows + offset for offset, features in deep])
    layers = zip(*(features.deep for _, features in deep), strict=True)
    return DeepFeatures(places, tuple(torch.cat(layer) for layer in layers))
