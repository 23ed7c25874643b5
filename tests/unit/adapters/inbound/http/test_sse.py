"""Signs of life while a client waits, and an end to work when it leaves."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from semantic.adapters.inbound.http import sse
from semantic.adapters.inbound.openai.reply_set import with_heartbeats
from semantic.domain.chat import Event, Finished, PrefillProgress, Started, TextDelta, Usage
from semantic.domain.sampling import FinishReason

pytestmark = pytest.mark.unit

STARTED = Started("1", "m", Usage(9))
FINISHED = Finished(FinishReason.END_TURN, Usage(9, 1))


class ScriptedReply:
    """A reply whose events come when the test says so."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self.events.get()
            yield event
            if isinstance(event, Finished):
                return

    def cancel(self) -> None:
        self.is_cancelled = True


async def test_a_quiet_reply_has_heartbeats() -> None:
    reply = ScriptedReply()
    beats = with_heartbeats(reply, interval_s=0.001)
    assert isinstance(await anext(beats), sse.Heartbeat)
    reply.events.put_nowait(TextDelta("a"))
    while isinstance(event := await anext(beats), sse.Heartbeat):
        pass
    assert event == TextDelta("a")
    reply.events.put_nowait(FINISHED)
    rest = [event async for event in beats]
    assert rest[-1] == FINISHED
    assert reply.is_cancelled


async def test_steady_progress_does_not_silence_the_heart() -> None:
    """A long prefill reports progress many times a second, and clients see none of it."""
    reply = ScriptedReply()
    seen: list[Event | sse.Heartbeat] = []
    async for event in with_heartbeats(reply, interval_s=0.02):
        seen.append(event)
        if isinstance(event, Finished):
            break
        if sum(isinstance(e, sse.Heartbeat) for e in seen) >= 2:
            reply.events.put_nowait(FINISHED)
        else:
            await asyncio.sleep(0.005)
            reply.events.put_nowait(PrefillProgress(len(seen), 10_000))
    assert sum(isinstance(e, PrefillProgress) for e in seen) > 2


async def test_a_client_that_left_before_the_first_frame_cancels_the_reply() -> None:
    reply = ScriptedReply()

    async def frames() -> AsyncIterator[str]:
        async for _ in reply:
            yield "never"

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        del message
        await asyncio.sleep(0)

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    await sse.event_stream(frames(), reply)(scope, receive, send)
    assert reply.is_cancelled


def test_a_named_frame() -> None:
    assert sse.named("ping", {"type": "ping"}) == 'event: ping\ndata: {"type":"ping"}\n\n'
