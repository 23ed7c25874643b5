"""Merged replies, heartbeats while a client waits, and cancellation when it leaves."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from semantic.adapters.inbound.http import streaming
from semantic.adapters.inbound.http.streaming import FrameLog, ReplySet
from semantic.domain.events import (
    Event,
    Finished,
    PrefillProgress,
    TextDelta,
    Usage,
)
from semantic.domain.sampling import FinishReason
from tests.canned_replies import CannedReply

pytestmark = pytest.mark.unit

END = Finished(FinishReason.END_TURN, Usage(1))


def test_a_payload_is_one_line() -> None:
    said = {"é": "".join(map(chr, range(0x2100)))}
    line, after = streaming.data(said).splitlines()
    assert (json.loads(line.removeprefix("data: ")), after) == (said, "")


class SlowReply(CannedReply):
    """Says nothing until it is let."""

    def __init__(self) -> None:
        super().__init__((END,))
        self.may_speak = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Event]:
        await self.may_speak.wait()
        yield END


async def test_a_slow_reply_does_not_hold_others_up() -> None:
    slow, fast = SlowReply(), CannedReply((TextDelta("a"), TextDelta("b"), END))
    seen: list[tuple[int, Event]] = []
    async for index, event in ReplySet([slow, fast]).events():
        seen.append((index, event))
        if event is END and index == 1:
            slow.may_speak.set()
    assert seen == [(1, TextDelta("a")), (1, TextDelta("b")), (1, END), (0, END)]


async def test_silence_causes_heartbeats() -> None:
    slow = SlowReply()
    beats = 0
    async for item in ReplySet([slow], heartbeat_s=0.001).events_and_heartbeats():
        if isinstance(item, streaming.Heartbeat):
            beats += 1
            slow.may_speak.set()
    assert beats >= 1


async def test_no_heartbeat_follows_the_final_event() -> None:
    class EndsLate(CannedReply):
        async def __aiter__(self) -> AsyncIterator[Event]:
            yield END
            await asyncio.sleep(0.05)  # dozens of heartbeats

    items = [i async for i in ReplySet([EndsLate()], heartbeat_s=0.001).events_and_heartbeats()]
    assert items[-1] == (0, END)


async def test_heartbeats_continue_during_steady_progress() -> None:
    class Prefilling(CannedReply):
        async def __aiter__(self) -> AsyncIterator[Event]:
            while not self.is_cancelled:
                await asyncio.sleep(0.001)
                yield PrefillProgress(1, 2)

    is_steady = False
    async with asyncio.timeout(60):
        async for item in ReplySet([Prefilling()], heartbeat_s=0.02).events_and_heartbeats():
            is_beat = isinstance(item, streaming.Heartbeat)
            if is_beat and is_steady:
                break
            is_steady |= not is_beat  # on a busy machine the first beat may come first


async def test_a_client_that_left_before_the_first_frame_cancels_all_replies() -> None:
    replies = [CannedReply(), CannedReply()]

    async def frames() -> AsyncIterator[str]:
        yield "never"

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        del message
        await asyncio.sleep(0)

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    await streaming.EventStream(frames(), ReplySet(replies))(scope, receive, send)
    assert all(reply.is_cancelled for reply in replies)


async def test_a_client_that_stops_reading_cancels_all_replies() -> None:
    replies = [CannedReply((TextDelta("a"), END)), SlowReply()]
    events = ReplySet(replies).events_and_heartbeats()
    await anext(events)
    await events.aclose()
    assert all(reply.is_cancelled for reply in replies)


# -- frames that are kept -----------------------------------------------------------------------


async def read(log: FrameLog, start: int = 0) -> list[str]:
    return [frame async for frame in log.read(start)]


async def test_all_readers_see_the_same_frames_whenever_they_start() -> None:
    log = FrameLog()
    early = [asyncio.create_task(read(log)) for _ in range(2)]
    log.append("a")
    await asyncio.sleep(0)
    late = asyncio.create_task(read(log, 1))
    log.append("b")
    log.end()
    assert [await task for task in early] == [["a", "b"], ["a", "b"]]
    assert await late == ["b"]
    assert await read(log, 1) == ["b"]
    assert await read(log, 5) == []


async def test_a_waiting_reader_receives_progress() -> None:
    log = FrameLog(heartbeat_s=0.01)
    log.progress = "prefill 1/2"
    frames = log.read()
    assert await anext(frames) == ": prefill 1/2\n\n"
    log.append("a")
    assert await anext(frames) == "a"
    log.end()
    assert [frame async for frame in frames] == []


async def test_a_reader_that_leaves_removes_no_frames() -> None:
    log = FrameLog()
    leaving = asyncio.create_task(read(log))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    log.append("a")
    log.end()
    assert await read(log) == ["a"]
