"""Images are downloaded from allowed domains only, whatever redirects and name servers say."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from semantic.adapters.images.fetch import MediaFetcher
from semantic.domain.errors import InvalidRequestError
from tests.pictures import picture

pytestmark = pytest.mark.integration

DATA = picture()


@dataclass
class Site:
    """A web server, and the paths and hosts it was asked for."""

    port: int
    asked: list[tuple[str, str]] = field(default_factory=list)
    locations: dict[str, str] = field(default_factory=dict)

    @property
    def domain(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


@pytest.fixture
def site() -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.asked.append((self.path, self.headers["host"]))
            if location := made.locations.get(self.path):
                self.send_response(302)
                self.send_header("location", location)
                self.end_headers()
                return
            self.send_response(404 if self.path == "/missing" else 200)
            self.end_headers()
            with contextlib.suppress(OSError):  # the client has enough
                self.wfile.write(DATA * 2000 if self.path == "/large" else DATA)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = Site(server.server_port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_address_that_the_operator_wrote_down_is_asked(site: Site) -> None:
    assert MediaFetcher([site.domain], 10_000).fetch(site.url("/a.png")) == DATA
    assert site.asked == [("/a.png", site.domain)]


def test_another_port_of_it_is_not(site: Site) -> None:
    with pytest.raises(InvalidRequestError, match="allowed_media_domains"):
        MediaFetcher(["127.0.0.1"], 10_000).fetch(site.url("/a.png"))
    assert site.asked == []


def test_redirects_between_allowed_domains_are_followed(site: Site) -> None:
    site.locations |= {"/a": "/b", "/b": site.url("/c.png")}
    assert MediaFetcher([site.domain], 10_000).fetch(site.url("/a")) == DATA
    assert [path for path, _ in site.asked] == ["/a", "/b", "/c.png"]


@pytest.mark.parametrize(
    "location",
    ["http://localhost:{port}/secret", "http://[::1]:{port}/secret", "http://2130706433:{port}/",
     "http://169.254.169.254/latest/meta-data", "file:///etc/passwd", "//localhost:{port}/secret"],
)  # fmt: skip
def test_a_redirect_leads_nowhere_else(site: Site, location: str) -> None:
    site.locations["/a"] = location.format(port=site.port)
    with pytest.raises(InvalidRequestError):
        MediaFetcher([site.domain], 10_000).fetch(site.url("/a"))
    assert [path for path, _ in site.asked] == ["/a"]


def test_a_circle_of_redirects_ends(site: Site) -> None:
    site.locations["/a"] = "/a"
    with pytest.raises(InvalidRequestError, match="redirects"):
        MediaFetcher([site.domain], 10_000).fetch(site.url("/a"))
    assert len(site.asked) == 4


def test_a_name_is_looked_up_once_and_its_address_is_asked() -> None:
    """A name server that answers with another address the second time gains nothing."""
    answers, sent = iter([["93.184.216.34"], ["127.0.0.1"]]), list[httpx.Request]()

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200, stream=httpx.ByteStream(DATA))

    fetcher = MediaFetcher(
        ["img.example"],
        10_000,
        resolve=lambda *_: next(answers),
        transport=httpx.MockTransport(answer),
    )
    assert fetcher.fetch("https://img.example/a.png") == DATA
    (request,) = sent
    assert str(request.url) == "https://93.184.216.34/a.png"
    assert request.headers["host"] == request.extensions["sni_hostname"] == "img.example"
    with pytest.raises(InvalidRequestError, match="not public"):
        fetcher.fetch("https://img.example/a.png")
    assert len(sent) == 1


@pytest.mark.parametrize("path, reason", [("/large", "max_image_mb"), ("/missing", "status 404")])
def test_a_download_may_fail(site: Site, path: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        MediaFetcher([site.domain], 10_000).fetch(site.url(path))


def test_a_server_that_does_not_answer_is_reported() -> None:
    with pytest.raises(InvalidRequestError, match="downloading the image failed"):
        MediaFetcher(["127.0.0.1:9"], 10_000).fetch("http://127.0.0.1:9/a.png")
