"""Reads the images of requests: decodes and checks them in a thread, or refuses them by field.

It also serves the stored files, for pages that show a conversation.
"""

import hashlib
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Path
from fastapi.responses import Response

from semantic.adapters.images.files import ImageLimits, media_type_of, read_image
from semantic.adapters.images.sources import ImageSources
from semantic.adapters.inbound.http.errors import error_response, refusals
from semantic.adapters.inbound.wire import STORED_IMAGE, SentImage, sent_images
from semantic.application.prompt.images import ReadImage
from semantic.application.prompt.replay import LruCache
from semantic.application.requests.prepare import PreparationThreads
from semantic.domain.agents import Principal
from semantic.domain.chat import ImagePart, Message, Part, ToolResultPart
from semantic.domain.errors import InvalidRequestError

_MAX_KNOWN = 4096
_NUM_DECODING = 2  # a decoded image takes up to seven bytes a pixel
_TIMEOUT_S = 60.0
_DIGEST = re.compile("[0-9a-f]{64}")
_FILE: dict[str, Any] = {"image/*": {}}
# The content is the client's own: no browser may take it for a page or a script.
_SAFE = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; sandbox",
    "cache-control": "private, max-age=86400, immutable",
}


class ImageReader:
    """Replaces the images that clients send by images that are read and checked."""

    def __init__(
        self,
        limits: ImageLimits,
        sources: ImageSources,
        principal: Callable[[], Principal],
        find_image: ReadImage,
    ) -> None:
        """Start with nothing known.

        Args:
            principal: Returns the caller of the current request.
            find_image: Returns an image of an earlier turn, which a request may name by its digest.
        """
        self._limits = limits
        self._principal = principal
        self._find_image = find_image
        self._sources = sources
        self._threads = PreparationThreads(_TIMEOUT_S)
        self._decoding = threading.Semaphore(_NUM_DECODING)
        # Clients send the images of earlier turns again: they are decoded once. Tenants have
        # separate entries: a shared one would leak through timing.
        self._known: LruCache[tuple[str, str], ImagePart] = LruCache(_MAX_KNOWN)

    async def read(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return messages whose images are read.

        Raises:
            InvalidRequestError: an image is malformed, too large or not allowed, or there are too
                many; the error names its field.
        """
        sent, limit = sent_images(messages), self._limits.max_images
        if len(sent) > limit:
            raise InvalidRequestError(
                f"the request has {len(sent)} images; at most {limit} are allowed: send fewer, or "
                "raise the server's setting max_images.",
                param=sent[limit],
            )
        return await self._threads.run(self._read_all, messages)

    def _read_all(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        return tuple(
            replace(
                message,
                parts=tuple(
                    self._read_part(part, f"messages[{index}].content[{position}]")
                    for position, part in enumerate(message.parts)
                ),
            )
            for index, message in enumerate(messages)
        )

    def _read_part(self, part: Part, where: str) -> Part:
        match part:
            case SentImage():
                return self._read(part, where)
            case ToolResultPart():
                content = (
                    self._read(inner, f"{where}.content[{position}]")
                    if isinstance(inner, SentImage)
                    else inner
                    for position, inner in enumerate(part.content)
                )
                return replace(part, content=tuple(content))
            case _:
                return part

    def _read(self, image: SentImage, where: str) -> ImagePart:
        try:
            data = self._find_bytes(image.source)
            key = (self._principal().tenant, hashlib.sha256(data).hexdigest())
            known = self._known.get(key)
            if known is None:
                with self._decoding:
                    known = replace(read_image(data, self._limits), data=b"")
                self._known.put(key, known)
            return replace(known, data=data)
        except InvalidRequestError as error:
            error.param = where
            raise

    def _find_bytes(self, source: str) -> bytes:
        if not source.startswith(STORED_IMAGE):
            return self._sources.find_bytes(source)
        data = self._find_image(self._principal().tenant, source.removeprefix(STORED_IMAGE))
        if data is None:
            raise InvalidRequestError("no image with this digest is stored; send the file.")
        return data


def images_router(principal: Callable[[], Principal], find_image: ReadImage) -> APIRouter:
    """Serve the images of stored turns; `principal` returns the caller of the current request."""
    router = APIRouter(prefix="/v1/images", tags=["agents"])

    @router.get(
        "/{sha256}",
        response_class=Response,
        responses={200: {"description": "the file", "content": _FILE}, **refusals(404)},
    )
    def read_image_file(
        sha256: Annotated[str, Path(json_schema_extra={"pattern": "^[0-9a-f]{64}$"})],
    ) -> Response:
        """Return the file of an image in a stored turn, by the digest that the turn shows."""
        is_digest = _DIGEST.fullmatch(sha256) is not None
        data = find_image(principal().tenant, sha256) if is_digest else None
        if data is None:
            return error_response(404, "no image with this digest is stored.", "not_found")
        return Response(data, media_type=media_type_of(data), headers=_SAFE)

    return router
