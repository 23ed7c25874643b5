import asyncio
from collections.abc import Callable

import pytest

from semantic.application.engine.request import EventBatch, ReplyState
from semantic.application.parsing import ReplyParser
from semantic.application.requests.reply import FinishedReply, LiveReply, ReplyHub
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
async def test_the_end_is_reported_once_and_before_it_is_read(end: Finished | Failed) -> None:
    hub, ends = ReplyHub(), list[object]()
    reply = open_reply(hub, "a")
    reply.on_end(lambda event, _: ends.append(event))
    reply.on_end(lambda _, reuse: ends.append(reuse))
    reuse = Reuse(computed=7)
    hub.emit([("a", ReplyState((1,), None, 0, reuse)), ("a", end)])

    async for event in reply:
        assert ends == ([end, reuse] if event is not STARTED else [])

    assert ends == [end, reuse]


class FaultyParser(ReplyParser):
    """Raises at events of one kind."""

    def __init__(self, kind: type[Event]) -> None:
        super().__init__(ReplyFormat())
        self._kind = kind

    def push(self, event: Event) -> list[Event]:
        if isinstance(event, self._kind):
            raise TypeError("a defect in the parser")
        return super().push(event)


@pytest.mark.parametrize("kind", [TextDelta, Finished, Failed])
async def test_a_fault_in_one_reply_ends_it_with_one_error_and_leaves_others_alone(
    kind: type[Event], caplog: pytest.LogCaptureFixture
) -> None:
    hub, cancelled, ends = ReplyHub(), list[str](), list[object]()
    faulty = LiveReply(STARTED, FaultyParser(kind), lambda: cancelled.append("a"))
    faulty.on_end(lambda event, _: ends.append(event))
    hub.open("a", faulty)
    other = open_reply(hub, "b")
    last = Failed(BackendError("broken")) if kind is Failed else FINISHED
    state = ReplyState((1,), None, 0, Reuse())
    hub.emit([("a", state), ("a", TextDelta("A")), ("b", TextDelta("B")), ("a", last)])
    hub.emit([("a", FINISHED), ("b", FINISHED)])

    assert await read(other) == [STARTED, TextDelta("B"), FINISHED]
    events = [event for event in await read(faulty) if not isinstance(event, TextDelta)]
    assert [type(event) for event in events] == [Started, Failed]
    assert ends == events[1:]
    assert cancelled or kind is not TextDelta  # an engine that goes on is stopped
    assert hub.num_open == 0
    assert "a defect in the parser" in caplog.text


async def test_a_reply_whose_logging_is_cancelled_still_ends() -> None:
    async def log(_: FinishedReply) -> bool:
        raise asyncio.CancelledError

    reply = LiveReply(STARTED, ReplyParser(ReplyFormat()), lambda: None, log=log)
    reply.state = ReplyState((1,), None, 0, Reuse())
    with pytest.raises(asyncio.CancelledError):
        await reply.finish(FINISHED)
    assert [type(event) for event in await read(reply)] == [Started, Failed]


async def test_a_fault_in_an_end_hook_spares_the_other_hooks_and_the_reader(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fault(*_: object) -> None:
        raise RuntimeError("a defect in a hook")

    hub, ends = ReplyHub(), list[object]()
    reply = open_reply(hub, "a")
    reply.on_end(fault)
    reply.on_end(lambda event, _: ends.append(event))
    hub.emit([("a", FINISHED)])
    assert await read(reply) == [STARTED, FINISHED]
    assert ends == [FINISHED]
    assert "a defect in a hook" in caplog.text


async def test_a_reply_has_one_final_event() -> None:
    reply = make_reply()
    reply.push(FINISHED)
    reply.push(TextDelta("late"))
    reply.push(Failed(BackendError("late")))
    assert await read(reply) == [STARTED, FINISHED]
