"""HTTP client of a running server for the commands: JSON calls, event streams and files."""

import contextlib
import json
import ssl
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, Any, Self, TypeAlias

import httpx

from semantic.domain.errors import SemanticError

Json: TypeAlias = dict[str, Any]
DEFAULT_URL = "http://127.0.0.1:8000"
_CONNECT_S = 5.0
_PIECE = 2**20
# Entries per page; the server allows no more.
_PAGE = 100


class ServerError(SemanticError):
    """The server refused a request, or did not answer.

    Attributes:
        status: The HTTP status; 0 if the server did not answer.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ServerClient:
    """A connection to one server; a context manager that closes it on exit.

    Methods raise ServerError if the server refuses a request, does not answer, or disconnects.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        """Configure the client; sends no request.

        Args:
            url: The server's address, with or without `http://` and `/v1`.

        Raises:
            ServerError: the address or the key is malformed.
        """
        if key and not (key.isascii() and key.isprintable()):
            raise ServerError("--key: a key consists of printable ASCII characters")
        self.url = url.rstrip("/").removesuffix("/v1")
        if "://" not in self.url:
            self.url = f"http://{self.url}"
        self.key = key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        trusted = _trusted_certificates(is_needed=self.url.startswith("https:"))
        with self._answers():  # trust_env=False: no proxy
            self._http = httpx.Client(
                base_url=self.url, headers=headers, timeout=timeout, trust_env=False, verify=trusted
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def call(self, method: str, path: str, **options: Any) -> Json:
        """Send a request and return the JSON of its response; empty if that has no body."""
        with self._answers():
            response = self._http.request(method, path, **options)
            self._check(response)
            try:
                found: Json = response.json() if response.content else {}
            except ValueError as error:
                raise ServerError(f"{self.url} is not a Semantic server") from error
            return found

    def pages(self, path: str, cursor: str, **query: Any) -> Iterator[Json]:
        """Yield the entries of a paged list; `cursor` is the query parameter of the next page."""
        query = {"limit": _PAGE, **query}
        while True:
            page = self.call("GET", path, params=query)
            yield from page["data"]
            if page["next"] is None:
                return
            query[cursor] = page["next"]

    def events(self, method: str, path: str, **options: Any) -> Generator[Json, None, None]:
        """Yield the JSON of each event of a stream; closing the iterator disconnects."""
        with self._answers(), self._http.stream(method, path, **options) as response:
            self._check(response)
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def download(self, path: str, target: IO[bytes]) -> Iterator[int]:
        """Download into `target`; yields the size in bytes of each chunk as it is written."""
        with self._answers(), self._http.stream("GET", path) as response:
            self._check(response)
            for piece in response.iter_bytes(_PIECE):
                target.write(piece)
                yield len(piece)

    @contextlib.contextmanager
    def _answers(self) -> Iterator[None]:
        try:
            yield
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ServerError(f"--server: {self.url!r} is not an address: {error}") from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if "certificate" in str(error).lower():
                raise ServerError(
                    f"the certificate of {self.url} is not trusted; if it is yours, set "
                    f"SSL_CERT_FILE to its file ({error})"
                ) from error
            if "ssl" in str(error).lower():
                raise ServerError(
                    f"{self.url} does not use HTTPS; without a certificate, its address begins "
                    "with http://"
                ) from error
            raise ServerError(
                f"no server answers at {self.url}; start one with `semantic serve`, or name its "
                "address with --server"
            ) from error
        except httpx.HTTPError as error:
            is_plain = isinstance(error, httpx.RemoteProtocolError) and self.url.startswith("http:")
            hint = "; if it has a certificate, its address begins with https://" if is_plain else ""
            reason = str(error).rstrip(".") or type(error).__name__
            raise ServerError(f"the connection to {self.url} broke: {reason}{hint}") from error

    def _check(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        response.read()
        message = _message(response)
        if response.status_code == httpx.codes.UNAUTHORIZED:
            message = f"{message} Give a key with --key or SEMANTIC_CLIENT_KEY."
        raise ServerError(message, response.status_code)


def _trusted_certificates(*, is_needed: bool) -> ssl.SSLContext:
    if not is_needed:  # reading them takes longer than most requests
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        raise ServerError(f"SSL_CERT_FILE cannot be used: {error}") from error


def file_pieces(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in chunks of 1 MiB."""
    with path.open("rb") as source:
        while piece := source.read(_PIECE):
            yield piece


def _message(response: httpx.Response) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(response.json()["error"]["message"])
    return f"{response.request.url} answered {response.status_code} {response.reason_phrase}"
