import pytest

from semantic.domain.chat import ChatRequest, ImagePart, Message, Role, TextPart, ThinkingPart
from semantic.domain.errors import InvalidRequestError

pytestmark = pytest.mark.unit


def test_a_request_without_messages_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        ChatRequest("tiny", ())

    assert refused.value.param == "messages"


def test_a_messages_text_is_its_text_parts() -> None:
    parts = (TextPart("one "), ThinkingPart("hm"), ImagePart("image/png", "AA=="), TextPart("two"))

    assert Message(Role.USER, parts).text == "one two"
    assert Message.of(Role.USER, "hello") == Message(Role.USER, (TextPart("hello"),))
    assert Message(Role.ASSISTANT, ()).text == ""
