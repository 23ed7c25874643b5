"""Images of Idefics3 and SmolVLM: square tiles in rows and columns, and the whole image as one."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from semantic.adapters.outbound.vision.pixels import Pixels, planes

_MAX_EDGE = 4096
_AROUND, _GLOBAL, _IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"
_PATCH, _SCALE = 32, 2  # of configs that do not state them


class TileProcessor:
    """Divides an image into tiles of the size that the tower reads."""

    marker = feature = _IMAGE
    colour_axis = 1
    defaults: Mapping[str, object] = {
        "do_resize": True,
        "do_image_splitting": True,
        "image_mean": 0.5,
        "image_std": 0.5,
        "resample": int(Image.Resampling.LANCZOS),
        "size": {"longest_edge": 4 * 364},
        "max_image_size": {"longest_edge": 364},
    }

    def __init__(self, settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._longest = int(settings["size"]["longest_edge"]) if settings["do_resize"] else 0
        self._tile = int(settings["max_image_size"]["longest_edge"])
        self._is_divided = bool(settings["do_image_splitting"])
        self._filter = Image.Resampling(settings["resample"])
        per_side = self._tile // int(config["vision_config"].get("patch_size") or _PATCH)
        self._num_features = per_side**2 // int(config.get("scale_factor") or _SCALE) ** 2

    def pixels(self, image: Image.Image) -> tuple[Pixels, tuple[int, ...]]:
        tile = self._tile
        if self._longest:
            image = image.resize(_fitted(*image.size, self._longest), self._filter)
        if not self._is_divided:
            return planes(image.resize((tile, tile), self._filter))[None], (0, 0)
        image = image.resize(_in_tiles(*image.size, tile), self._filter)
        rows, columns = image.height // tile, image.width // tile
        whole = planes(image)
        if rows == columns == 1:
            return whole[None], (0, 0)
        tiles = whole.reshape(3, rows, tile, columns, tile).transpose(1, 3, 0, 2, 4)
        small = planes(image.resize((tile, tile), self._filter))
        return np.concatenate((tiles.reshape(-1, 3, tile, tile), small[None])), (rows, columns)

    def text(self, grid: tuple[int, ...]) -> str:
        rows, columns = grid
        features = _IMAGE * self._num_features
        lines = [
            "".join(f"{_AROUND}<row_{row}_col_{column}>{features}" for column in _from_1(columns))
            for row in _from_1(rows)
        ]
        whole = f"{_AROUND}{_GLOBAL}{features}{_AROUND}"
        return "\n".join([*lines, "", whole]) if lines else whole

    def positions(self, _grid: tuple[int, ...]) -> tuple[int, ...]:
        return ()


def _from_1(number: int) -> range:
    return range(1, number + 1)


def _fitted(width: int, height: int, longest: int) -> tuple[int, int]:
    """Scale the longer edge to a length, and the shorter one to an even number."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _MAX_EDGE:
        width, height = _MAX_EDGE, int(_MAX_EDGE / ratio)
    elif height > width and height > _MAX_EDGE:
        width, height = int(_MAX_EDGE * ratio), _MAX_EDGE
    return max(width, 1), max(height, 1)


def _in_tiles(width: int, height: int, tile: int) -> tuple[int, int]:
    """Round up to whole tiles: the longer edge first, then the other in proportion."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return width, height
