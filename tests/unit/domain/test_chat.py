import pytest

from semantic.domain.chat import ChatRequest, Message, RawPrompt, Role
from semantic.domain.errors import InvalidRequestError
from semantic.domain.sampling import StopRules

pytestmark = pytest.mark.unit


def test_a_request_without_messages_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        ChatRequest("tiny", ())

    assert refused.value.param == "messages"


def test_only_a_raw_prompt_may_want_no_reply() -> None:
    nothing = StopRules(max_tokens=0)
    with pytest.raises(InvalidRequestError) as refused:
        ChatRequest("tiny", (Message.of(Role.USER, "hello"),), stop=nothing)
    assert refused.value.param == "max_tokens"
    assert ChatRequest("tiny", (), raw_prompt=RawPrompt("hello"), stop=nothing).stop is nothing
