import pytest

from semantic.domain.chat import ChatRequest
from semantic.domain.errors import InvalidRequestError

pytestmark = pytest.mark.unit


def test_a_request_without_messages_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        ChatRequest("tiny", ())

    assert refused.value.param == "messages"
