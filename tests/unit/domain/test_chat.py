import pytest

from semantic.domain.chat import (
    ChatRequest,
    ImagePart,
    Message,
    Role,
    TextPart,
    ThinkingPart,
    ToolChoice,
    ToolMode,
)
from semantic.domain.errors import InvalidRequestError
from semantic.domain.sampling import SamplingParams, StopRules

pytestmark = pytest.mark.unit


def test_a_request_without_messages_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        ChatRequest("tiny", ())

    assert refused.value.param == "messages"


def test_a_request_needs_no_more_than_a_model_and_a_message() -> None:
    request = ChatRequest("tiny", (Message.of(Role.USER, "hello"),))

    assert request.tool_choice == ToolChoice(ToolMode.AUTO, name=None, is_parallel=True)
    assert (request.sampling, request.stop) == (SamplingParams(), StopRules())
    assert request.agent.agent_id is None


def test_a_messages_text_is_its_text_parts() -> None:
    parts = (TextPart("one "), ThinkingPart("hm"), ImagePart("image/png", "AA=="), TextPart("two"))

    assert Message(Role.USER, parts).text == "one two"
    assert Message.of(Role.USER, "hello") == Message(Role.USER, (TextPart("hello"),))
    assert Message(Role.ASSISTANT, ()).text == ""
