"""Pixels of prepared images: their arrays, and scaling to the numbers that a tower reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from semantic.domain.images.spans import PixelBuffer

Pixels: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PixelScale:
    """How pixels become numbers: ``(pixel * factor - mean) / std``, for each colour.

    Attributes:
        factor: 1 for a processor that does not rescale.
        mean: 0 for a processor that does not normalise; `std` is 1 then.
    """

    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def from_settings(cls, settings: Mapping[str, object]) -> Self:
        """Read complete processor settings.

        Raises:
            TypeError: a setting is no number.
            ValueError: not every colour has one.
        """
        factor = _number(settings["rescale_factor"]) if settings["do_rescale"] else 1.0
        if not settings["do_normalize"]:
            return cls(factor, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        return cls(factor, _colours(settings["image_mean"]), _colours(settings["image_std"]))

    def apply(self, pixels: Pixels, *, colour_axis: int) -> NDArray[np.float32]:
        """Scale pixels, with the operations and precisions of transformers."""
        shape = [1] * pixels.ndim
        shape[colour_axis] = 3
        levels = (np.arange(256, dtype=np.float64) * self.factor).astype(np.float32)
        scaled = levels[pixels]
        scaled -= np.array(self.mean, np.float32).reshape(shape)
        scaled /= np.array(self.std, np.float32).reshape(shape)
        return scaled


def to_buffer(pixels: Pixels) -> PixelBuffer:
    """Return pixels as part of a prepared image."""
    return PixelBuffer("pixels", pixels.shape, "uint8", pixels.tobytes())


def from_buffer(buffer: PixelBuffer) -> Pixels:
    """Return the pixels of a prepared image."""
    return np.frombuffer(buffer.data, np.uint8).reshape(buffer.shape)


def planes(image: Image.Image) -> Pixels:
    """Return an RGB image as ``[3, height, width]``."""
    return np.asarray(image, np.uint8).transpose(2, 0, 1)


def _colours(value: object) -> tuple[float, ...]:
    values = value if isinstance(value, list | tuple) else [value] * 3
    if len(values) != 3:
        raise ValueError(f"image_mean and image_std must have 3 numbers, got {value!r}")
    return tuple(map(_number, values))


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected a number, got {value!r}")
    return float(value)
