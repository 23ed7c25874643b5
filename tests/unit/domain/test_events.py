import dataclasses
from typing import assert_never, get_args

import pytest

from semantic.domain import agents, blocks, chat, events, reply_format, sampling, spec
from semantic.domain.errors import BackendError
from semantic.domain.events import (
    Event,
    Failed,
    Finished,
    ModelProgress,
    PrefillProgress,
    Started,
    TextDelta,
    ThinkingDelta,
    ThinkingEnded,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from semantic.domain.sampling import FinishReason

pytestmark = pytest.mark.unit

USAGE = Usage(prompt_tokens=3)
EVENTS: tuple[Event, ...] = (
    Started("r1", "tiny", USAGE),
    PrefillProgress(1, 3),
    ModelProgress("loading"),
    TextDelta("hi"),
    ThinkingDelta("hm"),
    ThinkingEnded("signature"),
    ToolCallStarted(0, "c1", "search"),
    ToolCallDelta(0, "{}"),
    ToolCallEnded(0),
    Finished(FinishReason.END_TURN, USAGE),
    Failed(BackendError("the device is gone")),
)


def test_all_tokens_are_those_of_prompt_and_reply() -> None:
    assert Usage(7, 3, cache_read_tokens=4, cache_creation_tokens=2).total_tokens == 10


def kind(event: Event) -> str:
    """Take an event apart; the type checker refuses this if a member is missing."""
    match event:
        case Started() | PrefillProgress() | ModelProgress():
            return "before the reply"
        case TextDelta() | ThinkingDelta() | ThinkingEnded():
            return "text"
        case ToolCallStarted() | ToolCallDelta() | ToolCallEnded():
            return "tool call"
        case Finished() | Failed():
            return "final"
        case _:
            assert_never(event)


def test_events_can_be_taken_apart_exhaustively() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(Event))
    assert [kind(event) for event in EVENTS].count("final") == 2


VALUES = [
    value
    for module in (agents, blocks, chat, events, reply_format, sampling, spec)
    for value in vars(module).values()
    if getattr(value, "__module__", "") == module.__name__
    and dataclasses.is_dataclass(value)
    and isinstance(value, type)
]


@pytest.mark.parametrize("value", VALUES)
def test_values_are_frozen_and_slotted(value: type) -> None:
    # A dataclass defines its own __setattr__ only if it is frozen.
    assert "__setattr__" in vars(value)
    assert "__slots__" in vars(value)
    assert "__dict__" not in vars(value)


def test_every_event_is_such_a_value() -> None:
    assert set(get_args(Event)) <= set(VALUES)
