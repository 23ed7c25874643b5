"""Recognises and decodes image files: PNG, JPEG, GIF, WebP and BMP.

The bytes alone decide which format a file has: clients often send a wrong media type.
"""

import hashlib
import io
import re
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from semantic.domain.chat import ImagePart
from semantic.domain.errors import InvalidRequestError

_MEDIA_TYPES = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "MPO": "image/jpeg",  # a JPEG file with more pictures after the first
    "GIF": "image/gif",
    "WEBP": "image/webp",
    "BMP": "image/bmp",
}
_FORMATS = tuple(name for name in _MEDIA_TYPES if name != "MPO")
ACCEPTED = "PNG, JPEG, GIF, WebP or BMP"
_OTHER_FORMATS = {
    "SVG": re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*|<!DOCTYPE[^>]*>\s*)*<svg\b", re.S),
    "HTML or XML": re.compile(rb"\s*<[!?a-z]", re.I),
    "PDF": re.compile(rb".{0,1024}%PDF-", re.S),
    "HEIC or AVIF": re.compile(rb".{4}ftyp", re.S),
    "TIFF": re.compile(rb"II[*+]\0|MM\0[*+]"),
    "JPEG 2000": re.compile(rb"\0\0\0\x0cjP|\xff\x4f\xff\x51"),
    "JPEG XL": re.compile(rb"\xff\x0a|\0\0\0\x0cJXL"),
    "ICO": re.compile(rb"\0\0[\x01\x02]\0"),
    "PSD": re.compile(rb"8BPS"),
    "PostScript": re.compile(rb"%!PS"),
    "ZIP": re.compile(rb"PK\x03\x04"),
    "video or audio": re.compile(rb"\x1aE\xdf\xa3|RIFF.{4}(?:AVI |WAVE)|OggS|ID3", re.S),
}
_MAX_ASPECT = 200  # processors divide an image into tiles, or scale its longer side


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits on the images of a request.

    Attributes:
        max_bytes: Size of one file.
        max_pixels: Width times height of one image.
        max_images: Images in one request, including those of earlier turns that it repeats.
    """

    max_bytes: int = 20 * 2**20
    max_pixels: int = 40_000_000
    max_images: int = 100


def open_rgb(data: bytes, max_pixels: int | None = None) -> Image.Image:
    """Decode the first frame of a file, upright, in RGB, with transparent areas on white.

    Args:
        data: The file.
        max_pixels: A larger image is refused before its pixels are decoded; None for a file that
            passed `read_image` before.

    Raises:
        InvalidRequestError: the format is not accepted, the image is too large, or the file is
            damaged.
    """
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            _check_size(*image.size, max_pixels)
            image.load()
            return _flattened(ImageOps.exif_transpose(image))
    except InvalidRequestError:
        raise
    except UnidentifiedImageError:
        raise InvalidRequestError(_refusal(data)) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InvalidRequestError(_too_large("too many", max_pixels)) from None
    except Exception as error:  # noqa: BLE001 - Pillow raises errors of many types for damaged files
        raise InvalidRequestError(
            f"the image file is damaged or incomplete ({error}); send the whole file."
        ) from None


def read_image(data: bytes, limits: ImageLimits) -> ImagePart:
    """Check a file and return it as a part of a message.

    Raises:
        InvalidRequestError: see `open_rgb`; or the file is too large.
    """
    if len(data) > limits.max_bytes:
        raise InvalidRequestError(_too_many_bytes(len(data), limits))
    width, height = open_rgb(data, limits.max_pixels).size
    digest = hashlib.sha256(data).hexdigest()
    return ImagePart(digest, media_type_of(data), width, height, data)


def media_type_of(data: bytes) -> str:
    """Return the media type of an accepted file, by its bytes.

    Raises:
        InvalidRequestError: the format is not accepted.
    """
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            return _MEDIA_TYPES[image.format or ""]
    except Exception:  # noqa: BLE001 - as in `open_rgb`
        raise InvalidRequestError(_refusal(data)) from None


def check_num_bytes(num_bytes: int, limits: ImageLimits) -> None:
    """Raise `InvalidRequestError` if a file of this size is too large."""
    if num_bytes > limits.max_bytes:
        raise InvalidRequestError(_too_many_bytes(num_bytes, limits))


def _check_size(width: int, height: int, max_pixels: int | None) -> None:
    if max_pixels is not None and width * height > max_pixels:
        raise InvalidRequestError(_too_large(f"{width}x{height}", max_pixels))
    if max(width, height) > _MAX_ASPECT * min(width, height):
        raise InvalidRequestError(
            f"the image has {width}x{height} pixels: its longer side may be at most "
            f"{_MAX_ASPECT} times its shorter side; crop it."
        )


def _flattened(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits a pixel, which Pillow would clip
        grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255)
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _too_large(size: str, max_pixels: int | None) -> str:
    limit = f"{(max_pixels or 0) / 1e6:g} million"
    return (
        f"the image has {size} pixels; at most {limit} are allowed: scale it down, or raise the "
        "server's setting max_image_mpixels."
    )


def _too_many_bytes(num_bytes: int, limits: ImageLimits) -> str:
    return (
        f"the image file has {num_bytes / 2**20:.1f} MB; at most {limits.max_bytes / 2**20:g} MB "
        "are allowed: send a smaller one, or raise the server's setting max_image_mb."
    )


def _refusal(data: bytes) -> str:
    if not data:
        return f"the image is empty; send the bytes of a {ACCEPTED} file."
    start = data[:4096]
    known = next((name for name, form in _OTHER_FORMATS.items() if form.match(start)), None)
    if known is None:
        return f"the bytes are not an image in a format that this server reads; send {ACCEPTED}."
    return f"images in {known} are not supported; send {ACCEPTED}."
