"""Downloads images from the domains that the operator allows.

A URL can make a server connect to addresses that its sender cannot reach. So every hop, including
redirects, must be an allowed domain, all of its addresses must be public, and the connection goes
to an address that was checked: a second lookup could return another one.
"""

import ipaddress
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import urlsplit

import httpx

from semantic.domain.errors import InvalidRequestError

_SUBDOMAINS = "*."
_MAX_REDIRECTS = 3
_TIMEOUT_S = 10.0
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver: TypeAlias = Callable[[str, int], Sequence[str]]


def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a host name."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


@dataclass(frozen=True, slots=True)
class _Domain:
    host: str
    port: int | None
    has_subdomains: bool

    @classmethod
    def of(cls, text: str) -> "_Domain":
        parsed = urlsplit(f"//{text.removeprefix(_SUBDOMAINS)}")
        host = (parsed.hostname or "").rstrip(".")
        return cls(host, parsed.port, text.startswith(_SUBDOMAINS))

    def includes(self, host: str, port: int | None) -> bool:
        is_named = host.endswith(f".{self.host}") if self.has_subdomains else host == self.host
        return is_named and port == self.port


class MediaFetcher:
    """Downloads files from allowed domains. Thread-safe."""

    def __init__(
        self,
        domains: Sequence[str],
        max_bytes: int,
        *,
        resolve: Resolver = resolve_host,
        timeout_s: float = _TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Create a downloader.

        Args:
            domains: Host names, ``*.`` before a name for its subdomains, with a port unless it is
                the scheme's own. An IP address, written out, may be private; the addresses of a
                name may not.
            max_bytes: A larger file is refused as soon as this much has arrived.
            resolve: Returns the addresses of a host name.
            timeout_s: Longest download.
            transport: Sends the requests; None connects to the addresses.
        """
        self._domains = tuple(map(_Domain.of, domains))
        self._max_bytes = max_bytes
        self._resolve = resolve
        self._timeout_s = timeout_s
        self._transport = transport

    def fetch(self, text: str) -> bytes:
        """Download a file.

        Raises:
            InvalidRequestError: the URL is not allowed, or the download failed.
        """
        deadline = time.monotonic() + self._timeout_s
        try:
            url = httpx.URL(text)
            for _ in range(_MAX_REDIRECTS + 1):
                found = self._get(url, deadline)
                if isinstance(found, bytes):
                    return found
                url = url.join(found)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise InvalidRequestError(
                f"downloading the image failed ({type(error).__name__}); send it as a data URI."
            ) from error
        raise InvalidRequestError(
            f"the image's URL leads to more than {_MAX_REDIRECTS} redirects; send a data URI."
        )

    def _get(self, url: httpx.URL, deadline: float) -> bytes | str:
        """Return the body, or where a redirect leads."""
        host, address = self._checked(url)
        headers = {"host": url.netloc.decode(), "accept": "image/*", "accept-encoding": "identity"}
        with (
            # Environment variables could name a proxy, which would resolve the name again.
            httpx.Client(
                timeout=self._timeout_s, trust_env=False, transport=self._transport
            ) as client,
            client.stream(
                "GET",
                url.copy_with(host=address),
                headers=headers,
                extensions={"sni_hostname": host},
            ) as answer,
        ):
            if answer.is_redirect:
                return answer.headers["location"]
            if answer.status_code != httpx.codes.OK:
                raise InvalidRequestError(
                    f"{host} answered the request for the image with status {answer.status_code}."
                )
            return self._body(answer, deadline)

    def _body(self, answer: httpx.Response, deadline: float) -> bytes:
        body = bytearray()
        for piece in answer.iter_raw():
            body += piece
            if len(body) > self._max_bytes:
                raise InvalidRequestError(
                    f"the image at this URL has more than {self._max_bytes / 2**20:g} MB; send a "
                    "smaller one, or raise the server's setting max_image_mb."
                )
            if time.monotonic() > deadline:
                raise InvalidRequestError(
                    f"downloading the image took more than {self._timeout_s:g} s; send a data URI."
                )
        return bytes(body)

    def _checked(self, url: httpx.URL) -> tuple[str, str]:
        """Return the host of an allowed URL, and an address of it that may be connected to."""
        host = url.raw_host.decode("ascii").lower().rstrip(".")
        if url.scheme not in ("http", "https") or url.userinfo:
            raise InvalidRequestError(
                "an image's URL must be http or https, without a user name; send a data URI."
            )
        if not any(domain.includes(host, url.port) for domain in self._domains):
            shown = f"{host}:{url.port}" if url.port else host
            raise InvalidRequestError(
                f"images are not downloaded from {shown[:100]!r}: send a data URI, or add the "
                "domain to the server's setting allowed_media_domains."
            )
        if _parsed(host) is not None:
            return host, host  # the operator has written this very address into the settings
        addresses = self._resolve(host, url.port or (443 if url.scheme == "https" else 80))
        if not addresses or not all(is_public(address) for address in addresses):
            raise InvalidRequestError(
                f"images are not downloaded from {host!r}: it has an address that is not public."
            )
        return host, addresses[0]


def is_public(address: str) -> bool:
    """Whether an address belongs to the public internet, also one embedded in an IPv6 address.

    Example:
        >>> is_public("8.8.8.8"), is_public("10.0.0.1"), is_public("::ffff:127.0.0.1")
        (True, False, False)
    """
    parsed = _parsed(address.partition("%")[0])
    if parsed is None or not parsed.is_global or parsed.is_multicast:
        return False
    return all(inner.is_global for inner in _embedded(parsed))


def _embedded(address: _Address) -> list[ipaddress.IPv4Address]:
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [inner for inner in found if inner is not None]


def _parsed(address: str) -> _Address | None:
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        return None
