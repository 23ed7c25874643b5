"""The order of Anthropic's stream events, for replies as they are and for any others."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.adapters.inbound.anthropic.events import MessageStream, whole_message
from semantic.adapters.inbound.http import streaming
from semantic.domain.errors import BackendError, OverloadedError
from semantic.domain.events import (
    Event,
    Failed,
    Finished,
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

STARTED = Started("1f", "m", Usage(40))
FOUND = PrefillProgress(30, 40, reused=30)
USAGE = Usage(40, 9, cache_read_tokens=30, cache_creation_tokens=10, thinking_tokens=4)


def run(events: list[Event], **options: bool) -> list[dict[str, Any]]:
    stream = MessageStream(**options)
    return [made for event in events for made in stream.push(event)]


def transcript(events: list[Event], **options: bool) -> str:
    return "".join(
        streaming.named_event(str(made["type"]), made) for made in run(events, **options)
    )


START = (
    "event: message_start\n"
    'data: {"type":"message_start","message":{"id":"msg_1f","type":"message","role":"assistant",'
    '"model":"m","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":0,'
    '"cache_creation_input_tokens":10,"cache_read_input_tokens":30,"output_tokens":0}}}\n\n'
)


def ending(reason: str, stop: str = "null") -> str:
    return (
        "event: message_delta\n"
        f'data: {{"type":"message_delta","delta":{{"stop_reason":"{reason}",'
        f'"stop_sequence":{stop}}},"usage":{{"input_tokens":0,"cache_creation_input_tokens":10,'
        '"cache_read_input_tokens":30,"output_tokens":9,'
        '"output_tokens_details":{"thinking_tokens":4}}}\n\n'
        'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    )


def block(index: int, content: str, *deltas: str) -> str:
    head = f'{{"type":"content_block_start","index":{index},"content_block":{content}}}'
    frames = [f"event: content_block_start\ndata: {head}\n\n"]
    for delta in deltas:
        body = f'{{"type":"content_block_delta","index":{index},"delta":{delta}}}'
        frames.append(f"event: content_block_delta\ndata: {body}\n\n")
    stop = f'{{"type":"content_block_stop","index":{index}}}'
    return "".join([*frames, f"event: content_block_stop\ndata: {stop}\n\n"])


def test_text() -> None:
    events: list[Event] = [
        STARTED,
        FOUND,
        TextDelta("Hé"),
        TextDelta("llo"),
        Finished(FinishReason.STOP_SEQUENCE, USAGE, "END"),
    ]
    assert transcript(events) == (
        START
        + block(
            0,
            '{"type":"text","text":""}',
            '{"type":"text_delta","text":"Hé"}',
            '{"type":"text_delta","text":"llo"}',
        )
        + ending("stop_sequence", '"END"')
    )


THINKING_AND_CALLS: list[Event] = [
    STARTED,
    FOUND,
    ThinkingDelta("Hm."),
    ThinkingEnded("a1b2"),
    TextDelta("Let me look."),
    ToolCallStarted(0, "c0", "read"),
    ToolCallDelta(0, '{"path": '),
    ToolCallDelta(0, '"x"}'),
    ToolCallEnded(0),
    ToolCallStarted(1, "c1", "list"),
    ToolCallEnded(1),
    Finished(FinishReason.TOOL_USE, USAGE),
]


def test_thinking_text_and_calls() -> None:
    assert transcript(THINKING_AND_CALLS) == (
        START
        + block(
            0,
            '{"type":"thinking","thinking":"","signature":""}',
            '{"type":"thinking_delta","thinking":"Hm."}',
            '{"type":"signature_delta","signature":"a1b2"}',
        )
        + block(1, '{"type":"text","text":""}', '{"type":"text_delta","text":"Let me look."}')
        + block(
            2,
            '{"type":"tool_use","id":"toolu_c0","name":"read","input":{}}',
            '{"type":"input_json_delta","partial_json":"{\\"path\\": "}',
            '{"type":"input_json_delta","partial_json":"\\"x\\"}"}',
        )
        + block(3, '{"type":"tool_use","id":"toolu_c1","name":"list","input":{}}')
        + ending("tool_use")
    )


def test_thinking_may_be_kept_back() -> None:
    events: list[Event] = [
        STARTED,
        FOUND,
        ThinkingDelta("Hm."),
        ThinkingEnded("a1"),
        TextDelta("Hi"),
        Finished(FinishReason.END_TURN, USAGE),
    ]
    assert transcript(events, shows_thinking=False) == (
        START
        + block(
            0,
            '{"type":"thinking","thinking":"","signature":""}',
            '{"type":"signature_delta","signature":"a1"}',
        )
        + block(1, '{"type":"text","text":""}', '{"type":"text_delta","text":"Hi"}')
        + ending("end_turn")
    )


def test_a_whole_message_is_what_its_stream_adds_up_to() -> None:
    message = whole_message(run(THINKING_AND_CALLS))
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": "a1b2"},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "toolu_c0", "name": "read", "input": {"path": "x"}},
        {"type": "tool_use", "id": "toolu_c1", "name": "list", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"
    assert message["id"] == "msg_1f"


def test_an_empty_reply_has_no_block() -> None:
    made = run([STARTED, FOUND, TextDelta(""), Finished(FinishReason.END_TURN, USAGE)])
    assert [event["type"] for event in made] == ["message_start", "message_delta", "message_stop"]


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_failure_ends_the_stream_with_an_error(is_begun: bool) -> None:
    text: list[Event] = [FOUND, TextDelta("Hi")] if is_begun else []
    *_, last = run([STARTED, *text, Failed(OverloadedError("busy.")), TextDelta("more")])
    assert last == {"type": "error", "error": {"type": "overloaded_error", "message": "busy."}}


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_reason_has_a_name(reason: FinishReason) -> None:
    *_, delta, _ = run([STARTED, Finished(reason, USAGE)])
    assert delta["delta"]["stop_reason"] in {
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded",
    }  # fmt: skip


TEXTS = st.sampled_from(["", "a", "{", "é\n"])
CALLS = st.integers(0, 2)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(PrefillProgress, st.just(1), st.just(2)),
    st.builds(TextDelta, TEXTS),
    st.builds(ThinkingDelta, TEXTS),
    st.builds(ThinkingEnded, TEXTS),
    st.builds(ToolCallStarted, CALLS, st.just("x"), st.just("f")),
    st.builds(ToolCallDelta, CALLS, TEXTS),
    st.builds(ToolCallEnded, CALLS),
    st.builds(Finished, st.sampled_from(FinishReason), st.just(USAGE)),
    st.builds(Failed, st.just(BackendError("broken"))),
)


@given(st.lists(EVENTS, max_size=30), st.booleans())
def test_any_order_of_events_makes_an_orderly_stream(middle: list[Event], shows: bool) -> None:
    """What clients rely on holds even for replies that no model can make."""
    events: list[Event] = [STARTED, *middle, Finished(FinishReason.END_TURN, USAGE)]
    made = run(events, shows_thinking=shows)
    final = next(event for event in events if isinstance(event, Finished | Failed))
    names = [event["type"] for event in made]
    if isinstance(final, Failed):
        assert names.count("error") == 1
        assert names[-1] == "error"
    else:
        assert names[-2:] == ["message_delta", "message_stop"]
    assert names.count("message_start") == (names[0] != "error")
    assert names[0] in ("message_start", "error")
    check_blocks(made, is_whole=isinstance(final, Finished))


def check_blocks(made: list[dict[str, Any]], *, is_whole: bool) -> None:
    open_type, last_delta, index = "", "", -1
    for event in made:
        match event["type"]:
            case "content_block_start":
                assert not open_type
                index += 1
                assert event["index"] == index
                open_type, last_delta = event["content_block"]["type"], ""
            case "content_block_delta":
                assert event["index"] == index
                last_delta = event["delta"]["type"]
                assert last_delta in {
                    "text": ("text_delta",),
                    "thinking": ("thinking_delta", "signature_delta"),
                    "tool_use": ("input_json_delta",),
                }.get(open_type, ())
            case "content_block_stop":
                assert event["index"] == index
                assert open_type
                assert open_type != "thinking" or last_delta == "signature_delta"
                assert open_type != "text" or last_delta  # no empty text
                open_type = ""
    assert not (is_whole and open_type)
    json.dumps(made)
