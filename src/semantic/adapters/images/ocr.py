"""`OcrPort` over RapidOCR, whose package contains the weights: nothing is downloaded."""

import importlib.util
import os
import threading
from typing import Any

import numpy as np
from PIL import Image, ImageChops

from semantic.adapters.images.files import open_rgb

_PACKAGES = ("rapidocr", "onnxruntime")
_MARGIN = 16  # pixels around the content
_MAX_SIDE = 960  # of the copy in which text is searched; lines are read from the image itself


def is_ocr_installed() -> bool:
    """Whether the extra `ocr` is installed; loads nothing."""
    return all(importlib.util.find_spec(name) is not None for name in _PACKAGES)


class RapidOcr:
    """Recognises text, one image at a time; loads its models with the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine: Any = None

    def recognise(self, data: bytes) -> str:
        with self._lock:  # decoded inside it: large images would take much memory together
            content = _content(open_rgb(data))
            if content is None:
                return ""
            pixels = np.asarray(content)[:, :, ::-1]  # OpenCV's order of colours
            if self._engine is None:
                self._engine = _load_engine()
            found = self._engine(pixels)
        return str(found.to_markdown()) if found.txts else ""


def _content(image: Image.Image) -> Image.Image | None:
    """Cut off empty margins, with which the search loses small text; None if all is empty."""
    background = Image.new("RGB", image.size, image.getpixel((0, 0)))
    box = ImageChops.difference(image, background).getbbox()
    if box is None:
        return None
    left, top, right, bottom = box
    width, height = image.size
    return image.crop(
        (
            max(left - _MARGIN, 0),
            max(top - _MARGIN, 0),
            min(right + _MARGIN, width),
            min(bottom + _MARGIN, height),
        )
    )


def _load_engine() -> Any:
    from rapidocr import RapidOCR  # noqa: PLC0415 - an optional package, which takes a second

    # Half of the cores: the model that replies needs the others.
    num_threads = max(1, (os.cpu_count() or 2) // 2)
    return RapidOCR(
        params={
            "Global.log_level": "error",
            "Global.max_side_len": 100_000,
            "Global.use_cls": False,  # finds text that stands upside down
            "Det.limit_type": "max",
            "Det.limit_side_len": _MAX_SIDE,
            "EngineConfig.onnxruntime.intra_op_num_threads": num_threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )
