"""The order of Anthropic's stream events, for replies as they are and for any others."""

import json
from typing import Any

import pytest
from anthropic.types import (
    CacheMissMessagesChanged,
    CacheMissModelChanged,
    CacheMissPreviousMessageNotFound,
    CacheMissSystemChanged,
    CacheMissToolsChanged,
    CacheMissUnavailable,
)
from hypothesis import given
from hypothesis import strategies as st

from semantic.adapters.inbound.anthropic.events import MessageStream, whole_message
from semantic.adapters.inbound.http import streaming
from semantic.domain.errors import BackendError, OverloadedError
from semantic.domain.events import (
    CacheMiss,
    Event,
    Failed,
    Finished,
    MissReason,
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
from tests.canned_replies import CUT_CALL, EVERYTHING
from tests.unit.adapters.inbound.openai.test_transcripts import check

pytestmark = pytest.mark.unit

STARTED = Started("1f", "m", Usage(40))
FOUND = PrefillProgress(30, 40, reused=30)
USAGE = Usage(40, 9, cache_read_tokens=30, cache_creation_tokens=10, thinking_tokens=4)


def run(events: list[Event], **options: bool) -> list[dict[str, Any]]:
    stream = MessageStream(**options)
    return [made for event in events for made in stream.push(event)]


@pytest.mark.parametrize(
    "name, shows", [("anthropic_stream.txt", True), ("anthropic_stream_omitted.txt", False)]
)
def test_a_stream_whose_thinking_may_be_kept_back(name: str, shows: bool) -> None:
    made = run([EVERYTHING[0], FOUND, *EVERYTHING[1:]], shows_thinking=shows)
    check(name, "".join(streaming.named_event(str(event["type"]), event) for event in made))


def test_a_whole_message_is_what_its_stream_adds_up_to() -> None:
    message = whole_message(run([*EVERYTHING]))
    assert message["content"] == [
        {"type": "thinking", "thinking": "Let me look.", "signature": "sig"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "ä.txt"}},
        {"type": "tool_use", "id": "toolu_2", "name": "list", "input": {}},
    ]
    assert (message["stop_reason"], message["id"]) == ("tool_use", "msg_abc")


@pytest.mark.parametrize("has_arguments", [True, False])
def test_a_whole_message_has_no_call_that_was_cut_off(has_arguments: bool) -> None:
    events = [e for e in CUT_CALL if has_arguments or not isinstance(e, ToolCallDelta)]
    message = whole_message(run(events))
    assert message["content"] == [{"type": "text", "text": "I look."}]
    assert message["stop_reason"] == "max_tokens"


def test_a_call_that_is_nested_too_deeply_to_be_read_is_left_out() -> None:
    deep = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    call: list[Event] = [ToolCallStarted(0, "1", "read"), ToolCallDelta(0, deep)]
    message = whole_message(run([STARTED, TextDelta("I look."), *call, ToolCallEnded(0)]))
    assert message["content"] == [{"type": "text", "text": "I look."}]


def test_a_stream_shows_what_was_written_of_a_call() -> None:
    made = run([*CUT_CALL])
    text = "".join(streaming.named_event(str(event["type"]), event) for event in made)
    check("anthropic_stream_cut_call.txt", text)


def test_a_stop_sequence_is_reported() -> None:
    ended = Finished(FinishReason.STOP_SEQUENCE, USAGE, "END")
    *_, delta, _ = run([STARTED, TextDelta("Hi"), ended])
    assert delta["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    assert delta["usage"]["output_tokens_details"] == {"thinking_tokens": 4}


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


COUNTED: dict[MissReason, Any] = {
    MissReason.MODEL_CHANGED: CacheMissModelChanged,
    MissReason.TOOLS_CHANGED: CacheMissToolsChanged,
    MissReason.SYSTEM_CHANGED: CacheMissSystemChanged,
    MissReason.MESSAGES_CHANGED: CacheMissMessagesChanged,
}
UNCOUNTED: dict[MissReason, Any] = {
    MissReason.PARAMETERS_CHANGED: CacheMissUnavailable,
    MissReason.UNAVAILABLE: CacheMissUnavailable,
    MissReason.NOT_FOUND: CacheMissPreviousMessageNotFound,
}


@pytest.mark.parametrize("reason", MissReason)
def test_diagnostics_have_only_the_reasons_that_the_vendor_knows(reason: MissReason) -> None:
    started = Started("1", "m", Usage(3), change=CacheMiss(reason, 7, "why"))
    start, *_ = run([started, TextDelta("Hi")], has_diagnostics=True)
    told = start["message"]["diagnostics"]
    if reason in COUNTED:
        found = COUNTED[reason].model_validate(told["cache_miss_reason"])
        assert found.cache_missed_input_tokens == 7
    elif reason in UNCOUNTED:
        assert told["cache_miss_reason"].keys() == {"type"}
        UNCOUNTED[reason].model_validate(told["cache_miss_reason"])
    else:  # the requests agree
        assert told is None
