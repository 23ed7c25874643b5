"""Which turns of a conversation are dropped when it is too long."""

import pytest

from semantic.application.requests.truncation import without_oldest
from semantic.domain.chat import ChatRequest, Message, Role, TextPart, ToolResultPart, ToolUsePart
from semantic.domain.errors import ContextLengthError

pytestmark = pytest.mark.unit

SYSTEM = Message.of(Role.SYSTEM, "be brief")
RESULT = Message(Role.TOOL, (ToolResultPart("1", (TextPart("42"),)),))
CALL = Message(Role.ASSISTANT, (ToolUsePart("1", "f", {}),))


def said(num_turns: int) -> tuple[Message, ...]:
    turns = [
        (Message.of(Role.USER, f"{number:04}" * 20), Message.of(Role.ASSISTANT, "yes"))
        for number in range(num_turns)
    ]
    return tuple(message for turn in turns for message in turn)


def shortened(messages: tuple[Message, ...], num_prompt: int, limit: int) -> ChatRequest | None:
    refusal = ContextLengthError(num_prompt=num_prompt, limit=limit, param="messages")
    return without_oldest(ChatRequest("m", messages), refusal)


def test_system_prompt_and_last_turn_stay() -> None:
    messages = (SYSTEM, *said(3), Message.of(Role.USER, "x" * 1000))
    made = shortened(messages, 10_000, 10)
    assert made is not None
    assert made.messages == (SYSTEM, messages[-1])
    assert made.num_dropped == 6
    assert shortened(made.messages, 10_000, 10) is None


def test_a_tool_result_keeps_its_call_and_its_question() -> None:
    asked = Message.of(Role.USER, "what is it?")
    made = shortened((*said(1), asked, CALL, RESULT), 1000, 990)
    assert made is not None
    assert made.messages == (asked, CALL, RESULT)


def test_the_same_turns_are_dropped_until_a_third_of_the_limit_is_added() -> None:
    """One token for each character, about: the prompt grows by 100, the limit is 2000."""
    dropped = []
    for num_turns in range(21, 40):
        made = shortened((*said(num_turns), said(1)[0]), num_turns * 100, 2000)
        assert made is not None
        dropped.append(made.num_dropped)
    assert dropped == sorted(dropped)
    assert len(set(dropped)) <= 4
