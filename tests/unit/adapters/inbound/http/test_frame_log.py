import asyncio

import pytest

from semantic.adapters.inbound.http.frame_log import FrameLog

pytestmark = pytest.mark.unit


async def read(log: FrameLog, start: int = 0) -> list[str]:
    return [frame async for frame in log.read(start)]


async def test_all_who_read_see_the_same_whenever_they_come() -> None:
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


async def test_who_waits_is_told_how_far_it_is() -> None:
    log = FrameLog(heartbeat_s=0.01)
    log.progress = "prefill 1/2"
    frames = log.read()
    assert await anext(frames) == ": prefill 1/2\n\n"
    log.append("a")
    assert await anext(frames) == "a"
    log.end()
    assert [frame async for frame in frames] == []


async def test_who_leaves_takes_nothing_away() -> None:
    log = FrameLog()
    leaving = asyncio.create_task(read(log))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    log.append("a")
    log.end()
    assert await read(log) == ["a"]
