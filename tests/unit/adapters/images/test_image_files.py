import hashlib
import io
import struct
import zlib

import pytest
from PIL import Image

from semantic.adapters.images.files import ImageLimits, media_type_of, open_rgb, read_image
from semantic.domain.errors import InvalidRequestError
from tests.pictures import RED, picture, saved

pytestmark = pytest.mark.unit

LIMITS = ImageLimits()
FORMS = {"PNG": "png", "JPEG": "jpeg", "GIF": "gif", "WEBP": "webp", "BMP": "bmp"}
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><rect width="9" height="9"/></svg>'


@pytest.mark.parametrize("form", FORMS)
def test_the_bytes_alone_say_what_a_file_is(form: str) -> None:
    data = picture(form=form)
    part = read_image(data, LIMITS)
    assert (part.media_type, part.width, part.height) == (f"image/{FORMS[form]}", 24, 16)
    assert (part.digest, part.data) == (hashlib.sha256(data).hexdigest(), data)
    shown = open_rgb(data).getpixel((5, 5))
    assert [round(value / 255) for value in shown] == [1, 0, 0]  # type: ignore[union-attr]


def chunk(name: bytes, body: bytes) -> bytes:
    checked = name + body
    return struct.pack(">I", len(body)) + checked + struct.pack(">I", zlib.crc32(checked))


def png_header(width: int, height: int) -> bytes:
    """A PNG file that claims a size and has no pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


REFUSED = {
    "empty": (b"", "empty"),
    "text": (b"hello, world", "format"),
    "svg": (SVG, "SVG"),
    "svg after xml": (b"\n<?xml version='1.0'?><!-- x --><!DOCTYPE svg>" + SVG, "SVG"),
    "html": (b"<!doctype html><img>", "HTML"),
    "pdf": (b"%PDF-1.7\n%\xe2\xe3", "PDF"),
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"),
    "avif": (b"\0\0\0\x1cftypavif\0\0\0\0", "AVIF"),
    "tiff": (saved(Image.new("RGB", (9, 9)), "TIFF"), "TIFF"),
    "ico": (b"\0\0\1\0\1\0\x10\x10\0\0\1\0\x20\0\x68\x04\0\0", "ICO"),
    "psd": (b"8BPS\0\1", "PSD"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0", "PostScript"),
    "zip": (b"PK\3\4" + bytes(20), "ZIP"),
    "video": (b"RIFF\0\0\0\0AVI LIST", "video"),
    "too many bytes": (picture() + bytes(21 * 2**20), "max_image_mb"),
    "too many pixels": (png_header(8000, 8000), "8000x8000 pixels.*max_image_mpixels"),
    "a bomb": (png_header(2**31 - 1, 2**31 - 1), "too many pixels.*max_image_mpixels"),
    "a line": (picture((1, 100_000)), "1x100000.*crop"),
    "a column": (picture((40_000, 1), form="BMP"), "40000x1.*crop"),
    "no size": (png_header(0, 9), "damaged|format"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_files_are_refused_with_a_reason(name: str) -> None:
    data, reason = REFUSED[name]
    with pytest.raises(InvalidRequestError, match=f"(?s){reason}"):
        read_image(data, LIMITS)


@pytest.mark.parametrize("form", FORMS)
def test_a_truncated_file_is_refused(form: str) -> None:
    noise = Image.effect_noise((64, 48), 80).convert("RGB")
    data = saved(noise, form)
    read_image(data, LIMITS)
    for share in (0.1, 0.5, 0.9):
        with pytest.raises(InvalidRequestError, match=r"damaged or incomplete|format"):
            read_image(data[: int(len(data) * share)], LIMITS)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_rotation_is_applied_once(orientation: int) -> None:
    """All eight files show the same picture: red above, on the left."""
    upright = Image.new("RGB", (32, 16), (0, 0, 255))
    upright.paste(RED, (0, 0, 16, 8))
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # as PIL's `Transpose`
    turned = upright.transpose(Image.Transpose(undo[orientation])) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    for form, options in (("JPEG", {"quality": 95}), ("PNG", {}), ("WEBP", {"lossless": True})):
        data = saved(turned, form, exif=exif, **options)
        part, shown = read_image(data, LIMITS), open_rgb(data)
        assert (part.width, part.height) == shown.size == (32, 16)
        assert shown.getpixel((4, 3))[0] > 200, form  # type: ignore[index]
        assert shown.getpixel((28, 12))[2] > 200, form  # type: ignore[index]


def rgba(mode: str) -> Image.Image:
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    clear.paste((255, 0, 0, 255), (0, 0, 4, 8))
    return clear.convert(mode) if mode != "RGBA" else clear


@pytest.mark.parametrize("mode, form", [("RGBA", "PNG"), ("LA", "PNG"), ("RGBA", "WEBP")])
def test_transparent_areas_are_white(mode: str, form: str) -> None:
    options = {"lossless": True} if form == "WEBP" else {}
    assert open_rgb(saved(rgba(mode), form, **options)).getpixel((6, 4)) == (255, 255, 255)


def test_a_palette_may_be_transparent() -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 255, 0, 0, 0, 255])
    assert open_rgb(saved(image, transparency=1)).getpixel((1, 1)) == (255, 255, 255)
    assert open_rgb(saved(image)).getpixel((1, 1)) == (0, 0, 255)


def test_half_transparent_areas_are_mixed_with_white() -> None:
    assert open_rgb(picture(colour=(255, 0, 0, 128))).getpixel((1, 1)) == (255, 127, 127)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_an_animation_shows_its_first_frame(form: str) -> None:
    first, second = Image.new("RGB", (8, 8), RED), Image.new("RGB", (8, 8), (0, 0, 255))
    options = {"lossless": True} if form == "WEBP" else {}
    data = saved(first, form, save_all=True, append_images=[second], **options)
    assert open_rgb(data).getpixel((1, 1)) == RED
    assert media_type_of(data) == f"image/{form.lower()}"


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "I;16"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    grey = Image.new("L", (8, 8), 255)
    if mode == "I;16":
        data = saved(Image.frombytes("I;16", (8, 8), struct.pack("<64H", *[0x8000] * 64)))
        expected = (128, 128, 128)
    else:
        data = saved(grey.convert(mode), "JPEG" if mode == "CMYK" else "PNG")
        expected = (255, 255, 255)
    assert open_rgb(data).mode == "RGB"
    assert open_rgb(data).getpixel((1, 1)) == expected


def test_what_follows_an_image_is_not_read() -> None:
    """A file may be valid in two formats; only its picture counts."""
    for data in (picture(), picture(form="GIF"), picture(form="JPEG")):
        part = read_image(data + b"<script>alert(1)</script>PK\3\4" + bytes(30), LIMITS)
        assert part.media_type == media_type_of(data)


def test_several_pictures_in_a_jpeg_file_count_as_jpeg() -> None:
    file = io.BytesIO()
    first, second = Image.new("RGB", (8, 8), RED), Image.new("RGB", (8, 8))
    first.save(file, "MPO", save_all=True, append_images=[second])
    assert read_image(file.getvalue(), LIMITS).media_type == "image/jpeg"
