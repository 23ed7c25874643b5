"""Replaces images by the text recognised in them, for models that accept only text."""

from dataclasses import replace

from semantic.application.prompt.images import ReadImage
from semantic.application.prompt.replay import LruCache
from semantic.domain.chat import ChatRequest, ImagePart, Part, TextPart, ToolResultPart
from semantic.domain.errors import InvalidRequestError
from semantic.ports.vision import OcrPort

_MAX_BYTES = 16 * 2**20


class ImageTexts:
    """Replaces images by text, or refuses them. Thread-safe; recognising text can take seconds.

    Attributes:
        ocr: Recognises text; None refuses images.
        hint: What else the client or the operator can do; ends the message of a refusal.
    """

    def __init__(self, read: ReadImage) -> None:
        self._read = read
        # Tenants have separate entries: a shared one would leak through timing.
        self._known: LruCache[tuple[str, str], str] = LruCache(
            _MAX_BYTES, lambda _, text: len(text) + 200
        )
        self.ocr: OcrPort | None = None
        self.hint = "send text, or serve a model that accepts images."

    def replace_images(self, request: ChatRequest, tenant: str, model_id: str) -> ChatRequest:
        """Return a request without images; those of an ephemeral request are not remembered.

        Raises:
            InvalidRequestError: there is no text recognition, or a file is no longer stored.
        """

        def shown(image: ImagePart, where: str) -> TextPart:
            if self.ocr is None:
                raise InvalidRequestError(
                    f"model {model_id} does not accept images; {self.hint}", param=where
                )
            return TextPart(described(image, self._text(image, tenant, where, request)))

        def converted(part: Part, where: str) -> Part:
            match part:
                case ImagePart():
                    return shown(part, where)
                case ToolResultPart():
                    content = (
                        shown(inner, f"{where}.content[{i}]")
                        if isinstance(inner, ImagePart)
                        else inner
                        for i, inner in enumerate(part.content)
                    )
                    return replace(part, content=tuple(content))
                case _:
                    return part

        messages = (
            replace(
                message,
                parts=tuple(
                    converted(part, f"messages[{index}].content[{i}]")
                    for i, part in enumerate(message.parts)
                ),
            )
            for index, message in enumerate(request.messages)
        )
        return replace(request, messages=tuple(messages))

    def _text(self, image: ImagePart, tenant: str, where: str, request: ChatRequest) -> str:
        key, is_kept = (tenant, image.digest), not request.agent.is_ephemeral
        text = self._known.get(key, is_used=is_kept)
        if text is not None:
            return text
        data = image.data or self._read(tenant, image.digest)
        if not data or self.ocr is None:
            raise InvalidRequestError(
                f"the file of image {image.digest[:12]} is no longer stored; send it again.",
                param=where,
            )
        text = self.ocr.recognise(data)
        if is_kept:
            self._known.put(key, text)
        return text


def described(image: ImagePart, text: str) -> str:
    r"""Return the text that stands for an image, marked as recognised.

    Example:
        >>> described(ImagePart("", "image/png", 40, 30), "Save\nCancel").splitlines()[1:]
        ['Save', 'Cancel', '[end of the recognised text]']
    """
    size = f"{image.width}x{image.height} pixels"
    if not text:
        return f"[An image of {size}, which you cannot see. No text was recognised in it.]"
    return (
        f"[An image of {size}, which you cannot see. Text recognised in it by OCR, with possible "
        f"errors:]\n{text}\n[end of the recognised text]"
    )
