"""Several replies read as one."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from semantic.adapters.inbound.http import sse
from semantic.adapters.inbound.openai.reply_set import ReplySet, start_all, times
from semantic.domain.agents import Principal
from semantic.domain.chat import (
    ChatRequest,
    Event,
    Finished,
    Message,
    PrefillProgress,
    Role,
    TextDelta,
    Usage,
)
from semantic.domain.errors import OverloadedError
from semantic.domain.sampling import FinishReason, SamplingParams
from tests.canned_replies import CannedInference, CannedReply

pytestmark = pytest.mark.unit

REQUEST = ChatRequest("m", (Message.of(Role.USER, "hi"),))
END = Finished(FinishReason.END_TURN, Usage(1))


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


async def test_silence_is_noticed() -> None:
    slow = SlowReply()
    beats = 0
    async for item in ReplySet([slow], heartbeat_s=0.001).events_and_heartbeats():
        if isinstance(item, sse.Heartbeat):
            beats += 1
            slow.may_speak.set()
    assert beats >= 1


async def test_steady_progress_does_not_silence_the_heart() -> None:
    class Prefilling(CannedReply):
        async def __aiter__(self) -> AsyncIterator[Event]:
            while not self.is_cancelled:
                await asyncio.sleep(0.001)
                yield PrefillProgress(1, 2)

    num_progress = 0
    async for item in ReplySet([Prefilling()], heartbeat_s=0.02).events_and_heartbeats():
        if isinstance(item, sse.Heartbeat):
            break
        num_progress += 1
    assert num_progress


async def test_a_client_that_left_before_the_first_frame_cancels_all() -> None:
    replies = [CannedReply(), CannedReply()]

    async def frames() -> AsyncIterator[str]:
        yield "never"

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        del message
        await asyncio.sleep(0)

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    await sse.event_stream(frames(), ReplySet(replies))(scope, receive, send)
    assert all(reply.is_cancelled for reply in replies)


async def test_whoever_stops_reading_cancels_all() -> None:
    replies = [CannedReply((TextDelta("a"), END)), SlowReply()]
    events = ReplySet(replies).events_and_heartbeats()
    await anext(events)
    await events.aclose()
    assert all(reply.is_cancelled for reply in replies)


@pytest.mark.parametrize(
    "error", [OverloadedError("full."), RuntimeError("a defect"), asyncio.CancelledError()]
)
async def test_if_one_does_not_start_none_runs(error: BaseException) -> None:
    made: list[CannedReply] = []

    class Full(CannedInference):
        async def start(self, request: ChatRequest, principal: Principal) -> CannedReply:
            if len(made) == 2:
                raise error
            made.append(await super().start(request, principal))
            return made[-1]

    with pytest.raises(type(error)):
        await start_all(Full(), times(REQUEST, 3), Principal())
    assert [reply.is_cancelled for reply in made] == [True, True]


@pytest.mark.parametrize("seed", [0, 7, -(2**63), 2**63 - 1, 2**64 - 1])
def test_seeds_of_several_replies_differ_and_are_valid(seed: int) -> None:
    requests = times(replace(REQUEST, sampling=SamplingParams(seed=seed)), 4)
    assert requests[0].sampling.seed == seed
    assert len({(request.sampling.seed or 0) % 2**64 for request in requests}) == 4
