"""Returns the bytes of an image that a request names: a data URI, base64, or a URL."""

import binascii
import re
from urllib.parse import unquote_to_bytes

from semantic.adapters.images.fetch import MediaFetcher
from semantic.adapters.images.files import ImageLimits, check_num_bytes
from semantic.domain.errors import InvalidRequestError

_SCHEME = re.compile(r"\s*([a-zA-Z][a-zA-Z0-9+.-]*):")
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_NOT_BASE64 = "the image is not valid base64; send the whole file, encoded in base64."


class ImageSources:
    """Finds the bytes of images. Thread-safe; a URL can take some seconds."""

    def __init__(self, limits: ImageLimits, fetcher: MediaFetcher) -> None:
        self._limits = limits
        self._fetcher = fetcher

    def find_bytes(self, source: str) -> bytes:
        """Return the file behind a data URI, an allowed URL, or base64 without a prefix.

        Raises:
            InvalidRequestError: the source is malformed, not allowed or too large.
        """
        match = _SCHEME.match(source)
        scheme = match[1].lower() if match else ""
        match scheme:
            case "":
                return self._decode(source)
            case "data":
                return self._data_uri(source)
            case "http" | "https":
                return self._fetcher.fetch(source.strip())
            case "file":
                raise InvalidRequestError(
                    "the server reads no files of its own; send the image as a data URI."
                )
            case _:
                raise InvalidRequestError(
                    f"URLs of the scheme {scheme[:20]!r} are not supported; send a data URI "
                    "(data:image/png;base64,...)."
                )

    def _data_uri(self, uri: str) -> bytes:
        header, comma, body = uri.partition(",")
        if not comma:
            raise InvalidRequestError(
                "a data URI needs a comma before its data: data:image/png;base64,..."
            )
        if header.rstrip().lower().endswith(";base64"):
            return self._decode(body)
        check_num_bytes(len(body) // 3, self._limits)  # each byte takes up to three characters
        return unquote_to_bytes(body)

    def _decode(self, text: str) -> bytes:
        """Decode base64 in either alphabet, with or without padding and line breaks."""
        check_num_bytes(len(text) // 4, self._limits)  # percent signs and line breaks count too
        given = unquote_to_bytes(text) if "%" in text else text.encode("ascii", "replace")
        plain = b"".join(given.split()).translate(_URL_SAFE).rstrip(b"=")
        check_num_bytes(len(plain) * 3 // 4, self._limits)
        try:
            return binascii.a2b_base64(plain + b"=" * (-len(plain) % 4), strict_mode=True)
        except binascii.Error:
            raise InvalidRequestError(_NOT_BASE64) from None
