"""Small image files, and how protocols send them."""

import base64
import io
from typing import Any

from PIL import Image

RED = (255, 0, 0)


def picture(
    size: tuple[int, int] = (24, 16), colour: tuple[int, ...] = RED, form: str = "PNG", **save: Any
) -> bytes:
    """A file with one colour."""
    mode = "RGB" if len(colour) == 3 else "RGBA"
    return saved(Image.new(mode, size, colour), form, **save)


def saved(image: Image.Image, form: str = "PNG", **save: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **save)
    return file.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_uri(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64_of(data)}"


def openai_image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(data), "detail": "auto"}}


def anthropic_image(data: bytes, media_type: str = "image/png") -> dict[str, Any]:
    source = {"type": "base64", "media_type": media_type, "data": base64_of(data)}
    return {"type": "image", "source": source}


def responses_image(data: bytes) -> dict[str, Any]:
    return {"type": "input_image", "image_url": data_uri(data), "detail": "auto"}
