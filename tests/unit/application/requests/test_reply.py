import asyncio
from collections.abc import Callable

import pytest

from semantic.application.engine.request import EventBatch, ReplyState
from semantic.application.parsing import ReplyParser
from semantic.application.requests.reply import LiveReply, ReplyHub
from semantic.domain.agents import Reuse
from semantic.domain.errors import BackendError
from semantic.domain.events import (
    Event,
    Failed,
    Finished,
    PrefillProgress,
    ScoredToken,
    Started,
    TextDelta,
    Usage,
)
from semantic.domain.reply_format import ReplyFormat
from semantic.domain.sampling import FinishReason

pytestmark = pytest.mark.unit

STARTED = Started("r", "m", Usage(prompt_tokens=1))
FINISHED = Finished(FinishReason.END_TURN, Usage(prompt_tokens=1))


def make_reply(on_cancel: Callable[[], None] = lambda: None) -> LiveReply:
    return LiveReply(STARTED, ReplyParser(ReplyFormat()), on_cancel)


def open_reply(hub: ReplyHub, name: str, cancel: Callable[[str], None] = print) -> LiveReply:
    reply = make_reply(lambda: cancel(name))
    hub.open(name, reply)
    return reply


async def read(reply: LiveReply) -> list[Event]:
    return [event async for event in reply]


async def test_pieces_that_wait_are_joined() -> None:
    reply = make_reply()
    for done in range(50):
        reply.push(PrefillProgress(done, 50))
    for i in range(1000):
        reply.push(TextDelta(str(i % 10), (ScoredToken(b"x", -1.0),)))
    reply.push(FINISHED)
    events = await read(reply)
    assert events[:2] == [STARTED, PrefillProgress(49, 50)]
    assert isinstance(events[2], TextDelta)
    assert events[2].text == "0123456789" * 100
    assert len(events[2].logprobs) == 1000
    assert events[3:] == [FINISHED]


async def test_events_cross_from_another_thread_to_their_reply() -> None:
    hub = ReplyHub()
    first, second = (open_reply(hub, name) for name in ("a", "b"))
    batch: EventBatch = [
        ("a", TextDelta("A")),
        ("gone", TextDelta("?")),
        ("b", Failed(BackendError("broken"))),
        ("a", FINISHED),
    ]
    await asyncio.to_thread(hub.emit, batch)
    assert await read(first) == [STARTED, TextDelta("A"), FINISHED]
    failed = (await read(second))[-1]
    assert isinstance(failed, Failed)
    assert hub.num_open == 0


async def test_leaving_early_cancels_once_and_ending_does_not() -> None:
    cancelled: list[str] = []
    hub = ReplyHub()
    left = open_reply(hub, "left", cancelled.append)
    events = aiter(left)
    assert await anext(events) == STARTED
    await events.aclose()
    assert cancelled == ["left"]
    left.cancel()
    ended = open_reply(hub, "ended", cancelled.append)
    hub.emit([("ended", FINISHED)])
    await read(ended)
    ended.cancel()
    assert cancelled == ["left"]


def test_events_for_a_loop_that_is_gone_are_dropped() -> None:
    hub = ReplyHub()
    hub.emit([("a", FINISHED)])

    async def open_one() -> None:
        open_reply(hub, "a")

    asyncio.run(open_one())
    hub.emit([("a", FINISHED)])


@pytest.mark.parametrize("end", [FINISHED, Failed(BackendError("broken"))])
async def test_the_end_is_told_once_and_before_it_is_read(end: Finished | Failed) -> None:
    hub, ends = ReplyHub(), list[object]()
    reply = open_reply(hub, "a")
    reply.on_end(lambda event, _: ends.append(event))
    reply.on_end(lambda _, reuse: ends.append(reuse))
    reuse = Reuse(computed=7)
    hub.emit([("a", ReplyState((1,), None, 0, reuse)), ("a", end)])

    async for event in reply:
        assert ends == ([end, reuse] if event is not STARTED else [])

    assert ends == [end, reuse]
