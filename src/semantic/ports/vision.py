"""Interfaces of a model's image preprocessing, and of text recognition."""

from typing import Protocol

from semantic.domain.images.spans import PreparedImage


class VisionPort(Protocol):
    """Prepares images for one model. Immutable, thread-safe, and used off the engine's thread."""

    @property
    def fingerprint(self) -> str:
        """Identifies the preprocessing: class, sizes, normalisation, version and model type."""

    @property
    def marker_id(self) -> int:
        """The special token that the chat template writes once for each image."""

    def prepare(self, data: bytes) -> PreparedImage:
        """Decode an image file and prepare it for the model.

        Raises:
            InvalidRequestError: the file cannot be decoded, or the model cannot take this image.
        """


class OcrPort(Protocol):
    """Recognises text in images. Thread-safe, and used off the engine's thread."""

    def recognise(self, data: bytes) -> str:
        """Return the lines of text in an image file, from top to bottom; empty if there are none.

        Raises:
            InvalidRequestError: the file cannot be decoded.
        """
