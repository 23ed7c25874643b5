"""Prepares images for a loaded model: pixels for its tower, tokens for its prompt."""

import json
from functools import lru_cache
from pathlib import Path

import structlog

from semantic.adapters.images.files import open_rgb
from semantic.adapters.outbound.vision.pixels import to_buffer
from semantic.adapters.outbound.vision.processors import (
    VisionSettings,
    read_vision_settings,
)
from semantic.domain.images.spans import PreparedImage, image_digest, image_ids
from semantic.ports.text import TokenizerPort

_NUM_TEXTS = 64

_log = structlog.get_logger()


class HFVision:
    """`VisionPort` over a Hugging Face model directory."""

    def __init__(self, settings: VisionSettings, tokenizer: TokenizerPort) -> None:
        """Find the model's image tokens.

        Raises:
            LookupError: the tokenizer does not have them.
        """
        self.settings, self.fingerprint = settings, settings.fingerprint
        self._processor, self._tokenizer = settings.processor, tokenizer
        self.marker_id = self._id(settings.processor.marker)
        self._feature_id = self._id(settings.processor.feature)
        self._tokens = lru_cache(_NUM_TEXTS)(self._encode)

    def prepare(self, data: bytes) -> PreparedImage:
        image = open_rgb(data)
        pixels, grid = self._processor.pixels(image)
        buffers = (to_buffer(pixels),)
        positions = self._processor.positions(grid)
        digest = image_digest(self.fingerprint, buffers, positions)
        tokens = self._tokens(grid)
        ids = iter(image_ids(digest, tokens.count(self._feature_id)))
        keyed = tuple(next(ids) if token == self._feature_id else token for token in tokens)
        return PreparedImage(digest, keyed, buffers, positions, image.width, image.height)

    def _encode(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(self._processor.text(grid)))

    def _id(self, text: str) -> int:
        if text not in self._tokenizer.special_ids:
            raise LookupError(f"its tokenizer has no special token {text}")
        return self._tokenizer.special_ids[text]


def load_vision(directory: Path, tokenizer: TokenizerPort) -> HFVision | None:
    """Return the preprocessing of a model directory; None for a model that takes no images.

    A model without image tokens still takes text: the log says why it takes no images.
    """
    config = json.loads((directory / "config.json").read_text("utf-8"))
    settings = read_vision_settings(directory, config)
    try:
        return None if settings is None else HFVision(settings, tokenizer)
    except LookupError as error:
        _log.warning("the model takes no images", model=directory.name, reason=str(error))
        return None
