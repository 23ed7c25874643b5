"""Images of Qwen 2.5 VL and Qwen 3 VL: near their own size, as a grid of patches."""

import math
from collections.abc import Mapping
from typing import Any

from PIL import Image

from semantic.adapters.outbound.vision.pixels import Pixels, planes
from semantic.domain.errors import InvalidRequestError

_IMAGE = "<|image_pad|>"
_MAX_RATIO = 200


class PatchProcessor:
    """Scales an image to whole groups of patches and lists the patches, group by group.

    The tower reads two frames at a time; for an image both are the same, which the backend adds.
    """

    marker = feature = _IMAGE
    colour_axis = 1
    defaults: Mapping[str, object] = {
        "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "resample": int(Image.Resampling.BICUBIC),
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
        "patch_size": 14,
        "merge_size": 2,
    }

    def __init__(self, settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        del config
        size = settings["size"]
        self._min_pixels = int(settings.get("min_pixels") or size["shortest_edge"])
        self._max_pixels = int(settings.get("max_pixels") or size["longest_edge"])
        self._patch, self._group = int(settings["patch_size"]), int(settings["merge_size"])
        self._filter = Image.Resampling(settings["resample"])
        self._is_resized = bool(settings["do_resize"])

    def pixels(self, image: Image.Image) -> tuple[Pixels, tuple[int, ...]]:
        patch, group = self._patch, self._group
        if self._is_resized:
            image = image.resize(self._fitted(*image.size), self._filter)
        rows, columns = image.height // patch, image.width // patch
        shape = (3, rows // group, group, patch, columns // group, group, patch)
        groups = planes(image).reshape(shape).transpose(1, 4, 2, 5, 0, 3, 6)
        return groups.reshape(rows * columns, 3, patch, patch), (1, rows, columns)

    def text(self, grid: tuple[int, ...]) -> str:
        return _IMAGE * (math.prod(grid) // self._group**2)

    def positions(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        frames, rows, columns = grid
        return frames, rows // self._group, columns // self._group

    def _fitted(self, width: int, height: int) -> tuple[int, int]:
        """Round to whole groups, with a number of pixels within the limits of the model."""
        unit = self._patch * self._group
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise InvalidRequestError(
                f"the image has {width}x{height} pixels: its longer side may be at most "
                f"{_MAX_RATIO} times its shorter side; crop it."
            )
        across, down = round(width / unit) * unit, round(height / unit) * unit
        if across * down > self._max_pixels:
            scale = math.sqrt(height * width / self._max_pixels)
            across = max(unit, math.floor(width / scale / unit) * unit)
            down = max(unit, math.floor(height / scale / unit) * unit)
        elif across * down < self._min_pixels:
            scale = math.sqrt(self._min_pixels / (height * width))
            across = math.ceil(width * scale / unit) * unit
            down = math.ceil(height * scale / unit) * unit
        return across, down
