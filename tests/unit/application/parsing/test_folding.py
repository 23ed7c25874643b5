import pytest

from semantic.application.parsing import fold_message
from semantic.domain.chat import (
    Event,
    Message,
    PrefillProgress,
    Role,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingEnded,
    ThinkingPart,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    ToolUsePart,
)

pytestmark = pytest.mark.unit


def message_of(*events: Event) -> Message:
    return fold_message(events)


def test_pieces_are_joined_in_their_order() -> None:
    made = message_of(
        PrefillProgress(1, 2),
        ThinkingDelta("h"),
        ThinkingDelta("m"),
        ThinkingEnded("sig"),
        TextDelta("Let me "),
        TextDelta("look."),
        ToolCallStarted(0, "c0", "read"),
        ToolCallDelta(0, '{"path":'),
        ToolCallStarted(1, "c1", "list"),
        ToolCallDelta(0, ' "a.py"}'),
        ToolCallEnded(0),
        ToolCallEnded(1),
    )

    assert made == Message(
        Role.ASSISTANT,
        (
            ThinkingPart("hm", "sig"),
            TextPart("Let me look."),
            ToolUsePart("c0", "read", {"path": "a.py"}),
            ToolUsePart("c1", "list", {}),
        ),
    )


def test_arguments_that_were_cut_off_are_left_out() -> None:
    made = message_of(ToolCallStarted(0, "c0", "read"), ToolCallDelta(0, '{"path": "a'))

    assert made.parts == (ToolUsePart("c0", "read", {}),)
