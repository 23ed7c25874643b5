"""The bytes that OpenAI's clients receive; `REGENERATE=1` writes the transcripts anew."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from semantic.adapters.inbound.http.streaming import ReplySet
from semantic.adapters.inbound.openai.events import ChatForm, CompletionForm, collect, stream
from semantic.adapters.inbound.openai.requests import CompletionRequest
from semantic.adapters.inbound.responses.events import ResponseWriter
from semantic.adapters.inbound.responses.requests import ResponsesRequest
from semantic.adapters.inbound.responses.routes import RecentResponses, ResponseRun
from semantic.adapters.inbound.responses.stored import settings_of
from semantic.domain.errors import GenerationTimeoutError
from semantic.domain.events import (
    Event,
    Failed,
    Finished,
    PrefillProgress,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from semantic.domain.sampling import FinishReason
from tests.canned_replies import CUT_CALL, EVERYTHING, USAGE, CannedReply
from tests.open_responses import check_event, check_response

pytestmark = pytest.mark.unit

GOLDEN = Path(__file__).parents[4] / "golden"
PLAIN: tuple[Event, ...] = (
    Started("abc", "m", Usage(20)),
    TextDelta("Hi"),
    Finished(FinishReason.MAX_TOKENS, USAGE),
)
# Input over several lines, cut inside an escape; arguments of another form; and a call cut off.
CUSTOM_CALLS: tuple[Event, ...] = (
    Started("abc", "m", Usage(20)),
    ToolCallStarted(0, "1", "patch", is_custom=True),
    ToolCallDelta(0, '{"input": "*** \\"a\\"\\'),
    ToolCallDelta(0, "n\\u00e4"),
    ToolCallDelta(0, '"}'),
    ToolCallEnded(0),
    ToolCallStarted(1, "2", "patch", is_custom=True),
    ToolCallDelta(1, '{"text": "x"}'),
    ToolCallEnded(1),
    ToolCallStarted(2, "3", "read"),
    ToolCallDelta(2, "{}"),
    ToolCallEnded(2),
    ToolCallStarted(3, "4", "patch", is_custom=True),
    ToolCallDelta(3, '{"input": "ab'),
    Finished(FinishReason.MAX_TOKENS, USAGE),
)
FAILING: tuple[Event, ...] = (
    Started("abc", "m", Usage(20)),
    TextDelta("Hi"),
    Failed(GenerationTimeoutError("too late.")),
)


def check(name: str, text: str) -> None:
    """Compare with a transcript, times left out."""
    text = re.sub(r'("(?:created|created_at|completed_at)": ?)\d+', r"\g<1>0", text)
    path = GOLDEN / name
    if os.environ.get("REGENERATE"):
        path.write_text(text)
    assert text == path.read_text()


def replies_of(*events: tuple[Event, ...]) -> ReplySet:
    return ReplySet([CannedReply(reply) for reply in events])


def run_of(
    events: tuple[Event, ...],
    recent: RecentResponses,
    body: ResponsesRequest | None = None,
    replies: ReplySet | None = None,
) -> ResponseRun:
    asked = {"model": "m", "input": "hi", "include": ["reasoning.encrypted_content"]}
    body = body or ResponsesRequest.model_validate(asked)
    writer = ResponseWriter(settings_of(body), wants_handles=body.wants_handles)
    replies = replies or replies_of(events)
    return ResponseRun(replies, writer, recent, is_stored=body.is_stored)


async def test_a_chat_stream() -> None:
    frames = [f async for f in stream(replies_of(EVERYTHING), ChatForm(1), has_usage=True)]
    check("chat_stream.txt", "".join(frames))


async def test_a_chat_reply() -> None:
    body = await collect(replies_of(EVERYTHING, PLAIN), ChatForm(2))
    check("chat.json", json.dumps(body, indent=1, ensure_ascii=False))


async def test_a_call_that_was_cut_off() -> None:
    frames = [f async for f in stream(replies_of(CUT_CALL), ChatForm(1), has_usage=False)]
    check("chat_stream_cut_call.txt", "".join(frames))
    body = await collect(replies_of(CUT_CALL), ChatForm(1))
    check("chat_cut_call.json", json.dumps(body, indent=1, ensure_ascii=False))
    frames = [frame async for frame in run_of(CUT_CALL, RecentResponses()).frames()]
    check("response_stream_cut_call.txt", "".join(frames))
    response: Any = await run_of(CUT_CALL, RecentResponses()).collect()
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


async def until_progress(frames: AsyncIterator[str]) -> AsyncIterator[str]:
    """The signs of life in a stream, up to the first that tells of progress."""
    async for frame in frames:
        if frame.startswith(":"):
            yield frame
        if frame.startswith(": prefill"):
            return


async def test_waiting_is_visible() -> None:
    class Waiting(CannedReply):
        async def __aiter__(self) -> AsyncIterator[Event]:
            yield PLAIN[0]
            yield PrefillProgress(5, 20)
            await asyncio.Event().wait()

    for frames in (
        stream(ReplySet([Waiting()], heartbeat_s=0.001), ChatForm(1), has_usage=False),
        run_of(PLAIN, RecentResponses(), replies=ReplySet([Waiting()], heartbeat_s=0.001)).frames(),
    ):
        # On a busy machine the first sign may come before the progress does.
        async with asyncio.timeout(30):
            signs = {frame async for frame in until_progress(frames)}
        assert signs <= {": waiting\n\n", ": prefill 5/20\n\n"}


async def test_a_chat_stream_that_fails() -> None:
    frames = [f async for f in stream(replies_of(FAILING), ChatForm(1), has_usage=True)]
    check("chat_stream_failing.txt", "".join(frames))


async def test_a_stream_of_completions() -> None:
    body = CompletionRequest.model_validate({"model": "m", "prompt": ["One", "Two"], "echo": True})
    form = CompletionForm(body, ["One", "Two"])
    frames = [f async for f in stream(replies_of(PLAIN, PLAIN), form, has_usage=body.has_usage)]
    check("completions_stream.txt", "".join(frames))


async def test_a_completion() -> None:
    body = CompletionRequest.model_validate({"model": "m", "prompt": "One", "logprobs": 1})
    made = await collect(replies_of(EVERYTHING), CompletionForm(body, [""]))
    check("completion.json", json.dumps(made, indent=1, ensure_ascii=False))


async def test_a_response_stream() -> None:
    recent = RecentResponses()
    frames = [frame async for frame in run_of(EVERYTHING, recent).frames()]
    check("response_stream.txt", "".join(frames))
    kept = recent.find_run("resp_abc")
    assert kept is not None
    assert kept.response["status"] == "completed"
    assert kept.is_ended.is_set()


async def test_a_response_stream_that_fails() -> None:
    frames = [frame async for frame in run_of(FAILING, RecentResponses()).frames()]
    check("response_stream_failing.txt", "".join(frames))


@pytest.mark.parametrize("events", [EVERYTHING, CUT_CALL, PLAIN, FAILING], ids=len)
@pytest.mark.parametrize("is_background", [False, True], ids=["attended", "background"])
async def test_responses_follow_the_open_specification(
    events: tuple[Event, ...], is_background: bool
) -> None:
    body = ResponsesRequest.model_validate({"input": "hi", "background": is_background})
    stream = [*events[:1], PrefillProgress(5, 20), *events[1:]]
    frames = [frame async for frame in run_of(tuple(stream), RecentResponses(), body).frames()]
    made = [json.loads(frame.partition("data: ")[2]) for frame in frames]
    for event in made:
        check_event(event)
    check_response(made[-1]["response"])
    begun = ["response.created", *["response.queued"] * is_background, "response.in_progress"]
    assert [event["type"] for event in made[: len(begun)]] == begun
    states = ["queued"] * 2 * is_background + ["in_progress"] * (2 - is_background)
    assert [event["response"]["status"] for event in made[: len(begun)]] == states


async def test_custom_calls() -> None:
    frames = [f async for f in stream(replies_of(CUSTOM_CALLS), ChatForm(1), has_usage=False)]
    check("chat_stream_custom.txt", "".join(frames))
    body = await collect(replies_of(CUSTOM_CALLS), ChatForm(1))
    check("chat_custom.json", json.dumps(body, indent=1, ensure_ascii=False))
    frames = [frame async for frame in run_of(CUSTOM_CALLS, RecentResponses()).frames()]
    check("response_stream_custom.txt", "".join(frames))


async def test_a_response() -> None:
    tools = [{"type": "function", "name": "read"}, {"type": "web_search"}]
    body = ResponsesRequest.model_validate(
        {"model": "m", "input": "hi", "tools": tools, "store": False}
    )
    recent = RecentResponses()
    made = await run_of(PLAIN, recent, body).collect()
    check("response.json", json.dumps(made, indent=1, ensure_ascii=False))
    assert recent.find_run("resp_abc") is None


async def test_a_failed_response_is_an_error_where_it_is_waited_for() -> None:
    with pytest.raises(GenerationTimeoutError):
        await run_of(FAILING, RecentResponses()).collect()
