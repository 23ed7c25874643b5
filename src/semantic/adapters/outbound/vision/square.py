"""Images of Gemma 3: one square, whatever their shape."""

from collections.abc import Mapping
from typing import Any

from PIL import Image

from semantic.adapters.outbound.vision.pixels import Pixels, planes

_START, _IMAGE, _END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
_NUM_FEATURES = 256  # of configs that do not state it


class SquareProcessor:
    """Scales an image to a square. Crops of long images ("pan and scan") are not used."""

    marker, feature = _START, _IMAGE
    colour_axis = 1
    defaults: Mapping[str, object] = {
        "do_resize": True,
        "image_mean": 0.5,
        "image_std": 0.5,
        "resample": int(Image.Resampling.BILINEAR),
        "size": {"height": 224, "width": 224},
    }

    def __init__(self, settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._size = (int(settings["size"]["width"]), int(settings["size"]["height"]))
        self._filter = Image.Resampling(settings["resample"])
        self._num_features = int(config.get("mm_tokens_per_image") or _NUM_FEATURES)

    def pixels(self, image: Image.Image) -> tuple[Pixels, tuple[int, ...]]:
        return planes(image.resize(self._size, self._filter))[None], ()

    def text(self, _grid: tuple[int, ...]) -> str:
        return f"{_START}{_IMAGE * self._num_features}{_END}"

    def positions(self, _grid: tuple[int, ...]) -> tuple[int, ...]:
        return ()
