"""Responses while they are made: their clients may be slow, or gone."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from semantic.adapters.inbound.http.streaming import ReplySet
from semantic.adapters.inbound.responses.events import ResponseWriter
from semantic.adapters.inbound.responses.routes import RecentResponses, ResponseRun
from semantic.domain.events import (
    Event,
    Finished,
    Started,
    TextDelta,
    Usage,
)
from semantic.domain.sampling import FinishReason
from tests.canned_replies import CannedReply

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
    book = RecentResponses()
    run = ResponseRun(ReplySet([EndlessReply()]), ResponseWriter({}), book, is_stored=True)
    frames = run.frames()
    first = await anext(frames)
    assert "response.created" in first
    async with asyncio.timeout(10):
        await run.cancel()
    assert run.response["status"] == "cancelled"
    assert book.find("resp_abc") is run
    assert "response.incomplete" in [frame async for frame in frames][-1]
    assert run.log is None
