"""Responses while they are made, whose clients may be slow or gone, and made again from the log."""

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from semantic.adapters.inbound.http.streaming import Json, ReplySet
from semantic.adapters.inbound.responses.events import ResponseWriter
from semantic.adapters.inbound.responses.routes import RecentResponses, ResponseRun
from semantic.adapters.inbound.responses.stored import items_of, response_of
from semantic.domain.chat import Message, Role, TextPart, ToolResultPart, ToolUsePart
from semantic.domain.events import (
    Event,
    Finished,
    Started,
    TextDelta,
    Usage,
)
from semantic.domain.sampling import FinishReason
from semantic.ports.inbound import PastTurn
from tests.canned_replies import CannedReply
from tests.open_responses import check_response

pytestmark = pytest.mark.unit


class EndlessReply(CannedReply):
    """Speaks until it is cancelled."""

    async def __aiter__(self) -> AsyncIterator[Event]:
        yield Started("abc", "m", Usage(1))
        while not self.is_cancelled:
            await asyncio.sleep(0)
            yield TextDelta("a")
        yield Finished(FinishReason.CANCELLED, Usage(1))


async def test_a_client_that_stopped_reading_does_not_hold_a_cancel_up() -> None:
    recent = RecentResponses()
    run = ResponseRun(ReplySet([EndlessReply()]), ResponseWriter({}), recent, is_stored=True)
    frames = run.frames()
    first = await anext(frames)
    assert "response.created" in first
    async with asyncio.timeout(10):
        await run.cancel()
    assert run.response["status"] == "cancelled"
    assert recent.find_run("resp_abc") is run
    assert "response.incomplete" in [frame async for frame in frames][-1]
    assert run.log is None


TEXT = Message.of(Role.ASSISTANT, "Par")
CALL = Message(Role.ASSISTANT, (TextPart("Let me see."), ToolUsePart("c1", "read", {})))


def past(reply: Message, reason: FinishReason | None, model: str = "other") -> PastTurn:
    return PastTurn("turn_1", (), reply, Usage(3, 2), 7.9, model, reason)


@pytest.mark.parametrize(
    "reply, reason, status",
    [
        (TEXT, FinishReason.END_TURN, "completed"),
        (TEXT, FinishReason.STOP_SEQUENCE, "completed"),
        (CALL, FinishReason.TOOL_USE, "completed"),
        (TEXT, FinishReason.MAX_TOKENS, "incomplete"),
        (TEXT, FinishReason.CONTEXT_FULL, "incomplete"),
        (TEXT, None, "completed"),  # turns that older servers logged do not tell
    ],
)
def test_a_response_made_again_ended_as_it_did(
    reply: Message, reason: FinishReason | None, status: str
) -> None:
    made = response_of("1", past(reply, reason), served="this")

    is_cut = status == "incomplete"
    assert made["status"] == status
    assert made["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)
    assert (made["created_at"], made.get("completed_at")) == (7, None if is_cut else 7)


@pytest.mark.parametrize("reason", [FinishReason.MAX_TOKENS, FinishReason.STOP_SEQUENCE])
def test_a_response_made_again_has_what_was_written_of_a_call(reason: FinishReason) -> None:
    reply = Message(Role.ASSISTANT, (ToolUsePart.cut("c1", "read", '{"path": "a'),))
    (item,) = cast("list[Json]", response_of("1", past(reply, reason), "m")["output"])
    assert (item["arguments"], item["status"]) == ('{"path": "a', "incomplete")


def test_a_response_made_again_follows_the_open_specification() -> None:
    check_response(response_of("1", past(CALL, FinishReason.TOOL_USE), "m"))


def test_custom_calls_are_listed_as_such() -> None:
    called = ToolUsePart("c1", "patch", {"input": "a\nb"}, is_custom=True)
    result = ToolResultPart("c1", (TextPart("done"),))
    messages = (Message(Role.ASSISTANT, (called,)), Message(Role.TOOL, (result,)))
    call, output = items_of("1", messages)
    assert (call["type"], call["input"]) == ("custom_tool_call", "a\nb")
    assert (output["type"], output["output"]) == ("custom_tool_call_output", "done")
    assert call["call_id"] == output["call_id"]


def test_a_response_made_again_names_the_model_that_made_it() -> None:
    assert response_of("1", past(TEXT, None), served="this")["model"] == "other"
    assert response_of("1", past(TEXT, None, model=""), served="this")["model"] == "this"
