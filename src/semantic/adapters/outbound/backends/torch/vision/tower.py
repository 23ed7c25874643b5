"""Computes the features of images by a model's own vision tower, in the modules of transformers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from semantic.adapters.outbound.backends.images import FeatureCache, ImageFeatures, runs
from semantic.adapters.outbound.backends.torch.kv.sequences import ChunkFeatures
from semantic.adapters.outbound.vision.processors import VisionSettings
from semantic.domain.images.spans import ImageSpan, PreparedImage


class VisionTower(FeatureCache[torch.Tensor]):
    """A model's vision tower and connector."""

    def __init__(self, model: Any, settings: VisionSettings) -> None:
        """Take the base model of transformers, without its language model."""
        super().__init__(settings)
        self._model = model

    def chunk_features(
        self, spans: Sequence[ImageSpan], start: int, end: int
    ) -> ChunkFeatures | None:
        """Return the features at the positions ``[start, end)``; None if there are none.

        Raises:
            InvalidRequestError: an image was prepared for another model.
        """
        rows, pieces = self.find(spans, start, end)
        if not rows:
            return None
        deep = zip(*(piece.deep for piece in pieces), strict=True)
        return ChunkFeatures(
            torch.tensor(rows),
            torch.cat([piece.embeddings for piece in pieces]),
            tuple(torch.cat(layer) for layer in deep),
            runs(rows) if self.is_bidirectional else (),
        )

    @torch.inference_mode()
    def compute(
        self, pixels: NDArray[np.float32], image: PreparedImage
    ) -> ImageFeatures[torch.Tensor]:
        values, inputs = torch.from_numpy(pixels).to(self._model.dtype), {}
        if self._is_tiled:
            values = values[None]
        if self.has_grid:
            config = self._model.config.vision_config
            frames, rows, columns = image.grid
            group = config.spatial_merge_size
            grid = torch.tensor([[frames, rows * group, columns * group]])
            inputs["image_grid_thw"] = grid
            # The tower reads two frames at a time; both are the image.
            values = values[:, :, None].expand(-1, -1, config.temporal_patch_size, -1, -1)
            values = values.flatten(1)
        output = self._model.get_image_features(values, **inputs, return_dict=True)
        deep = getattr(output, "deepstack_features", None) or ()
        return ImageFeatures(_joined(output.pooler_output), tuple(map(_joined, deep)))


def _joined(features: Any) -> torch.Tensor:
    """Return the features of one image, ``[features, hidden]``, in memory of their own."""
    whole: torch.Tensor = features[0] if isinstance(features, list | tuple) else features
    return whole.reshape(-1, whole.shape[-1]).clone()
