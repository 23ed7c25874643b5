import asyncio
import threading

import pytest

from semantic.application.agents.feed import AgentAction, AgentChanged, EventFeed, MissedEvents
from semantic.domain.errors import OverloadedError

pytestmark = pytest.mark.unit


def event(name: str, tenant: str = "local") -> AgentChanged:
    return AgentChanged(tenant, name, AgentAction.CREATED)


async def test_a_reader_hears_what_happens_in_order() -> None:
    feed = EventFeed()
    reader = feed.subscribe("local")
    feed.publish(event("a"))
    thread = threading.Thread(target=feed.publish, args=(event("b"),))
    thread.start()

    assert [await reader.next(5), await reader.next(5)] == [event("a"), event("b")]
    assert await reader.next(0.001) is None
    thread.join()


async def test_an_event_that_comes_while_another_is_read_does_not_end_the_feed() -> None:
    feed = EventFeed()
    reader = feed.subscribe("local")
    feed.publish(event("a"))
    await asyncio.sleep(0)  # the reader is woken for the first one
    feed.publish(event("b"))

    assert [await reader.next(5), await reader.next(5)] == [event("a"), event("b")]
    assert await reader.next(0.001) is None
    feed.publish(event("c"))
    assert await reader.next(5) == event("c")


async def test_tenants_hear_of_their_own_agents_alone() -> None:
    feed = EventFeed()
    mine, theirs = feed.subscribe("local"), feed.subscribe("acme")
    feed.publish(event("a", "acme"))

    assert await theirs.next(5) == event("a", "acme")
    assert await mine.next(0.001) is None


async def test_a_slow_reader_loses_the_oldest_events_and_is_notified() -> None:
    feed = EventFeed(capacity=3)
    reader = feed.subscribe("local")
    for name in "abcde":
        feed.publish(event(name))

    heard = [await reader.next(5) for _ in range(4)]

    assert heard == [MissedEvents(2), event("c"), event("d"), event("e")]
    feed.publish(event("f"))
    assert await reader.next(5) == event("f")


async def test_a_feed_that_closes_ends_its_readers_after_what_they_missed() -> None:
    feed = EventFeed()
    reader = feed.subscribe("local")
    waiting = asyncio.create_task(feed.subscribe("local").next(60))
    await asyncio.sleep(0)
    feed.publish(event("a"))
    assert await waiting == event("a")
    feed.close()

    assert await reader.next(5) == event("a")
    with pytest.raises(StopAsyncIteration):
        await reader.next(5)


async def test_there_are_only_so_many_readers() -> None:
    feed = EventFeed(max_readers=1)
    reader = feed.subscribe("local")
    with pytest.raises(OverloadedError):
        feed.subscribe("local")
    reader.close()
    reader.close()

    feed.subscribe("local")
