"""Reads how a model prepares images from the files of its directory."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import structlog
from PIL import Image

from semantic.adapters.outbound.vision.families import (
    BIDIRECTIONAL,
    IN_GRIDS,
    TILED,
    takes_images,
)
from semantic.adapters.outbound.vision.patches import PatchProcessor
from semantic.adapters.outbound.vision.pixels import Pixels, PixelScale
from semantic.adapters.outbound.vision.square import SquareProcessor
from semantic.adapters.outbound.vision.tiles import TileProcessor

VERSION = 1  # of this preprocessing; part of the fingerprint
_FILES = ("preprocessor_config.json", "processor_config.json")
_DEFAULTS: Mapping[str, object] = {
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
}

_log = structlog.get_logger()


class ImageProcessor(Protocol):
    """How one family of models prepares images; its constructor takes settings and config.

    Attributes:
        marker: The text that chat templates write for an image.
        feature: The text of the token at the position of each feature.
        colour_axis: The axis of the colours in the pixels.
        defaults: Settings that the files may omit, besides the common ones.
    """

    marker: ClassVar[str]
    feature: ClassVar[str]
    colour_axis: ClassVar[int]
    defaults: ClassVar[Mapping[str, object]]

    def pixels(self, image: Image.Image) -> tuple[Pixels, tuple[int, ...]]:
        """Return the input of the tower, and a grid that decides the text and the positions."""

    def text(self, grid: tuple[int, ...]) -> str:
        """Return the text that replaces the marker."""

    def positions(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Return `PreparedImage.grid`, in features."""


_FAMILIES: Mapping[str, Any] = {
    **dict.fromkeys(TILED, TileProcessor),
    **dict.fromkeys(IN_GRIDS, PatchProcessor),
    **dict.fromkeys(BIDIRECTIONAL, SquareProcessor),
}


@dataclass(frozen=True, slots=True)
class VisionSettings:
    """How a model prepares images.

    Attributes:
        fingerprint: Identifies all of it.
    """

    model_type: str
    processor: ImageProcessor
    scale: PixelScale
    fingerprint: str


def read_vision_settings(directory: Path, config: Mapping[str, object]) -> VisionSettings | None:
    """Read the settings of a model directory; None if the model, or this server, takes no images.

    A model whose settings are missing or damaged still takes text: the log says why it takes no
    images.
    """
    if not takes_images(config):
        return None
    model_type = str(config["model_type"])
    family = _FAMILIES[model_type]
    try:
        settings = {**_DEFAULTS, **family.defaults, **_settings(directory)}
        processor: ImageProcessor = family(settings, config)
        scale = PixelScale.from_settings(settings)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning(
            "the model takes no images; download its preprocessor_config.json to change that",
            model=directory.name,
            reason=str(error),
        )
        return None
    fingerprint = json.dumps([VERSION, model_type, settings], sort_keys=True)
    return VisionSettings(model_type, processor, scale, fingerprint)


def _settings(directory: Path) -> dict[str, object]:
    for name in _FILES:
        path = directory / name
        if path.is_file():
            found = json.loads(path.read_text("utf-8"))
            # Newer files have the settings of images beside those of videos and texts.
            nested = found.get("image_processor", found)
            if "size" in nested or "image_mean" in nested:
                return {key: value for key, value in nested.items() if value is not None}
    raise FileNotFoundError("preprocessor_config.json is missing")
