import base64
from collections.abc import Sequence
from urllib.parse import quote

import pytest

from semantic.adapters.images.fetch import MediaFetcher, is_public
from semantic.adapters.images.files import ImageLimits
from semantic.adapters.images.sources import ImageSources
from semantic.domain.errors import InvalidRequestError
from tests.pictures import base64_of, data_uri, picture

pytestmark = pytest.mark.unit

DATA = picture((40, 30))
ENCODED = base64_of(DATA)
LINES = "\r\n".join(ENCODED[at : at + 76] for at in range(0, len(ENCODED), 76))


def sources(*domains: str, addresses: Sequence[str] = ("93.184.216.34",)) -> ImageSources:
    limits = ImageLimits(max_bytes=10_000)
    fetcher = MediaFetcher(domains, limits.max_bytes, resolve=lambda *_: addresses)
    return ImageSources(limits, fetcher)


@pytest.mark.parametrize(
    "source",
    [
        ENCODED,
        LINES,
        f"  {ENCODED}\n",
        ENCODED.rstrip("="),
        base64.urlsafe_b64encode(DATA).decode(),
        data_uri(DATA),
        data_uri(DATA, "text/html"),
        data_uri(DATA, ""),
        data_uri(DATA, "image/png;charset=utf-8;name=a.png"),
        data_uri(DATA).replace("data:", "DATA:").replace(";base64", ";BASE64"),
        f" data:image/png;base64,{quote(ENCODED, safe='')}",
        f"data:image/png;base64,{LINES}",
        f"data:image/png,{quote(DATA)}",
    ],
)
def test_one_file_has_many_encodings(source: str) -> None:
    assert sources().find_bytes(source) == DATA


@pytest.mark.parametrize(
    "source, reason",
    [
        ("ab cd!", "base64"),
        ("A", "base64"),
        ("QUJD=QUJD", "base64"),
        ("QUJD\ud800", "base64"),
        ("data:image/png;base64,äö", "base64"),
        ("data:image/png;base64", "comma"),
        ("file:///etc/passwd", "no files"),
        ("FILE:/etc/passwd", "no files"),
        ("ftp://img.example/a.png", "'ftp'"),
        ("gopher://img.example/", "'gopher'"),
        ("C:\\a.png", "'c'"),
        ("blob:http://x/y", "'blob'"),
        ("A" * 20_000, "max_image_mb"),
        ("data:image/png;base64," + "A" * 200_000, "max_image_mb"),
        ("data:image/png," + "%41" * 40_000, "max_image_mb"),
        ("http://img.example/a.png", "allowed_media_domains"),
        ("https://8.8.8.8/a.png", "allowed_media_domains"),
    ],
)  # fmt: skip
def test_other_sources_are_refused_with_a_reason(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        sources().find_bytes(source)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/a.png",
        "http://2130706433/a.png",
        "http://0x7f.1/a.png",
        "http://017700000001/a.png",
        "http://127.1/a.png",
        "http://[::1]/a.png",
        "http://[::ffff:127.0.0.1]/a.png",
        "http://[fe80::1%25eth0]/a.png",
        "http://169.254.169.254/latest/meta-data",
        "http://localhost/a.png",
        "http://img.example.evil.example/a.png",
        "http://evil-img.example/a.png",
        "http://sub.img.example/a.png",
        "http://img.example:8080/a.png",
        "http://img.example@evil.example/a.png",
        "http://evil.example#@img.example/a.png",
        "http://evil.example\\@img.example/a.png",
        "http://user:secret@img.example/a.png",
        "http:///a.png",
        "http://",
        "http://img.example\r\nhost: evil.example/a.png",
        "https://ⓔvil.example/a.png",
        "http://" + "a" * 5000,
    ],
)
def test_only_the_allowed_host_itself_is_asked(url: str) -> None:
    asked: list[str] = []

    def resolve(host: str, _: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    fetcher = MediaFetcher(["img.example"], 1000, resolve=resolve)
    with pytest.raises(InvalidRequestError):
        fetcher.fetch(url)
    assert asked == []


@pytest.mark.parametrize(
    "url", ["http://img.example/a", "http://IMG.example./a", "https://a.b.cdn.example/a"]
)
@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "169.254.169.254", "0.0.0.1", "::1", "fd00::1", "fe80::1%eth0",
     "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "100.64.0.1", "224.0.0.1", "junk"],
)  # fmt: skip
def test_a_name_never_leads_to_a_private_address(url: str, address: str) -> None:
    """All addresses are checked: a server that has a public one too is refused as well."""
    allowed = sources("img.example", "*.cdn.example", addresses=("93.184.216.34", address))
    with pytest.raises(InvalidRequestError, match="not public"):
        allowed.find_bytes(url)


def test_public_addresses() -> None:
    assert all(map(is_public, ("93.184.216.34", "2606:2800:220:1::1", "64:ff9b::808:808")))


def test_a_name_without_an_address_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not public"):
        sources("img.example", addresses=()).find_bytes("http://img.example/a.png")
