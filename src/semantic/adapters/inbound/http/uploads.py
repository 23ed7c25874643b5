"""Receives a large file in the body of a request, without holding it in memory."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator

from fastapi import Request

from semantic.domain.errors import InvalidRequestError, OverloadedError

_PIECE = 2**20
_IN_MEMORY = 2**23
_RETRY_S = 60.0  # delay before a retry when the disk was full
# Few uploads run at once: each must be this fast on average after the first seconds.
_UPLOAD_GRACE_S, _MIN_UPLOAD_RATE = 60.0, 2**16


@contextlib.asynccontextmanager
async def uploaded(http: Request) -> AsyncIterator[Callable[[], Iterator[bytes]]]:
    """Store the body of a request until the context ends.

    Yields:
        A function that returns the content from its beginning, on every call.

    Raises:
        InvalidRequestError: the client sends too slowly.
        OverloadedError: the disk is full.
    """
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as file:
        started, num_bytes = time.monotonic(), 0
        async for piece in http.stream():
            num_bytes += len(piece)
            _require_pace(num_bytes, time.monotonic() - started)
            await asyncio.to_thread(_store, file, piece)
        yield lambda: _pieces(file)


def _require_pace(num_bytes: int, elapsed_s: float) -> None:
    if elapsed_s > _UPLOAD_GRACE_S + num_bytes / _MIN_UPLOAD_RATE:
        raise InvalidRequestError(
            f"the upload is too slow: {num_bytes} bytes in {elapsed_s:.0f} s, at least "
            f"{_MIN_UPLOAD_RATE // 1024} KB/s are required. Copy the file to the server's machine "
            "and import it there."
        )


def _store(file: "tempfile.SpooledTemporaryFile[bytes]", piece: bytes) -> None:
    try:
        file.write(piece)
    except OSError as error:
        raise OverloadedError(
            f"the file cannot be stored in {tempfile.gettempdir()}: {error.strerror}.",
            retry_after_s=_RETRY_S,
        ) from error


def _pieces(file: "tempfile.SpooledTemporaryFile[bytes]") -> Iterator[bytes]:
    file.seek(0)
    while piece := file.read(_PIECE):
        yield piece
