"""Prepares the images of a request for the loaded model, with a cache."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from semantic.application.prompt.replay import LruCache
from semantic.domain.chat import ImagePart
from semantic.domain.errors import InvalidRequestError
from semantic.domain.images.spans import PreparedImage
from semantic.ports.vision import VisionPort

_MAX_BYTES = 256 * 2**20
_NUM_AT_ONCE = 2  # a decoded image takes up to seven bytes a pixel
# Returns the file of an image that a tenant sent earlier, by its digest; None if it is not stored.
ReadImage: TypeAlias = Callable[[str, str], bytes | None]


class ImagePreparer:
    """Prepares images, which every turn of a conversation sends or refers to again. Thread-safe."""

    def __init__(self, read: ReadImage, *, max_bytes: int = _MAX_BYTES) -> None:
        """Start with an empty cache; `max_bytes` bounds its pixels."""
        self._read = read
        self._decoding = threading.Semaphore(_NUM_AT_ONCE)
        # Tenants have separate entries: a shared one would leak through timing.
        self._prepared: LruCache[tuple[str, str, str], PreparedImage] = LruCache(
            max_bytes, lambda _, image: image.nbytes
        )

    def prepare(
        self,
        images: Sequence[ImagePart],
        tenant: str,
        vision: VisionPort,
        *,
        is_kept: bool,
        max_tokens: int,
    ) -> tuple[PreparedImage, ...]:
        """Prepare images in order; with `is_kept` they stay in the cache.

        Images beyond `max_tokens` have no pixels: a prompt that is too long is counted and
        refused, and must not take the memory of all its images.

        Raises:
            InvalidRequestError: an image cannot be decoded, or its file is no longer stored.
        """
        prepared: list[PreparedImage] = []
        num_tokens = 0
        for image in images:
            one = self._one(image, tenant, vision, is_kept=is_kept)
            num_tokens += len(one.tokens)
            prepared.append(one if num_tokens <= max_tokens else replace(one, pixels=()))
        return tuple(prepared)

    def _one(
        self, image: ImagePart, tenant: str, vision: VisionPort, *, is_kept: bool
    ) -> PreparedImage:
        key = (tenant, image.digest, vision.fingerprint)
        found = self._prepared.get(key, is_used=is_kept)
        if found is not None:
            return found
        data = image.data or self._read(tenant, image.digest)
        if not data:
            raise InvalidRequestError(
                f"the file of image {image.digest[:12]} is no longer stored; send it again.",
                param="messages",
            )
        with self._decoding:
            prepared = replace(vision.prepare(data), tenant=tenant)
        if is_kept:
            self._prepared.put(key, prepared)
        return prepared
