from dataclasses import replace

import pytest

from semantic.application.requests.rewriting.image_text import ImageTexts
from semantic.domain.chat import (
    AgentHint,
    ChatRequest,
    ImagePart,
    Message,
    Role,
    TextPart,
    ToolResultPart,
)
from semantic.domain.errors import InvalidRequestError

pytestmark = pytest.mark.unit

SENT = ImagePart("1" * 64, "image/png", 40, 30, b"save")
STORED = ImagePart("2" * 64, "image/png", 400, 300)
LOST = ImagePart("3" * 64, "image/png", 4, 3)


class Reader:
    """Recognises a file's bytes as its text."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def recognise(self, data: bytes) -> str:
        self.asked.append(data)
        return data.decode().strip()


def texts() -> tuple[ImageTexts, Reader]:
    files = {("a", STORED.digest): b"cancel"}
    made, ocr = ImageTexts(lambda tenant, digest: files.get((tenant, digest))), Reader()
    made.ocr = ocr
    return made, ocr


def asked(*images: ImagePart) -> ChatRequest:
    result = ToolResultPart("1", (TextPart("shot"), *images))
    return ChatRequest("m", (Message(Role.USER, (TextPart("Look:"), *images)),
                             Message(Role.TOOL, (result,))))  # fmt: skip


def test_an_image_is_replaced_by_its_text_and_size_wherever_it_stands() -> None:
    made, ocr = texts()
    user, tool = made.replace_images(asked(SENT, STORED), "a", "m").messages
    look, sent, stored = user.parts
    assert look == TextPart("Look:")
    assert isinstance(sent, TextPart)
    assert isinstance(stored, TextPart)
    assert sent.text.startswith("[An image of 40x30 pixels, which you cannot see. Text recognised")
    assert sent.text.endswith(":]\nsave\n[end of the recognised text]")
    assert "400x300" in stored.text
    assert "\ncancel\n" in stored.text
    assert tool.parts == (ToolResultPart("1", (TextPart("shot"), sent, stored)),)
    assert ocr.asked == [b"save", b"cancel"]  # each once
    assert made.replace_images(asked(SENT), "b", "m").messages[0].parts[1] == sent
    assert len(ocr.asked) == 3  # tenants share nothing


def test_an_image_without_text_is_named_too() -> None:
    made, _ = texts()
    blank = replace(SENT, data=b" ")
    (_, shown), _ = (m.parts for m in made.replace_images(asked(blank), "a", "m").messages)
    assert shown == TextPart(
        "[An image of 40x30 pixels, which you cannot see. No text was recognised in it.]"
    )


def test_nothing_of_an_ephemeral_request_is_kept() -> None:
    made, ocr = texts()
    ephemeral = replace(asked(SENT), agent=AgentHint(is_ephemeral=True))
    made.replace_images(ephemeral, "a", "m")
    made.replace_images(ephemeral, "a", "m")
    assert len(ocr.asked) == 4


def test_a_file_that_is_gone_is_named() -> None:
    made, _ = texts()
    with pytest.raises(InvalidRequestError, match="333333333333 is no longer stored") as caught:
        made.replace_images(asked(SENT, LOST), "a", "m")
    assert caught.value.param == "messages[0].content[2]"


def test_without_recognition_the_model_and_the_field_are_named() -> None:
    made, _ = texts()
    made.ocr, made.hint = None, "send text."
    with pytest.raises(InvalidRequestError) as caught:
        made.replace_images(asked(SENT), "a", "tiny")
    assert caught.value.message == "model tiny does not accept images; send text."
    assert caught.value.param == "messages[0].content[1]"
